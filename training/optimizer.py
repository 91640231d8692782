"""AdamW, its schedule, gradient clipping, and the watch over gradients that are not finite."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model.gpt import GPT
from training.distributed import any_rank
from training.sharding import full_tensor, local_tensor


def make_optimizer(net: GPT, optim: Any) -> torch.optim.AdamW:
    """AdamW over the parameters of `net`; `optim` is the section of the configuration.

    Matrices decay. Norms, biases and position encodings do not, but for what an encoding names in `decayed`: decay
    towards zero would favour encodings without parameters.
    """
    spared = {id(p) for pe in net.distinct_encodings for name, p in pe.named_parameters() if name not in pe.decayed}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}  # PyTorch updates shards apart from whole tensors
    for p in net.parameters():
        decay = optim.weight_decay if p.ndim >= 2 and id(p) not in spared else 0.0
        groups.setdefault((decay, isinstance(p, DTensor)), []).append(p)
    decaying = [{"params": group, "weight_decay": decay} for (decay, _), group in groups.items()]
    return torch.optim.AdamW(decaying, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)


def learning_rate(step: int, optim: Any, max_steps: int) -> float:
    """The learning rate of optimizer step `step`, from 0: linear warm-up to lr, then a cosine to min_lr_ratio * lr."""
    if step < optim.warmup_steps:
        return optim.lr * ((step + 1) / optim.warmup_steps)
    done = (step - optim.warmup_steps) / max(1, max_steps - 1 - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


def clip_gradients(net: nn.Module, scale: Tensor, max_norm: float | None) -> Tensor:
    """Multiply all gradients by `scale`, then clip their norm as `clip_grad_norm_` does; the norm before clipping."""
    parts: dict[bool, list[Tensor]] = {}
    for p in net.parameters():
        if p.grad is not None:
            parts.setdefault(isinstance(p, DTensor), []).append(p.grad)
    norms = [full_tensor(torch.nn.utils.get_total_norm(part)) for part in parts.values()]
    norm = (norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))) * scale
    factor = scale * ((math.inf if max_norm is None else max_norm) / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local_tensor(grad) for part in parts.values() for grad in part], factor)
    return norm


def check_finite(net: nn.Module, norms: list[Tensor], step: int, optim: Any) -> None:
    """Raise ValueError, with the step and the remedy, unless the gradient norms of the latest steps, up to `step`,
    and all weights are finite. All ranks call it."""
    what, finite = "the loss or its gradient", torch.stack(norms).isfinite().tolist()
    if all(finite):
        weights = torch.stack([local_tensor(p.detach()).isfinite().all() for p in net.parameters()])
        what, finite[-1] = "a weight", not any_rank(not weights.all())[0]
    if not all(finite):
        first = step - len(norms) + 1 + finite.index(False)
        remedy = f"lower optim.lr={optim.lr:g}, raise optim.warmup_steps={optim.warmup_steps}"
        raise ValueError(f"{what} became infinite or NaN in step {first}: {remedy}, or use trainer.precision=32")
