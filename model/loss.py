"""The loss of training, in the memory of one tensor of logits."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.attention import exactly

IGNORE_INDEX = -100  # a target that is not scored, as in torch's cross_entropy
# Logits whose loss is made at once: few enough for the cache of a core, on a GPU so many that launches do not count.
LOSS_PIECE = {"cpu": 2**20, "cuda": 2**27}


class CrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies in nats of all targets but IGNORE_INDEX, with the gradient written over the logits.

    Logits are the largest tensor of a small network. Autograd would hold three of that size, or more; here there is
    one, and pieces of it. The gradient has the same bits as autograd's. It takes the place of what it is made from, so
    a second backward pass is an error of PyTorch's.

    Args of `apply`:
        logits: [N, padded vocabulary], which nothing else may read any more.
        targets: int64 [N].
        vocab_size: the columns from it on are padding.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.vocab_size = vocab_size
        sums = []
        for part, wanted in CrossEntropy._pieces(logits, targets):
            part = part[:, :vocab_size]
            if CrossEntropy._in_place(part):
                log_probabilities = torch.log_softmax(part, -1, out=part)
            else:
                log_probabilities = exactly(part).log_softmax(-1)
            sums.append(F.nll_loss(log_probabilities, wanted, ignore_index=IGNORE_INDEX, reduction="sum"))
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        logits[:, ctx.vocab_size :] = 0
        for part, wanted in CrossEntropy._pieces(logits, targets):
            part = part[:, : ctx.vocab_size]
            in_place = CrossEntropy._in_place(part)
            log_probabilities = part if in_place else exactly(part).log_softmax(-1)
            of_targets = -grads[0] * (wanted != IGNORE_INDEX)  # the gradient of each target's logarithm
            of_all = torch.zeros_like(log_probabilities)
            of_all.scatter_(1, wanted.clamp(min=0)[:, None], of_targets[:, None])
            # A private function of PyTorch: the gradient of its log_softmax.
            of_logits = part if in_place else torch.empty_like(of_all)
            torch._log_softmax_backward_data(of_all, log_probabilities, 1, of_all.dtype, out=of_logits)
            if not in_place:
                part.copy_(of_logits)
        return logits, None, None

    @staticmethod
    def _pieces(logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        rows = max(1, LOSS_PIECE.get(logits.device.type, 2**24) // logits.size(1))
        return zip(logits.split(rows), targets.split(rows), strict=True)

    @staticmethod
    def _in_place(part: Tensor) -> bool:
        """Whether logarithms of probabilities take the place of the logits; else the backward pass makes them again."""
        return part.dtype == torch.float32 and part.is_contiguous()
