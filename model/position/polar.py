"""PoPE: what is matched in magnitudes, where in angles."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import attention
from model.position.base import Context, PositionEncoding, Shape
from model.position.ops import Base, bounded, exact_dtype, inverse_frequencies


class PoPE(PositionEncoding):
    """PoPE (arXiv 2509.10534): every channel c of a query or key is a magnitude, softplus(q_ic), with an angle that
    the position alone decides, so the score is the sum of their products times cos((i - j) base^(-c/D) - delta_c).

    delta is learned for each key head, within [-2 pi, 0], and starts at 0. Queries and keys get twice the channels.
    """

    def __init__(self, shape: Shape, *, base: Base = 10000.0, **options: Any) -> None:
        super().__init__(shape, **options)
        self.base = base
        self.delta = nn.Parameter(torch.zeros(shape.n_kv_head, shape.head_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.delta)

    def tables(self, pos: Tensor, length: int) -> Any:
        """cos and sin of the angles, fp32 [length, D]."""
        angle = pos[:, None].to(exact_dtype(pos.device)) * inverse_frequencies(2 * self.head_dim, self.base, pos.device)
        return angle.cos().float(), angle.sin().float()

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Twice the channels: the magnitudes times cos, and times sin."""
        delta = bounded(self.delta.float(), -2 * torch.pi, 0.0)[:, None]  # [Hkv, 1, D]
        cos, sin = (table[-k.size(2) :] for table in ctx.tables)
        of_keys = torch.cat((cos * delta.cos() - sin * delta.sin(), sin * delta.cos() + cos * delta.sin()), dim=-1)
        of_queries = torch.cat((cos, sin), dim=-1)[-q.size(2) :]
        q, k = ((F.softplus(x.float()).repeat(1, 1, 1, 2) * t).to(x.dtype) for x, t in ((q, of_queries), (k, of_keys)))
        return self.tempered(q, ctx), k

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        return self.attend(q, k, v, state, ctx)  # the temperature comes after the softplus, in `rotate`

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        q, k = self.rotate(q, k, ctx)
        v = F.pad(v, (0, self.head_dim))  # fused kernels want one width
        return attention(q, k, v, ctx, window=self.window)[..., : self.head_dim]
