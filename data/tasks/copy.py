"""Copying a string (Jelassi et al., arXiv 2402.01032): say again what was read."""

from dataclasses import dataclass

import numpy as np

from data.tasks.base import MOST, PAD, Draw, Sequences, Task, next_tokens

SEPARATOR, FIRST = 1, 2


@dataclass(kw_only=True, eq=False)
class Copy(Task):
    """Symbols, a separator, and the same symbols again.

        s3 s0 s3 s7 | s3 s0 s3 s7 -
                      ^^^^^^^^^^^       the targets

    The symbols are uniform, 1 to length // 2 of them, each number equally often, then padding; in the difficulty full
    there are length // 2, so that a text is copied which is as much longer as the text itself.
    """

    task = "copy"
    difficulties = ("in-distribution", "full")

    kinds: int = 26  # number of different symbols

    def __post_init__(self) -> None:
        self.check(kinds=(2, MOST))

    @property
    def vocab(self) -> list[str]:
        return [PAD, "|", *(f"s{i}" for i in range(self.kinds))]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        most = length // 2
        self.check_length(length, most > 0, "at least 2 tokens")
        size_draw, symbol_draw = draw(1, most)
        n = 1 + (size_draw * most).astype(np.int64)  # symbols, [B, 1]
        if difficulty == "full":
            n[:] = most
        column = np.arange(length + 1)
        again = (column > n) & (column <= 2 * n)  # [B, length + 1]
        symbols = FIRST + (symbol_draw * self.kinds).astype(np.int64)  # [B, most]
        at = np.clip(np.where(again, column - n - 1, column), 0, most - 1)
        tokens = np.where(column <= 2 * n, np.take_along_axis(symbols, at, axis=1), 0)
        return next_tokens(np.where(column == n, SEPARATOR, tokens), again)
