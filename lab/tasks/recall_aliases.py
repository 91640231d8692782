"""Recall whose queries name a key by another symbol: nothing in them matches what they ask about.

For: telling retrieval from literal copying. Shown: nothing yet, as no documented run uses it. Leaves: when a release
passes without such a run.
"""

from data.tasks.recall import Recall


class RecallAliases(Recall):
    """Recall whose queries name a key by another symbol, always the same one, which is learned in training.

        k7 v2 k1 v9 k4 v2 . a4 v2 . . a7 v2 a1 v9 .

    So a query shares no symbol with what it asks about: literal copying does not answer it (after NoLiMa, arXiv
    2502.05167).
    """

    task = "recall_aliases"

    @property
    def vocab(self) -> list[str]:
        return [*super().vocab, *(f"a{i}" for i in range(self.keys))]

    @property
    def query_offset(self) -> int:
        return self.keys + self.values
