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

    The heads of a layer share its embeddings, which start normal with std D^-1/2, as in the released code of CoPE.

    Args:
        max_distance: the last distance with an embedding; default train_len - 1.
        beyond: further away "last": keys share the last embedding; "zero": they have none.
    """

    def __init__(
        self, shape: Shape, *, max_distance: Cap | None = None, beyond: Literal["last", "zero"] = "last", **options: Any
    ) -> None:
        super().__init__(shape, **options)
        self.beyond = beyond
        self.max_distance = shape.train_len - 1 if max_distance is None else max_distance
        self.distances = nn.Parameter(torch.zeros(shape.head_dim, self.max_distance + 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.distances, 0.0, self.head_dim**-0.5, generator)

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """The embeddings of the distances length - 1, .., 0: [D, length]."""
        bank = self.bank
        return bank[:, (pos.flip(0) - pos[0]).clamp(max=bank.size(1) - 1)]

    @property
    def bank(self) -> Tensor:
        """The embeddings of 0, 1, 2, ..: [D, n]; all distances from n - 1 on have the last."""
        return self.distances if self.beyond == "last" else F.pad(self.distances, (0, 1))

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        """q_i.r_[i-j], scaled as q.k is: [B, H, Tq, Tk]."""
        if ctx.has_gaps:
            scores = (q * ctx.scale) @ self.bank.to(q.dtype)  # [B, H, Tq, n]
            at = ctx.distance.clamp(0, scores.size(-1) - 1)
            return scores.gather(-1, at.expand(*q.shape[:2], -1, -1))
        queries, keys = q.size(2), ctx.pos_k.size(0)
        own = F.pad(ctx.tables[:, ctx.length - keys :].to(q.dtype), (0, queries))
        return shifted((q * ctx.scale) @ own, keys)  # no [Tq, Tk, D] is ever built


class Profiles(Relative):
    """Relative profiles, as in Thinking Machines' Inkling: a bank of profiles of a bias against the distance, which
    each token and head mixes by a projection r_i of the layer's input: r_i.P[i-j] is added to the scaled score.

    In Inkling queries and keys are normed (model.qk_norm) and keys and values convolved too, and the score is q.k / D.

    Args:
        rank: number of profiles; the heads of a layer share them.
    """

    decayed = ("mix",)

    def __init__(self, shape: Shape, *, rank: Count = 16, **options: Any) -> None:
        super().__init__(shape._replace(head_dim=rank), **options)
        self.head_dim = shape.head_dim
        self.mix = nn.Parameter(torch.zeros(shape.n_head, rank, shape.dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for p in self.parameters():
            nn.init.normal_(p, 0.0, 0.02, generator)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """r, [B, T, H, rank]."""
        return {"r": (x @ self.mix.flatten(0, 1).mT).unflatten(-1, self.mix.shape[:2])}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        # More channels of the queries, which meet zeros in the keys, bring r to the bias of each block.
        r = state["r"][:, -q.size(2) :].transpose(1, 2)
        room = -(r.size(-1) + q.size(-1)) % 8 + r.size(-1)
        q = torch.cat((q, F.pad(r, (0, room - r.size(-1)))), dim=-1)
        k, v = F.pad(k, (0, room)), F.pad(v, (0, room))
        return attention(q, k, v, ctx, bias=self.bias, window=self.window)[..., : self.head_dim]

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        r = q[..., self.head_dim : self.head_dim + self.distances.size(0)]
        return super().bias(r / ctx.scale, ctx)
