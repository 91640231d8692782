"""The same targets with the text before them cut to train_len tokens: what a use of far text is measured against."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from data.base import EvalSet
from ropewalk.evaluation.scoring import Scorer


def windows(length: int, short: int) -> Iterator[tuple[slice, int]]:
    """Yield windows of `short` tokens that overlap by half, and how many first targets of each are scored already.

    The targets from `short` on are new in one window each, with between short / 2 and `short` tokens before them.
    """
    step = max(1, short // 2)
    scored_to = short
    for start in [*range(step, length - short, step), length - short]:
        yield slice(start, start + short), scored_to - start
        scored_to = start + short


def nats_of_cut(score: Scorer, texts: EvalSet, groups: Tensor, n_groups: int, short: int) -> np.ndarray:
    """Sum the losses of the targets from `short` on, read in `windows`, for each text and group, nats [n, n_groups].

    Args:
        groups: the group of each target, int64 [n, length]; -1: not scored.
    """
    total = np.zeros(())
    for window, n_scored in windows(texts.length, short):
        of_window = groups[:, window].clone()
        of_window[:, :n_scored] = -1
        total = total + score(_only(texts, window), of_window, n_groups).nats
    return total


def _only(texts: EvalSet, window: slice) -> EvalSet:
    """Return only the tokens of `window` of every text."""

    def batch(first: int, last: int) -> tuple[Tensor, Tensor]:
        x, y = texts.batch(first, last)
        return inputs_of(x, window, texts.text_start), y[:, window]

    return EvalSet("cut", window.stop - window.start, texts.n, batch)


def inputs_of(x: Tensor, window: slice, text_start: int | None) -> Tensor:
    """Return a window of texts [B, T], which begins with the token that texts begin with, if there is one."""
    part = x[:, window].clone()
    if text_start is not None:
        part[:, 0] = text_start
    return part
