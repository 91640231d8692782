"""Flip-flop language modelling (Liu et al., arXiv 2306.00946): remember one bit among distracting ones."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from data.tasks.base import Sequences, Task, check_range, uniforms

WRITE, READ, SKIP, ZERO = range(4)


@dataclass(kw_only=True, eq=False)
class FlipFlop(Task):
    """Pairs of an instruction and a bit; the bit after a read is the one that was last written.

        w 1 i 0 i 1 r 1 w 0 i 1 r 0
                      ^           ^     the targets

    FFL(p): an instruction is i(gnore) with probability p, else w(rite) or r(ead) with equal probability; the first is a
    write, the last a read. The bits after writes and ignores are uniform.
    """

    task = "flip_flop"
    difficulties = ("in-distribution", "dense", "sparse")

    ignore: float = 0.8  # p in training, and of the difficulty in-distribution
    dense: float = 0.1  # p of the difficulty dense, with many writes and reads
    sparse: float = 0.98  # p of the difficulty sparse, where the last write is far away

    def __post_init__(self) -> None:
        for name, p in asdict(self).items():
            check_range(name, p, 0, 1)

    @cached_property
    def vocab(self) -> list[str]:
        return ["w", "r", "i", "0", "1"]

    def sequences(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> Sequences:
        self.check_length(length, length >= 4 and length % 2 == 0, "an even number of tokens, at least 4")
        p = dict(zip(self.difficulties, (self.ignore, self.dense, self.sparse), strict=True))[difficulty]
        draws = uniforms(stream, indices, length)
        kind_draw, bit_draw = draws[:, 0::2], draws[:, 1::2]  # [B, pairs]
        kind = np.where(kind_draw < p, SKIP, np.where(kind_draw < p + (1 - p) / 2, WRITE, READ))
        kind[:, 0], kind[:, -1] = WRITE, READ
        bits = (bit_draw < 0.5).astype(np.int64)
        latest = np.maximum.accumulate(np.where(kind == WRITE, np.arange(length // 2), 0), axis=1)  # last write so far
        bits = np.where(kind == READ, np.take_along_axis(bits, latest, axis=1), bits)
        tokens = np.stack((kind, ZERO + bits), axis=2).reshape(len(bits), -1)  # [B, length]
        is_target = np.zeros(tokens.shape, dtype=bool)
        is_target[:, 1::2] = kind == READ
        return tokens, is_target
