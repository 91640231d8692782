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
from typing import Any

import torch
from torch import Tensor

import lab.kernels.flash  # noqa: F401  registers the operators
from lab.kernels.ops import LOG2E, Maybe, grads_of_sinks, means_of, padded, relative_errors
from model.attention import Run, run_of_keys

EXACT = ("sinks",)  # of `errors`, what fp32 holds for inputs of 16 bit too


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
            bias = (None, None, None, None)
            out, log_sums = torch.ops.ropewalk.flash(q, k, v, *run, *bias, zone_sinks, scale)
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
        means = means_of(out, out_grad)  # [B, H, T]
        q_grads = []
        k_grads = []
        v_grads = []
        exact_means = []
        for zone in range(ctx.n_zones):
            q, k, run = _of_zone(zone, ctx.n_zones, tensors)
            bias = (None, None, None, None)
            q_grad, k_grad, v_grad, _, _, zone_means = torch.ops.ropewalk.flash_backward(
                q, k, v, *run, *bias, ctx.scale, log_sums, means, out_grad, True
            )
            q_grads.append(q_grad)
            k_grads.append(k_grad)
            v_grads.append(v_grad)
            exact_means.append(zone_means)

        sinks_grad = None
        if sinks is not None:
            sinks_grad = grads_of_sinks(sinks, log_sums, reduce(torch.add, exact_means)).sum((0, 2))
        no_grads = [None] * len(tensors[2 * ctx.n_zones :])
        return None, None, reduce(torch.add, v_grads), sinks_grad, *q_grads, *k_grads, *no_grads


def _of_zone(zone: int, n_zones: int, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Queries, keys and run of a zone, from the tensors that `Zones` takes."""
    start = 2 * n_zones + len(Run._fields) * zone
    return tensors[zone], tensors[n_zones + zone], tensors[start : start + len(Run._fields)]


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


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of `zones` and its gradients on a device, against softmax attention in float64.

    Three zones, with grouped heads, a window, sinks, and queries that see no key of a zone.
    """
    generator = torch.Generator().manual_seed(0)
    length = 110
    window = 70
    i = torch.arange(length, device=device)
    # Near keys, those of the chunk before, and all older ones, as in dual chunk attention.
    chunk = i // 30
    zone = (chunk[:, None] - chunk).clamp(max=2)
    distance = i[:, None] - i
    unseen = (distance < 0) | (distance >= window)
    ends = [(30 * chunk, i), (30 * (chunk - 1), 30 * chunk - 1), (0 * i, 30 * (chunk - 1) - 1)]
    runs = [run_of_keys(first, newest, window) for first, newest in ends]

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    inputs = {"v": random(2, 1, length, 64).to(dtype), "sinks": random(2)}
    for n in range(3):
        inputs[f"q of zone {n}"] = random(2, 2, length, 64).to(dtype)
        inputs[f"k of zone {n}"] = random(2, 1, length, 64).to(dtype)
    out_grad = random(2, 2, length, 64).to(dtype)

    def exact(v: Tensor, sinks: Tensor, **rotated: Tensor) -> Tensor:
        scores = torch.zeros(2, 2, length, length, dtype=v.dtype, device=device)
        for n in range(3):
            in_zone = rotated[f"q of zone {n}"] @ rotated[f"k of zone {n}"].mT / 8
            scores = torch.where(zone == n, in_zone, scores)
        scores = scores.masked_fill(unseen, -torch.inf)
        sink_scores = sinks[:, None, None].expand(2, -1, length, 1)
        return torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1] @ v

    def kernel(v: Tensor, sinks: Tensor, **rotated: Tensor) -> Tensor:
        queries = [rotated[f"q of zone {n}"] for n in range(3)]
        keys = [rotated[f"k of zone {n}"] for n in range(3)]
        return zones(queries, keys, v, runs, scale=1 / 8, sinks=sinks)

    return relative_errors(kernel, exact, inputs, out_grad)
