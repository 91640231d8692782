"""Chains of assignments (after the variable tracking of RULER, Hsieh et al., arXiv 2404.06654): follow references."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.tasks.base import Sequences, Task, check_range, choose, smallest, uniform_parts

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
        check_range("hops", self.hops, 1, len(LETTERS) - 1)
        check_range("chains", self.chains, 1, len(LETTERS) // (1 + self.hops))  # each variable is a letter

    @cached_property
    def difficulties(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("in-distribution", *(f"hops-{n}" for n in range(1 + self.hops)))

    @cached_property
    def vocab(self) -> list[str]:
        return [".", "=", "?", *LETTERS, *map(str, range(10))]

    def sequences(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> Sequences:
        c, depth = self.chains, 1 + self.hops
        n = c * depth  # variables
        filler = length + 1 - 3 * (n + c)  # the last value need not be read
        self.check_length(length, filler >= 0, f"at least {3 * (n + c) - 1} tokens for its statements and questions")
        parts = uniform_parts(stream, indices, len(LETTERS), n, c, c, c, filler + n)
        name_draw, order_draw, value_draw, hop_draw, question_draw, place_draw = parts
        variable = LETTER + smallest(name_draw, n).reshape(-1, c, depth)
        value = LETTER + len(LETTERS) + (value_draw * 10).astype(np.int64)  # [B, c]
        meaning = np.concatenate((value[..., None], variable[..., :-1]), axis=2)  # what each is set to, [B, c, depth]
        statement = np.stack((variable, np.full_like(variable, IS), meaning), axis=-1).reshape(-1, 3 * n)
        # which statement is that of each variable: any, but in the order of its chain
        number = np.sort(np.argsort(order_draw, axis=1).reshape(-1, c, depth), axis=2).reshape(-1, n)
        filler_before = choose(place_draw, n) - np.arange(n)
        start = 3 * number + np.take_along_axis(filler_before, number, axis=1)  # [B, n]
        tokens = np.full((len(start), length + 1), FILLER)
        np.put_along_axis(tokens, (start[..., None] + np.arange(3)).reshape(-1, 3 * n), statement, axis=1)

        hop = (hop_draw * depth).astype(np.int64) if difficulty == "in-distribution" else int(difficulty[5:])
        asked = np.take_along_axis(variable, np.broadcast_to(hop, value.shape)[..., None], axis=2)[..., 0]  # [B, c]
        chain = np.argsort(question_draw, axis=1)
        questions = tokens[:, -3 * c :]
        questions[:, 0::3] = ASKS
        questions[:, 1::3] = np.take_along_axis(asked, chain, axis=1)
        questions[:, 2::3] = np.take_along_axis(value, chain, axis=1)
        from_end = length - np.arange(length + 1)
        return tokens, np.broadcast_to((from_end < 3 * c) & (from_end % 3 == 0), tokens.shape)
