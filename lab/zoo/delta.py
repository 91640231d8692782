"""The gated delta rule: a memory that is read, corrected and forgotten, instead of a softmax.

For: a recurrent part of a `hybrid`, which carries the order where the layers that see everything have no positions.
Has shown: it carries the order there as well as windows with RoPE do, not better. Leaves: with the question whether
RoPE can be dropped over a recurrent layer (docs/log/dropping.md).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.zoo.ops import unit_vectors
from lab.zoo.path import Reflections, products_through, reflections_of
from model.attention import exactly, for_heads_of, in_blocks
from model.position.base import Context, Shape
from model.position.forget import FoX


class GatedDelta(FoX):
    """Gated delta rule (arXiv 2412.06464): S_t = f_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, read as
    q_t^T S_t / sqrt(D). Each head of queries has its memory S [D, D] and the forget gates f of FoX.

    Queries and keys have length 1. beta = sigmoid(W x + b), of `strength` [Hkv, dim] and `strength_bias` [Hkv], says
    how much of what the memory has at key k gives way to v. It is computed as attention whose weights are products of
    what the tokens between have changed, in blocks, so that a cache and a window are those of attention; the time grows
    with the square of the length. Of the published layer the convolution (model.conv) and the output's norm and gate
    are left to the network.

    Args:
        init_bias: of the forget gates: at 4 a head forgets half in 38 tokens.
    """

    decayed = ("gate", "strength")
    has_softmax = False
    linear_in_q = False  # queries are normed: `attend` applies the temperature after it

    def __init__(self, shape: Shape, *, init_bias: float = 4.0, **options: Any) -> None:
        super().__init__(shape, init_bias=init_bias, **options)
        self.strength = nn.Parameter(torch.zeros(shape.n_kv_head, shape.dim))
        self.strength_bias = nn.Parameter(torch.zeros(shape.n_kv_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        nn.init.normal_(self.strength, 0.0, 0.02, generator)
        nn.init.zeros_(self.strength_bias)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """beta [B, T, Hkv], and ln f [B, T, H]; fp32."""
        with torch.autocast(x.device.type, enabled=False):
            strength = F.linear(exactly(x), exactly(self.strength), exactly(self.strength_bias))
        return {"beta": strength.sigmoid(), **super().state(x)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        # In fp32: what a key wrote passes through the corrections of all later tokens, and rounding errors accumulate.
        with torch.autocast(q.device.type, enabled=False):
            queries = ctx.tempered(unit_vectors(exactly(q)))
            keys = unit_vectors(exactly(k))
            reflections = reflections_of(keys, keys, state["beta"].mT[..., None], past=k.size(2) - q.size(2))
            log_gate_sums = self.log_gate_sums(state).transpose(1, 2)  # [B, H, Tk]
            out = in_blocks(self._weighted, [queries], [keys, exactly(v), *reflections, log_gate_sums], ctx)
        return out.to(v.dtype)

    def _weighted(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        """What a block of queries q [B, H, Tq, D] reads, [B, H, Tq, D]: see `PaTH` for `others`."""
        *fields, log_gate_sums, ctx = others
        reflections = Reflections(*[for_heads_of(q, x) for x in fields])
        products = products_through(q, for_heads_of(q, k), reflections)  # [B, H, Tq, Tk]
        left = log_gate_sums[:, :, -q.size(2) :, None] - log_gate_sums[:, :, None]  # ln of it, [B, H, Tq, Tk]
        left = left.to(q.dtype).masked_fill(~ctx.visible(), -torch.inf).exp()
        return (ctx.scale * products * left * reflections.beta.mT) @ for_heads_of(q, v)
