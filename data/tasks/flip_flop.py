"""Flip-flop language modelling (Liu et al., arXiv 2306.00946): remember one bit among distractors."""

from dataclasses import dataclass

import numpy as np

from data.base import IGNORE_INDEX
from data.tasks.base import Draw, Sequences, Share, Task

WRITE, READ, IGNORE, ZERO = range(4)  # token ids; the bit 1 is ZERO + 1


@dataclass(kw_only=True, eq=False)
class FlipFlop(Task):
    """Pairs of an instruction and a bit; the bit after a read is the one that was last written.

        w 1 i 0 i 1 r 1 w 0 i 1 r 0
                      ^           ^     the targets

    FFL(p): an instruction is i(gnore) with probability p, otherwise w(rite) or r(ead) with equal probability. The first
    is always a write, the last a read. The bits after writes and ignores are uniform.
    """

    task = "flip_flop"
    difficulties = ("in-distribution", "dense", "sparse")

    ignore: Share = 0.8  # p in training, and of the difficulty in-distribution
    dense: Share = 0.1  # p of the difficulty dense, with many writes and reads
    sparse: Share = 0.98  # p of the difficulty sparse, where the last write is far away

    @property
    def vocab(self) -> list[str]:
        return ["w", "r", "i", "0", "1"]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        self.check_length(length, length >= 4 and length % 2 == 0, "an even number of tokens, at least 4")
        p = {"in-distribution": self.ignore, "dense": self.dense, "sparse": self.sparse}[difficulty]
        (draws,) = draw(length)
        instruction_draw = draws[:, 0::2]  # [B, pairs]
        bit_draw = draws[:, 1::2]
        instruction = np.where(instruction_draw < p + (1 - p) / 2, WRITE, READ)
        instruction = np.where(instruction_draw < p, IGNORE, instruction)
        instruction[:, 0] = WRITE
        instruction[:, -1] = READ

        # A read has the bit of the last write before it.
        written = ZERO + (bit_draw < 0.5)
        pair = np.arange(length // 2)
        write = np.where(instruction == WRITE, pair, 0)
        last_write = np.maximum.accumulate(write, axis=1)  # up to each pair
        memory = np.take_along_axis(written, last_write, axis=1)
        is_read = instruction == READ
        bit = np.where(is_read, memory, written)

        # The bit follows its instruction: it is the target where a read is the input.
        inputs = np.stack((instruction, bit), axis=2).reshape(-1, length)
        targets = np.full_like(inputs, IGNORE_INDEX)
        targets[:, 0::2] = np.where(is_read, bit, IGNORE_INDEX)
        return inputs, targets
