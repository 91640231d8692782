"""Chains of assignments (after the variable tracking of RULER, Hsieh et al., arXiv 2404.06654): follow references.

For: several hops in one text. Shown: no encoding learned it in the runs of docs/log/tasks.md. Leaves: when a
release passes in which still none has.
"""

from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase as LETTERS

import numpy as np

from data.tasks.base import Draw, Sequences, Task, choose, next_tokens, smallest, write

FILLER, IS, ASKS, LETTER = range(4)  # token ids; LETTER is the first letter's
DIGIT = LETTER + len(LETTERS)


@dataclass(kw_only=True, eq=False)
class Variables(Task):
    """Variables that are set to a digit or to another variable, among filler; then the value of one of each chain.

        h = 7 . q = 2 . . c = h m = c . t = q ? m 7 ? q 2
                                                  ^     ^    the targets: two hops and none

    Each chain is a variable set to a digit and `hops` more, each set to the one before. All have different names, and
    the chains are interleaved. In training each question is about any variable of its chain; in the difficulty hops-N
    about the one that is N references away from the digit. A longer text has more filler.
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
        # Statements and questions have three tokens each; filler has one.
        chains = self.chains
        depth = 1 + self.hops  # variables of a chain
        n = chains * depth  # variables
        least = 3 * (n + chains) - 1  # the last value need not be read
        filler = length - least
        needs = f"at least {least} tokens for its statements and questions"
        self.check_length(length, filler >= 0, needs)

        # A text draws the letters, the order of the statements, values, what is asked, and where the filler lies.
        name_draw, order_draw, value_draw, hop_draw, question_draw, place_draw = draw(
            len(LETTERS), n, chains, chains, chains, filler + n
        )

        variable = LETTER + smallest(name_draw, n).reshape(-1, chains, depth)  # [B, chains, depth]
        value = DIGIT + (value_draw * 10).astype(np.int64)  # [B, chains]
        rows = len(value)

        # Statements: each variable is set to the one before it in its chain, the first one to the value.
        meaning = np.concatenate((value[..., None], variable[..., :-1]), axis=2)
        equals = np.full_like(variable, IS)
        statement = np.stack((variable, equals, meaning), axis=-1)  # [B, chains, depth, 3]
        start = _starts(order_draw, place_draw, chains)  # [B, n]
        column = start[..., None] + np.arange(3)
        tokens = np.full((rows, length + 1), FILLER)
        write(tokens, column, statement)

        # Questions: one for each chain, in any order, at the end of the text.
        if difficulty == "in-distribution":
            hops = (hop_draw * depth).astype(np.int64)
        else:
            hops = np.full_like(value, int(difficulty.removeprefix("hops-")))
        asked = np.take_along_axis(variable, hops[..., None], axis=2)[..., 0]  # [B, chains]

        mark = np.full_like(asked, ASKS)
        question = np.stack((mark, asked, value), axis=2)  # [B, chains, 3]

        order = np.argsort(question_draw, axis=1)
        question = np.take_along_axis(question, order[..., None], axis=1)
        tokens[:, -3 * chains :] = question.reshape(rows, -1)
        # The value is the last of the three tokens of a question.
        from_end = length - np.arange(length + 1)
        is_question = from_end < 3 * chains
        return next_tokens(tokens, is_question & (from_end % 3 == 0))


def _starts(order_draw: np.ndarray, place_draw: np.ndarray, chains: int) -> np.ndarray:
    """The column where the statement of each variable begins: int64 [B, n].

    Args:
        order_draw: a random number for each of the n variables, which order the statements: [B, n].
        place_draw: one for each statement and each filler, which decide where the filler lies: [B, n + filler].
        chains: of n / chains variables each, whose statements keep their order.
    """
    rows, n = order_draw.shape
    # A variable must be set before it is referred to. So all statements are shuffled, and then the places of each
    # chain's statements are sorted.
    shuffled = np.argsort(order_draw, axis=1).reshape(rows, chains, -1)
    number = np.sort(shuffled, axis=2).reshape(rows, n)
    filler_before = choose(place_draw, n) - np.arange(n)  # before the first, second, ... statement of the text
    return 3 * number + np.take_along_axis(filler_before, number, axis=1)
