"""AdamW, its schedule, gradient clipping, and the watch over gradients that are not finite."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from model.gpt import GPT
from training.distributed import any_rank
from training.sharding import full_tensor, is_sharded, local_tensor

DEFERRED = ("cuda",)  # devices that looking at a number would stall: they are asked only now and then


class NonFiniteError(ValueError):
    """The loss, its gradient or a weight is infinite or not a number."""


def make_optimizer(net: GPT, optim: Any, device: str) -> torch.optim.AdamW:
    """AdamW over the parameters of `net`; `optim` is the section of the configuration.

    Matrices decay. Norms, biases and position encodings do not, but for what an encoding names in `decayed`: decay
    towards zero would favour encodings without parameters.
    """
    spared = {id(p) for pe in net.distinct_encodings for name, p in pe.named_parameters() if name not in pe.decayed}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}  # PyTorch updates shards apart from whole tensors
    for p in net.parameters():
        decay = optim.weight_decay if p.ndim >= 2 and id(p) not in spared else 0.0
        groups.setdefault((decay, is_sharded(p)), []).append(p)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for (decay, _), group in groups.items()],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        fused=device in ("cpu", "cuda"),
    )


def learning_rate(step: int, optim: Any, max_steps: int) -> float:
    """The learning rate of optimizer step `step`, from 0: linear warm-up to lr, then a cosine to min_lr_ratio * lr."""
    if step < optim.warmup_steps:
        return optim.lr * ((step + 1) / optim.warmup_steps)
    done = (step - optim.warmup_steps) / max(1, max_steps - 1 - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


def clip_gradients(net: nn.Module, scale: Tensor, max_norm: float | None) -> Tensor:
    """Multiply all gradients by `scale`, then clip their norm as `clip_grad_norm_` does; the norm before clipping.

    Where that norm is not finite, gradients stay as they are.
    """
    parts: dict[bool, list[Tensor]] = {}
    for p in net.parameters():
        if p.grad is not None:
            parts.setdefault(is_sharded(p), []).append(p.grad)
    norms = [full_tensor(torch.nn.utils.get_total_norm(part)) for part in parts.values()]
    norm = (norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))) * scale
    factor = scale * ((math.inf if max_norm is None else max_norm) / (norm + 1e-6)).clamp(max=1.0)
    gradients = [local_tensor(grad) for part in parts.values() for grad in part]
    torch._foreach_mul_(gradients, torch.where(norm.isfinite(), factor, 1.0))
    return norm


def guard(optimizer: torch.optim.Optimizer, norm: Tensor, step: int, cfg: Any) -> None:
    """Before an optimizer step: make sure that a gradient whose norm is not finite changes nothing.

    Raises NonFiniteError, or on DEFERRED devices makes AdamW skip this step and all later ones.
    """
    if norm.device.type not in DEFERRED:
        return check_gradients([norm], step, cfg)
    bad = (~norm.isfinite()).float()  # as a GradScaler does it: fused AdamW does nothing where found_inf is 1
    optimizer.found_inf = torch.maximum(getattr(optimizer, "found_inf", bad), bad)  # type: ignore[attr-defined]


def check_gradients(norms: list[Tensor], step: int, cfg: Any) -> None:
    """Raise NonFiniteError if one of the gradient norms of the latest steps, up to `step`, is not finite."""
    finite = torch.stack(norms).isfinite().tolist()
    if not all(finite):
        raise _error("the loss or its gradient", step - len(norms) + 1 + finite.index(False), cfg)


def check_weights(net: nn.Module, step: int, cfg: Any) -> None:
    """Raise NonFiniteError if a weight is not finite, though the gradient was. Called by all ranks."""
    finite = torch.stack([local_tensor(p.detach()).isfinite().all() for p in net.parameters()]).all()
    if any_rank(not finite)[0]:
        raise _error("a weight", step, cfg)


def _error(what: str, step: int, cfg: Any) -> NonFiniteError:
    return NonFiniteError(
        f"{what} became infinite or NaN in step {step}: lower optim.lr={cfg.optim.lr:g}, raise optim.warmup_steps="
        f"{cfg.optim.warmup_steps}, or use trainer.precision=32; python scripts/replay.py "
        f"run={cfg.runs_dir}/{cfg.name} step={step} shows its batch"
    )
