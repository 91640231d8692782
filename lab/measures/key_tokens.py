"""Key tokens: the loss where far text decides, as a judge says, and not by literal repetition.

A judge is a trained model that reads all the text well. A token is key if the judge predicts it better, by more than a
threshold, after the whole text than after the text cut to train_len: the idea of LongPPL (arXiv 2410.23771). Far copies
match literally, which hides failures (NoLiMa, arXiv 2502.05167); these tokens need not.

The judge's own gain on these tokens is too high, since they were chosen by it. All other models can be compared.

For: use of far text that is no copy, as the judge of LongPPL. Shown: nothing yet, as no documented run uses it.
Leaves: when a release passes without such a run.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

import ropewalk
from conf.schema import Config
from data.base import Data, EvalSet, hash_texts
from model.gpt import GPT
from model.position.network import for_length, max_len_of
from ropewalk.app.resolve import load_config
from ropewalk.app.run_dir import find, read_environment
from ropewalk.evaluation.measures.base import Job, Measure, Plan
from ropewalk.evaluation.measures.cut import inputs_of, nats_of_cut, tokens_read, windows
from ropewalk.evaluation.results import Measured
from ropewalk.evaluation.scoring import BATCH_TOKENS, Scorer, token_losses
from ropewalk.training.hardware import Hardware

KEY, OTHER, NOT_SCORED = 0, 1, -1


class Judge(NamedTuple):
    """The model that chooses the tokens."""

    net: GPT  # in evaluation mode, of the same tokens as the models that it judges
    id: str  # equal for equal weights read in the same way
    threshold: float  # nats


class KeyTokens(Measure):
    """The measure with the model in the run `judge` as judge."""

    judge: str | None = None
    pe: str | dict[str, Any] | None = None  # how the judge's weights are read; None: as they were trained
    threshold: float = Field(2.0, gt=0, allow_inf_nan=False)  # nats
    device: str = "cpu"

    def plan(self, data: Data, cfg: Config) -> Plan | None:
        """Return the jobs, as `with_judge` does.

        Raises ValueError: there is no such run, it has other tokens, or its weights cannot be read like that.
        """
        if self.judge is None:
            raise ValueError("measures: key_tokens needs key_tokens.judge=RUN, a trained model that chooses the tokens")
        reader = {"pe": self.pe} if isinstance(self.pe, str) else self.pe or {}
        hardware = Hardware.resolve(accelerator=self.device, precision="32-true")
        model = ropewalk.load(self.judge, device=hardware.device, **reader)
        if model.data.tokenizer_identity() != data.tokenizer_identity():
            problem = "was trained with another tokenizer: take one of these data"
            raise ValueError(f"key_tokens.judge={self.judge} {problem}")
        path = find(self.judge)
        identity = hash_texts(read_environment(path).run_id, load_config(path).trainer.max_steps, reader)
        return with_judge(data, cfg, Judge(model.net, identity, self.threshold))


def with_judge(data: Data, cfg: Config, judge: Judge) -> Plan | None:
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
    settings = {
        "length": length,
        "cut": cfg.train_len,
        "threshold": judge.threshold,
        "judge": judge.id,
        "sequences": cfg.eval.sequences,
        "texts": texts.texts_hash,
    }
    # Computed at the first use, and then kept for all variants.
    groups = cache(partial(groups_of_targets, judge, texts, cfg.train_len))
    run = partial(_run, texts, groups, cfg.train_len)
    return Plan("key_tokens", settings, [Job(length, tokens_read(texts, cfg.train_len), run)])


def groups_of_targets(judge: Judge, texts: EvalSet, cut: int) -> Tensor:
    """Return the group of each target, int64 [texts, length], see `chosen`. Raises ValueError: no token is key."""
    batch_size = max(1, BATCH_TOKENS["cpu"] // texts.length)
    batches = []
    for start in range(0, texts.n, batch_size):
        x, y = texts.batch(start, min(texts.n, start + batch_size))
        batches.append(chosen(judge, x, y, cut, texts.text_start))
    groups = torch.cat(batches)
    if not (groups == KEY).any():
        worth = f"text from beyond {cut} tokens is never worth {judge.threshold:g} nats to the judge"
        raise ValueError(f"key_tokens: {worth}: lower key_tokens.threshold, or take a judge that uses far text")
    return groups


def _run(texts: EvalSet, groups: Callable[[], Tensor], cut: int, score: Scorer) -> list[Measured]:
    whole = score(texts, groups(), 2)
    baseline = nats_of_cut(score, texts, groups(), 2, cut)
    measured = []
    for group, name in ((KEY, "key"), (OTHER, "other")):
        if whole.tokens[:, group].any():
            measured.append(whole.measured(texts.length, group, baseline=baseline, texts=texts, difficulty=name))
    return measured


def chosen(judge: Judge, x: Tensor, y: Tensor, cut: int, text_start: int | None) -> Tensor:
    """Return the group of each target as the judge says, int64 [B, T] on the CPU: KEY, OTHER or NOT_SCORED.

    Args:
        x: token ids, int64 [B, T].
        y: targets, likewise.
        cut: tokens of the windows; the first `cut` targets have no text that could be cut, and are not scored.
        text_start: id of the token that windows begin with, if there is one.
    """
    length = x.size(1)
    encodings = for_length(judge.net.encodings, length, judge.net.train_len)
    whole, _ = token_losses(judge.net, x, y, encodings=encodings)
    of_cut = whole.clone()
    for window, n_scored in windows(length, cut):
        losses, _ = token_losses(judge.net, inputs_of(x, window, text_start), y[:, window])
        of_cut[:, window][:, n_scored:] = losses[:, n_scored:]
    is_key = (of_cut - whole > judge.threshold).cpu()
    groups = torch.where(is_key, KEY, OTHER)
    groups[:, :cut] = NOT_SCORED
    return groups
