"""Multi-query associative recall (Arora et al., arXiv 2312.04927): tell the value that came with a key."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.tasks.base import Sequences, Task, check_range, choose, uniforms


@dataclass(kw_only=True, eq=False)
class Recall(Task):
    """Pairs of a key and a value; then each key again, in another order and among filler, with its value.

        k7 v2 k1 v9 k4 v2 . k4 v2 . . k7 v2 k1 v9 .
                               ^         ^     ^      the targets

    The keys of a text differ, its values are any. The filler `.` lies at random places between the queries; in the
    difficulty near after all of them, so that they follow the pairs at once; in far before all of them. A longer text
    has more filler, not more pairs.
    """

    task = "recall"
    difficulties = ("in-distribution", "near", "far")

    pairs: int = 8  # in a text, each asked for once
    keys: int = 32  # number of different keys
    values: int = 32  # number of different values

    def __post_init__(self) -> None:
        check_range("keys", self.keys, 1)
        check_range("pairs", self.pairs, 1, self.keys)  # the keys of a text are different
        check_range("values", self.values, 2)

    @cached_property
    def vocab(self) -> list[str]:
        return [".", *(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.values))]

    def sequences(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> Sequences:
        p = self.pairs
        filler = length + 1 - 4 * p  # the last value need not be read
        self.check_length(length, filler >= 0, f"at least {4 * p - 1} tokens for data.pairs={p}")
        draws = uniforms(stream, indices, self.keys + 2 * p + filler + p)
        key_draw, value_draw, order_draw, place_draw = np.split(draws, np.cumsum((self.keys, p, p)), axis=1)
        key = 1 + np.argsort(key_draw, axis=1)[:, :p]  # [B, p]
        value = 1 + self.keys + (value_draw * self.values).astype(np.int64)
        order = np.argsort(order_draw, axis=1)
        # after the pairs come `filler` tokens and p queries: which of these places are queries?
        places = {"in-distribution": choose(place_draw, p), "near": np.arange(p), "far": filler + np.arange(p)}
        at = np.broadcast_to(2 * p + places[difficulty] + np.arange(p), key.shape)  # a query takes two tokens
        tokens = np.zeros((len(key), length + 1), dtype=np.int64)
        tokens[:, 0 : 2 * p : 2], tokens[:, 1 : 2 * p : 2] = key, value
        np.put_along_axis(tokens, at, np.take_along_axis(key, order, axis=1), axis=1)
        np.put_along_axis(tokens, at + 1, np.take_along_axis(value, order, axis=1), axis=1)
        is_target = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(is_target, at + 1, True, axis=1)
        return tokens, is_target
