"""Selective copying (Gu and Dao, arXiv 2312.00752, section 3.1): copy what matters, in its order."""

from collections.abc import Sequence

import numpy as np

from data.tasks.base import PAD, Task, choose, uniforms

BLANK, SEPARATOR = ".", "|"


class SelectiveCopy(Task):
    """Symbols among blanks, then a separator, then the symbols alone in the order in which they came.

        s3 . . s0 s3 . | s3 s0 s3 - -
                         ^^^^^^^^       the scored tokens

    A text of `length` tokens holds n = length // 4 symbols, each uniform among those there are, at any places among
    n blanks, in the slice dense among n // 2, in the slice sparse among 2 n. So sparse fills the length, and the others
    end with padding: a position is never beyond `length`, but training leaves a quarter of them unused. 512 tokens are
    the 128 / 128, 64 / 128 and 256 / 128 of CoPE's paper (arXiv 2405.18719).

    Args:
        kinds: number of different symbols.

    Raises:
        ValueError: fewer than 2 symbols.
    """

    task = "selective_copy"
    difficulties = ("in-distribution", "dense", "sparse")

    def __init__(self, *, kinds: int = 16) -> None:
        if kinds < 2:
            raise ValueError(f"data.kinds={kinds} must be at least 2: there is nothing to remember otherwise")
        self.kinds = kinds

    @property
    def symbols(self) -> list[str]:
        return [PAD, BLANK, SEPARATOR, *(f"s{i}" for i in range(self.kinds))]

    def sequences(
        self, stream: str, indices: Sequence[int], length: int, difficulty: str
    ) -> tuple[np.ndarray, np.ndarray]:
        n = length // 4
        if n == 0:
            raise ValueError(
                f"a selective copy needs at least 4 tokens, not {length}: choose train_len and eval.lengths accordingly"
            )
        places = n + dict(zip(self.difficulties, (n, n // 2, 2 * n), strict=True))[difficulty]
        draws = uniforms(stream, indices, n + places)
        pad, blank, separator, first = range(4)
        copied = first + (draws[:, :n] * self.kinds).astype(np.int64)  # [B, n]
        tokens = np.full((len(copied), length + 1), pad)
        tokens[:, :places] = blank
        tokens[:, :places][choose(draws[:, n:], n)] = copied.ravel()
        tokens[:, places] = separator
        tokens[:, places + 1 : places + 1 + n] = copied
        scored = np.zeros(tokens.shape, dtype=bool)
        scored[:, places + 1 : places + 1 + n] = True
        return tokens, scored
