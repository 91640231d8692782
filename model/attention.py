"""Attention in memory linear in the length: SDPA, sliding windows and biases in blocks of queries; and the cache."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Positions = tuple[Tensor, int]  # of tokens, int64 [T], ascending; and the length of the text that they are from
R = TypeVar("R")
BLOCK = 128  # queries whose scores are held at once


@dataclass(frozen=True)
class Context:
    """The positions of one attention call. The queries are the newest of the keys' tokens."""

    pos_q: Tensor  # int64 [Tq]
    pos_k: Tensor  # int64 [Tk], cached keys included; its last Tq entries are pos_q
    length: int  # tokens read so far, also where a window has forgotten some
    tables: Any  # what `PositionEncoding.tables` returned for all of them
    scale: float  # multiplies q.k: logit_scale / sqrt(head_dim)
    sinks: Tensor | None = None  # a logit for each head, [H], that takes part in the softmax: see `softmax`
    has_gaps: bool = False  # tokens of the text are missing: neighbours among the keys may be far apart

    def block(self, start: int, stop: int, low: int = 0) -> "Context":
        """The context of queries start..stop-1 and of the keys from `low` up to the last of these queries."""
        end = self.pos_k.size(0) - self.pos_q.size(0) + stop
        return replace(self, pos_q=self.pos_q[start:stop], pos_k=self.pos_k[low:end])

    @property
    def distance(self) -> Tensor:
        """i - j for every query i and key j, int64 [Tq, Tk]; negative in the future."""
        return self.pos_q[:, None] - self.pos_k[None, :]

    def visible(self, window: int | None = None) -> Tensor:
        """Whether key j may be seen by query i, bool [Tq, Tk]: j <= i, and i - j < window if there is one."""
        distance = self.distance
        seen = distance >= 0
        return seen if window is None else seen & (distance < window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, bias: Callable[[Tensor, Context], Tensor] | None = None,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal softmax attention [B, H, Tq, D], softmax(scale q.k + bias) v, in memory linear in the length.

    Args:
        q: queries [B, H, Tq, D], the newest of the keys' tokens.
        k, v: keys and values [B, Hkv, Tk, D]; H is a multiple of Hkv (grouped-query attention).
        bias: (queries of a block, its context) -> [H, tq, tk] or [B, H, tq, tk], added to the scaled scores.
        window: query i sees the keys with i - j < window.
    """
    queries, keys = q.size(2), k.size(2)
    if window is not None and window >= keys and not ctx.has_gaps:
        window = None
    if bias is None and window is None:
        if queries == 1:  # the newest token sees every key
            return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks)
        if queries == keys:
            return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks, causal=True)

    def block(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        of_pairs = None if bias is None else bias(q, ctx)
        return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks, visible=ctx.visible(window), bias=of_pairs)

    # A mask costs little to keep for the backward pass; a bias, one number for each score, is computed again.
    return in_blocks(block, (q,), (k, v), ctx, window=window, recompute=bias is not None)


def in_blocks(
    function: Callable[..., Tensor], queries: Sequence[Tensor], keys: Sequence[Tensor], ctx: Context, *,
    window: int | None = None, recompute: bool = True,
) -> Tensor:  # fmt: skip
    """Attention [B, H, Tq, D] by `function`, one block of queries at a time, each with the keys it can see.

    Args:
        function: (*queries of the block, *keys of the block, its context) -> [B, H, tq, D].
        queries: what belongs to the queries' tokens, each [B, H, Tq, ...].
        keys: what belongs to the keys' tokens, each [B, Hkv, Tk, ...].
        window: as in `attention`; keys beyond it are not handed to the function.
        recompute: compute each block again in the backward pass instead of keeping its scores, if more than two.
    """
    length, past = ctx.pos_q.size(0), ctx.pos_k.size(0) - ctx.pos_q.size(0)
    if recompute and length > 2 * BLOCK:
        function = recomputed(function)
    out, keys, split = [], list(keys), [x.split(BLOCK, dim=2) for x in queries]
    compiling = torch.compiler.is_compiling()  # a compiler sums gradients without padding them
    for i in range(-(-length // BLOCK)):  # torch.compile has one graph for all lengths with this number of blocks
        start, stop = i * BLOCK, min(length, (i + 1) * BLOCK)
        low = 0 if window is None else max(0, past + start + 1 - window)
        seen = []
        for n, x in enumerate(keys):
            part, keys[n] = (x[:, :, low : past + stop], x) if compiling else Slice.apply(x, low, past + stop)
            seen.append(part)
        out.append(function(*(own[i] for own in split), *seen, ctx.block(start, stop, low)))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


class Slice(torch.autograd.Function):
    """x[:, :, low:stop], and x for the next slice. Gradients are summed in place; autograd pads each with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: int, stop: int) -> tuple[Tensor, Tensor]:
        ctx.low, ctx.stop = low, stop
        return x[:, :, low:stop], x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        of_part, of_rest = grads
        of_rest[:, :, ctx.low : ctx.stop] += of_part
        return of_rest, None, None


def recomputed(function: Callable[..., R]) -> Callable[..., R]:
    """`function`, computed again in the backward pass, with the same dropout, instead of keeping its activations."""
    if not torch.is_grad_enabled():
        return function
    # No check: a function may choose other sizes when it is computed again, by sums that differ in the last bit.
    return functools.partial(checkpoint, function, use_reentrant=False, determinism_check="none")


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of the keys from scores [B, H, Tq, Tk].

    With `sinks` [H] each head has a key more, of that score and a value of zero, so the weights sum to less than 1: to
    sigmoid(logsumexp(scores) - sink).
    """
    if sinks is None:
        return scores.softmax(-1)
    of_sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, of_sinks), dim=-1).softmax(-1)[..., :-1]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None = None, visible: Tensor | None = None,
    bias: Tensor | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's scaled dot-product attention, called nowhere else.

    Args:
        sinks: see `softmax`.
        visible: whether a query may see a key, bool [Tq, Tk]; None: it may.
        bias: added to the scores, [H, Tq, Tk] or [B, H, Tq, Tk]; needs `visible`.
        causal: query t sees keys 0..t. Needs Tq == Tk: PyTorch aligns its causal mask to the top left.
    """
    if sinks is not None:
        return _with_sinks(q, k, v, sinks, scale=scale, visible=visible, bias=bias, causal=causal)
    if q.is_cuda and (visible is not None or q.dtype == torch.float32):
        # With grouped heads PyTorch has only its T x T math kernel for these on CUDA.
        k, v = for_heads_of(q, k), for_heads_of(q, v)
    mask, grouped = visible, q.size(1) != k.size(1)
    if bias is not None:
        assert visible is not None
        if not (q.is_cuda or torch.compiler.is_compiling()):  # elsewhere no fused kernel has a gradient for its mask
            return Weights.apply(q, for_heads_of(q, k), bias, visible, scale).to(v.dtype) @ for_heads_of(q, v)
        mask = bias.to(q.dtype).masked_fill(~visible, -torch.inf)
        mask = mask if mask.ndim == 4 else mask[None]  # with three dimensions a fused kernel may be passed over
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


class Weights(torch.autograd.Function):
    """softmax(scale q.k + bias) in one tensor [B, H, Tq, Tk]; autograd would hold three, and pass over them twice."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor, visible: Tensor, scale: float) -> Tensor:
        weights = (q * scale) @ k.mT + bias
        hide(weights, visible)
        torch.softmax(weights, -1, out=weights)
        ctx.save_for_backward(q, k, weights)
        ctx.scale, ctx.bias = scale, bias.shape
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weights = ctx.saved_tensors
        of_scores = torch._softmax_backward_data(grads[0], weights, -1, weights.dtype)
        scaled = (of_scores * ctx.scale).to(q.dtype)
        return scaled @ k, scaled.mT @ q, of_scores.sum_to_size(ctx.bias), None, None


def hide(scores: Tensor, visible: Tensor) -> None:
    """Set the scores [..., Tq, Tk] of keys that are not `visible`, bool [Tq, Tk], to -inf, in place."""
    start = visible.size(1) - visible.size(0)  # of the keys that are newer than a query
    if scores.is_cuda or not visible[:, :start].all():  # a window hides old keys too; on a GPU looking would stall
        start = 0
    scores[..., start:].clamp_(max=torch.where(visible[:, start:], torch.inf, -torch.inf))  # faster than masked_fill_


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, scale: float, visible: Tensor | None, bias: Tensor | None,
    causal: bool,
) -> Tensor:  # fmt: skip
    """`sdpa` with a first key for the sinks: a channel more, which other keys lack, makes its score."""
    room = 8  # fused kernels want multiples of 8 channels
    of_sinks = F.pad((sinks / scale).to(q.dtype)[:, None, None], (0, room - 1))  # [H, 1, room]
    q = torch.cat((q, of_sinks.expand(*q.shape[:3], -1)), dim=-1)
    first = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.size(-1), room - 1))
    k = torch.cat((first, F.pad(k, (0, room))), dim=2)
    v = F.pad(v, (0, room, 1, 0))
    if causal:
        q = F.pad(q, (0, 0, 1, 0))  # a query for the first key too, so that the mask stays causal
    visible = visible if visible is None else F.pad(visible, (1, 0), value=True)
    bias = bias if bias is None else F.pad(bias, (1, 0))
    return sdpa(q, k, v, scale=scale, visible=visible, bias=bias, causal=causal)[:, :, int(causal) :, :-room]


def for_heads_of(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values `x` [B, Hkv, Tk, ...] repeated to the H heads of `q` [B, H, Tq, D] that share them."""
    groups = q.size(1) // x.size(1)
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


class KVCache:
    """The text read so far, for each layer: keys and values before any rotation, and what the encoding's `state` names.

    A buffer doubles when it is full. A layer with a sliding window forgets what no later token can see.
    """

    def __init__(self, n_layer: int) -> None:
        self._buffers: list[dict[str, Tensor]] = [{} for _ in range(n_layer)]  # [B, room, ...] each
        self._held = [0] * n_layer  # tokens in each layer's buffers
        self.length = 0  # tokens read so far, by the last layer

    def append(self, layer: int, window: int | None = None, **new: Tensor) -> dict[str, Tensor]:
        """Add the tensors [B, T, ...] of T new tokens to a layer; return all it holds that these tokens can see."""
        buffers, held = self._buffers[layer], self._held[layer]
        added = next(iter(new.values())).size(1)
        drop = 0 if window is None else max(0, held - (window - 1))
        stop = held - drop + added
        for name, x in new.items():
            old = buffers.get(name, x[:, :0])
            if drop or old.size(1) < stop:
                buffers[name] = x.new_empty(x.size(0), max(stop, 2 * (held - drop)), *x.shape[2:])
                buffers[name][:, : held - drop] = old[:, drop:held]
            buffers[name][:, held - drop : stop] = x
        self._held[layer] = stop
        self.length += added if layer == len(self._held) - 1 else 0
        return {name: buffers[name][:, :stop] for name in new}
