"""Counting (CoPE's paper, arXiv 2405.18719, and its released code): run a program whose variables are counters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from data.tasks.base import PAD, Sequences, Task, check_range, uniforms

FEWEST = 3  # operations of a program


@dataclass(kw_only=True, eq=False)
class Counting(Task):
    """Programs that set variables, increment them or do nothing; the value of one is asked for at the end.

        pass a=0 pass a++ b=0 a++ pass b++ a? 2 - -
                                              ^       the target

    Programs have 3 to `length` - 1 operations, with equal probability, and padding at the end; in the difficulty full
    they have `length` - 1. The grammar is that of the released code: an operation is drawn by its weight; a set takes
    any variable, an increment one that has been set; if there is none, or it is at the cap, the operation is drawn
    again. Programs without a set do not occur. Here a token is an operation, in the released code a word (`a ++;` has
    two), so there the number of operations does not tell the length, and long programs lose their beginning.

    With `balance`, each value up to the cap that the program's size allows is the answer equally often; otherwise 0 and
    the cap prevail. Such a program is drawn without the increments that count, which are then inserted at random places
    after the last set of the variable in question.
    """

    task = "counting"
    difficulties = ("in-distribution", "full")

    variables: int = 1  # how many there are: a, b, ...
    weights: Sequence[float] = (1, 50, 7)  # of set, pass and increment
    cap: int = 10  # the largest value
    values: Literal["zero", "random"] = "zero"  # zero: a set is always to 0; random: to any value up to the cap
    balance: bool = False

    def __post_init__(self) -> None:
        check_range("variables", self.variables, 1, 26, "they are letters")
        check_range("cap", self.cap, 1, 99, "the largest value")
        w = self.weights = tuple(self.weights)  # a list in a configuration
        if len(w) != 3 or not all(0 <= x < float("inf") for x in w) or not w[0] > 0 or w[2] > 10 * (w[0] + w[1]):
            raise ValueError(
                f"data.weights={list(w)} must be three numbers, of set (above 0), pass and increment; the last at most "
                f"10 times the sum of the others, or all programs end at the cap"
            )

    @cached_property
    def vocab(self) -> list[str]:
        names = "abcdefghijklmnopqrstuvwxyz"[: self.variables]
        sets = [f"{name}={value}" for name in names for value in range(self._starts)]
        increments, questions = ([f"{name}{sign}" for name in names] for sign in ("++", "?"))
        return [PAD, "pass", *sets, *increments, *questions, *map(str, range(self.cap + 1))]

    @cached_property
    def _odds(self) -> tuple[float, float, np.float64]:
        """Probabilities of set and increment; logarithm of that of a pass where only set and pass are possible."""
        set_, pass_, add = np.array(self.weights) / sum(self.weights)
        with np.errstate(divide="ignore"):
            return float(set_), float(add), np.log1p(-set_ / (set_ + pass_))

    @cached_property
    def _starts(self) -> int:
        """Number of values that a variable may be set to, from 0 on."""
        return 1 if self.values == "zero" else self.cap + 1

    def _set(self, variable: int, value: int) -> int:
        return 2 + variable * self._starts + value

    def _add(self, variable: int) -> int:
        """Token of an increment; those of questions and of answers follow."""
        return 2 + self.variables * self._starts + variable

    def sequences(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> Sequences:
        most = length - 1
        if most < FEWEST:
            raise ValueError(
                f"counting needs at least {FEWEST + 1} tokens, for {FEWEST} operations and the question, not {length}: "
                f"choose train_len and eval.lengths accordingly"
            )
        tokens = np.zeros((len(indices), length + 1), dtype=np.int64)  # padding
        is_target = np.zeros(tokens.shape, dtype=bool)
        for row, draws in enumerate(uniforms(f"{stream}/question", indices, 4 + self.cap).tolist()):
            n = most if difficulty == "full" else _pick(draws[0], FEWEST, most)
            counted = 0  # increments to insert
            if self.balance:
                zero = self.values == "zero"
                answer = _pick(draws[1], 0, min(self.cap, n - 1) if zero else self.cap)
                counted = answer if zero else _pick(draws[2], 0, min(answer, n - 1))
            numbers = _numbers(f"{stream}/operations", indices[row], 2 * length)
            program, values, last = self._program(numbers, n - counted)
            asked = sorted(values)[int(draws[3] * len(values))]
            if self.balance:
                after, add = last[asked], self._add(asked)
                program[after] = self._set(asked, answer - counted)
                old = ((i, 1 if i > after and token == add else token) for i, token in enumerate(program))
                new = ((after + draw * (len(program) - after), add) for draw in draws[4 : 4 + counted])
                program = [token for _, token in sorted([*old, *new], key=lambda item: item[0])]
            else:
                answer = values[asked]
            question = self._add(self.variables + asked), self._add(2 * self.variables + answer)
            tokens[row, : n + 2] = *program, *question
            is_target[row, n + 1] = True
        return tokens, is_target

    def _program(self, numbers: Iterator[float], n: int) -> tuple[list[int], dict[int, int], dict[int, int]]:
        """A program of n operations; of each variable its value at the end, and which operation set it last."""
        set_, add, log = self._odds
        # before the first set only passes are possible: a geometric number of them, but fewer than n
        passes = min(int(np.log1p(next(numbers) * np.expm1(n * log)) / log), n - 1)
        program: list[int] = []
        values: dict[int, int] = {}
        last: dict[int, int] = {}
        while len(program) < n:
            kind, which = next(numbers), next(numbers)
            if len(program) == passes or (values and kind < set_):
                variable, value = divmod(int(which * (self.variables * self._starts)), self._starts)
                values[variable], last[variable] = value, len(program)
                program.append(self._set(variable, value))
            elif not values or kind >= set_ + add:
                program.append(1)
            else:
                variable = sorted(values)[int(which * len(values))]
                if values[variable] < self.cap:
                    values[variable] += 1
                    program.append(self._add(variable))
        return program, values, last


def _pick(draw: float, low: int, high: int) -> int:
    """A whole number between low and high, both included."""
    return low + int(draw * (high - low + 1))


def _numbers(stream: str, index: int, stop: int) -> Iterator[float]:
    """`uniforms` without end, the first `stop` at once."""
    start = 0
    while True:
        yield from uniforms(stream, [index], stop)[0, start:].tolist()
        start, stop = stop, 2 * stop
