"""Softmax attention to zones of keys, each with queries and keys of its own, in Triton: memory linear in the length.

The training-free extensions of RoPE (`model.position.windowed`) rotate queries and keys by other positions for near
keys than for far ones. Every key that a query sees is in one zone, and those of a zone are a run of neighbours. So each
zone is one call of the flash kernel, which also returns the logarithms of the sums of exp(score). With these sums as
weights, the mean of the outputs is the softmax over all keys.

The backward pass calls each zone's kernels with the output and the logarithms of the whole. That is exact, as
`model.attention.ByLogSums` explains.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lab.kernels.flash  # noqa: F401  registers the operators
from lab.kernels.ops import LOG2E, Maybe, grads_of_sinks, padded


class Run(NamedTuple):
    """The keys that each query sees, where they are neighbours; all int32 [T] and ascending."""

    first: Tensor  # the first key that each query sees
    last: Tensor  # the last query that sees each key
    newest: Tensor  # the newest key that each query sees; less than `first` if it sees none
    oldest: Tensor  # the oldest query that sees each key; greater than `last` if none does


def run_of_keys(first: Tensor, newest: Tensor, window: int | None) -> Run:
    """The run of keys first..newest of each query, int64 [T] each and ascending, without those beyond the window.

    `first` may be below 0, and `newest` too.
    """
    i = torch.arange(first.size(0), device=first.device)
    oldest_in_window = torch.zeros_like(i) if window is None else (i - window + 1).clamp(min=0)
    first = first.maximum(oldest_in_window)
    last = torch.searchsorted(first, i, right=True) - 1
    oldest = torch.searchsorted(newest.contiguous(), i)
    return Run(first.int(), last.int(), newest.int(), oldest.int())


class Zones(torch.autograd.Function):
    """The attention of `zones`, whose tensors come one after the other: queries, keys and runs of all zones."""

    @staticmethod
    def forward(ctx: Any, scale: float, n_zones: int, v: Tensor, sinks: Maybe, *tensors: Tensor) -> Tensor:
        outputs = []
        sums = []
        for zone in range(n_zones):
            q, k, run = _of_zone(zone, n_zones, tensors)
            # A sink is one more key with a value of zero, and it has to be in one zone.
            zone_sinks = sinks if zone == 0 else None
            out, log_sums = torch.ops.ropewalk.flash(q, k, v, run, [], zone_sinks, "nothing", scale)
            outputs.append(out)
            sums.append(log_sums / LOG2E.value)  # to base e

        zone_sums = torch.stack(sums)  # [zones, B, H, T]
        log_sums = zone_sums.logsumexp(0) * LOG2E.value
        # The share of a zone in the weight of all keys is fp32, so its part of the output is, too.
        shares = zone_sums.softmax(0)[..., None]
        parts = [share * out for share, out in zip(shares, outputs, strict=True)]
        whole = reduce(torch.add, parts).to(v.dtype)  # [B, H, T, D]
        ctx.save_for_backward(v, sinks, whole, log_sums, *tensors)
        ctx.scale = scale
        ctx.n_zones = n_zones
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Maybe, ...]:
        v, sinks, out, log_sums, *tensors = ctx.saved_tensors
        out_grad = grads[0].contiguous()
        q_grads = []
        k_grads = []
        v_grads = []
        exact_means = []
        for zone in range(ctx.n_zones):
            q, k, run = _of_zone(zone, ctx.n_zones, tensors)
            q_grad, k_grad, v_grad, _, zone_means = torch.ops.ropewalk.flash_backward(
                q, k, v, run, [], None, "nothing", ctx.scale, out, log_sums, out_grad, True
            )
            q_grads.append(q_grad)
            k_grads.append(k_grad)
            v_grads.append(v_grad)
            exact_means.append(zone_means)

        sinks_grad = None
        if sinks is not None:
            sinks_grad = grads_of_sinks(sinks, log_sums, reduce(torch.add, exact_means))
        no_grads = [None] * len(tensors[2 * ctx.n_zones :])
        return None, None, reduce(torch.add, v_grads), sinks_grad, *q_grads, *k_grads, *no_grads


def _of_zone(zone: int, n_zones: int, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Queries, keys and run of a zone, from the tensors that `Zones` takes."""
    start = 2 * n_zones + 4 * zone
    return tensors[zone], tensors[n_zones + zone], list(tensors[start : start + 4])


def zones(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    v: Tensor,
    runs: Sequence[Run],
    *,
    scale: float,
    sinks: Maybe = None,
) -> Tensor:
    """Softmax attention [B, H, T, D] over the keys of all zones, of as many queries as keys.

    Args:
        queries: of each zone, [B, H, T, D], fp32, bf16 or fp16.
        keys: of each zone, [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        v: values of all zones [B, Hkv, T, D] of the same dtype.
        runs: which keys each query sees in each zone. They may be none, but not in all zones.
        sinks: a logit for each head, [H]: see `model.attention.softmax`.
    """
    n_zones = len(runs)
    head_dim = v.size(3)
    v, *rotated = padded(v, *queries, *keys)
    if sinks is not None:
        sinks = sinks.float()
    rows = [row for run in runs for row in run]
    return Zones.apply(scale, n_zones, v, sinks, *rotated, *rows)[..., :head_dim]
