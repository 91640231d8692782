"""What the kernels share: parts of kernels in Triton, and the one way in which attention by kernels is registered."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from model.position.ops import without_low_bits

Maybe = Tensor | None
LOG2E = tl.constexpr(1.4426950408889634)
# Of the operators of `registered`: the queries, keys and values; the first key that each query sees, and the last query
# that sees each key; what scores depend on besides; the sinks; the name of the bias; and the factor of q.k.
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor first, Tensor last, Tensor[] extra, Tensor? sinks, str bias, float scale"


@triton.jit
def numbers_of_heads(H: tl.constexpr, G: tl.constexpr):
    """What a program of the grid (.., H, B), one for each head of queries, works on.

    Returns:
        b: the number of the text.
        h: the number of the head in its text.
        head: its number among the heads of all texts.
        kv_head: the number of the head of keys that it shares, among those of all texts.
    """
    # Blocks of one head are dimension 0, so they run side by side and find its keys in the cache.
    b = tl.program_id(2)
    h = tl.program_id(1)
    head = (b * H + h).to(tl.int64)
    kv_head = (b * (H // G) + h // G).to(tl.int64)
    return b, h, head, kv_head


@triton.jit
def numbers_of_key_heads():
    """What a program of the grid (.., H // G, B), one for each head of keys, works on.

    Returns:
        b: the number of the text.
        group: the number of the head of keys in its text.
        kv_head: its number among the heads of keys of all texts.
    """
    b = tl.program_id(2)
    group = tl.program_id(1)
    kv_head = (b * tl.num_programs(1) + group).to(tl.int64)
    return b, group, kv_head


@triton.jit
def load_rows(x, rows, n_rows, D: tl.constexpr, IS_FULL: tl.constexpr = False):
    """The `rows` of x [n_rows, D]; zeros for those beyond the end, where IS_FULL says that there are none."""
    channels = tl.arange(0, D)
    places = x + rows[:, None] * D + channels[None, :]
    if IS_FULL:
        return tl.load(places)
    else:
        return tl.load(places, mask=rows[:, None] < n_rows, other=0.0)


@triton.jit
def load_numbers(x, places, n):
    """The numbers of x [n] at `places`; zeros for those beyond the end."""
    return tl.load(x + places, mask=places < n, other=0.0)


@triton.jit
def store_rows(x, rows, n_rows, values, D: tl.constexpr):
    """Write `values` [len(rows), D] to the `rows` of x [n_rows, D], but for those beyond the end."""
    channels = tl.arange(0, D)
    tl.store(x + rows[:, None] * D + channels[None, :], values, mask=rows[:, None] < n_rows)


@triton.jit
def store_numbers(x, places, n, values):
    """Write `values` to x [n] at `places`, but for those beyond the end."""
    tl.store(x + places, values, mask=places < n)


@triton.jit
def scores_of(a, b, scale):
    """Products of all rows of `a` [m, D] and of `b` [n, D], times `scale`, fp32 [m, n]."""
    return tl.dot(a, tl.trans(b), input_precision="ieee") * scale


@triton.jit
def product(weights, tile):
    """The matrix product with a tile [.., D], in fp32; the weights are rounded as the tile is."""
    return tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")


@triton.jit
def product_with_columns(weights, tile):
    """`product`, but by the columns of the weights [len(i), len(j)]: sums over the queries, [len(j), D]."""
    return tl.dot(tl.trans(weights.to(tile.dtype)), tile, input_precision="ieee")


@triton.jit
def add_tile(scores, v_tile, highest, total, acc):
    """Add a tile of keys to the softmax of its queries: the new `highest`, `total` and `acc`.

    Args:
        scores: to base 2, [len(i), len(j)]; -inf where a key is not seen.
        v_tile: the values, [len(j), D].
        highest, total: of the tiles before this one, [len(i)] each.
        acc: the sum of 2^(score - highest) x value over these tiles, fp32 [len(i), D].
    """
    # Sums over the tiles before this one are brought to the new highest score.
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A query that has not seen a key yet has nothing to scale, and -inf less -inf would be NaN.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)

    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + product(weights, v_tile)
    return new_highest, total, acc


def high_and_low(x: Tensor) -> tuple[Tensor, Tensor]:
    """Write float64 `x` as the sum of two fp32 tensors."""
    low = x - without_low_bits(x, torch.float32)
    return (x - low).float().contiguous(), low.float().contiguous()


def grads_of_sinks(sinks: Tensor, log_sums: Tensor, means: Tensor) -> Tensor:
    """The gradients of `sinks` [H]; `log_sums` and `means` are [B, H, T].

    The gradient of a score is its weight x (the gradient of this weight - the mean). A sink has the weight
    exp(sink - log sum), and since its value is zero, the gradient of this weight is 0.
    """
    of_queries = -torch.exp2(sinks[:, None] * LOG2E.value - log_sums) * means  # [B, H, T]
    return of_queries.sum((0, 2))


def padded(*tensors: Tensor) -> list[Tensor]:
    """`tensors` [.., D] with zeros up to the channels that kernels take, contiguous."""
    head_dim = tensors[0].size(-1)
    room = max(16, triton.next_power_of_2(head_dim)) - head_dim
    if room:  # tiles have powers of two, and matrix units take 16 channels or more
        tensors = tuple(F.pad(x, (0, room)) for x in tensors)
    return [x.contiguous() for x in tensors]


def registered(name: str, forward: Callable[..., Any], backward: Callable[..., list[Tensor]]) -> None:
    """Register attention by kernels as `torch.ops.ropewalk.<name>`, with its gradients by `<name>_backward`.

    Args:
        forward: (inputs as in `INPUTS`) -> the output, as q, and the logarithms to base 2 of the sums of
            exp(score), fp32 [B, H, T].
        backward: (inputs, output, logarithms, gradient of the output) -> gradients of q, k, v, of all of `extra`, and
            of the sinks.
    """

    def fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def fake_backward(*inputs: Any) -> list[Tensor]:
        q, k, v, _first, _last, extra, sinks, *_ = inputs
        like = [q, k, v, *extra, q.new_empty(0, dtype=torch.float32) if sinks is None else sinks]
        return [torch.empty_like(x) for x in like]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # No score, but the inputs, the output and a number for each query.
        q, k, v, first, last, extra, sinks, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, first, last, sinks, *output, *extra)

    def differentiate(ctx: Any, out_grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        *inputs, sinks, out, log_sums = ctx.saved_tensors[:8]
        extra = list(ctx.saved_tensors[8:])
        operator = getattr(torch.ops.ropewalk, f"{name}_backward")
        grads = operator(*inputs, extra, sinks, *ctx.options, out, log_sums, out_grad.contiguous())
        q_grad, k_grad, v_grad, *of_extra, sinks_grad = grads
        return q_grad, k_grad, v_grad, None, None, of_extra, None if sinks is None else sinks_grad, None, None

    of_backward = f"({INPUTS}, Tensor out, Tensor log_sums, Tensor out_grad) -> Tensor[]"
    both = (
        (f"ropewalk::{name}", f"({INPUTS}) -> (Tensor, Tensor)", forward, fake_forward),
        (f"ropewalk::{name}_backward", of_backward, backward, fake_backward),
    )
    for full_name, schema, function, fake in both:
        operator = torch.library.custom_op(full_name, launched(function), mutates_args=(), schema=schema)
        operator.register_fake(fake)
    torch.library.register_autograd(f"ropewalk::{name}", differentiate, setup_context=keep)


def launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function` launch its kernels on the device of its tensors, which must be contiguous."""

    @functools.wraps(function)
    def call(q: Tensor, *others: Any) -> Any:
        tensors = [q]
        for x in others:
            tensors += x if isinstance(x, list) else [x]
        assert all(x.is_contiguous() for x in tensors if isinstance(x, Tensor)), "kernels read contiguous tensors"
        # Triton launches on the current device, which is the first of the machine in every rank until it says other.
        with torch.cuda.device_of(q):
            return function(q, *others)

    return call
