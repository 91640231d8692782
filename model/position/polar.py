"""PoPE: magnitudes say what a query looks for, angles where."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import attention
from model.position.base import Context, PositionEncoding, Shape
from model.position.ops import Base, bounded, cos_sin, inverse_frequencies


class PoPE(PositionEncoding):
    """PoPE (arXiv 2509.10534): every channel c of a query or key is a magnitude, softplus(q_ic), with an angle that
    the position alone decides, so the score is the sum of their products times cos((i - j) base^(-c/D) - delta_c).

    RoPE instead lets a pair of channels decide part of its angle. `delta` [Hkv, D] is learned, within [-2 pi, 0], and
    starts at 0. Queries and keys get twice the channels.
    """

    linear_in_q = False  # the temperature comes after the softplus, in `rotate`

    def __init__(self, shape: Shape, *, base: Base = 10000.0, **options: Any) -> None:
        super().__init__(shape, **options)
        self.base = base
        self.delta = nn.Parameter(torch.zeros(shape.n_kv_head, shape.head_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.delta)

    def tables(self, pos: Tensor, length: int) -> Any:
        """Cosine and sine of the angles, fp32 [length, D] each."""
        inv_freq = inverse_frequencies(2 * self.head_dim, self.base, pos.device)  # [D]
        return cos_sin(pos[:, None].to(inv_freq.dtype) * inv_freq)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return q [B, H, Tq, 2D] and k [B, Hkv, Tk, 2D]: the magnitudes times the cosine, then times the sine.

        The product of two such vectors is the sum over c of both magnitudes times the cosine of the difference of the
        angles.
        """
        cos, sin = ctx.tables
        cos = cos[-k.size(2) :]
        sin = sin[-k.size(2) :]
        delta = bounded(self.delta.float(), -2 * torch.pi, 0.0)[:, None]  # [Hkv, 1, D]
        # Cosine and sine of angle + delta by the addition theorems: the angles are in the tables, delta is learned.
        cos_keys = cos * delta.cos() - sin * delta.sin()  # [Hkv, Tk, D]
        sin_keys = sin * delta.cos() + cos * delta.sin()
        of_queries = torch.cat((cos, sin), dim=-1)[-q.size(2) :]  # [Tq, 2D]
        q = _channels(q, of_queries)
        k = _channels(k, torch.cat((cos_keys, sin_keys), dim=-1))
        return ctx.tempered(q), k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        q, k = self.rotate(q, k, ctx)
        v = F.pad(v, (0, self.head_dim))  # fused kernels want one width
        return attention(q, k, v, ctx)[..., : self.head_dim]


def _channels(x: Tensor, table: Tensor) -> Tensor:
    """Multiply the magnitudes of `x` [B, H, T, D], once for each half, by `table` [.., T, 2D]: [B, H, T, 2D]."""
    magnitudes = F.softplus(x.float()).repeat(1, 1, 1, 2)
    return (magnitudes * table).to(x.dtype)
