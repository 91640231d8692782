"""Attention by kernels as an operator of PyTorch: differentiable, and known to the compiler."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lab.kernels import cope, flash
from lab.kernels.ops import LOG2E, Inputs, Outputs, launch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    last_query: Tensor,
    *,
    scale: float,
    bias: str = "nothing",
    extra: tuple[Tensor, ...] = (),
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention [B, H, T, D], softmax(scale q.k + bias) v, of as many queries as keys.

    Gradients of the bias and of `sinks` are sums in fp32, whatever the dtype of q.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        first_key: the first key that each query sees, int32 [T] or [B, T], ascending; the last one is its own.
        last_query: the last query that sees each key, int32 [T] or [B, T], ascending; the first one is its own.
        bias: its name, of `lab.kernels.biases.BIASES`; or "cope".
        extra: what the bias depends on; with "cope" what each entry of the table adds to scores, fp32 [B, H, T, P].
        sinks: a logit for each head, [H]: see `model.attention.softmax`.
    """
    n_batch, n_head, length, head_dim = q.shape
    # Tiles have powers of two, and matrix units take 16 channels or more.
    padding = max(16, triton.next_power_of_2(head_dim)) - head_dim
    if padding:  # by 0 channels `pad` would copy
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    q, k, v = (x.contiguous() for x in (q, k, v))
    first_key, last_query = (x.expand(n_batch, length).contiguous() for x in (first_key, last_query))
    if sinks is None:
        sinks = torch.full((n_head,), -torch.inf, device=q.device)
    tensors = [x.contiguous() for x in extra]
    out, _ = attention_op(q, k, v, first_key, last_query, sinks.float().contiguous(), tensors, bias, scale)
    return out[..., :head_dim]


@torch.library.custom_op("ropewalk::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    last_query: Tensor,
    sinks: Tensor,
    extra: list[Tensor],
    bias: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output, as q, and the logarithms to base 2 of the sums of exp(score), fp32 [B, H, T]."""
    x = inputs(q, k, v, first_key, last_query, sinks, extra)
    out, log_sums = like_outputs(q)
    module = kernels_of(bias)
    tile, *_ = flash.tiles(q.size(3), bias)
    n_blocks = triton.cdiv(q.size(2), tile.queries)
    launch(module.forward_kernel, tile, n_blocks, q, x, out, log_sums, scale, **module.constants(x, bias))
    return out, log_sums


@torch.library.custom_op("ropewalk::attention_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    last_query: Tensor,
    sinks: Tensor,
    extra: list[Tensor],
    bias: str,
    scale: float,
    out: Tensor,
    log_sums: Tensor,
    out_grad: Tensor,
) -> list[Tensor]:
    """The gradients of q, k, v, of all of `extra`, and of the sinks."""
    x = inputs(q, k, v, first_key, last_query, sinks, extra)
    y = Outputs(out, log_sums, torch.empty_like(log_sums), out_grad)
    grads = kernels_of(bias).backward(x, y, bias, scale)
    # The gradient of a score is its weight x (the gradient of this weight - the mean). A sink has the weight
    # exp(sink - log sum), and since its value is zero, the gradient of this weight is 0.
    of_sinks = -torch.exp2(sinks[:, None] * LOG2E.value - log_sums) * y.means  # [B, H, T]
    return [*grads, of_sinks.sum((0, 2))]


def inputs(*tensors: Any) -> Inputs:
    """The inputs of kernels, which read contiguous tensors."""
    *one_each, extra = tensors
    assert all(x.is_contiguous() for x in (*one_each, *extra)), "kernels read contiguous tensors"
    return Inputs(*one_each, extra=tuple(extra))  # type: ignore[misc]


def kernels_of(bias: str) -> Any:
    """The module whose kernels serve a bias."""
    return cope if bias == "cope" else flash


@attention_op.register_fake
def like_outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Tensors of the shapes of the operator's results."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward.register_fake
def like_gradients(*arguments: Any) -> list[Tensor]:
    q, k, v, _first_key, _last_query, sinks, extra, *_ = arguments
    return [torch.empty_like(x) for x in (q, k, v, *extra, sinks)]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep for the backward pass no score, but the inputs, the output and a number for each query."""
    *tensors, extra, bias, scale = inputs
    ctx.options = bias, scale
    ctx.save_for_backward(*output, *tensors, *extra)


def differentiate(ctx: Any, out_grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    """The gradients of all arguments of the operator."""
    out, log_sums, *tensors = ctx.saved_tensors
    extra = tensors[6:]
    grads = backward(*tensors[:6], extra, *ctx.options, out, log_sums, out_grad.contiguous())
    return *grads[:3], None, None, grads[-1], grads[3:-1], None, None


attention_op.register_autograd(differentiate, setup_context=setup_context)
