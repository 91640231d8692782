"""State tracking (Merrill et al., arXiv 2404.08819): the running product of elements of a finite group.

For: encodings that keep a state. Shown: only PaTH and CoPE learn parity, and neither far beyond its length
(docs/log/tasks.md). Leaves: when PaTH leaves the lab.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from string import ascii_lowercase

import numpy as np

from data.base import IGNORE_INDEX
from data.tasks.base import Draw, Sequences, Task


@dataclass(kw_only=True, eq=False)
class Group(Task):
    """Elements of a group after a start sign; the target at each of them is the product of all up to it.

        > bac bca acb cab       S3, as permutations of abc: what a, b and c become
          bac cba bca abc       the targets

    The model does not read the targets, so it must compute the state anew at every position. z2 is parity, and zN is
    addition modulo N. S5 and A5 are not solvable: no transformer of constant depth is believed to track their state in
    texts of any length. In training all elements are equally probable; in the difficulty sparse nine of ten elements
    are replaced by the identity.
    """

    task = "group"
    difficulties = ("in-distribution", "sparse")

    group: str = "z2"  # zN: numbers modulo N; sN: permutations of N letters; aN: the even ones
    generators: bool = False  # draw only the identity and 1 (zN), transpositions (sN) or cycles of three letters (aN)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"z([2-9]|[1-9]\d)|s[2-6]|a[3-6]", self.group):
            raise ValueError(f"data.group={self.group} must be z2 to z99, s2 to s6, or a3 to a6")

    @cached_property
    def elements(self) -> list[tuple[int, ...]]:
        """Each element as a permutation of 0..n-1; the identity comes first."""
        kind = self.group[0]
        numbers = range(int(self.group[1:]))
        # Addition of k modulo n is a shift by k, so one kind of element serves for all groups.
        if kind == "z":
            return [(*numbers[shift:], *numbers[:shift]) for shift in numbers]
        if kind == "a":
            return [p for p in permutations(numbers) if _inversions(p) % 2 == 0]
        return list(permutations(numbers))

    @cached_property
    def drawn(self) -> np.ndarray:
        """Indices of the elements that texts are made of."""
        if not self.generators:
            return np.arange(len(self.elements))
        if self.group[0] == "z":
            return np.arange(2)  # 0 and 1
        # Transpositions move two letters, cycles of three letters three: in each group the fewest that any element but
        # the identity moves.
        elements = np.array(self.elements)
        moved = (elements != elements[0]).sum(axis=1)
        return np.flatnonzero(moved <= moved[1:].min())

    @cached_property
    def products(self) -> np.ndarray:
        """Index of the element "first a, then b", int64 [a, b]."""
        # A table, so that the states of all texts advance by one lookup a token.
        index = {element: i for i, element in enumerate(self.elements)}
        products = np.empty((len(index), len(index)), dtype=np.int64)
        for a, i in index.items():
            for b, j in index.items():
                products[i, j] = index[tuple(b[x] for x in a)]
        return products

    @property
    def vocab(self) -> list[str]:
        names = []
        for element in self.elements:
            if self.group[0] == "z":
                names.append(str(element[0]))
            else:
                names.append("".join(ascii_lowercase[x] for x in element))
        return [*names, ">"]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        self.check_length(length, length >= 2, "at least 2 tokens")
        (draws,) = draw(2 * length)
        identity_draw = draws[:, 0::2]  # [B, length]
        element_draw = draws[:, 1::2]
        tokens = self.drawn[(element_draw * len(self.drawn)).astype(np.int64)]
        if difficulty == "sparse":
            tokens[identity_draw < 0.9] = 0
        tokens[:, 0] = len(self.elements)  # the start sign
        # Nothing is asked at the start sign, where the state is the identity, whose index is 0.
        targets = np.full(tokens.shape, IGNORE_INDEX)
        state = np.zeros(len(tokens), dtype=np.int64)
        for t in range(1, length):
            state = self.products[state, tokens[:, t]]
            targets[:, t] = state
        return tokens, targets


def _inversions(permutation: tuple[int, ...]) -> int:
    """The number of pairs in the wrong order: even for an even permutation."""
    return sum(x > y for x, y in combinations(permutation, 2))
