"""Selective copying (Gu and Dao, arXiv 2312.00752, section 3.1): copy the symbols among blanks, in their order."""

from dataclasses import dataclass

import numpy as np

from data.tasks.base import PAD, Draw, Sequences, Symbols, Task, choose, next_tokens

PAD_ID, BLANK, SEPARATOR, FIRST = range(4)  # token ids; FIRST is the first symbol's


@dataclass(kw_only=True, eq=False)
class SelectiveCopy(Task):
    """Symbols among blanks, then a separator, then the symbols alone in the order in which they came.

        s3 . . s0 s3 . | s3 s0 s3 - -
                         ^^^^^^^^       the targets

    A text of `length` tokens holds n = length // 4 uniform symbols at random places among n blanks (the difficulty
    in-distribution), n // 2 blanks (dense) or 2 n blanks (sparse). So sparse texts fill the length, and the others end
    with padding: training leaves a quarter of the positions unused. At 512 tokens these are the 128, 64 and 256 blanks
    with 128 symbols of CoPE's paper (arXiv 2405.18719).
    """

    task = "selective_copy"
    difficulties = ("in-distribution", "dense", "sparse")

    kinds: Symbols = 16  # number of different symbols

    @property
    def vocab(self) -> list[str]:
        return [PAD, ".", "|", *(f"s{i}" for i in range(self.kinds))]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        n = length // 4
        self.check_length(length, n > 0, "at least 4 tokens")
        blanks = {"in-distribution": n, "dense": n // 2, "sparse": 2 * n}[difficulty]
        places = n + blanks
        symbol_draw, place_draw = draw(n, places)
        # the longest text, sparse, has 3 n places, a separator and n symbols, of which the last need not be read
        symbols = FIRST + (symbol_draw * self.kinds).astype(np.int64)  # [B, n]
        tokens = np.full((len(symbols), length + 1), PAD_ID)
        tokens[:, :places] = BLANK
        np.put_along_axis(tokens, choose(place_draw, n), symbols, axis=1)
        tokens[:, places] = SEPARATOR
        first = places + 1
        tokens[:, first : first + n] = symbols
        is_copy = np.zeros(length + 1, dtype=bool)
        is_copy[first : first + n] = True
        return next_tokens(tokens, is_copy)
