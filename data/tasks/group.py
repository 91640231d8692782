"""State tracking (Merrill et al., arXiv 2404.08819): the running product of elements of a finite group."""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import numpy as np

from data.base import IGNORE_INDEX
from data.tasks.base import Draw, Sequences, Task


@dataclass(kw_only=True, eq=False)
class Group(Task):
    """Elements of a group after a start sign; the target at each of them is the product of all up to it.

        > bac bca acb cab       S3, as permutations of abc: what becomes of a, of b and of c
          bac cba bca abc       the targets

    They are not read, so the state must be found anew at every position. z2 is parity, and zN addition modulo N. S5
    and A5 are not solvable: no transformer of constant depth is believed to hold their state in texts of any length.
    Trained on elements that are all equally probable; in the difficulty sparse nine of ten are the identity.
    """

    task = "group"
    difficulties = ("in-distribution", "sparse")

    group: str = "s3"  # zN: numbers modulo N; sN: permutations of N letters; aN: the even ones
    generators: bool = False  # draw only the identity and 1 (zN), transpositions (sN) or cycles of three letters (aN)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"z([2-9]|[1-9]\d)|s[2-6]|a[3-6]", self.group):
            raise ValueError(f"data.group={self.group} must be z2 to z99, s2 to s6, or a3 to a6")

    @cached_property
    def elements(self) -> list[tuple[int, ...]]:
        """Each element as a permutation of 0..n-1; the identity comes first."""
        n = int(self.group[1:])
        if self.group[0] == "z":
            return [tuple((i + shift) % n for i in range(n)) for shift in range(n)]
        inversions = {p: sum(x > y for x, y in combinations(p, 2)) for p in permutations(range(n))}
        return [p for p in inversions if self.group[0] == "s" or inversions[p] % 2 == 0]

    @cached_property
    def drawn(self) -> np.ndarray:
        """Indices of the elements that texts are made of."""
        is_cyclic = self.group[0] == "z"
        size = [p[0] if is_cyclic else sum(i != x for i, x in enumerate(p)) for p in self.elements]  # letters moved
        return np.flatnonzero(np.array(size) <= (min(size[1:]) if self.generators else max(size)))

    @cached_property
    def products(self) -> np.ndarray:
        """Index of "first a, then b", int64 [n, n]."""
        index = {p: i for i, p in enumerate(self.elements)}
        return np.array([[index[tuple(b[x] for x in a)] for b in self.elements] for a in self.elements])

    @property
    def vocab(self) -> list[str]:
        names = [str(p[0]) if self.group[0] == "z" else "".join("abcdef"[x] for x in p) for p in self.elements]
        return [*names, ">"]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        self.check_length(length, length >= 2, "at least 2 tokens")
        (draws,) = draw(2 * length)
        tokens = self.drawn[(draws[:, 1::2] * len(self.drawn)).astype(np.int64)]  # [B, length]
        if difficulty == "sparse":
            tokens[draws[:, 0::2] < 0.9] = 0
        tokens[:, 0] = len(self.elements)
        targets = np.full(tokens.shape, IGNORE_INDEX)
        state = np.zeros(len(tokens), dtype=np.int64)
        for t in range(1, length):
            targets[:, t] = state = self.products[state, tokens[:, t]]
        return tokens, targets
