"""Attention in memory linear in the length: SDPA, sliding windows and biases in blocks of queries; and the cache.

On a GPU `model.kernels` computes windows and biases; what is here is its specification, and serves all other devices.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Positions = tuple[Tensor, int]  # positions of tokens, int64 [T], ascending; and the length of the text they are from
R = TypeVar("R")
Bias = Callable[[Tensor, "Context"], Tensor]  # see `attention`
BLOCK = 128  # queries whose scores are held at once
MAX_HEAD_DIM = 256  # channels of a head that kernels can hold


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of packed rows stand in their documents, which attention does not leave."""

    pos: Tensor  # int64 [B, T]: position of each token within its document
    first: Tensor  # int32 [B, T]: the first key of the row that each query sees
    last: Tensor  # int32 [B, T]: the last query of the row that sees each key


class Run(NamedTuple):
    """The keys that each query sees, where they are neighbours; all int32 [T] and ascending."""

    first: Tensor  # the first key that each query sees
    last: Tensor  # the last query that sees each key
    newest: Tensor  # the newest key that each query sees; less than `first` if it sees none
    oldest: Tensor  # the oldest query that sees each key; greater than `last` if none does


@dataclass(frozen=True)
class Context:
    """The positions of one attention call. The queries are the newest of the keys' tokens."""

    pos_q: Tensor  # int64 [Tq]
    pos_k: Tensor  # int64 [Tk], cached keys included; its last Tq entries are pos_q
    length: int  # tokens of the text so far, with those that a window has dropped or a gap leaves out
    tables: Any  # what `PositionEncoding.tables` returned: for all tokens of the pass, cached and dropped ones included
    scale: float  # multiplies q.k: logit_scale / sqrt(head_dim)
    window: int | None = None  # query i sees the keys with i - j < window; None: all keys up to itself
    temperature: Tensor | None = None  # of each query's scores, [Tq, 1], [H, Tq, 1] or [B, H, Tq, 1]: see `tempered`
    sinks: Tensor | None = None  # a logit for each head, [H], that takes part in the softmax: see `softmax`
    has_gaps: bool = False  # tokens of the text are missing: neighbours among the keys may be far apart
    kernels: bool = False  # attention may use `model.kernels`
    places: Places | None = None  # the tokens are rows of documents, which kernels read in place; None: one text a row

    def block(self, start: int, stop: int, low: int = 0) -> "Context":
        """The context of queries start..stop-1 and of the keys from `low` up to the last of these queries.

        Raises:
            ValueError: the tokens are packed documents, which only kernels read in place.
        """
        self.refuse_places()
        past = self.pos_k.size(0) - self.pos_q.size(0)
        end = past + stop
        return replace(self, pos_q=self.pos_q[start:stop], pos_k=self.pos_k[low:end])

    def refuse_places(self) -> None:
        """Raise ValueError if the tokens are packed documents: attention without kernels would cross their borders."""
        if self.places is not None:
            raise ValueError("in_place=True: this attention does not use kernels; leave out in_place of the encoding")

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

    def tempered(self, q: Tensor) -> Tensor:
        """All queries of the call, [B, H, Tq, D], times the temperature.

        The layer does this before `PositionEncoding.attend`; an encoding that is not `linear_in_q` does it itself.
        """
        if self.temperature is None:
            return q
        return (q * self.temperature).to(q.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, bias: Bias | None = None, row: Callable[[], Tensor] | None = None
) -> Tensor:
    """Causal softmax attention [B, H, Tq, D], softmax(scale q.k + bias) v, in memory linear in the length.

    Args:
        q: queries [B, H, Tq, D], the newest of the keys' tokens.
        k, v: keys and values [B, Hkv, Tk, D]; H is a multiple of Hkv (grouped-query attention).
        bias: (queries of a block, its context) -> [H, tq, tk] or [B, H, tq, tk], added to the scaled scores.
        row: the same bias where it depends on the distance alone: () -> fp32 [H, L], of the distances 0 to L - 1; L
            exceeds every distance between tokens.
    """
    if ctx.window is not None and ctx.window >= k.size(2) and not ctx.has_gaps:
        ctx = replace(ctx, window=None)  # it hides nothing
    if bias is None and ctx.window is None and ctx.places is None:
        return _plain_attention(q, k, v, ctx)
    if has_kernel(q, ctx, gaps=True) and (bias is None or row is not None):
        return flash(q, k, v, ctx, row=None if row is None else row())
    ctx.refuse_places()
    return _masked_attention(q, k, v, ctx, bias)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """`attention` without a bias or a mask other than the causal one: by one fused kernel wherever there is one."""
    n_queries = q.size(2)
    if n_queries == 1:  # the newest token sees every key
        return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks)
    whole = n_queries == k.size(2)
    if whole and ctx.sinks is None:
        return sdpa(q, k, v, scale=ctx.scale, causal=True)
    if has_log_sums(q, k, v):
        return by_log_sums(q, k, v, ctx.sinks, scale=ctx.scale)
    if has_kernel(q, ctx, gaps=True):
        return flash(q, k, v, ctx)
    if whole:
        return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks, causal=True)
    return _masked_attention(q, k, v, ctx, None)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, ctx: Context, bias: Bias | None) -> Tensor:
    """`attention` in blocks of queries, for each of which SDPA gets the mask and the bias of all its pairs."""

    def block(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        block_bias = None if bias is None else bias(q, ctx)
        return sdpa(q, k, v, scale=ctx.scale, sinks=ctx.sinks, visible=ctx.visible(), bias=block_bias)

    # The mask of a window costs little to keep for the backward pass. A bias, one number for each score and head, is
    # computed again there, and so is a mask over all keys.
    return in_blocks(block, (q,), (k, v), ctx, recompute=bias is not None or ctx.window is None)


def has_kernel(q: Tensor, ctx: Context, *, gaps: bool = False) -> bool:
    """True if kernels can compute the attention of the queries q [B, H, Tq, D].

    Args:
        gaps: whether the kernels can where tokens of the text are missing.
    """
    whole = q.size(2) == ctx.pos_k.size(0) and (gaps or not ctx.has_gaps)
    return ctx.kernels and whole and q.dtype != torch.float64 and q.size(3) <= MAX_HEAD_DIM


def flash(q: Tensor, k: Tensor, v: Tensor, ctx: Context, **bias: Tensor | None) -> Tensor:
    """Attention [B, H, T, D] by `lab.kernels.flash`, where `has_kernel`, gaps included."""
    from lab.kernels import flash as kernels  # needs Triton, which only comes with PyTorch for GPUs

    first, last = seen_keys(q, ctx)
    pos = ctx.pos_k.int() if ctx.has_gaps and bias.get("row") is not None else None
    return kernels.flash(q, k, v, first, last, scale=ctx.scale, sinks=ctx.sinks, pos=pos, **bias)


def seen_keys(q: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """The first key that each query of q [B, H, T, D] sees, and the last query that sees each key, where `has_kernel`.

    int32 [T] each, or [B, T] where each text has its own documents. Right with gaps, too.
    """
    if ctx.places is not None:
        return ctx.places.first, ctx.places.last
    if ctx.has_gaps and ctx.window is not None:
        pos = ctx.pos_k.contiguous()
        first = torch.searchsorted(pos, pos - ctx.window + 1)
        last = torch.searchsorted(pos, pos + ctx.window - 1, right=True) - 1
        return first.int(), last.int()
    return seen_range(q.size(2), ctx.window, q.device)


def seen_range(length: int, window: int | None, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The first key that each query sees, and the last query that sees each key, int32 [length] each; without gaps."""
    if window is None or window > length:
        window = length
    i = torch.arange(length, device=device, dtype=torch.int32)
    first = (i - window + 1).clamp(min=0)
    last = (i + window - 1).clamp(max=length - 1)
    return first, last


def run_of_keys(first: Tensor, newest: Tensor, window: int | None) -> Run:
    """The run of keys first..newest of each query, int64 [T] each and ascending, without those beyond the window.

    `first` may be below 0, and `newest` too.
    """
    i = torch.arange(first.size(0), device=first.device)
    oldest_in_window = 0 if window is None else (i - window + 1).clamp(min=0)
    first = first.clamp(min=oldest_in_window)
    last = torch.searchsorted(first, i, right=True) - 1
    oldest = torch.searchsorted(newest, i)
    return Run(first.int(), last.int(), newest.int(), oldest.int())


def in_blocks(
    function: Callable[..., Tensor], queries: Sequence[Tensor], keys: Sequence[Tensor], ctx: Context, *,
    recompute: bool = True,
) -> Tensor:  # fmt: skip
    """Attention [B, H, Tq, D] by `function`, one block of queries at a time, each with the keys in its window.

    Args:
        function: (*queries of the block, *keys of the block, its context) -> [B, H, tq, D].
        queries: what belongs to the queries' tokens, each [B, H, Tq, ...].
        keys: what belongs to the keys' tokens, each [B, Hkv, Tk, ...].
        recompute: compute each block again in the backward pass instead of keeping its scores, if there are more than
            two.
    """
    n_queries = ctx.pos_q.size(0)
    past = ctx.pos_k.size(0) - n_queries  # keys before the first query
    # Up to two blocks keep their scores: that is less memory than the rest of a layer, and saves the second pass.
    if recompute and n_queries > 2 * BLOCK:
        function = recomputed(function)
    query_blocks = [x.split(BLOCK, dim=2) for x in queries]
    keys = list(keys)
    out = []
    # torch.compile unrolls this loop: one graph serves all lengths with the same number of blocks.
    for i in range(-(-n_queries // BLOCK)):
        start = i * BLOCK
        stop = min(n_queries, start + BLOCK)
        # Keys `low` to `end` are those that some query of the block can see: the oldest is the farthest key in the
        # window of its first query, the newest its last query's own.
        low = 0 if ctx.window is None else max(0, past + start + 1 - ctx.window)
        end = past + stop
        if torch.compiler.is_compiling():  # the compiler sums the gradients of slices without padding them
            block_keys = [x[:, :, low:end] for x in keys]
        else:
            # Every slice hands its tensor on to the next one, so that all write into one gradient: see `Slice`.
            pairs = [Slice.apply(x, low, end) for x in keys]
            block_keys = [part for part, _ in pairs]
            keys = [whole for _, whole in pairs]
        block_queries = [blocks[i] for blocks in query_blocks]
        out.append(function(*block_queries, *block_keys, ctx.block(start, stop, low)))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


class Slice(torch.autograd.Function):
    """x[:, :, low:stop], and x for the next slice.

    Autograd pads the gradient of each slice with zeros to the size of x and adds these up, which is quadratic in the
    number of slices. Here the slices form a chain: the gradient of all later slices arrives as one tensor of that size,
    and the gradient of this slice is added to it in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: int, stop: int) -> tuple[Tensor, Tensor]:
        ctx.low = low
        ctx.stop = stop
        return x[:, :, low:stop], x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        part_grad, rest_grad = grads  # [B, H, stop - low, ...], [B, H, Tk, ...]
        rest_grad[:, :, ctx.low : ctx.stop] += part_grad
        return rest_grad, None, None


def recomputed(function: Callable[..., R]) -> Callable[..., R]:
    """Return `function` without stored activations: the backward pass computes it again, with the same dropout."""
    if not torch.is_grad_enabled():
        return function
    # PyTorch's check that shapes repeat is off. CoPE chooses the size of its tensors by sums, which may differ in the
    # last bit when they are computed again: other sizes then, and the same result.
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
    if bias is not None:
        assert visible is not None
        k, v = for_heads_of(q, k), for_heads_of(q, v)
        # A fused kernel takes a bias as a mask of the dtype of q, so it would be rounded, and only on a GPU does the
        # mask get a gradient. PyTorch's fallback holds several tensors of all scores, `Weights` one. A compiler fuses
        # them by itself.
        if torch.compiler.is_compiling():
            weights = (products(q, k, scale) + bias).masked_fill(~visible, -torch.inf).softmax(-1)
        else:
            weights = Weights.apply(q, k, bias, visible, scale)  # [B, H, Tq, Tk]
        return weights.to(v.dtype) @ v
    if q.is_cuda and (visible is not None or q.dtype == torch.float32):
        # For these PyTorch has no fused CUDA kernel with grouped heads, only one that holds all T x T scores.
        k, v = for_heads_of(q, k), for_heads_of(q, v)
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=grouped)


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale q.k for all pairs of queries [B, H, Tq, D] and keys [B, H, Tk, D], [B, H, Tq, Tk] in fp32 or better.

    16 bit would round a score of 20 by up to 0.06, which a fused kernel does not.
    """
    with torch.autocast(q.device.type, enabled=False):
        return (exactly(q) * scale) @ exactly(k).mT


def exactly(x: Tensor) -> Tensor:
    """Convert 16 bit to fp32; fp32 and float64 stay, so that a network in float64 is exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Weights(torch.autograd.Function):
    """Attention weights softmax(scale q.k + bias), [B, H, Tq, Tk], with the gradient written by hand.

    It holds one tensor of this size. Autograd would hold three, and pass over them twice.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor, visible: Tensor, scale: float) -> Tensor:
        # The softmax writes over the scores, and the backward pass needs the weights alone.
        weights = products(q, k, scale) + bias
        hide(weights, visible)
        torch.softmax(weights, -1, out=weights)
        ctx.save_for_backward(q, k, weights)
        ctx.scale = scale
        ctx.bias_shape = bias.shape
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weights = ctx.saved_tensors
        # A private function of PyTorch, the gradient of its softmax: written out, it takes two more tensors of this
        # size.
        score_grad = torch._softmax_backward_data(grads[0], weights, -1, weights.dtype)
        product_grad = (score_grad * ctx.scale).to(q.dtype)  # of q.k
        return product_grad @ k, product_grad.mT @ q, score_grad.sum_to_size(ctx.bias_shape), None, None


def hide(scores: Tensor, visible: Tensor) -> None:
    """Set the scores [..., Tq, Tk] of keys that are not `visible`, bool [Tq, Tk], to -inf, in place."""
    # A clamp by an upper limit, inf for what is visible and -inf for the rest, is faster than masked_fill_. Without a
    # window only the newest Tq keys, from `start` on, can lie in a query's future, and the others are left alone. On a
    # GPU all keys are clamped, since asking whether a window hides old keys would wait for the device.
    start = visible.size(1) - visible.size(0)
    if scores.is_cuda or not visible[:, :start].all():
        start = 0
    limit = torch.where(visible[:, start:], torch.inf, -torch.inf)
    scores[..., start:].clamp_(max=limit)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, scale: float, visible: Tensor | None, bias: Tensor | None,
    causal: bool,
) -> Tensor:  # fmt: skip
    """`sdpa` with one more key, the first, for the sinks."""
    # Fused kernels know no sinks, but they do take one more key whose score is the sink of its head. So queries get a
    # channel that holds sink / scale; that channel is 1 in the additional key, whose other channels are 0, and 0 in all
    # other keys. The value of that key is zero. Fused kernels want multiples of 8 channels, hence 8 of them.
    extra = 8
    sink_channels = F.pad((sinks / scale).to(q.dtype)[:, None, None], (0, extra - 1))  # [H, 1, extra]
    q = torch.cat((q, sink_channels.expand(*q.shape[:3], -1)), dim=-1)  # [B, H, Tq, D + extra]
    first_key = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.size(-1), extra - 1))  # [B, Hkv, 1, D + extra]
    k = torch.cat((first_key, F.pad(k, (0, extra))), dim=2)  # [B, Hkv, 1 + Tk, D + extra]
    v = F.pad(v, (0, extra, 1, 0))  # [B, Hkv, 1 + Tk, D + extra]
    if visible is not None:
        visible = F.pad(visible, (1, 0), value=True)  # [Tq, 1 + Tk]
    if bias is not None:
        bias = F.pad(bias, (1, 0))  # [.., Tq, 1 + Tk]
    if causal:
        # A query for the additional key too, so that query t still sees keys 0..t; its result is dropped.
        q = F.pad(q, (0, 0, 1, 0))  # [B, H, 1 + Tq, D + extra]
    first = int(causal)
    return sdpa(q, k, v, scale=scale, visible=visible, bias=bias, causal=causal)[:, :, first:, :-extra]


def has_log_sums(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if a fused kernel of PyTorch computes this attention and returns the logarithms of its sums."""
    if not q.dtype == k.dtype == v.dtype:
        return False
    if q.is_cuda:
        # FlashAttention is for 16 bit, and for GPUs of the A100's generation or newer.
        fits = q.element_size() == 2 and q.size(3) % 8 == 0 and q.size(3) <= 256
        return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)
    return q.device.type == "cpu"


def by_log_sums(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, scale: float) -> Tensor:
    """Causal attention [B, H, Tq, D] where `has_log_sums`; the queries are the newest of the keys' tokens.

    It is what `sdpa` cannot call a fused kernel for: with keys before the first query, Tq < Tk, or with sinks [H].
    """
    k, v = for_heads_of(q, k), for_heads_of(q, v)  # the kernels' backward passes know no grouped heads
    return ByLogSums.apply(q, k, v, sinks, scale)


class ByLogSums(torch.autograd.Function):
    """Softmax attention over up to three parts, merged by the logarithms of their sums.

    The parts are the queries' own tokens, causally; the Tk - Tq keys before them, which all queries see; and a sink.
    Each of the first two is one call of a fused kernel without a mask, which also returns the logarithms of the sums of
    exp(score). With these sums as weights, the mean of the outputs is the softmax over all keys; the output of a sink
    is zero. The backward pass calls each part's kernel with the output and the logarithms of the whole. That is exact:
    the weight of a key is exp(score - logarithm of the whole sum), and the gradient of its score needs, beyond that,
    only the whole output. PyTorch's ring attention does the same.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
        past = k.size(2) - q.size(2)
        new, log_sums, *random_state = fused_forward(q, k[:, :, past:], v[:, :, past:], causal=True, scale=scale)
        out = exactly(new)  # [B, H, Tq, D]
        if past > 0:
            old, old_sums, *_ = fused_forward(q, k[:, :, :past], v[:, :, :past], causal=False, scale=scale)
            out, log_sums = merged(out, log_sums, exactly(old), old_sums)
        if sinks is not None:
            whole_sums = torch.logaddexp(log_sums, sinks.to(log_sums.dtype)[:, None])
            out = out * torch.exp(log_sums - whole_sums)[..., None]
            log_sums = whole_sums
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, log_sums, *random_state)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *whole = ctx.saved_tensors
        past = k.size(2) - q.size(2)
        q_grad, k_grad, v_grad = fused_backward(
            grads[0], q, k[:, :, past:], v[:, :, past:], *whole, causal=True, scale=ctx.scale
        )
        if past > 0:
            of_old = fused_backward(grads[0], q, k[:, :, :past], v[:, :, :past], *whole, causal=False, scale=ctx.scale)
            q_grad = q_grad + of_old[0]
            k_grad = torch.cat((of_old[1], k_grad), dim=2)
            v_grad = torch.cat((of_old[2], v_grad), dim=2)

        sinks_grad = None
        if sinks is not None:
            # A score's gradient is its weight x (the gradient of the weight - the mean of these over all keys). The
            # value of a sink is zero, so the gradient of its weight is.
            out, log_sums, *_ = whole
            mean = (exactly(grads[0]) * exactly(out)).sum(-1)  # [B, H, Tq]
            weight = torch.exp(sinks.to(log_sums.dtype)[:, None] - log_sums)
            sinks_grad = -(weight * mean).sum((0, 2)).to(sinks.dtype)
        return q_grad, k_grad, v_grad, sinks_grad, None


def merged(out: Tensor, log_sums: Tensor, other_out: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention over two sets of keys from that over each: its output, and the logarithms of its sums.

    Args:
        out, other_out: the outputs over each set, [B, H, Tq, D], fp32 or better.
        log_sums, other_sums: the logarithms of the sums of exp(score) over each, [B, H, Tq].
    """
    whole_sums = torch.logaddexp(log_sums, other_sums)
    share = torch.exp(log_sums - whole_sums)[..., None]  # of the first set
    return torch.lerp(other_out, out, share), whole_sums


# PyTorch's private operators behind scaled_dot_product_attention: only they return the logarithms of the sums.
def fused_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The output [B, H, Tq, D], the logarithms of the sums [B, H, Tq] and, on CUDA, the state of the dropout.

    Args:
        mask: added to the scores, [1, 1, Tq, Tk] in the dtype of q; on a CPU alone.
    """
    if q.device.type == "cpu":
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return tuple(forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale))
    assert mask is None
    result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    out, log_sums, _, _, _, _, seed, offset, _ = result
    return out, log_sums, seed, offset


def fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *random_state: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from that of the output and from what `fused_forward` returned."""
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, log_sums, 0.0, causal, scale=scale)
    # No dropout and no texts of different lengths, which `None` would describe.
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = (None, None, q.size(2), k.size(2))
    return backward(grad, q, k, v, out, log_sums, *lengths, 0.0, causal, *random_state, scale=scale)


def for_heads_of(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values `x` [B, Hkv, Tk, ...] repeated to the H heads of `q` [B, H, Tq, D] that share them."""
    groups = q.size(1) // x.size(1)
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


class KVCache:
    """The text read so far, for each layer: keys and values before any rotation, and the encoding's `state`.

    A buffer doubles when it is full. A layer with a sliding window drops what no later token can see.
    """

    def __init__(self, n_layer: int) -> None:
        self._buffers: list[dict[str, Tensor]] = [{} for _ in range(n_layer)]  # [B, room, ...] each
        self._held = [0] * n_layer  # tokens in each layer's buffers
        self.length = 0  # tokens read so far, by the last layer
        self._recent: dict[nn.Module, Tensor] = {}  # see `with_recent`

    def append(self, layer: int, window: int | None = None, **new: Tensor) -> dict[str, Tensor]:
        """Add the tensors [B, T, ...] of T new tokens to a layer; return these after all older ones still visible."""
        buffers = self._buffers[layer]
        held = self._held[layer]
        added = next(iter(new.values())).size(1)
        # The first new token can see the last window - 1 of the tokens held, later ones see fewer.
        visible = held if window is None else min(held, window - 1)
        room = next(iter(buffers.values())).size(1) if buffers else 0
        # What is hidden is dropped only when the buffer is full, and the next one has room for twice what is kept: so
        # copying costs a constant for each token.
        full = held + added > room
        kept = visible if full else held
        stop = kept + added

        # Copy what is kept into a new buffer if the old one is full, and then the new tokens behind it.
        for name, x in new.items():
            if full:
                old = buffers.get(name, x[:, :0])
                buffers[name] = x.new_empty(x.size(0), max(stop, 2 * kept), *x.shape[2:])
                buffers[name][:, :kept] = old[:, held - kept : held]
            buffers[name][:, kept:stop] = x
        self._held[layer] = stop
        # The last layer ends a forward pass: only then have all layers read the new tokens.
        if layer == len(self._held) - 1:
            self.length += added
        return {name: buffers[name][:, kept - visible : stop] for name in new}

    def with_recent(self, owner: nn.Module, x: Tensor, n: int) -> Tensor:
        """Return what `owner` reads of new tokens, `x` [B, T, C], after the `n` before them; zeros before the text."""
        before = self._recent.get(owner, x.new_zeros(x.size(0), n, x.size(2)))
        tokens = torch.cat((before, x), dim=1)  # [B, n + T, C]
        self._recent[owner] = tokens[:, tokens.size(1) - n :]
        return tokens
