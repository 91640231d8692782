"""Counting (CoPE's paper, arXiv 2405.18719, and its released code): run a program whose variables are counters."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from data.tasks.base import PAD, Draw, Sequences, Task, next_tokens

PAD_ID, PASS, FIRST_SET = range(3)  # token ids: the order of `vocab`
FEWEST = 3  # operations of a program at least


@dataclass(kw_only=True, eq=False)
class Counting(Task):
    """Programs that set variables to 0, increment them or do nothing; the value of one is asked for at the end.

        pass a=0 pass a++ b=0 a++ pass b++ a? 2 - -
                                              ^       the target

    Programs have 3 to `length` - 1 operations, each number equally often; padding fills the rest. In the difficulty
    full they have `length` - 1. The grammar is that of the released code, in which a token is a word: an operation is
    drawn by its weight; a set takes any variable, an increment one that has been set. If there is none, or it is at the
    cap, the operation is drawn again. Programs without a set do not occur.
    """

    task = "counting"
    difficulties = ("in-distribution", "full")
    version = 2

    variables: Annotated[int, Field(ge=1, le=26)] = 1  # how many there are: a, b, ...
    # Of set, pass and increment.
    weights: Annotated[Sequence[Annotated[float, Field(ge=0)]], Field(min_length=3, max_length=3)] = (1, 50, 7)
    cap: Annotated[int, Field(ge=1, le=99)] = 10  # the largest value

    def __post_init__(self) -> None:
        self.weights = list(self.weights)
        set_weight, pass_weight, add_weight = self.weights
        if set_weight == 0 or add_weight > 10 * (set_weight + pass_weight):
            raise ValueError(
                f"data.weights={self.weights} must be the weights of set (above 0), pass and increment, "
                "the last at most 10 times the sum of the others; else all programs end at the cap"
            )

    @property
    def vocab(self) -> list[str]:
        names = ascii_lowercase[: self.variables]
        operations = [f"{name}{sign}" for sign in ("=0", "++", "?") for name in names]
        return [PAD, "pass", *operations, *map(str, range(self.cap + 1))]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        most = length - 1
        self.check_length(length, most >= FEWEST, f"{FEWEST + 1} or more tokens, for operations and the question")
        least = FEWEST
        if difficulty == "full":
            least = most
        # Whether an operation is possible depends on those before it, which forbids drawing all at once. So candidates
        # are drawn without regard to the cap, half as many again as a program needs, and the possible ones are kept.
        columns = 3 * most // 2
        while True:
            size_draw, passes_draw, asked_draw, kind_draw = draw(1, 1, 1, 2 * columns)
            n = least + (size_draw * (most - least + 1)).astype(np.int64)  # operations, [B, 1]
            passes = self._leading_passes(passes_draw, n)
            candidates = self._candidates(kind_draw[:, 0::2], kind_draw[:, 1::2])
            place = passes + candidates.possible.cumsum(axis=1) - 1  # of each candidate in the program, [B, C]
            if (place[:, -1:] >= n - 1).all():
                return self._write(candidates, place, n, asked_draw, length)
            # Too few were possible in some program. The random numbers begin alike for any number of columns, so the
            # same candidates are drawn again, and more of them.
            columns *= 2

    def _leading_passes(self, passes_draw: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Draw the number of passes that a program of `n` operations starts with, fewer than n: int64 [B, 1].

        Before the first set only passes are possible, so their number is geometric. A program without a set would be
        drawn again, so it is cut off at n: the inverse of that distribution, applied to a uniform number.
        """
        chance_of_set, chance_of_pass, _ = np.array(self.weights) / sum(self.weights)
        with np.errstate(divide="ignore"):  # without passes the logarithm is -inf, and there are none
            log = np.log1p(-chance_of_set / (chance_of_set + chance_of_pass))  # of the chance of another pass
        passes = np.log1p(passes_draw * np.expm1(n * log)) // log
        return np.minimum(passes, n - 1).astype(np.int64)

    def _candidates(self, kind: np.ndarray, which: np.ndarray) -> "Candidates":
        """Draw operations one after another, beginning with a set, without regard to the cap.

        Args:
            kind: random numbers that decide the kind of each operation, [B, C].
            which: random numbers that decide its variable, [B, C].
        """
        chance_of_set, _, chance_of_add = np.array(self.weights) / sum(self.weights)
        is_set = kind < chance_of_set
        is_set[:, 0] = True
        is_add = ~is_set & (kind < chance_of_set + chance_of_add)
        any_variable = np.ones((self.variables, 1, 1), dtype=bool)
        sets = is_set & _one_of(any_variable, which)
        known = np.logical_or.accumulate(sets, axis=2)
        adds = is_add & _one_of(known, which)
        # A value is the increments since the last set: all so far, less those before the set. An increment at the cap
        # is not possible and will be left out. It may be counted here all the same, as may those after it: none of
        # them is possible before the next set, and the value is then the cap.
        total = adds.cumsum(axis=2)
        before_set = np.maximum.accumulate(np.where(sets, total, 0), axis=2)
        values = total - before_set
        possible = ~(adds & (values > self.cap)).any(axis=0)
        chosen = np.concatenate((sets, adds))  # [2 V, B, C] in the order of `vocab`: True at one place, or none: a pass
        tokens = np.where(chosen.any(axis=0), FIRST_SET + chosen.argmax(axis=0), PASS)
        return Candidates(tokens, known, np.minimum(values, self.cap), possible)

    def _write(
        self, candidates: "Candidates", place: np.ndarray, n: np.ndarray, asked_draw: np.ndarray, length: int
    ) -> Sequences:
        """Write programs: passes, the possible candidates that have a place below n, the question and its answer."""
        column = np.arange(length + 1)
        tokens = np.where(column < n, PASS, PAD_ID)
        used = place < n
        row, candidate = (used & candidates.possible).nonzero()
        tokens[row, place[row, candidate]] = candidates.tokens[row, candidate]

        # The question is about one of the variables that have been set by the end; its value there is the answer.
        rows = np.arange(len(n))
        end = used.sum(axis=1) - 1  # the last candidate of each program
        asked = _one_of(candidates.known[:, rows, end], asked_draw[:, 0]).argmax(axis=0)
        question = n[:, 0]
        first_question = FIRST_SET + 2 * self.variables  # after the sets and the increments
        first_value = first_question + self.variables
        tokens[rows, question] = first_question + asked
        tokens[rows, question + 1] = first_value + candidates.values[asked, rows, end]
        return next_tokens(tokens, column == n + 1)


class Candidates(NamedTuple):
    """C operations for each of B programs of V variables, drawn one after another; the possible ones count."""

    tokens: np.ndarray  # the operation's token, int64 [B, C]
    known: np.ndarray  # whether this variable has been set by then, bool [V, B, C]
    values: np.ndarray  # the variable's value after it, int64 [V, B, C]
    possible: np.ndarray  # whether it can be executed, bool [B, C]


def _one_of(known: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Choose one of the variables that are `known` [V, ...], each equally probable: bool of the same shape."""
    number = (draws * known.sum(axis=0)).astype(np.int64)
    return known & (known.cumsum(axis=0) == number + 1)
