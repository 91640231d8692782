"""Flip-flop language modelling (Liu et al., arXiv 2306.00946): remember one bit among distracting ones."""

from collections.abc import Sequence

import numpy as np

from data.tasks.base import Task, uniforms

WRITE, READ, IGNORED, ZERO = range(4)


class FlipFlop(Task):
    """Pairs of an instruction and a bit; the bit after a read is the one that was last written.

        w 1 i 0 i 1 r 1 w 0 i 1 r 0
                      ^           ^     the scored tokens

    FFL(p): an instruction is i(gnore) with probability p, else w(rite) or r(ead) with equal probability; the first is a
    write, the last a read. The bits after writes and ignores are uniform.

    Args:
        ignore: p of training and of the slice in-distribution.
        dense: p of the slice dense, with many writes and reads.
        sparse: p of the slice sparse, where the last write is far away.

    Raises:
        ValueError: a probability outside of 0..1.
    """

    task = "flip_flop"
    difficulties = ("in-distribution", "dense", "sparse")

    def __init__(self, *, ignore: float = 0.8, dense: float = 0.1, sparse: float = 0.98) -> None:
        for name, p in (("ignore", ignore), ("dense", dense), ("sparse", sparse)):
            if not 0 <= p <= 1:
                raise ValueError(f"data.{name}={p:g} must be between 0 and 1: the probability of an ignored bit")
        self.ignore, self.dense, self.sparse = ignore, dense, sparse

    @property
    def symbols(self) -> list[str]:
        return ["w", "r", "i", "0", "1"]

    def sequences(
        self, stream: str, indices: Sequence[int], length: int, difficulty: str
    ) -> tuple[np.ndarray, np.ndarray]:
        if length < 4 or length % 2:
            raise ValueError(
                f"flip-flop has pairs of tokens, at least two: {length} tokens are not possible; choose train_len and "
                f"eval.lengths so that every length is even"
            )
        p = dict(zip(self.difficulties, (self.ignore, self.dense, self.sparse), strict=True))[difficulty]
        draws = uniforms(stream, indices, length)
        kind_draw, bit_draw = draws[:, 0::2], draws[:, 1::2]  # [B, pairs]
        kind = np.where(kind_draw < p, IGNORED, np.where(kind_draw < p + (1 - p) / 2, WRITE, READ))
        kind[:, 0], kind[:, -1] = WRITE, READ
        bits = (bit_draw < 0.5).astype(np.int64)
        pairs = np.arange(kind.shape[1])
        latest = np.maximum.accumulate(np.where(kind == WRITE, pairs, 0), axis=1)  # pair of the last write so far
        bits = np.where(kind == READ, np.take_along_axis(bits, latest, axis=1), bits)
        tokens = np.stack((kind, ZERO + bits), axis=2).reshape(len(bits), -1)  # [B, length]
        scored = np.zeros(tokens.shape, dtype=bool)
        scored[:, 1::2] = kind == READ
        return tokens, scored
