"""Counting (CoPE's paper, arXiv 2405.18719, and its released code): run a program whose variables are counters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.tasks.base import PAD, Draw, Sequences, Task, next_tokens

FEWEST = 3  # operations of a program


@dataclass(kw_only=True, eq=False)
class Counting(Task):
    """Programs that set variables to 0, increment them or do nothing; the value of one is asked for at the end.

        pass a=0 pass a++ b=0 a++ pass b++ a? 2 - -
                                              ^       the target

    Programs have 3 to `length` - 1 operations, each number equally often, then padding; in the difficulty full they
    have `length` - 1. The grammar is that of the released code, in which a token is a word: an operation is drawn by
    its weight; a set takes any variable, an increment one that has been set; if there is none, or it is at the cap, the
    operation is drawn again. Programs without a set do not occur.
    """

    task = "counting"
    difficulties = ("in-distribution", "full")
    version = 2

    variables: int = 1  # how many there are: a, b, ...
    weights: Sequence[float] = (1, 50, 7)  # of set, pass and increment
    cap: int = 10  # the largest value

    def __post_init__(self) -> None:
        self.check(variables=(1, 26), cap=(1, 99))
        w = self.weights = list(self.weights)
        if len(w) != 3 or not all(0 <= x < float("inf") for x in w) or not w[0] > 0 or w[2] > 10 * (w[0] + w[1]):
            needs = "the weights of set (above 0), pass and increment; the last at most 10 times the sum of the others"
            raise ValueError(f"data.weights={list(w)} must be {needs}, or all programs end at the cap")

    @property
    def vocab(self) -> list[str]:
        names = "abcdefghijklmnopqrstuvwxyz"[: self.variables]
        operations = [f"{name}{sign}" for sign in ("=0", "++", "?") for name in names]
        return [PAD, "pass", *operations, *map(str, range(self.cap + 1))]

    def sequences(self, draw: Draw, length: int, difficulty: str, candidates: int = 0) -> Sequences:
        """A program is passes, a set, and what is possible of a row of C candidates.

        Candidates are drawn without regard to their effect. If too few are possible, all is drawn again with more.
        """
        most = length - 1
        self.check_length(length, most >= FEWEST, f"{FEWEST + 1} or more tokens, for operations and the question")
        least, candidates = most if difficulty == "full" else FEWEST, candidates or 3 * most // 2
        sizes, candidate_draw = draw(3, 2 * candidates)
        size_draw, passes_draw, asked_draw = sizes.T
        kind, which = candidate_draw[:, 0::2], candidate_draw[:, 1::2]  # [B, C]
        set_, pass_, add = np.array(self.weights) / sum(self.weights)
        n = least + (size_draw * (most - least + 1)).astype(np.int64)  # operations, [B]
        # before the first set only passes are possible: a geometric number of them, but fewer than n
        with np.errstate(divide="ignore"):
            log = np.log1p(-set_ / (set_ + pass_))
        passes = np.minimum(np.log1p(passes_draw * np.expm1(n * log)) // log, n - 1).astype(np.int64)

        is_set = (kind < set_) | (np.arange(candidates) == 0)
        is_add = ~is_set & (kind < set_ + add)
        sets = is_set & _one_of(np.ones((self.variables, 1, 1), dtype=bool), which)  # [variables, B, C]
        known = np.logical_or.accumulate(sets, axis=2)  # which variables have been set
        adds = is_add & _one_of(known, which)
        total = adds.cumsum(axis=2)
        values = total - np.maximum.accumulate(np.where(sets, total, 0), axis=2)  # if there were no cap
        possible = ~(adds & (values > self.cap)).any(axis=0)  # [B, C]
        place = passes[:, None] + possible.cumsum(axis=1) - 1  # in the program
        if (place[:, -1] < n - 1).any():
            return self.sequences(draw, length, difficulty, 2 * candidates)

        columns, v = np.arange(length + 1), self.variables
        tokens = (columns < n[:, None]).astype(np.int64)  # passes, then padding
        operation = 1 + is_set * (1 + sets.argmax(axis=0)) + is_add * (1 + v + adds.argmax(axis=0))
        used = place < n[:, None]
        row, column = (used & possible).nonzero()
        tokens[row, place[row, column]] = operation[row, column]
        rows, end = np.arange(len(n)), used.sum(axis=1) - 1
        asked = _one_of(known[:, rows, end], asked_draw).argmax(axis=0)
        tokens[rows, n] = 2 + 2 * v + asked
        tokens[rows, n + 1] = 2 + 3 * v + np.minimum(values[asked, rows, end], self.cap)
        return next_tokens(tokens, columns == n[:, None] + 1)


def _one_of(known: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """One of the variables that are `known` [variables, ...], each equally probable: bool of the same shape."""
    number = (draws * known.sum(axis=0)).astype(np.int64)
    return known & (known.cumsum(axis=0) == number + 1)
