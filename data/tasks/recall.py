"""Multi-query associative recall (Arora et al., arXiv 2312.04927): tell the value that came with a key."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from conf.schema import Count
from data.tasks.base import MAX_OPTION, Draw, Sequences, Share, Size, Symbols, Task, argsmallest, choose, next_tokens


@dataclass(kw_only=True, eq=False)
class Recall(Task):
    """Pairs of a key and a value; then each key again, in another order and among filler, with its value.

        k7 v2 k1 v9 k4 v2 . k4 v2 . . k7 v2 k1 v9 .
                               ^         ^     ^      the targets
        k7 k7 v3 k0 k7 v1 . . k0 k7 v1 . k7 k7 v3     the same with key_len=2

    The keys of a text are all different, its values need not be. The filler `.` lies at random places among the
    queries; in the difficulty near it follows all queries, so that they come right after the pairs; in far it precedes
    them. A longer text has more filler, not more pairs, unless their density is given.
    """

    task = "recall"
    difficulties = ("in-distribution", "near", "far")

    pairs: Count = 4  # in a text, each asked for once
    density: Share | None = None  # instead of `pairs`: share of a text that pairs and queries take
    keys: Size = 16  # number of different symbols in keys
    values: Symbols = 16  # number of different symbols in values
    key_len: Annotated[int, Field(ge=1, le=16)] = 1  # symbols of a key
    value_len: Size = 1  # symbols of a value, each a target
    # A query is g places behind the pairs with weight g^(gap_power - 1); 0.01: as in the paper.
    gap_power: Annotated[float, Field(ge=0, le=10)] = 1.0

    def __post_init__(self) -> None:
        possible = self.keys**self.key_len
        # The keys of a text are different, and it draws one random number for each possible key.
        if not self.pairs <= possible <= MAX_OPTION:
            raise ValueError(
                f"data.pairs={self.pairs}: data.key_len={self.key_len} of data.keys={self.keys} makes {possible:,} "
                f"keys, which must be at least as many, and at most {MAX_OPTION:,}"
            )

    @property
    def vocab(self) -> list[str]:
        keys = [f"k{i}" for i in range(self.keys)]
        values = [f"v{i}" for i in range(self.values)]
        return [".", *keys, *values]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        # A text is n pairs, then filler and n queries, each query as long as a pair.
        size = self.key_len + self.value_len  # tokens of a pair, and of a query with its answer
        possible = self.keys**self.key_len  # different keys
        n = self.pairs
        if self.density is not None:
            taken = int(self.density * (length + 1))
            n = max(1, taken // (2 * size))
        least = 2 * size * n - 1  # the last value need not be read
        filler = length - least
        needs = f"at least {least} tokens for {n} pairs, of at most {possible} different keys"
        self.check_length(length, filler >= 0 and n <= possible, needs)

        # The pairs, and the same pairs in the order of their queries.
        key_draw, value_draw, order_draw, place_draw = draw(possible, n * self.value_len, n, filler + n)
        pairs = self._pairs(key_draw, value_draw, n)  # [B, n, size]
        order = np.argsort(order_draw, axis=1)
        answered = np.take_along_axis(pairs, order[..., None], axis=1)  # each query with its answer

        # The text after the pairs is `filler` single tokens and n queries in some order: n of these `filler` + n items
        # are queries. Each query before takes `size` tokens instead of one, which moves it by `size` - 1.
        item = self._queries(place_draw, n, difficulty)
        start = size * n + item + (size - 1) * np.arange(n)
        column = np.broadcast_to(start[..., None] + np.arange(size), pairs.shape)  # of each token of a query

        # Filler everywhere, then the pairs at the start and the queries in their places.
        rows = len(pairs)
        tokens = np.zeros((rows, length + 1), dtype=np.int64)
        tokens[:, : size * n] = pairs.reshape(rows, -1)
        # numpy wants as many axes in all three: a row of columns and a row of tokens for each text.
        np.put_along_axis(tokens, column.reshape(rows, -1), answered.reshape(rows, -1), axis=1)

        # Only the values of queries are to be predicted. The ids of values are the last ones.
        is_target = tokens > self.keys
        is_target[:, : size * n] = False
        return next_tokens(tokens, is_target)

    def _pairs(self, key_draw: np.ndarray, value_draw: np.ndarray, n: int) -> np.ndarray:
        """The tokens of `n` pairs of different keys and any values: int64 [B, n, key_len + value_len]."""
        number = argsmallest(key_draw, n)[..., None]  # of each key among all, [B, n, 1]
        place_value = self.keys ** np.arange(self.key_len)
        key = number // place_value % self.keys  # its digits, [B, n, key_len]
        value = (value_draw * self.values).astype(np.int64).reshape(-1, n, self.value_len)
        # Token ids in the order of `vocab`: the filler, the keys, the values.
        return np.concatenate((1 + key, 1 + self.keys + value), axis=2)

    def _queries(self, place_draw: np.ndarray, n: int, difficulty: str) -> np.ndarray:
        """Choose which items after the pairs are the `n` queries: ascending, int64 [B, n] or [n].

        Args:
            place_draw: a random number for each item, in [0, 1): [B, items].
        """
        items = place_draw.shape[1]
        if difficulty == "near":
            return np.arange(n)
        if difficulty == "far":
            return np.arange(items - n, items)
        if self.gap_power != 1:
            # Weighted choice without replacement: each item arrives after an exponential time whose rate is its weight,
            # and the first n are chosen (Efraimidis and Spirakis, 2006).
            mean_time = np.arange(1, items + 1) ** (1 - self.gap_power)  # 1 / weight
            place_draw = -np.log1p(-place_draw) * mean_time
        return choose(place_draw, n)
