"""Texts that nobody knows before an entry is committed."""

from collections.abc import Sequence
from dataclasses import dataclass

from data.base import EvalSet
from data.tasks.markov import Markov

SWITCHES = (0.0, 0.01)  # of the two kinds of chains of the board: data.switch


@dataclass(kw_only=True, eq=False)
class DrawnTexts(Markov):
    """Markov chains whose evaluation reads the texts of a number that is drawn, and not always the same ones."""

    texts: int = 0

    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        return self._ends(f"test/{self.texts}", lengths, target_tokens, sequences)
