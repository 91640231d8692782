"""Copying a string (Jelassi et al., arXiv 2402.01032): repeat what was read.

For: the plainest use of far text. Shown: docs/log/tasks.md. Leaves: when selective copying, which is harder, says the
same of every encoding.
"""

from dataclasses import dataclass

import numpy as np

from data.tasks.base import PAD, Draw, Sequences, Symbols, Task, next_tokens

PAD_ID, SEPARATOR, FIRST = range(3)  # token ids; FIRST is the first symbol's


@dataclass(kw_only=True, eq=False)
class Copy(Task):
    """Symbols, a separator, and the same symbols again.

        s3 s0 s3 s7 | s3 s0 s3 s7 -
                      ^^^^^^^^^^^       the targets

    There are 1 to length // 2 uniform symbols, each number equally often; padding fills the rest. In the difficulty
    full there are always length // 2 symbols, so that what is to be copied grows with the text.
    """

    task = "copy"
    difficulties = ("in-distribution", "full")

    kinds: Symbols = 26  # number of different symbols

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
        symbols = FIRST + (symbol_draw * self.kinds).astype(np.int64)  # [B, most]

        # Columns 0 to n - 1 are the symbols, n is the separator, n + 1 to 2 n are the symbols again.
        column = np.arange(length + 1)
        is_copy = (column > n) & (column <= 2 * n)  # [B, length + 1]
        number = np.where(is_copy, column - n - 1, column)  # of the symbol in each column
        tokens = np.take_along_axis(symbols, np.clip(number, 0, most - 1), axis=1)
        tokens = np.where(column == n, SEPARATOR, tokens)
        tokens = np.where(column > 2 * n, PAD_ID, tokens)
        return next_tokens(tokens, is_copy)
