"""Far copies: does a network use what it read long ago, on natural text?

Scored are the tokens after words that occurred far away and not nearer, by the distance of that occurrence in octaves:
the loss with the whole text against the loss with the text cut to train_len, where a far occurrence is out of sight.
Both kinds of tokens count: those that continue as the earlier words did, and others, where copying is harmful. It is an
induction score (Olsson et al., arXiv 2209.11895) on natural text; compare LongPPL (arXiv 2410.23771).
"""

from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from conf.schema import Config
from data.base import Data, EvalSet
from evaluation.results import Measured
from evaluation.scoring import Job, Plan, Scorer

MATCH_BYTES, MATCH_TOKENS = 8, 3  # a repeated sequence has about so many bytes, and at least so many tokens


def repeats(tokens: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Distance from each token to where the `n` tokens before it last occurred, and whether it was the same there.

    The choice of tokens does not depend on the token itself, which is what the network predicts. A nearer occurrence
    hides those further back.

    Args:
        tokens: int64 [T].

    Returns:
        Distances in tokens, int64 [T]; 0 where the words did not occur before. And bool [T].
    """
    distances = np.zeros(len(tokens), dtype=np.int64)
    same = np.zeros(len(tokens), dtype=bool)
    if len(tokens) <= n:
        return distances, same
    # Equal rows of words get equal ids; within one id the distance to the row before it is that to the last occurrence.
    words = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)  # [T - n, n]; row i is before token i + n
    ids = np.unique(words, axis=0, return_inverse=True)[1].reshape(-1)
    distances[n:] = pd.Series(np.arange(len(ids))).groupby(ids).diff().fillna(0)
    earlier = np.arange(len(tokens)) - distances
    same = (distances > 0) & (tokens == tokens[earlier])
    return distances, same


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
    def group_of_targets() -> Tensor:
        """The group of each target, int64 [texts, length]: 2 octave + (0 same, 1 other); -1: not scored."""
        x, y = texts.batch(0, texts.n)
        tokens = torch.cat([x[:, :1], y], dim=1).numpy()
        # One pass over the text serves all octaves and both kinds of tokens: each target has a group.
        groups = []
        for row in tokens:
            distances, same = repeats(row, n)
            octave = np.frexp(distances)[1].astype(np.int64) - 1
            groups.append(np.where(distances > 0, 2 * octave + ~same, -1)[1:])
        group = torch.from_numpy(np.stack(groups))
        group[:, :short] = -1  # these have nothing that could be cut
        return group

    def run(score: Scorer) -> list[Measured]:
        group = group_of_targets()
        whole = score(texts, group, 2 * octaves)
        baseline = np.zeros_like(whole.nats)
        # The windows overlap by half. Each scores only the targets that none before it has scored.
        scored_to = short
        for start in window_starts:
            window = slice(start, start + short)
            group_in_window = group[:, window].clone()
            group_in_window[:, : scored_to - start] = -1
            scored_to = window.stop
            baseline += score(_cut(texts, window), group_in_window, 2 * octaves).nats
        measured = []
        for i in range(2 * octaves):
            if whole.tokens[:, i].any():
                part: dict[str, Any] = {
                    "span": (2 ** (i // 2), 2 ** (i // 2 + 1) - 1),
                    "continuation": ("same", "other")[i % 2],
                }
                measured.append(whole.measured(length, i, baseline=baseline, texts=texts, **part))
        return measured

    settings = {"length": length, "cut": short, "match": n, "sequences": cfg.eval.sequences, "texts": texts.texts_hash}
    settings["continuations"] = 2  # earlier versions scored only tokens that are the same
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
