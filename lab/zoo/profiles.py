"""Relative profiles: what a distance adds to a score depends on the query, through a few profiles."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import attention
from model.position.base import Context, Count, Shape
from model.position.relative import Relative


class Profiles(Relative):
    """Relative profiles, as in Thinking Machines' Inkling: r_i.P[i-j] is added to the scaled score. The rows of P are
    profiles, each a bias as a function of the distance, and r_i are the weights with which token i mixes them.

    P is `distances` [rank, max_distance + 1]. `mix` [H, rank, dim] projects the layer's input to r_i, for each head. In
    Inkling queries and keys are also normed (model.qk_norm), keys and values convolved, and the score is q.k / D.

    Args:
        rank: number of profiles; the heads of a layer share them.
    """

    decayed = ("mix",)

    def __init__(self, shape: Shape, *, rank: Count = 16, **options: Any) -> None:
        # The bank has `rank` rows instead of D, so the base class is told that heads are that wide.
        super().__init__(shape._replace(head_dim=rank), **options)
        self.head_dim = shape.head_dim
        self.mix = nn.Parameter(torch.zeros(shape.n_head, rank, shape.dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for p in self.parameters():
            nn.init.normal_(p, 0.0, 0.02, generator)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """r, [B, T, H, rank]."""
        mixed = x @ self.mix.flatten(0, 1).mT  # [B, T, H rank]
        return {"r": mixed.unflatten(-1, self.mix.shape[:2])}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        r = state["r"][:, -q.size(2) :].transpose(1, 2)  # [B, H, Tq, rank]
        # `attention` passes the queries of each block to `bias`, and nothing else of the layer's input. So r is carried
        # along as further channels of the queries, which are multiplied by zeros in the keys.
        rank = r.size(-1)
        unused = -(rank + q.size(-1)) % 8  # fused kernels want multiples of 8
        q = torch.cat((q, F.pad(r, (0, unused))), dim=-1)  # [B, H, Tq, D + rank + unused]
        k = F.pad(k, (0, rank + unused))  # [B, Hkv, Tk, D + rank + unused]
        v = F.pad(v, (0, rank + unused))
        return attention(q, k, v, ctx, bias=self.bias)[..., : self.head_dim]

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        rank = self.distances.size(0)
        r = q[..., self.head_dim : self.head_dim + rank]  # [B, H, Tq, rank]
        # The base class scales q.r as it scales q.k; r.P is to be added as it is.
        return super().bias(r / ctx.scale, ctx)
