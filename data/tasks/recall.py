"""Multi-query associative recall (Arora et al., arXiv 2312.04927): tell the value that came with a key."""

import math
from dataclasses import dataclass

import numpy as np

from data.tasks.base import MOST, Draw, Sequences, Task, choose, next_tokens, smallest


@dataclass(kw_only=True, eq=False)
class Recall(Task):
    """Pairs of a key and a value; then each key again, in another order and among filler, with its value.

        k7 v2 k1 v9 k4 v2 . k4 v2 . . k7 v2 k1 v9 .
                               ^         ^     ^      the targets
        k7 k7 v3 k0 k7 v1 . . k0 k7 v1 . k7 k7 v3     the same with key_len=2

    The keys of a text differ, its values are any. The filler `.` lies at random places between the queries; in the
    difficulty near after all of them, so that they follow the pairs at once; in far before all of them. A longer text
    has more filler, not more pairs, unless their density is given.
    """

    task = "recall"
    difficulties = ("in-distribution", "near", "far")

    pairs: int = 8  # in a text, each asked for once
    density: float | None = None  # instead of `pairs`: share of a text that pairs and queries take
    keys: int = 32  # number of different symbols in keys
    values: int = 32  # number of different symbols in values
    key_len: int = 1  # symbols of a key
    value_len: int = 1  # symbols of a value, each a target
    gap_power: float = 1.0  # a query is g places behind the pairs with weight g^(gap_power - 1); 0.01: as in the paper

    def __post_init__(self) -> None:
        self.check(keys=(1, MOST), values=(2, MOST), value_len=(1, MOST), gap_power=(0, 10))
        self.check(key_len=(1, int(math.log(MOST, max(2, self.keys)) + 1e-9)))  # each key has a random number in a text
        self.check(pairs=(1, self.keys**self.key_len))  # the keys of a text are different
        if self.density is not None:
            self.check(density=(0, 1))

    @property
    def vocab(self) -> list[str]:
        return [".", *(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.values))]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        a, size, known = self.key_len, self.key_len + self.value_len, self.keys**self.key_len
        p = self.pairs if self.density is None else max(1, int(self.density * (length + 1)) // (2 * size))
        filler = length + 1 - 2 * size * p  # the last value need not be read
        needs = f"at least {2 * size * p - 1} tokens for {p} pairs, of at most {known} different keys"
        self.check_length(length, filler >= 0 and p <= known, needs)
        key_draw, value_draw, order_draw, place_draw = draw(known, p * self.value_len, p, filler + p)
        key = smallest(key_draw, p)[..., None] // self.keys ** np.arange(a) % self.keys  # [B, p, a]
        value = (value_draw * self.values).astype(np.int64).reshape(-1, p, self.value_len)
        pair = np.concatenate((1 + key, 1 + self.keys + value), axis=2)  # [B, p, size]
        asked = np.take_along_axis(pair, np.argsort(order_draw, axis=1)[..., None], axis=1)
        # after the pairs come `filler` tokens and p queries: which of these places are queries?
        if self.gap_power != 1:  # weighted, without replacement: the first arrivals (Efraimidis and Spirakis, 2006)
            place_draw = -np.log1p(-place_draw) * np.arange(1, filler + p + 1) ** (1 - self.gap_power)
        places = {"in-distribution": choose(place_draw, p), "near": np.arange(p), "far": filler + np.arange(p)}
        start = size * p + places[difficulty] + (size - 1) * np.arange(p)  # a query takes `size` tokens
        at = np.broadcast_to(start[..., None] + np.arange(size), pair.shape)
        tokens = np.zeros((len(pair), length + 1), dtype=np.int64)
        tokens[:, : size * p] = pair.reshape(-1, size * p)
        np.put_along_axis(tokens, at.reshape(-1, size * p), asked.reshape(-1, size * p), axis=1)
        is_target = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(is_target, at[..., a:].reshape(len(pair), -1), True, axis=1)
        return next_tokens(tokens, is_target)
