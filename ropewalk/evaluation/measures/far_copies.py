"""Far copies: does a network use what it read long ago, on natural text?

Scored are the tokens after words that occurred far away and not nearer, by the distance of that occurrence in octaves:
the loss with the whole text against the loss with the text cut to train_len, where a far occurrence is out of sight.
Both kinds of tokens count: those that continue as the earlier words did, and others, where copying is harmful. It is an
induction score (Olsson et al., arXiv 2209.11895) on natural text; compare LongPPL (arXiv 2410.23771).
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from conf.schema import Config
from data.base import Data, EvalSet
from ropewalk.evaluation.measures.base import Part, Plan
from ropewalk.evaluation.measures.lengths import longest_settings
from ropewalk.evaluation.results import PartResult
from ropewalk.evaluation.scoring import Scorer

# A repeated sequence has about so many bytes, so that tokenizers compare, and at least so many tokens.
MATCH_BYTES = 8
MATCH_TOKENS = 3


def repeats(tokens: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the distance from each token to where the `n` tokens before it last occurred.

    The choice of tokens does not depend on the token itself, which is what the network predicts. A nearer occurrence
    hides those further back.

    Args:
        tokens: int64 [T].

    Returns:
        Distances in tokens, int64 [T], 0 if the words did not occur before; and whether the token after them was the
        same there, bool [T].
    """
    distances = np.zeros(len(tokens), dtype=np.int64)
    if len(tokens) <= n:
        return distances, np.zeros(len(tokens), dtype=bool)
    # Equal rows of words get equal ids; within one id the distance to the row before it is that to the last occurrence.
    words = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)  # [T - n, n]; row i is before token i + n
    ids = np.unique(words, axis=0, return_inverse=True)[1].reshape(-1)
    distances[n:] = pd.Series(np.arange(len(ids))).groupby(ids).diff().fillna(0)
    earlier = np.arange(len(tokens)) - distances
    # Whether the token is the same there. Without an occurrence `earlier` is the token itself, which does not count.
    return distances, (distances > 0) & (tokens == tokens[earlier])


def far_copies(data: Data, cfg: Config) -> Plan:
    """Return the measure for `cfg.eval`, of text at a length beyond train_len.

    Targets after the first train_len are scored twice: with the whole text before them, and in windows of train_len
    tokens that overlap by half, which leave each target between train_len / 2 and train_len tokens of context.
    """
    length = max(cfg.lengths)
    short = cfg.train_len
    texts = data.fully_scored(length, cfg.eval.sequences)
    n = match_tokens(data, texts)
    octaves = int(np.log2(length)) + 1

    # Computed at the first use, and then kept for all variants.
    @lru_cache(1)
    def group_of_targets() -> Tensor:
        """Return the group of each target, int64 [texts, length]: 2 octave + (0 same, 1 other); -1: not scored."""
        x, y = texts.batch(0, texts.n)
        tokens = torch.cat([x[:, :1], y], dim=1).numpy()
        # One pass over the text serves all octaves and both kinds of tokens: each target has a group.
        groups = []
        for row in tokens:
            distances, same = repeats(row, n)
            octave = np.frexp(distances)[1].astype(np.int64) - 1
            groups.append(np.where(distances > 0, 2 * octave + ~same, -1)[1:])
        group = torch.from_numpy(np.stack(groups))
        # The first targets have no text that could be cut.
        group[:, :short] = -1
        return group

    def run(scorer: Scorer) -> list[PartResult]:
        group = group_of_targets()
        whole = scorer(texts, group, 2 * octaves)
        baseline = nats_of_cut(scorer, texts, group, 2 * octaves, short)
        measured = []
        for i in range(2 * octaves):
            if not whole.tokens[:, i].any():  # no text has targets in this group
                continue
            octave, is_other = divmod(i, 2)
            span = (2**octave, 2 ** (octave + 1) - 1)
            continuation = "other" if is_other else "same"
            part = whole.measured(length, i, baseline=baseline, texts=texts, span=span, continuation=continuation)
            measured.append(part)
        return measured

    # Earlier versions scored only tokens that are the same: "continuations" tells their results apart.
    settings = longest_settings(cfg) | {"cut": short, "match": n, "texts": texts.texts_hash, "continuations": 2}
    return Plan("far_copies", settings, [Part(length, run)])


def match_tokens(data: Data, texts: EvalSet) -> int:
    """Return the tokens in a repeated sequence: as many as have about MATCH_BYTES, at least MATCH_TOKENS."""
    if data.token_bytes is None:
        return MATCH_BYTES  # where bytes mean nothing, a token counts as one
    _, targets = texts.batch(0, 1)
    bytes_per_token = float(data.token_bytes[targets].float().mean())
    return max(MATCH_TOKENS, round(MATCH_BYTES / max(bytes_per_token, 1)))


def windows(length: int, short: int) -> Iterator[tuple[slice, int]]:
    """Yield windows of `short` tokens that overlap by half, and how many first targets of each are scored already.

    The targets from `short` on are new in one window each, with between short / 2 and `short` tokens before them.
    """
    step = max(1, short // 2)
    scored_to = short
    for start in [*range(step, length - short, step), length - short]:
        yield slice(start, start + short), scored_to - start
        scored_to = start + short


def nats_of_cut(scorer: Scorer, texts: EvalSet, groups: Tensor, n_groups: int, short: int) -> np.ndarray:
    """Sum the losses of the targets from `short` on, read in `windows`, for each text and group, nats [n, n_groups].

    Args:
        groups: the group of each target, int64 [n, length]; -1: not scored.
    """
    total = np.zeros(())
    for window, n_scored in windows(texts.length, short):
        of_window = groups[:, window].clone()
        of_window[:, :n_scored] = -1
        total = total + scorer(only(texts, window), of_window, n_groups).nats
    return total


def only(texts: EvalSet, window: slice) -> EvalSet:
    """Return `window` of every text. Its first token is the one that whole texts begin with, if there is one."""

    def batch(first: int, last: int) -> tuple[Tensor, Tensor]:
        x, y = texts.batch(first, last)
        part = x[:, window].clone()
        if texts.text_start is not None:
            part[:, 0] = texts.text_start
        return part, y[:, window]

    return EvalSet("cut", window.stop - window.start, texts.n, batch)
