"""Multi-query associative recall (Arora et al., arXiv 2312.04927): find again what came with a key."""

from collections.abc import Sequence

import numpy as np

from data.tasks.base import Task, choose, uniforms

FILLER = "."


class Recall(Task):
    """Pairs of a key and a value; then each key again, in another order and after more or less filler, with its value.

        k7 v2 k1 v9 k4 v2 . k4 v2 . . k7 v2 k1 v9 .
                               ^         ^     ^      the scored tokens

    The keys of a text are different, the values any. What the pairs and the queries leave free is filler. It lies at
    random places between the queries; in the slice near after all of them, so that they follow the pairs at once; in
    the slice far before all of them. A longer text has more filler, not more pairs.

    Args:
        pairs: pairs in a text, each asked for once.
        keys: number of different keys. values: number of different values.

    Raises:
        ValueError: no pairs, fewer keys than pairs, or fewer than 2 values.
    """

    task = "recall"
    difficulties = ("in-distribution", "near", "far")

    def __init__(self, *, pairs: int = 8, keys: int = 32, values: int = 32) -> None:
        if pairs < 1:
            raise ValueError(f"data.pairs={pairs} must be at least 1")
        if keys < pairs:
            raise ValueError(f"data.keys={keys} must be at least data.pairs={pairs}: the keys of a text are different")
        if values < 2:
            raise ValueError(f"data.values={values} must be at least 2: there is nothing to remember otherwise")
        self.pairs, self.keys, self.values = pairs, keys, values

    @property
    def symbols(self) -> list[str]:
        return [FILLER, *(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.values))]

    def sequences(
        self, stream: str, indices: Sequence[int], length: int, difficulty: str
    ) -> tuple[np.ndarray, np.ndarray]:
        p = self.pairs
        filler = length + 1 - 4 * p  # the last value need not be read
        if filler < 0:
            raise ValueError(
                f"{p} pairs and as many queries need at least {4 * p - 1} tokens, not {length}: lower data.pairs, or "
                f"choose train_len and eval.lengths accordingly"
            )
        draws = uniforms(stream, indices, self.keys + 2 * p + filler + p)
        key_draw, value_draw, order_draw, place_draw = np.split(draws, np.cumsum((self.keys, p, p)), axis=1)
        key = 1 + np.argsort(key_draw, axis=1)[:, :p]  # [B, p]
        value = 1 + self.keys + (value_draw * self.values).astype(np.int64)
        order = np.argsort(order_draw, axis=1)
        # The rest is made of `filler` tokens and p queries: at which of these places are the queries?
        if difficulty == "near":
            places = np.broadcast_to(np.arange(p), key.shape)
        elif difficulty == "far":
            places = np.broadcast_to(filler + np.arange(p), key.shape)
        else:
            places = choose(place_draw, p).nonzero()[1].reshape(key.shape)
        at = 2 * p + places + np.arange(p)  # a query takes two tokens
        tokens = np.zeros((len(key), length + 1), dtype=np.int64)
        tokens[:, 0 : 2 * p : 2], tokens[:, 1 : 2 * p : 2] = key, value
        np.put_along_axis(tokens, at, np.take_along_axis(key, order, axis=1), axis=1)
        np.put_along_axis(tokens, at + 1, np.take_along_axis(value, order, axis=1), axis=1)
        scored = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(scored, at + 1, True, axis=1)
        return tokens, scored
