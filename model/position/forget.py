"""Scores that decay with the content between key and query: forget gates and stick-breaking attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import exactly, for_heads_of, has_kernel, in_blocks, products, seen_keys
from model.position.base import Context, PositionEncoding, Shape
from model.position.bias import KeyBias
from model.position.ops import exact_dtype, sums_to_the_end
from model.position.rotary import Rotary


class FoX(KeyBias):
    """Forgetting attention (arXiv 2503.02130): the sum of ln f_l over l = j+1..i is added to the score. Each token and
    head has a forget gate f_l = sigmoid(W x_l + b). With constant gates it is ALiBi.

    W is `gate` [H, dim], b is `gate_bias` [H].

    Args:
        init_bias: initial value of b. At 0, as in the released code, gates start at 1/2 and heads see few tokens.
    """

    decayed: tuple[str, ...] = ("gate",)
    in_place = True

    def __init__(self, shape: Shape, *, init_bias: float = 0.0, **options: Any) -> None:
        super().__init__(shape, **options)
        self.init_bias = init_bias
        self.gate = nn.Parameter(torch.zeros(shape.n_head, shape.dim))
        self.gate_bias = nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.gate, 0.0, 0.02, generator)
        nn.init.constant_(self.gate_bias, self.init_bias)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """ln f, fp32 [B, T, H]."""
        # In fp32: ln f is summed over the whole text, in which rounding errors add up.
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(exactly(x), exactly(self.gate), exactly(self.gate_bias))  # [B, T, H]
            return {"log_gates": F.logsigmoid(logits)}

    def log_gate_sums(self, state: dict[str, Tensor]) -> Tensor:
        """Sums of ln f from the first token on, [B, Tk, H]."""
        # The sums grow with the text while scores use differences of two of them, which for near keys are small: fp32
        # would lose these.
        log_gates = state["log_gates"].mT.contiguous()  # [B, H, Tk]: a GPU sums fastest along what lies together
        return log_gates.to(exact_dtype(log_gates.device)).cumsum(-1).mT

    def key_bias(self, state: dict[str, Tensor], ctx: Context) -> Tensor:
        # The sum over j+1..i is log_gate_sums(i) - log_gate_sums(j), in the form b(j) - b(i) with b = -log_gate_sums.
        return -self.log_gate_sums(state)


class RotaryFoX(Rotary, FoX):
    """FoX and RoPE."""

    family = "FoX and RoPE"
    in_place = True


def stick_breaking_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, past: Tensor, remainder: bool
) -> Tensor:  # fmt: skip
    """Compute stick-breaking attention by its definition, see `StickBreaking`; memory grows with Tq x Tk.

    Args:
        q: [B, H, Tq, D].
        k, v: [B, Hkv, Tk, D], H a multiple of Hkv; the queries are the newest of their tokens.
        past: whether a query sees a key, bool [Tq, Tk] or [B, 1, Tq, Tk]; no query sees its own.
        remainder: whether the weight that all keys leave goes to the token's own value.

    Returns:
        [B, H, Tq, D], in fp32 or better.
    """
    # In fp32: a weight is a product of as many factors as there are keys.
    with torch.autocast(q.device.type, enabled=False):
        # The weight is b_ij times the product of 1 - b_il over l = j+1..i-1. Since ln b_ij = z_ij + ln (1 - b_ij),
        # its logarithm is z_ij plus the sum of ln (1 - b_il) from key j itself on.
        z = products(q, for_heads_of(q, k), scale)  # [B, H, Tq, Tk]
        log_left = F.logsigmoid(-z).masked_fill(~past, 0.0)  # ln (1 - b)
        log_weight = z + sums_to_the_end(log_left)
        weight = log_weight.masked_fill(~past, -torch.inf).exp()  # [B, H, Tq, Tk]
        values = exactly(for_heads_of(q, v))  # [B, H, Tk, D]
        out = weight @ values  # [B, H, Tq, D]
        if remainder:
            rest = 1 - weight.sum(-1, keepdim=True)  # [B, H, Tq, 1]
            out = out + rest * values[:, :, -q.size(2) :]
    return out


class StickBreaking(PositionEncoding):
    """Stick-breaking attention (arXiv 2410.17980) instead of a softmax: with b_ij = sigmoid(scale q_i.k_j), key j < i
    takes the share b_ij of the weight that the keys nearer to i have left, the product of their 1 - b_il.

    So the nearest match wins, and positions enter in no other way. Nothing is learned.

    Args:
        remainder: whether the weight that all keys leave goes to the token's own value; otherwise it is lost.
    """

    has_softmax = False
    in_place = True
    kernels = "lab.kernels.stick_breaking"

    def __init__(self, shape: Shape, *, remainder: bool = True, **options: Any) -> None:
        super().__init__(shape, **options)
        self.remainder = remainder

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if has_kernel(q, ctx, gaps=True):
            from lab.kernels import stick_breaking as kernels  # needs Triton, which only comes with PyTorch for GPUs

            first, last = seen_keys(q, ctx)
            return kernels.stick_breaking(q, k, v, first, last, scale=ctx.scale, remainder=self.remainder)

        def block(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
            past = ctx.visible() & (ctx.distance > 0)  # [Tq, Tk]
            out = stick_breaking_attention(q, k, v, scale=ctx.scale, past=past, remainder=self.remainder)
            return out.to(v.dtype)

        return in_blocks(block, (q,), (k, v), ctx)
