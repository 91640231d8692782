"""What the kernels share: parts of kernels in Triton, and the check of a kernel against its specification."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from model.position.ops import without_low_bits

Maybe = Tensor | None
LOG2E = tl.constexpr(1.4426950408889634)


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
def load_rows(x, rows, n_rows, D: tl.constexpr):
    """The `rows` of x [n_rows, D]; zeros for those beyond the end."""
    channels = tl.arange(0, D)
    return tl.load(x + rows[:, None] * D + channels[None, :], mask=rows[:, None] < n_rows, other=0.0)


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
def scores_of(q_tile, k_tile, scale):
    """Products of all queries [len(i), D] and keys [len(j), D], times `scale`, fp32 [len(i), len(j)]."""
    return tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale


@triton.jit
def product(weights, tile):
    """The matrix product with a tile [.., D], in fp32; the weights are rounded as the tile is."""
    return tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")


@triton.jit
def product_with_columns(weights, tile):
    """`product`, but by the columns of the weights [len(i), len(j)]: sums over the queries, [len(j), D]."""
    return tl.dot(tl.trans(weights.to(tile.dtype)), tile, input_precision="ieee")


@triton.jit
def is_seen(i, j, first):
    """Whether the queries i see the keys j, [len(i), len(j)]; `first` is the first key that each query sees."""
    return (j[None, :] <= i[:, None]) & (j[None, :] >= first[:, None])


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


@triton.jit
def gradients_of(scores, seen, log_sum, weight_grads, mean):
    """The weights of a tile, 0 for keys that are not seen, and the gradients of its scores, [len(i), len(j)] each.

    Args:
        scores: as in the forward pass, computed again.
        log_sum, mean: of the queries i.
        weight_grads: the gradients of the weights.
    """
    scores = tl.where(seen, scores * LOG2E, float("-inf"))
    weights = tl.exp2(scores - log_sum[:, None])
    return weights, weights * (weight_grads - mean[:, None])


@triton.jit
def add_to(places, x, inside):
    """Add `x` to the numbers at `places`, which no other program changes, where `inside`."""
    before = tl.load(places, mask=inside, other=0.0)
    tl.store(places, before + x, mask=inside)


def launched(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Let `operator` launch its kernels on the device of its tensors, which must be contiguous."""

    @wraps(operator)
    def call(*inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        assert all(x.is_contiguous() for x in tensors), "kernels read contiguous tensors"
        # Triton launches on the current device, which is the first of the machine in every rank until it says other.
        with torch.cuda.device_of(tensors[0]):
            return operator(*inputs)

    return call


def or_unused(x: Maybe, other: Tensor) -> Tensor:
    """Return `x`, or another tensor in place of None, which a kernel then never reads."""
    return other if x is None else x


def high_and_low(x: Tensor) -> tuple[Tensor, Tensor]:
    """Write fp32 or float64 `x` as the sum of two fp32 tensors, the first of which has the gradient."""
    if x.dtype != torch.float64:
        return x.float().contiguous(), torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    low = x.detach() - without_low_bits(x, torch.float32)
    return (x - low).float().contiguous(), low.float().contiguous()


def means_of(out: Tensor, out_grad: Tensor) -> Tensor:
    """The sum over channels of the output x its gradient, fp32 [B, H, T]: see `lab.kernels.flash`."""
    return (out_grad.float() * out.float()).sum(-1)


def grads_of_sinks(sinks: Tensor, log_sums: Tensor, means: Tensor) -> Tensor:
    """The gradients of the scores of `sinks` [H], [B, H, T]; that of a sink is their sum.

    The gradient of a score is its weight x (the gradient of this weight - the mean). A sink has the weight
    exp(sink - log sum), and since its value is zero, the gradient of this weight is 0.
    """
    return -torch.exp2(sinks[:, None] * LOG2E.value - log_sums) * means


def padded(*tensors: Tensor) -> list[Tensor]:
    """`tensors` [.., D] with zeros up to the channels that kernels take, contiguous."""
    head_dim = tensors[0].size(-1)
    room = max(16, triton.next_power_of_2(head_dim)) - head_dim
    if room:  # tiles have powers of two, and matrix units take 16 channels or more
        tensors = tuple(F.pad(x, (0, room)) for x in tensors)
    return [x.contiguous() for x in tensors]


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass needs: no score, but the inputs, the output and a number for each query."""
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def relative_errors(
    attention: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Mapping[str, Tensor], out_grad: Tensor
) -> dict[str, float]:
    """Relative errors of the output of `attention`, "out", and of the gradient of each of its inputs.

    Args:
        exact: the same attention, which is called with float64.
        inputs: the arguments of both, by name.
        out_grad: the gradient of the output.
    """
    computed = _output_and_gradients(attention, inputs, out_grad)
    exact_inputs = {name: x.double() for name, x in inputs.items()}
    expected = _output_and_gradients(exact, exact_inputs, out_grad.double())
    relative = {}
    for name, a, b in zip(("out", *inputs), computed, expected, strict=True):
        relative[name] = float((a.double() - b).norm() / b.norm())
    return relative


def _output_and_gradients(
    attention: Callable[..., Tensor], inputs: Mapping[str, Tensor], out_grad: Tensor
) -> list[Tensor]:
    """Return the output of `attention`, and the gradient of each input for the gradient `out_grad` of the output."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad():
        out = attention(**leaves)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), out_grad)]
