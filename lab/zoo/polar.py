"""PoPE: in each channel a magnitude says what a query looks for, and an angle says where."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import attention, exactly
from model.position.base import Context, PositionEncoding, Shape
from model.position.ops import Base, bounded, cos_sin, inverse_frequencies


class PoPE(PositionEncoding):
    """PoPE (arXiv 2509.10534): channel c of a query or key is a magnitude, softplus(q_ic), with an angle that only the
    position decides. The score is the sum over c of both magnitudes times cos((i - j) base^(-c/D) - delta_c).

    In RoPE the content decides part of the angle too, since a pair of channels has a direction of its own. `delta`
    [Hkv, D] is learned, within [-2 pi, 0], and starts at 0. Queries and keys get twice as many channels.
    """

    in_place = True
    linear_in_q = False  # softplus is not linear: `rotate` applies the temperature after it

    def __init__(self, shape: Shape, *, base: Base = 10000.0, **options: Any) -> None:
        super().__init__(shape, **options)
        self.base = base
        self.delta = nn.Parameter(torch.zeros(shape.n_kv_head, shape.head_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.delta)

    def tables(self, pos: Tensor, length: int) -> Any:
        """Cosine and sine of the angles, fp32 [length, D] each."""
        # One frequency for each channel, where RoPE has one for each pair: those of a head twice as wide.
        inv_freq = inverse_frequencies(2 * self.head_dim, self.base, pos.device)  # [D]
        return cos_sin(pos[:, None].to(inv_freq.dtype) * inv_freq)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return q [B, H, Tq, 2D] and k [B, Hkv, Tk, 2D]: the magnitudes times the cosine, then times the sine.

        Their dot product is the sum over c of both magnitudes times the cosine of the difference of the angles, since
        cos a cos b + sin a sin b = cos(a - b).
        """
        # The tables are of all tokens. Those of the keys are the last Tk, those of the queries the last Tq of these.
        cos, sin = ctx.tables
        cos = cos[-k.size(2) :]  # [Tk, D]
        sin = sin[-k.size(2) :]
        delta = bounded(exactly(self.delta), -2 * torch.pi, 0.0)[:, None]  # [Hkv, 1, D]
        # Cosine and sine of angle + delta by the addition theorems. The tables hold the angles alone: they have no
        # gradient and are made once for all layers, while each layer learns its own delta.
        cos_keys = cos * delta.cos() - sin * delta.sin()  # [Hkv, Tk, D]
        sin_keys = sin * delta.cos() + cos * delta.sin()
        q_factors = torch.cat((cos, sin), dim=-1)[-q.size(2) :]  # [Tq, 2D]
        k_factors = torch.cat((cos_keys, sin_keys), dim=-1)  # [Hkv, Tk, 2D]
        q = _channels(q, q_factors)
        k = _channels(k, k_factors)
        return ctx.tempered(q), k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        q, k = self.rotate(q, k, ctx)
        # Fused kernels want values as wide as queries and keys. The added channels hold zeros and are cut off again.
        v = F.pad(v, (0, self.head_dim))  # [B, Hkv, Tk, 2D]
        return attention(q, k, v, ctx)[..., : self.head_dim]


def _channels(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply the magnitudes of `x` [B, H, T, D], repeated for each half, by `factors` [.., T, 2D]: [B, H, T, 2D]."""
    magnitudes = F.softplus(exactly(x)).repeat(1, 1, 1, 2)  # fp32 or better [B, H, T, 2D]
    return (magnitudes * factors).to(x.dtype)
