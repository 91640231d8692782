"""Scoring: loss and errors of the scored tokens, summed for each text. Every measure is made of these sums."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.base import IGNORE_INDEX, EvalSet, check_tokens
from model.gpt import GPT
from model.layout import Packing
from model.position.network import Encodings
from ropewalk.evaluation.results import PartResult
from ropewalk.run import processes
from ropewalk.training import distributed

BATCH_TOKENS = {"cpu": 4096, "cuda": 2**15, "mps": 2**13}  # read in one forward pass, about
Autocast = Callable[[], AbstractContextManager]


@torch.no_grad()
def token_losses(
    net: GPT, x: Tensor, y: Tensor, *, packing: Packing, encodings: Encodings | None
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each target, and whether it is wrong. The network is in evaluation mode (`evaluating`).

    Args:
        x: token ids, int64 [B, T]; best on the CPU, so that the device is never waited for.
        y: targets, likewise; IGNORE_INDEX: not scored.
        packing: how texts lie in a batch.
        encodings: that read them instead of the network's own.

    Returns:
        Cross-entropy in nats, fp32 [B, T], and whether another token was more probable, bool [B, T]. Both are 0 where
        a target is not scored.
    """

    def score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # The vocabulary is the last dimension: on a CPU, torch is slow to reduce a large one that is not.
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        wrong = (logits.argmax(-1) != targets) & (targets != IGNORE_INDEX)
        return losses.view_as(targets), wrong

    (columns,) = (y != IGNORE_INDEX).any(0).nonzero(as_tuple=True)
    layout = packing(x)
    device = net.embedding.weight.device
    x, y, columns = (t.to(device, non_blocking=True) for t in (x, y, columns))
    losses = torch.zeros_like(y, dtype=torch.float32)
    wrong = torch.zeros_like(y, dtype=torch.bool)
    # Only scored columns get logits, a bounded number at a time: with a large vocabulary, those of a batch of long
    # texts would fill the memory, and often only the last tokens count.
    hidden = net.hidden_states(x, layout, encodings=encodings)
    hidden = layout.gathered(hidden)  # [B, T, C], or longer: a shared text has padding after its end
    pieces = net.in_pieces(score, hidden[:, columns], y[:, columns])
    losses[:, columns] = torch.cat([piece[0] for piece in pieces], dim=1)
    wrong[:, columns] = torch.cat([piece[1] for piece in pieces], dim=1)
    return losses, wrong


class Sums(NamedTuple):
    """Sums over the scored tokens of each text, [n, G]: a column for each group of tokens."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    errors: np.ndarray

    def measured(
        self, length: int, group: int = 0, *, baseline: np.ndarray | None = None, optimum: np.ndarray | None = None,
        texts: EvalSet | None = None, **part: Any,
    ) -> PartResult:  # fmt: skip
        """Return one group as an entry of a results file.

        Args:
            length: tokens that were read.
            baseline: nats [n, G] of the same tokens, to compare with, in far copies and RULER. The gain of `lengths` is
                made of two lengths in `report.table`.
            optimum: nats [n, G] of the best possible predictor of the same tokens, if it is known.
            texts: what was scored; its documents are kept.
            part: the fields of `PartResult` that name the part of the measure.
        """
        arrays = self._asdict() | {"baseline_nats": baseline, "optimum_nats": optimum}
        lists: dict[str, Any] = {}
        for name, values in arrays.items():
            if values is not None:
                lists[name] = values[:, group].round(5).tolist()
        if texts is not None and texts.documents is not None:
            lists["documents"] = list(texts.documents[: len(self.nats)])
        return PartResult(length=length, **lists, **part)


@dataclass
class Scorer:
    """Scores sets of texts by one network. All ranks call it alike, share the batches, and get the same sums."""

    net: GPT
    # That read instead of the network's own; None: its own.
    encodings: Encodings | None = None
    # How texts lie in a batch; by default one in each row.
    packing: Packing = field(default_factory=Packing)
    # Bytes of each token, float64 [vocab_size]; None if they mean nothing.
    token_bytes: Tensor | None = None
    # Makes the network compute as in training.
    autocast: Autocast = nullcontext
    # Number of texts read of each set; None: all.
    limit: int | None = None
    # Losses of texts that several measures group in their own ways, by texts, length and first text of the batch.
    kept: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, texts: EvalSet, groups: Tensor | None = None, n_groups: int = 2) -> Sums:
        """Sum over the scored tokens of a set of `texts`.

        Args:
            groups: the group of each target, int64 [n, T]; -1: not scored. The losses are kept for other measures of
                the same texts. None: tokens without bytes are in group 1, all others in group 0.
            n_groups: number of groups.
        """
        n = texts.n if self.limit is None else min(texts.n, self.limit)
        device = self.net.embedding.weight.device.type
        batch_size = max(1, BATCH_TOKENS.get(device, 4096) // texts.length)

        # Each rank reads its share of the batches; the sums of all ranks are gathered at the end.
        sums: dict[int, Tensor] = {}
        for start in distributed.shared_batches(n, batch_size, self.packing.ranks_per_text):
            # None means that this rank has no batch left. It reads the first one too, and forgets it: ranks gather
            # sharded weights together, so none may skip a forward pass.
            first = 0 if start is None else start
            of_batch = self._sums(texts, first, min(n, first + batch_size), groups, n_groups)
            if start is not None:
                sums[first] = of_batch
        # The device is waited for only here, once for all batches.
        sums = {first: values.cpu() for first, values in sums.items()}

        of_all_ranks: dict[int, Tensor] = {}
        for of_rank in processes.gather(sums):
            of_all_ranks |= of_rank
        # In the order of the texts, whatever rank has read them.
        in_order = [of_all_ranks[first] for first in sorted(of_all_ranks)]
        nats, tokens, in_bytes, errors = torch.cat(in_order, dim=1).numpy()
        # Bytes are a share of the text's where the tokenizer changes it, and so need not be whole.
        return Sums(nats, tokens.astype(np.int64), np.rint(in_bytes).astype(np.int64), errors.astype(np.int64))

    def _sums(self, texts: EvalSet, first: int, last: int, groups: Tensor | None, n_groups: int) -> Tensor:
        """Return nats, tokens, bytes and errors of texts `first` to `last` - 1 by group, on the device: [4, B, G]."""
        x, y = texts.batch(first, last)
        check_tokens(x, y, self.net.vocab_size)
        # The bytes of each target, 1 where bytes mean nothing; and its group.
        size = torch.ones_like(y) if self.token_bytes is None else self.token_bytes[y.clamp(min=0)]
        group = (size == 0).long() if groups is None else groups[first:last]
        scored = y.masked_fill(group < 0, IGNORE_INDEX)
        # Another grouping of these texts scores other targets: if the losses are kept, all must be computed.
        key = (texts.texts_hash, texts.length, first) if texts.texts_hash and groups is not None else None
        losses, wrong = self._losses(x, y if key else scored, key)
        device = losses.device
        # Sums of many fp32 losses would lose digits that paired differences need; mps has no float64.
        precise = torch.float32 if device.type == "mps" else torch.float64
        mask = scored != IGNORE_INDEX
        in_bytes = torch.zeros_like(size) if self.token_bytes is None else size * mask
        visible = mask.to(device)
        quantities = (losses.where(visible, 0), mask, in_bytes, wrong.where(visible, 0))  # nats, tokens, bytes, errors
        values = torch.stack([quantity.to(device, precise) for quantity in quantities])  # [4, B, T]
        index = group.clamp(min=0).to(device).expand_as(values)
        sums = torch.zeros(4, len(scored), n_groups, dtype=precise, device=device)
        return sums.scatter_add_(2, index, values)

    def _losses(self, x: Tensor, y: Tensor, key: tuple[str, int, int] | None) -> tuple[Tensor, Tensor]:
        """Return the `token_losses` of a batch; with a `key` they are computed once and kept."""
        if key is not None and key in self.kept:
            return self.kept[key]
        with self.autocast():
            losses = token_losses(self.net, x, y, packing=self.packing, encodings=self.encodings)
        if key is not None:
            self.kept[key] = losses
        return losses
