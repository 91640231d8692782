"""Far copies: does a network use what it read long ago, on natural text?

They are the tokens that complete a repeated sequence, by the distance of its last occurrence in octaves: the loss with
the whole text against the loss with the text cut to train_len, where a far occurrence is out of sight. It is an
induction score (Olsson et al., arXiv 2209.11895) on natural text; compare LongPPL (arXiv 2410.23771).
"""

from functools import lru_cache

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from conf.schema import Config
from data.base import Data, EvalSet
from evaluation.results import Measured
from evaluation.scoring import Job, Plan, Scorer

MATCH_BYTES, MATCH_TOKENS = 8, 3  # a repeated sequence has about so many bytes, and at least so many tokens


def copy_distances(tokens: np.ndarray, n: int) -> np.ndarray:
    """Distance from each token to where it last followed the same `n` tokens.

    A token that differs from the earlier continuation is no copy; a nearer copy hides those further back.

    Args:
        tokens: int64 [T].

    Returns:
        Distances in tokens, int64 [T]; 0 for tokens that are no copy.
    """
    distances = np.zeros(len(tokens), dtype=np.int64)
    if len(tokens) <= n:
        return distances
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n + 1)  # [T - n, n + 1]; the last one is the target
    ids = np.unique(grams, axis=0, return_inverse=True)[1].reshape(-1)
    distances[n:] = pd.Series(np.arange(len(ids))).groupby(ids).diff().fillna(0)
    return distances


def far_copies(data: Data, cfg: Config) -> Plan | None:
    """The measure for `cfg.eval`; None for tasks, and where no length is beyond train_len.

    The targets from number train_len on are scored twice: with the whole text before them, and in windows of train_len
    tokens, half of that apart, which leave each target between train_len / 2 and train_len tokens of context.
    """
    length = max(cfg.lengths)
    short = cfg.train_len
    texts = data.fully_scored(length, cfg.eval.sequences) if length > short else None
    if texts is None:
        return None
    n = _match_tokens(data, texts)
    octaves = int(np.log2(length)) + 1
    step = max(1, short // 2)
    window_starts = [*range(step, length - short, step), length - short]

    @lru_cache(1)  # for all variants
    def octave_of_copies() -> Tensor:
        """The octave of the distance of each target, int64 [texts, length]; -1: not scored."""
        x, y = texts.batch(0, texts.n)
        tokens = torch.cat([x[:, :1], y], dim=1).numpy()
        distances = np.stack([copy_distances(row, n)[1:] for row in tokens])
        distances[:, :short] = 0  # these have nothing that could be cut
        return torch.from_numpy(np.frexp(distances)[1].astype(np.int64) - 1)

    def run(score: Scorer) -> list[Measured]:
        octave = octave_of_copies()
        whole = score(texts, octave, octaves)
        baseline = np.zeros_like(whole.nats)
        # The windows overlap by half. Each scores only the targets that none before it has scored.
        scored_to = short
        for start in window_starts:
            window = slice(start, start + short)
            octave_in_window = octave[:, window].clone()
            octave_in_window[:, : scored_to - start] = -1
            scored_to = window.stop
            baseline += score(_cut(texts, window), octave_in_window, octaves).nats
        measured = []
        for i in range(octaves):
            if whole.tokens[:, i].any():
                span = (2**i, 2 ** (i + 1) - 1)
                measured.append(whole.measured(length, i, baseline=baseline, texts=texts, span=span))
        return measured

    settings = {"length": length, "cut": short, "match": n, "sequences": cfg.eval.sequences, "texts": texts.texts_hash}
    tokens_read = texts.n * (length + len(window_starts) * short)
    return Plan("far_copies", settings, [Job(length, tokens_read, run)])


def _match_tokens(data: Data, texts: EvalSet) -> int:
    """Tokens of a repeated sequence: as many as have about MATCH_BYTES, at least MATCH_TOKENS."""
    bytes_per_token = 1.0
    if data.token_bytes is not None:
        _, targets = texts.batch(0, 1)
        bytes_per_token = float(data.token_bytes[targets].float().mean())
    return max(MATCH_TOKENS, round(MATCH_BYTES / max(bytes_per_token, 1)))


def _cut(texts: EvalSet, window: slice) -> EvalSet:
    """The same tokens of every text, alone."""

    def batch(first: int, last: int) -> tuple[Tensor, Tensor]:
        x, y = texts.batch(first, last)
        return x[:, window], y[:, window]

    return EvalSet("cut", window.stop - window.start, texts.n, batch)
