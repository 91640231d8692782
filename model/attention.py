"""Causal softmax attention in memory linear in the length: by one fused kernel, or in blocks of queries."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.cache import Cache

if TYPE_CHECKING:
    from model.position.base import PositionEncoding

R = TypeVar("R")
BLOCK = 128  # queries whose scores are held at once


@dataclass(frozen=True)
class Context:
    """What an encoding knows of one call of attention. The queries are the newest of the keys' tokens.

    `model.position.layer` makes one for each encoding of a forward pass. Where a batch is not one text in each row, its
    layout puts an object of its own in the place of this one, with the methods `attend` and `earlier`. With packed
    documents that is `model.layout.PackedContext`: it cuts the rows into documents, pads these to a few widths, and
    calls `attend` of a context of this class for each width, whose rows are one document each. No mask is needed then.
    """

    pos_q: Tensor  # int64 [Tq]
    pos_k: Tensor  # int64 [Tk], cached keys included; its last Tq entries are pos_q
    length: int  # tokens of the text so far, dropped and left-out ones included
    tables: Any  # what `PositionEncoding.tables` returned: for all tokens, also those whose keys a cache has dropped
    scale: float  # multiplies q.k: logit_scale / sqrt(head_dim)
    window: int | None = None  # query i sees the keys with i - j < window; None: all keys up to itself
    temperature: Tensor | None = None  # of each query's scores, broadcasts to [B, H, Tq, 1]: see `tempered`
    sinks: Tensor | None = None  # a logit for each head, [H], that takes part in the softmax: see `softmax`
    has_gaps: bool = False  # tokens are left out, as with trainer.positions: neighbours among the keys may be far apart
    cache: Cache | None = None  # holds the tokens before the first query

    def attend(
        self, pe: "PositionEncoding", q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], *, layer: Hashable,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """What the heads of one layer read, [B, T, H, D]: `pe.attend`, which rotates and calls `attention`.

        Args:
            q: queries [B, T, H, D].
            k, v: keys and values [B, Tk, Hkv, D] of the same tokens, and of those before them that other ranks hold;
                those in the cache are added here.
            state: what `pe.state` made of the tokens of k, [B, Tk, ...] each.
            layer: owns its part of the cache.
            sinks: see `softmax`.
        """
        ctx = replace(self, sinks=sinks)
        if self.cache is not None:
            # Raw keys: a rotation may depend on the length of the text, which grows.
            visible = None if pe.window is None else pe.window - 1 + pe.lookback
            state = self.cache.append(layer, {"k": k, "v": v, **state}, visible=visible)
            k = state.pop("k")
            v = state.pop("v")
            # With a window the cache has dropped the oldest keys, and their positions go with them.
            ctx = replace(ctx, pos_k=self.pos_k[-k.size(1) :])
        q = q.transpose(1, 2)  # [B, H, T, D]
        # If scores are proportional to q, scaling q scales them. Other encodings call `tempered` themselves.
        if pe.linear_in_q:
            q = ctx.tempered(q)
        heads = pe.attend(q, k.transpose(1, 2), v.transpose(1, 2), state, ctx)  # [B, H, T, D]
        return heads.transpose(1, 2)

    def earlier(self, owner: Hashable, x: Tensor, n: int) -> list[Tensor]:
        """`x` [B, T, C] of each token and of the 1 to `n` tokens before it: n + 1 tensors [B, T, C].

        Before the text there are zeros. `owner` has its own part of the cache.
        """
        tokens = x.size(1)
        if self.cache is not None:
            x = self.cache.append(owner, {"x": x}, visible=n)["x"]  # [B, T to n + T, C], with the tokens before
        return shifts(F.pad(x, (0, 0, n + tokens - x.size(1), 0)), n)

    def block(self, start: int, stop: int, low: int = 0) -> "Context":
        """The context of queries start..stop-1 and of the keys from `low` up to the last of these queries."""
        end = self.pos_k.size(0) - self.pos_q.size(0) + stop  # keys before the first query, and `stop` more
        return replace(self, pos_q=self.pos_q[start:stop], pos_k=self.pos_k[low:end])

    @property
    def distance(self) -> Tensor:
        """i - j for every query i and key j, int64 [Tq, Tk]; negative in the future."""
        return self.pos_q[:, None] - self.pos_k[None, :]

    def visible(self) -> Tensor:
        """True where query i may see key j, bool [Tq, Tk]: j <= i, and i - j < window if there is one."""
        distance = self.distance
        if self.window is None:
            return distance >= 0
        return (distance >= 0) & (distance < self.window)

    def mask(self) -> Tensor:
        """0 where query i may see key j, -inf elsewhere, fp32 [Tq, Tk]; faster on a CPU than `masked_fill`."""
        return torch.where(self.visible(), 0.0, -torch.inf)

    def tempered(self, q: Tensor) -> Tensor:
        """All queries of the call, [B, H, Tq, D], times the temperature."""
        if self.temperature is None:
            return q
        return (q * self.temperature).to(q.dtype)


def shifts(x: Tensor, n: int) -> list[Tensor]:
    """Of tokens `x` [B, n + T, C] the newest T, and those 1 to n tokens before each of them, [B, T, C] each."""
    return [x[:, n - k : x.size(1) - k] for k in range(n + 1)]


Bias = Callable[[Tensor, Context], Tensor]  # see `attention`


def attention(q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, bias: Bias | None = None) -> Tensor:
    """Causal softmax attention [B, H, Tq, D], softmax(scale q.k + bias) v, in memory linear in the length.

    Args:
        q: queries [B, H, Tq, D], the newest of the keys' tokens.
        k, v: keys and values [B, Hkv, Tk, D]; H is a multiple of Hkv (grouped-query attention).
        bias: (queries of a block, its context) -> [H, tq, tk] or [B, H, tq, tk], added to the scaled scores.
    """
    n_queries = q.size(2)
    n_keys = k.size(2)
    if ctx.window is not None and ctx.window >= n_keys and not ctx.has_gaps:
        ctx = replace(ctx, window=None)  # it hides nothing
    if bias is None and ctx.window is None:
        # One kernel without a mask serves for a single query, the newest token, which sees every key.
        if n_queries == 1:
            return fused(q, k, v, ctx)
        # One serves for a whole text too, and on a GPU for the last piece of a text. Elsewhere, or compiled, PyTorch
        # would make a mask of all pairs for a piece, so that pieces are read in blocks, below.
        reads_pieces = q.is_cuda and not torch.compiler.is_compiling()
        if n_queries == n_keys or reads_pieces:
            return fused(q, k, v, ctx, causal=True)

    # In blocks of queries, each with the mask and the bias of its own pairs.
    def block(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if bias is None:
            return fused(q, k, v, ctx, visible=ctx.visible())
        return biased(q, k, v, ctx, bias(q, ctx))

    # The backward pass keeps the mask of a window, which is small. Scores with a bias are computed again, and so is the
    # mask of a piece of a text, over all keys.
    return in_blocks(block, (q,), (k, v), ctx, recompute=bias is not None or ctx.window is None)


def biased(q: Tensor, k: Tensor, v: Tensor, ctx: Context, bias: Tensor) -> Tensor:
    """Attention [B, H, Tq, D] with `bias` [H, Tq, Tk] or [B, H, Tq, Tk] added to the scores, all held at once.

    A fused kernel would round the bias to the dtype of q, and has no gradient for it.
    """
    scores = products(q, for_heads_of(q, k), ctx.scale)  # [B, H, Tq, Tk]
    # Adding in place leaves autograd one tensor of this size, the weights. The mask joins the bias first, which is
    # smaller than the scores if all texts share it.
    scores += bias + ctx.mask()
    return softmax(scores, ctx.sinks).to(v.dtype) @ for_heads_of(q, v)


def fused(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, visible: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention [B, H, Tq, D] by PyTorch's `scaled_dot_product_attention`, which is called nowhere else.

    Args:
        visible: whether a query may see a key, bool [Tq, Tk]; None: it may.
        causal: the last query sees all keys, the one before it all but the last, and so on.
    """
    if ctx.sinks is not None:
        return fused_with_sinks(q, k, v, ctx, visible=visible, causal=causal)
    if causal and q.size(2) != k.size(2):
        # is_causal=True would align the mask to the top left.
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes a second

        visible = causal_lower_right(q.size(2), k.size(2))  # stands for the mask, without its Tq x Tk entries
        causal = False
    if q.is_cuda and (visible is not None or q.dtype == torch.float32):
        # For these PyTorch has no fused CUDA kernel with grouped heads, only one that holds all T x T scores.
        k = for_heads_of(q, k)
        v = for_heads_of(q, v)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=causal, scale=ctx.scale, enable_gqa=q.size(1) != k.size(1)
    )


def fused_with_sinks(q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, visible: Tensor | None, causal: bool) -> Tensor:
    """`fused` with one more key, the first, whose score is the sink of its head and whose value is zero.

    In 16 bit the sinks are rounded, and so are their gradients, by 1 to 4 percent.
    """
    assert ctx.sinks is not None
    # Fused kernels know no sinks, but they take one more key. So queries get a channel that holds sink / scale. The
    # additional key has 1 there and 0 elsewhere, all other keys have 0 there. Seven channels of zeros follow, as fused
    # kernels want multiples of 8.
    extra = 8
    sink_channels = F.pad((ctx.sinks / ctx.scale).to(q.dtype)[:, None, None], (0, extra - 1))  # [H, 1, extra]
    q = torch.cat((q, sink_channels.expand(*q.shape[:3], -1)), dim=-1)  # [B, H, Tq, D + extra]
    first_key = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.size(-1), extra - 1))  # [B, Hkv, 1, D + extra]
    k = torch.cat((first_key, F.pad(k, (0, extra))), dim=2)  # [B, Hkv, 1 + Tk, D + extra]
    v = F.pad(v, (0, extra, 1, 0))  # [B, Hkv, 1 + Tk, D + extra]
    if visible is not None:
        visible = F.pad(visible, (1, 0), value=True)  # [Tq, 1 + Tk]
    if causal:
        # A query for the additional key too: a whole text then still has as many queries as keys, and needs no mask.
        # The result of that query is dropped.
        q = F.pad(q, (0, 0, 1, 0))  # [B, H, 1 + Tq, D + extra]
    out = fused(q, k, v, replace(ctx, sinks=None), visible=visible, causal=causal)
    return out[:, :, int(causal) :, :-extra]  # without that query, if there is one, and the added channels


def in_blocks(
    function: Callable[..., Tensor], queries: Sequence[Tensor], keys: Sequence[Tensor], ctx: Context, *,
    recompute: bool = True,
) -> Tensor:  # fmt: skip
    """Attention [B, H, Tq, D] by `function`, one block of queries at a time, each with the keys in its window.

    Args:
        function: (*queries of the block, *keys of the block, its context) -> [B, H, tq, D].
        queries: what belongs to the queries' tokens, each [B, H, Tq, ...].
        keys: what belongs to the keys' tokens, each [B, Hkv, Tk, ...].
        recompute: the backward pass computes each block again. One or two blocks keep their scores, which take less
            memory than the rest of a layer.
    """
    n_queries = ctx.pos_q.size(0)
    past = ctx.pos_k.size(0) - n_queries  # keys before the first query
    if recompute and n_queries > 2 * BLOCK:
        function = recomputed(function)
    out = []
    # torch.compile unrolls this loop: one graph serves all lengths with the same number of blocks.
    for i in range(-(-n_queries // BLOCK)):
        start = i * BLOCK
        stop = min(n_queries, start + BLOCK)
        # The oldest visible key is the farthest in the window of the first query; the newest is the last query's own.
        low = 0 if ctx.window is None else max(0, past + start + 1 - ctx.window)
        end = past + stop
        block_queries = [x[:, :, start:stop] for x in queries]
        block_keys = [x[:, :, low:end] for x in keys]
        out.append(function(*block_queries, *block_keys, ctx.block(start, stop, low)))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def recomputed(function: Callable[..., R]) -> Callable[..., R]:
    """Return `function` without stored activations: the backward pass computes it again, with the same dropout."""
    if not torch.is_grad_enabled():
        return function
    # PyTorch's check that shapes repeat is off. CoPE sizes tensors by sums, whose last bit may change when computed
    # again. The result stays the same.
    return functools.partial(checkpoint, function, use_reentrant=False, determinism_check="none")


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of the keys from scores [B, H, Tq, Tk].

    With `sinks` [H] each head has one more key, with that score and a value of zero. So the weights of the others sum
    to less than 1: to sigmoid(logsumexp(scores) - sink).
    """
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)  # [B, H, Tq, 1]
    return torch.cat((scores, sink_scores), dim=-1).softmax(-1)[..., :-1]


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale q.k for all pairs of queries [B, H, Tq, D] and keys [B, H, Tk, D], [B, H, Tq, Tk] in fp32 or better.

    16 bit would round a score of 20 by up to 0.06, which a fused kernel does not.
    """
    with torch.autocast(q.device.type, enabled=False):
        return (exactly(q) * scale) @ exactly(k).mT


def exactly(x: Tensor) -> Tensor:
    """Convert 16 bit to fp32; fp32 and float64 stay, so that a network in float64 is exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def for_heads_of(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values `x` [B, Hkv, Tk, ...] repeated to the H heads of `q` [B, H, Tq, D] that share them."""
    groups = q.size(1) // x.size(1)
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
