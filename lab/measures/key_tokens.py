"""Key tokens: the loss where far text decides, as a judge says, and not by literal repetition.

A judge is a trained model that reads all the text well. A token is key if the judge predicts it better, by more than a
threshold, after the whole text than after the text cut to train_len: the idea of LongPPL (arXiv 2410.23771). Far copies
match literally, which hides failures (NoLiMa, arXiv 2502.05167); these tokens need not.

The judge's own gain on these tokens is too high, since they were chosen by it. All other models can be compared.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from conf.schema import Config
from data.base import Data
from model.gpt import GPT
from model.position.network import for_length, max_len_of
from ropewalk.evaluation.measures.cut import nats_of_cut, tokens_read, windows
from ropewalk.evaluation.results import Measured
from ropewalk.evaluation.scoring import BATCH_TOKENS, Job, Plan, Scorer, token_losses

KEY, OTHER, NOT_SCORED = 0, 1, -1


class Judge(NamedTuple):
    """The model that chooses the tokens."""

    net: GPT  # in evaluation mode, of the same tokens as the models that it judges
    id: str  # equal for equal weights read in the same way
    threshold: float  # nats


def key_tokens(data: Data, cfg: Config, judge: Judge) -> Plan | None:
    """Return the measure at the longest length; None for tasks, and if no length is beyond train_len.

    Targets after the first train_len are scored with the whole text before them and in windows of train_len tokens, as
    in `far_copies`: those that are key, and all others.

    Raises ValueError: the judge cannot read texts of that length. When the measure is made: no token is key.
    """
    length = max(cfg.lengths)
    texts = data.fully_scored(length, cfg.eval.sequences) if length > cfg.train_len else None
    if texts is None:
        return None
    max_len = max_len_of(judge.net.encodings)
    if max_len and length > max_len:
        raise ValueError(f"the judge reads at most {max_len} tokens, and texts have {length}: take another")

    # Computed at the first use, and then kept for all variants.
    @lru_cache(1)
    def group_of_targets() -> Tensor:
        """Return the group of each target, int64 [texts, length]."""
        batch_size = max(1, BATCH_TOKENS["cpu"] // length)
        batches = []
        for start in range(0, texts.n, batch_size):
            x, y = texts.batch(start, min(texts.n, start + batch_size))
            batches.append(chosen(judge, x, y, cfg.train_len))
        groups = torch.cat(batches)
        if not (groups == KEY).any():
            worth = f"text from beyond {cfg.train_len} tokens is never worth {judge.threshold:g} nats to the judge"
            raise ValueError(f"key_tokens: {worth}: lower key_tokens.threshold, or take a judge that uses far text")
        return groups

    def run(score: Scorer) -> list[Measured]:
        groups = group_of_targets()
        whole = score(texts, groups, 2)
        baseline = nats_of_cut(score, texts, groups, 2, cfg.train_len)
        measured = []
        for group, name in ((KEY, "key"), (OTHER, "other")):
            if whole.tokens[:, group].any():
                measured.append(whole.measured(length, group, baseline=baseline, texts=texts, difficulty=name))
        return measured

    settings = {
        "length": length,
        "cut": cfg.train_len,
        "threshold": judge.threshold,
        "judge": judge.id,
        "sequences": cfg.eval.sequences,
        "texts": texts.texts_hash,
    }
    return Plan("key_tokens", settings, [Job(length, tokens_read(texts, cfg.train_len), run)])


def chosen(judge: Judge, x: Tensor, y: Tensor, cut: int) -> Tensor:
    """Return the group of each target as the judge says, int64 [B, T] on the CPU: KEY, OTHER or NOT_SCORED.

    Args:
        x: token ids, int64 [B, T].
        y: targets, likewise.
        cut: tokens of the windows; the first `cut` targets have no text that could be cut, and are not scored.
    """
    length = x.size(1)
    encodings = for_length(judge.net.encodings, length, judge.net.train_len)
    whole, _ = token_losses(judge.net, x, y, encodings=encodings)
    of_cut = whole.clone()
    for window, n_scored in windows(length, cut):
        losses, _ = token_losses(judge.net, x[:, window], y[:, window])
        of_cut[:, window][:, n_scored:] = losses[:, n_scored:]
    is_key = (of_cut - whole > judge.threshold).cpu()
    groups = torch.where(is_key, KEY, OTHER)
    groups[:, :cut] = NOT_SCORED
    return groups
