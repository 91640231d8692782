"""Loss against context length, and loss by position.

The same last tokens of each text are read with more and more text before them. So a rise means that the encoding
breaks, and a fall that far text is used. The row at train_len is the baseline of all others: the text cut to what the
network was trained for.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from conf.schema import Config
from data.base import Data, EvalSet, hash_texts
from ropewalk.evaluation.measures.base import Part, Plan
from ropewalk.evaluation.results import PartResult
from ropewalk.evaluation.scoring import Scorer

BINS = 32  # in which the loss by position is averaged
OPTIMUM_TOKENS = 2**20  # that the best possible predictor reads at a time


def length_settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that decide the texts of the measure `lengths`, besides the data."""
    return {"lengths": cfg.lengths, "target_tokens": cfg.target_tokens, "sequences": cfg.eval.sequences}


def longest_settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that decide the texts of the measures at the longest length, besides the data."""
    return {"length": max(cfg.lengths), "sequences": cfg.eval.sequences}


def lengths(data: Data, cfg: Config) -> Plan:
    """Return the measure of the loss on the same targets at every length."""
    # The same texts at every length; only how much of them is read before the targets differs.
    sets = data.eval_sets(cfg.lengths, target_tokens=cfg.target_tokens, sequences=cfg.eval.sequences)
    settings = length_settings(cfg) | {"texts": hash_texts(*[texts.texts_hash for texts in sets])}
    parts = []
    for texts in sets:
        optimum = cache(partial(_optimum, data, texts))  # computed once for all variants
        parts.append(Part(texts.length, partial(_score, data, texts, optimum)))
    return Plan("lengths", settings, parts)


def _score(data: Data, texts: EvalSet, optimum: Callable[[int], np.ndarray | None], scorer: Scorer) -> list[PartResult]:
    sums = scorer(texts)
    if data.task:  # measured by its errors alone, so that no text is drawn for an optimum
        return [sums.measured(texts.length, texts=texts, task=data.task, difficulty=texts.name)]
    return [sums.measured(texts.length, optimum=optimum(len(sums.nats)), texts=texts)]


def _optimum(data: Data, texts: EvalSet, n: int) -> np.ndarray | None:
    """Return the nats of the best possible predictor on the first `n` texts, [n, 1]; None if it is not known."""
    batch_size = max(1, OPTIMUM_TOKENS // texts.length)
    sums = []
    for start in range(0, n, batch_size):
        losses = data.optimum(*texts.batch(start, min(n, start + batch_size)))
        if losses is None:
            return None
        sums.append(losses.sum(dim=1, keepdim=True).numpy())
    return np.concatenate(sums)


def by_position(data: Data, cfg: Config) -> Plan:
    """Return the measure of the loss by position, in one pass at the longest length, in bins of equal width.

    It says where in a text an encoding breaks, such as right after train_len, at the end of a window or slowly. The
    measure `lengths` cannot: it has few lengths, and scores the last tokens of each. Every bin has other tokens, so a
    bin is compared with the same bin of another encoding, not with the bin before it.
    """
    length = max(cfg.lengths)
    texts = data.fully_scored(length, cfg.eval.sequences)
    bins = torch.arange(length).chunk(BINS)
    # The bin of each position: all are as wide as the first, but the last one, which may be narrower.
    bin_of = torch.arange(length) // len(bins[0])

    def run(scorer: Scorer) -> list[PartResult]:
        sums = scorer(texts, bin_of.expand(texts.n, length), len(bins))
        measured = []
        for i, positions in enumerate(bins):
            span = int(positions[0]), int(positions[-1])
            measured.append(sums.measured(length, i, texts=texts, span=span))
        return measured

    settings = longest_settings(cfg) | {"bins": BINS, "texts": texts.texts_hash}
    return Plan("by_position", settings, [Part(length, run)])
