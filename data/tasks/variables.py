"""Chains of assignments (after the variable tracking of RULER, Hsieh et al., arXiv 2404.06654): follow references."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.tasks.base import Draw, Sequences, Task, choose, next_tokens, smallest

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FILLER, IS, ASKS, LETTER = range(4)


@dataclass(kw_only=True, eq=False)
class Variables(Task):
    """Variables that are set to a digit or to another variable, among filler; then the value of one of each chain.

        h = 7 . q = 2 . . c = h m = c . t = q ? m 7 ? q 2
                                                  ^     ^    the targets: two hops and none

    Each chain is a variable set to a digit and `hops` more, each set to the one before. All have different names, and
    the chains lie among each other. In training a chain is asked for any of its variables; in the difficulty hops-N for
    that which is N references away from the digit. A longer text has more filler.
    """

    task = "variables"

    chains: int = 3  # in a text; for each question the others distract
    hops: int = 2  # references in a chain

    def __post_init__(self) -> None:
        self.check(hops=(1, len(LETTERS) - 1))
        self.check(chains=(1, len(LETTERS) // (1 + self.hops)))  # each variable is a letter

    @cached_property
    def difficulties(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("in-distribution", *(f"hops-{n}" for n in range(1 + self.hops)))

    @property
    def vocab(self) -> list[str]:
        return [".", "=", "?", *LETTERS, *map(str, range(10))]

    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        c, depth = self.chains, 1 + self.hops
        n = c * depth  # variables
        filler = length + 1 - 3 * (n + c)  # the last value need not be read
        self.check_length(length, filler >= 0, f"at least {3 * (n + c) - 1} tokens for its statements and questions")
        names, order, values, hops, questions, places = draw(len(LETTERS), n, c, c, c, filler + n)
        variable = LETTER + smallest(names, n).reshape(-1, c, depth)
        value = LETTER + len(LETTERS) + (values * 10).astype(np.int64)  # [B, c]
        meaning = np.concatenate((value[..., None], variable[..., :-1]), axis=2)  # what each is set to, [B, c, depth]
        statement = np.stack((variable, np.full_like(variable, IS), meaning), axis=-1).reshape(-1, 3 * n)
        # which statement is that of each variable: any, but in the order of its chain
        number = np.sort(np.argsort(order, axis=1).reshape(-1, c, depth), axis=2).reshape(-1, n)
        filler_before = choose(places, n) - np.arange(n)
        start = 3 * number + np.take_along_axis(filler_before, number, axis=1)  # [B, n]
        tokens = np.full((len(start), length + 1), FILLER)
        np.put_along_axis(tokens, (start[..., None] + np.arange(3)).reshape(-1, 3 * n), statement, axis=1)

        hop = (hops * depth).astype(np.int64) if difficulty == "in-distribution" else int(difficulty[5:])
        asked = np.take_along_axis(variable, np.broadcast_to(hop, value.shape)[..., None], axis=2)[..., 0]  # [B, c]
        chain = np.argsort(questions, axis=1)
        question = np.stack((np.full_like(asked, ASKS), asked, value), axis=2)
        tokens[:, -3 * c :] = np.take_along_axis(question, chain[..., None], axis=1).reshape(-1, 3 * c)
        from_end = length - np.arange(length + 1)
        return next_tokens(tokens, (from_end < 3 * c) & (from_end % 3 == 0))
