"""Counting (CoPE's paper, arXiv 2405.18719, and its released code): run a program whose variables are counters."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from data.tasks.base import PAD, Task, uniforms

FEWEST = 3  # operations of a program
SET, ADD, PASS = range(3)


class Counting(Task):
    """Programs that set variables, increment them or do nothing; the value of one is asked for at the end.

        pass a=0 pass a++ b=0 a++ pass b++ a? 2 - -
                                              ^       the scored token

    Programs have 3 to `length` - 1 operations, any number as probable as another, and padding at the end; those of the
    slice full have `length` - 1.

    The grammar is that of the released code: an operation is drawn by its weight; a set takes any variable, an
    increment one that has been set; where there is none, or the one taken is at the cap, the operation is drawn again.
    Only variables that have been set are asked for, so programs that set none do not occur. Here a token is an
    operation. In the released code it is a word: `a = 0 ;` has four, `a ++;` two, `pass;` one. So the number of
    operations does not tell the length there, and programs that are too long lose their beginning.

    Args:
        variables: how many there are: a, b, ...
        weights: of set, pass and increment.
        cap: the largest value.
        values: zero: a set is always to 0; random: to any value up to the cap, as probable as another.
        balance: every value up to the cap that the program's size allows is the answer as often. Else the answers 0
            and `cap` prevail. The program is drawn without the increments that count, which are then put in anywhere
            after the last set of the variable in question.

    Raises:
        ValueError: no variables or too many, a weight or cap out of range.
    """

    task = "counting"
    difficulties = ("in-distribution", "full")

    def __init__(
        self,
        *,
        variables: int = 1,
        weights: list[float] = [1, 50, 7],  # noqa: B006 - never changed
        cap: int = 10,
        values: Literal["zero", "random"] = "zero",
        balance: bool = False,
    ) -> None:
        if not 1 <= variables <= 26:
            raise ValueError(f"data.variables={variables} must be between 1 and 26: they are letters")
        if len(weights) != 3 or not all(0 <= w < float("inf") for w in weights) or not weights[0] > 0:
            raise ValueError(f"data.weights={weights} must be three numbers, of set (above 0), pass and increment")
        if weights[2] > 10 * (weights[0] + weights[1]):
            raise ValueError(
                f"data.weights={weights}: increments, the last, may be 10 times as frequent as set and pass together, "
                f"no more: they would all end at the cap"
            )
        if not 1 <= cap <= 99:
            raise ValueError(f"data.cap={cap} must be between 1 and 99")
        self.variables, self.weights, self.cap, self.values, self.balance = variables, weights, cap, values, balance

    @property
    def letters(self) -> str:
        return "abcdefghijklmnopqrstuvwxyz"[: self.variables]

    @property
    def starts(self) -> int:
        """Number of values that a variable may be set to, from 0 on."""
        return 1 if self.values == "zero" else self.cap + 1

    @property
    def symbols(self) -> list[str]:
        return [
            PAD,
            "pass",
            *(f"{name}={value}" for name in self.letters for value in range(self.starts)),
            *(f"{name}++" for name in self.letters),
            *(f"{name}?" for name in self.letters),
            *(str(value) for value in range(self.cap + 1)),
        ]

    def sequences(
        self, stream: str, indices: Sequence[int], length: int, difficulty: str
    ) -> tuple[np.ndarray, np.ndarray]:
        most = length - 1
        if most < FEWEST:
            raise ValueError(
                f"counting needs at least {FEWEST + 1} tokens, for {FEWEST} operations and the question, not {length}: "
                f"choose train_len and eval.lengths accordingly"
            )
        rows = np.arange(len(indices))
        draws = uniforms(f"{stream}/question", indices, 4 + self.cap)
        n = np.full(len(rows), most)
        if difficulty != "full":
            n = _pick(draws[:, 0], FEWEST, most)
        counted = np.zeros_like(n)  # increments to put in
        if self.balance:
            zero = self.values == "zero"
            answer = _pick(draws[:, 1], 0, np.minimum(self.cap, n - 1) if zero else self.cap)
            counted = answer if zero else _pick(draws[:, 2], 0, np.minimum(answer, n - 1))
        operations, value, last = self._programs(f"{stream}/operations", indices, n - counted, most)
        is_set = last >= 0  # [variables, B]
        asked = ((is_set.cumsum(0) - 1 == _pick(draws[:, 3], 0, is_set.sum(0) - 1)) & is_set).argmax(0)
        if self.balance:
            after = last[asked, rows]
            operations[rows, after] = self._set(asked * self.starts + answer - counted)
            operations = self._put_in(operations, n - counted, asked, after, counted, draws[:, 4:])
        else:
            answer = value[asked, rows]
        tokens = np.zeros((len(rows), length + 1), dtype=np.int64)  # padding
        tokens[:, :most] = np.where(np.arange(most) < n[:, None], operations, 0)
        tokens[rows, n] = self._add(self.variables + asked)
        tokens[rows, n + 1] = self._add(2 * self.variables + answer)
        scored = np.zeros(tokens.shape, dtype=bool)
        scored[rows, n + 1] = True
        return tokens, scored

    def _set(self, target: np.ndarray) -> np.ndarray:
        """Token that sets variable target // starts to target % starts."""
        return 2 + target

    def _add(self, variable: np.ndarray) -> np.ndarray:
        """Token that increments a variable; those of questions and of answers follow."""
        return 2 + self.variables * self.starts + variable

    def _programs(
        self, stream: str, indices: Sequence[int], n: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Programs of n [B] operations, int64 [B, width], anything after them; and each [variables, B], the value at
        the end and the operation that set the variable last, -1 if none did.

        More operations are drawn than are needed, and those that are not possible left out: that is drawing again.
        """
        set_, pass_, add = np.array(self.weights) / sum(self.weights)
        columns = width + width // 4 + 1
        while True:
            draws = uniforms(stream, indices, 1 + 2 * columns)
            at, which, kind_draw = np.arange(columns), draws[:, 2::2], draws[:, 1::2]
            kind = np.where(kind_draw < set_, SET, np.where(kind_draw < set_ + add, ADD, PASS))
            # Before the first set only passes are possible: a geometric number of them, but fewer than n.
            with np.errstate(divide="ignore"):
                log = np.log1p(-set_ / (set_ + pass_))  # of the probability of a pass
            passes = np.minimum(np.log1p(draws[:, 0] * np.expm1(n * log)) / log, n - 1).astype(np.int64)[:, None]
            kind = np.where(at < passes, PASS, np.where(at == passes, SET, kind))
            target = (which * (self.variables * self.starts)).astype(np.int64)
            variable = np.arange(self.variables)[:, None, None]
            is_set = (kind == SET) & (target // self.starts == variable)
            last = np.maximum.accumulate(np.where(is_set, at, -1), axis=2)  # [variables, B, columns]
            known = last >= 0
            taken = (which * known.sum(0)).astype(np.int64)  # of those known
            added = (kind == ADD) & known & (known.cumsum(0) - 1 == taken)
            total, begin = added.cumsum(2), np.maximum(last, 0)
            start = np.take_along_axis((target % self.starts)[None], begin, axis=2)
            value = start + total - np.take_along_axis(total, begin, axis=2)
            possible = ~(added & (value > self.cap)).any(0)  # [B, columns]
            if (possible.sum(1) >= n).all():
                break
            columns *= 2
        operations = np.where(kind == SET, self._set(target), np.where(kind == ADD, self._add(added.argmax(0)), 1))
        kept = np.argsort(~possible, axis=1, kind="stable")[:, :width]
        rows, end = np.arange(len(n)), np.take_along_axis(kept, n[:, None] - 1, axis=1)[:, 0]
        last = last[:, rows, end]  # [variables, B]
        setting = np.where(last >= 0, possible.cumsum(1)[rows, last] - 1, -1)
        return np.take_along_axis(operations, kept, axis=1), np.minimum(value[:, rows, end], self.cap), setting

    def _put_in(
        self,
        operations: np.ndarray,
        n: np.ndarray,
        asked: np.ndarray,
        after: np.ndarray,
        counted: np.ndarray,
        draws: np.ndarray,
    ) -> np.ndarray:
        """The programs of n operations with `counted` increments of the variable `asked` after the operation `after`,
        at random places, in place of those they have there."""
        column, increment = np.arange(operations.shape[1]), self._add(asked)[:, None]
        operations = np.where((operations == increment) & (column > after[:, None]), 1, operations)
        places = after[:, None] + draws * (n - after)[:, None]
        key = np.concatenate((
            np.where(column < n[:, None], column, np.inf),
            np.where(np.arange(draws.shape[1]) < counted[:, None], places, np.inf),
        ), axis=1)  # fmt: skip
        both = np.concatenate((operations, np.broadcast_to(increment, draws.shape)), axis=1)
        return np.take_along_axis(both, np.argsort(key, axis=1, kind="stable"), axis=1)[:, : len(column)]


def _pick(draws: np.ndarray, low: int, high: np.ndarray | int) -> np.ndarray:
    """A whole number between low and high, both included, for each of `draws`."""
    return low + (draws * (high - low + 1)).astype(np.int64)
