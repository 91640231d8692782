"""The optimizer, its schedule, gradient clipping, and the check for gradients that are not finite."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conf import plugins
from conf.errors import ConfigError
from conf.schema import Optim
from model.gpt import GPT
from ropewalk.run.processes import any_rank
from ropewalk.training.ranks import full_tensor, local_tensor


def make_optimizer(net: GPT, optim: Optim) -> torch.optim.Optimizer:
    """Build AdamW, or the optimizer that `optim.optimizer` names, over the parameters of `net`.

    Matrices decay. Norms, biases and position encodings do not, except the parameters that an encoding names in
    `decayed`. Another optimizer gets the parameters with their names, as `torch.optim.Optimizer` documents it.

    Raises ConfigError: there is no such optimizer, or it does not take these options.
    """
    # Of each parameter of an encoding, whether it decays. Decay pulls an encoding towards the one with zero parameters:
    # a comparison would favour those without any.
    decays_in_encoding = {}
    for pe in net.distinct_encodings:
        for name, p in pe.named_parameters():
            decays_in_encoding[p] = name in pe.decayed

    # Sharded and whole tensors are in separate groups, because PyTorch cannot update them together.
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, p in net.named_parameters():
        decays = p.ndim >= 2 and decays_in_encoding.get(p, True)  # True: p is of no encoding
        weight_decay = optim.weight_decay if decays else 0.0
        lr_scale = optim.pe_lr_scale if p in decays_in_encoding else 1.0
        key = (weight_decay, lr_scale, isinstance(p, DTensor))
        group = groups.setdefault(key, {"params": [], "weight_decay": weight_decay, "lr_scale": lr_scale})
        group["params"].append((name, p) if optim.optimizer else p)
    betas = optim.beta1, optim.beta2
    if not optim.optimizer:
        return torch.optim.AdamW(list(groups.values()), lr=optim.lr, betas=betas, fused=True)
    cls, options = plugins.resolve(optim.optimizer, torch.optim.Optimizer, "torch.optim", "optim.optimizer")
    for name in sorted(options.keys() & {"lr", "weight_decay"}):  # the groups have them, so that these would do nothing
        raise ConfigError(f"optim.optimizer.{name}={options[name]}: set optim.{name} instead")
    if "betas" in inspect.signature(cls).parameters:
        options = {"betas": betas} | options
    try:
        return cls(list(groups.values()), lr=optim.lr, **options)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.optimizer={optim.optimizer}: {error}") from None


def learning_rate(step: int, optim: Optim, max_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    A linear warm-up to `lr`, then down to `min_lr_ratio * lr` by a cosine or a line: at once, or for "wsd" (warm-up,
    stable, decay; arXiv 2405.18392) by a line over the last `decay_share` of all steps.
    """
    if step < optim.warmup_steps:
        return optim.lr * ((step + 1) / optim.warmup_steps)
    start = optim.warmup_steps
    if optim.schedule == "wsd":
        start = max(start, max_steps - 1 - round(optim.decay_share * max_steps))
    done = (step - start) / max(1, max_steps - 1 - start)
    done = max(0.0, min(1.0, done))
    # The share of the way down that is still to go.
    if optim.schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = 1 - done
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)


def clip_gradients(net: nn.Module, scale: Tensor, max_norm: float | None) -> Tensor:
    """Multiply all gradients by `scale`, then clip their norm to `max_norm` as `clip_grad_norm_` does.

    Returns:
        The norm before clipping, a scalar tensor.
    """
    # PyTorch cannot combine sharded and whole tensors in one call, so each kind has a norm of its own first.
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    sharded: list[Tensor] = [grad for grad in grads if isinstance(grad, DTensor)]
    norms = [full_tensor(torch.nn.utils.get_total_norm(kind)) for kind in (whole, sharded) if kind]
    norm = torch.linalg.vector_norm(torch.stack(norms)) * scale
    # One multiplication does both, in one pass over the gradients.
    limit = math.inf if max_norm is None else max_norm
    factor = scale * (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(list(map(local_tensor, grads)), factor)
    return norm


def check_finite(net: nn.Module, norms: list[Tensor], step: int, optim: Optim) -> None:
    """Check the gradient norms of the latest steps, the last of which is `step`, and all weights. All ranks call it.

    Raises:
        ValueError: one is infinite or NaN; names the first such step and the remedy.
    """
    # A norm is the same on all ranks, so all of them find the same step. Shards differ: there the ranks must agree.
    finite = torch.stack(norms).isfinite().tolist()
    if not all(finite):
        culprit = "the loss or its gradient"
        first = step - len(norms) + 1 + finite.index(False)
    else:
        of_weights = [local_tensor(p.detach()).isfinite().all() for p in net.parameters()]
        (broken,) = any_rank(not torch.stack(of_weights).all())
        if not broken:
            return
        culprit = "a weight"
        first = step
    raise ValueError(
        f"{culprit} became infinite or NaN in step {first}: "
        f"lower optim.lr={optim.lr:g}, raise optim.warmup_steps={optim.warmup_steps}, or use trainer.precision=32"
    )
