"""Scoring: loss and errors of the scored tokens, summed for each text. Every measure is made of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.base import IGNORE_INDEX, EvalSet
from evaluation.results import Kind, Measured
from model.gpt import GPT
from training import distributed

BATCH_TOKENS = {"cpu": 4096, "cuda": 2**15, "mps": 2**13}  # tokens read in one forward pass, about
Autocast = Callable[[], AbstractContextManager]


@torch.no_grad()
def token_losses(net: GPT, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each target in nats, fp32 [B, T], and whether another token was more probable, bool [B, T].

    `x` and `y` are int64 [B, T] and best left on the CPU, so that a device is never waited for. Where `y` is
    IGNORE_INDEX both results are 0. Logits exist only for scored positions, a bounded number at a time."""

    def score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # the vocabulary innermost: else torch adds up the exponentials of a large one, on a CPU, one after the other
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.view_as(targets), (logits.argmax(-1) != targets) & (targets != IGNORE_INDEX)

    was_training = net.training
    (columns,) = (y != IGNORE_INDEX).any(0).nonzero(as_tuple=True)
    documents = net.documents(x)
    x, y, columns = (t.to(net.embedding.weight.device, non_blocking=True) for t in (x, y, columns))
    losses, wrong = torch.zeros_like(y, dtype=torch.float32), torch.zeros_like(y, dtype=torch.bool)
    net.eval()
    hidden = net.hidden_states(x, documents=documents)  # [B, T, C]
    parts = net.in_pieces(score, hidden[:, columns], y[:, columns])
    losses[:, columns], wrong[:, columns] = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    net.train(was_training)
    return losses, wrong


class Sums(NamedTuple):
    """Over the scored tokens of each text, [n, G]: a column for each group of tokens."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    errors: np.ndarray

    def measured(self, name: str, length: int, group: int = 0, baseline: np.ndarray | None = None) -> Measured:
        """One group for a results file; `baseline` are nats [n, G], too."""
        arrays = self._asdict() | ({} if baseline is None else {"baseline_nats": baseline})
        lists: dict[str, Any] = {key: values[:, group].round(5).tolist() for key, values in arrays.items()}
        return Measured(name=name, length=length, **lists)


@dataclass
class Scorer:
    """Scores sets of texts by one network. All ranks call it alike, share the batches, and get the same sums."""

    net: GPT
    token_bytes: Tensor | None = None  # bytes of each token, int64 [vocab_size]; None where they mean nothing
    autocast: Autocast = nullcontext  # in which the network computes as in training
    limit: int | None = None  # texts read of each set; None: all
    advance: Callable[[int], object] = field(default=lambda tokens: None)  # called with the number of tokens read
    kept: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by texts, length and batch

    def __call__(self, part: EvalSet, groups: Tensor | None = None, n_groups: int = 2) -> Sums:
        """Sums over the scored tokens. `groups` is the group of each target, int64 [n, T], -1: not scored; another
        measure of these texts uses their losses again. By default all are in 0, but for tokens without bytes: in 1."""
        n = part.n if self.limit is None else min(part.n, self.limit)
        device = self.net.embedding.weight.device
        double = torch.float32 if device.type == "mps" else torch.float64
        step = max(1, BATCH_TOKENS.get(device.type, 4096) // part.length)
        own: dict[int, Tensor] = {}
        for start in distributed.shared_batches(n, step):
            first = start or 0
            x, y = part.batch(first, min(n, first + step))
            size = torch.ones_like(y) if self.token_bytes is None else self.token_bytes[y.clamp(min=0)]
            group = (size == 0).long() if groups is None else groups[first : first + len(y)]
            scored = y.masked_fill(group < 0, IGNORE_INDEX)
            key = (part.texts_hash, part.length, first) if part.texts_hash and groups is not None else None
            found = self.kept.get(key) if key else None
            if found is None:
                with self.autocast():
                    found = token_losses(self.net, x, y if key else scored)
            if key:
                self.kept[key] = found
            self.advance(x.numel())
            if start is None:  # another rank's, read only to keep in step
                continue
            mask = scored != IGNORE_INDEX
            in_bytes = size * mask * (self.token_bytes is not None)
            losses, wrong = (t.where(mask.to(device), 0) for t in found)
            values = torch.stack([t.to(device, double) for t in (losses, mask, in_bytes, wrong)])  # [4, B, T]
            index = group.clamp(min=0).to(device).expand_as(values)
            own[first] = torch.zeros(4, len(y), n_groups, dtype=double, device=device).scatter_add_(2, index, values)
        own = {first: sums.cpu() for first, sums in own.items()}  # only now the device is waited for
        every = {first: sums for part in distributed.gather(own) for first, sums in part.items()}
        nats, *counts = torch.cat([every[first] for first in sorted(every)], dim=1).numpy()
        return Sums(nats, *(count.astype(np.int64) for count in counts))


class Job(NamedTuple):
    """A part of a measure."""

    length: int  # of its longest text
    tokens: int  # that it reads
    run: Callable[[Scorer], list[Measured]]


class Plan(NamedTuple):
    """A measure of one network, before any work."""

    kind: Kind
    eval: dict[str, Any]  # what decides the texts, see `evaluation.results.Evaluation`
    jobs: list[Job]
