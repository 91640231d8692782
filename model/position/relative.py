"""Relative position embeddings: every distance has a learned vector, which the query meets beside the key."""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention import attention
from model.position.base import Context, Count, PositionEncoding, Shape
from model.position.ops import shifted

Cap = Annotated[int, Field(ge=0)]


class Relative(PositionEncoding):
    """Relative embeddings of the keys (Shaw et al., arXiv 1803.02155): q_i.(k_j + r_[i-j]) / sqrt(D).

    Unlike an additive bias, what a distance adds depends on the query. The heads of a layer share its embeddings
    `distances` [D, max_distance + 1], which start normal with std D^-1/2, as in the released code of CoPE.

    Args:
        max_distance: the last distance with an embedding; default train_len - 1.
        beyond: what keys further away have: "last", the last embedding; "zero", none.
    """

    def __init__(
        self, shape: Shape, *, max_distance: Cap | None = None, beyond: Literal["last", "zero"] = "last", **options: Any
    ) -> None:
        super().__init__(shape, **options)
        if max_distance is None:
            max_distance = shape.train_len - 1
        self.beyond = beyond
        self.max_distance = max_distance
        self.distances = nn.Parameter(torch.zeros(shape.head_dim, self.max_distance + 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.distances, 0.0, self.head_dim**-0.5, generator)

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """The embeddings of the distances length - 1, .., 0: [D, length]."""
        bank = self.bank
        distance = pos.flip(0) - pos[0]
        return bank[:, distance.clamp(max=bank.size(1) - 1)]

    @property
    def bank(self) -> Tensor:
        """The embeddings of 0, 1, 2, ..: [D, n]; all distances from n - 1 on have the last."""
        if self.beyond == "last":
            return self.distances
        return F.pad(self.distances, (0, 1))

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        """q_i.r_[i-j], scaled as q.k is: [B, H, Tq, Tk]."""
        # Each query meets the embedding of every distance once, and then its keys pick theirs: no [Tq, Tk, D] is built.
        # Without gaps the pick is a shift of the row, which costs nothing.
        scaled = q * ctx.scale
        if ctx.has_gaps:
            scores = scaled @ self.bank.to(q.dtype)  # [B, H, Tq, n]
            distance = ctx.distance.clamp(0, scores.size(-1) - 1)  # [Tq, Tk]
            return scores.gather(-1, distance.expand(*q.shape[:2], -1, -1))
        queries, keys = q.size(2), ctx.pos_k.size(0)
        embeddings = ctx.tables[:, ctx.length - keys :].to(q.dtype)  # of the distances keys - 1, .., 0: [D, Tk]
        return shifted(scaled @ F.pad(embeddings, (0, queries)), keys)


class Profiles(Relative):
    """Relative profiles, as in Thinking Machines' Inkling: a bank of profiles of a bias against the distance, which
    each token and head mixes by a projection r_i of the layer's input: r_i.P[i-j] is added to the scaled score.

    P is `distances` [rank, max_distance + 1], and r_i comes from `mix` [H, rank, dim]. In Inkling queries and keys are
    normed (model.qk_norm) and keys and values convolved too, and the score is q.k / D.

    Args:
        rank: number of profiles; the heads of a layer share them.
    """

    decayed = ("mix",)

    def __init__(self, shape: Shape, *, rank: Count = 16, **options: Any) -> None:
        super().__init__(shape._replace(head_dim=rank), **options)  # `rank` channels meet the bank, not D
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
        # `attention` hands the queries of each block to `bias`, and nothing else. So r travels as further channels of
        # the queries, which meet zeros in the keys.
        r = state["r"][:, -q.size(2) :].transpose(1, 2)  # [B, H, Tq, rank]
        rank = r.size(-1)
        unused = -(rank + q.size(-1)) % 8  # fused kernels want multiples of 8
        q = torch.cat((q, F.pad(r, (0, unused))), dim=-1)
        k = F.pad(k, (0, rank + unused))
        v = F.pad(v, (0, rank + unused))
        return attention(q, k, v, ctx, bias=self.bias)[..., : self.head_dim]

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        rank = self.distances.size(0)
        r = q[..., self.head_dim : self.head_dim + rank]
        return super().bias(r / ctx.scale, ctx)  # r.P is not scaled, as q.r is
