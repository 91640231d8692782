"""Flip-flop language modelling (Liu et al., arXiv 2306.00946): remember one bit among distracting ones."""

from dataclasses import dataclass

import numpy as np

from data.base import IGNORE_INDEX
from data.tasks.base import Draw, Sequences, Task

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
        self.check(ignore=(0, 1), dense=(0, 1), sparse=(0, 1))

    @property
    def vocab(self) -> list[str]:
        return ["w", "r", "i", "0", "1"]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        self.check_length(length, length >= 4 and length % 2 == 0, "an even number of tokens, at least 4")
        p = dict(zip(self.difficulties, (self.ignore, self.dense, self.sparse), strict=True))[difficulty]
        (draws,) = draw(length)
        kind_draw, bit_draw = draws[:, 0::2], draws[:, 1::2]  # [B, pairs]
        kind = np.where(kind_draw < p, SKIP, np.where(kind_draw < p + (1 - p) / 2, WRITE, READ))
        kind[:, 0], kind[:, -1] = WRITE, READ
        bits = (bit_draw < 0.5).astype(np.int64)
        latest = np.maximum.accumulate(np.where(kind == WRITE, np.arange(length // 2), 0), axis=1)  # last write so far
        bits = np.where(kind == READ, np.take_along_axis(bits, latest, axis=1), bits)
        bits += ZERO
        targets = np.stack((np.where(kind == READ, bits, IGNORE_INDEX), np.full_like(bits, IGNORE_INDEX)), axis=2)
        return np.stack((kind, bits), axis=2).reshape(-1, length), targets.reshape(-1, length)
