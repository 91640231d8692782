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
    """How many of the `tokens`, int64 [T], ago each was last preceded by the same `n` tokens: int64 [T], 0 where it
    never was. One that differs from the earlier continuation is no copy; a nearer copy hides those further back."""
    distances = np.zeros(len(tokens), dtype=np.int64)
    if len(tokens) <= n:
        return distances
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n + 1)  # [T - n, n + 1]; the last one is the target
    ids = np.unique(grams, axis=0, return_inverse=True)[1].reshape(-1)
    distances[n:] = pd.Series(np.arange(len(ids))).groupby(ids).diff().fillna(0)
    return distances


def far_copies(data: Data, cfg: Config) -> Plan | None:
    """The measure for `cfg.eval`; None for tasks, and where no length is beyond train_len. The targets from number
    train_len on are scored twice: with the whole text before them, and in windows of train_len tokens, half of that
    apart, which leave each target between train_len / 2 and train_len tokens of context."""
    length, short = max(cfg.lengths), cfg.train_len
    texts = data.fully_scored(length, cfg.eval.sequences) if length > short else None
    if texts is None:
        return None
    bytes_per_token = 1.0 if data.token_bytes is None else float(data.token_bytes[texts.batch(0, 1)[1]].float().mean())
    n = max(MATCH_TOKENS, round(MATCH_BYTES / max(bytes_per_token, 1)))
    octaves = int(np.log2(length)) + 1
    step = max(1, short // 2)
    starts = [*range(step, length - short, step), length - short]  # of the windows

    @lru_cache(1)  # for all variants
    def octave_of_copies() -> Tensor:
        """Of each target, int64 [texts, length]; -1: not scored."""
        x, y = texts.batch(0, texts.n)
        tokens = torch.cat([x[:, :1], y], dim=1).numpy()
        distances = np.stack([copy_distances(row, n)[1:] for row in tokens])
        distances[:, :short] = 0  # these have nothing that could be cut
        return torch.from_numpy(np.frexp(distances)[1].astype(np.int64) - 1)

    def run(score: Scorer) -> list[Measured]:
        octave = octave_of_copies()
        whole = score(texts, octave, octaves)
        baseline, scored_to = np.zeros_like(whole.nats), short
        for start in starts:
            window = slice(start, start + short)
            own = octave[:, window].clone()
            own[:, : scored_to - start] = -1
            scored_to = window.stop

            def cut(first: int, last: int, window: slice = window) -> tuple[Tensor, Tensor]:
                x, y = texts.batch(first, last)
                return x[:, window], y[:, window]

            baseline += score(EvalSet("cut", short, texts.n, cut), own, octaves).nats
        scored = [i for i in range(octaves) if whole.tokens[:, i].any()]
        return [whole.measured(f"distance {2**i}-{2 ** (i + 1) - 1}", length, i, baseline) for i in scored]

    settings = {"length": length, "cut": short, "match": n, "sequences": cfg.eval.sequences, "texts": texts.texts_hash}
    return Plan("far_copies", settings, [Job(length, texts.n * (length + len(starts) * short), run)])
