"""Relative position embeddings: every distance has a learned vector, which the query is multiplied by as by a key."""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention import attention, has_kernel, products, seen_keys
from model.position.base import Context, Count, PositionEncoding, Shape, overrides
from model.position.ops import shifted

Cap = Annotated[int, Field(ge=0)]
MAX_RANK = 128  # profiles whose tiles kernels can hold beside those of a head


class Relative(PositionEncoding):
    """Relative embeddings of the keys (Shaw et al., arXiv 1803.02155): q_i.(k_j + r_[i-j]) / sqrt(D).

    Unlike in an additive bias, the term of a distance depends on the query. The heads of a layer share its embeddings,
    `distances` [D, max_distance + 1], which start normal with std D^-1/2, as in the released code of CoPE.

    Args:
        max_distance: the last distance with an embedding; default train_len - 1.
        beyond: the embedding of all longer distances: "last", the last one; "zero", zeros.
    """

    in_place = True
    kernels = "lab.kernels.relative"

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
        distance = pos.flip(0) - pos[0]  # [length]
        return bank[:, distance.clamp(max=bank.size(1) - 1)]

    @property
    def bank(self) -> Tensor:
        """The embeddings of the distances 0, 1, 2, .., [D, n]; the last one is that of n - 1 and all longer ones."""
        if self.beyond == "last":
            return self.distances
        return F.pad(self.distances, (0, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if has_kernel(q, ctx) and not overrides(self, Relative, "bias", "tables"):
            q, k = self.rotate(q, k, ctx)
            return self._by_kernel(q, k, v, ctx)
        return super().attend(q, k, v, state, ctx)

    def _by_kernel(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, position_q: Tensor | None = None) -> Tensor:
        from lab.kernels import relative as kernels  # needs Triton, which only comes with PyTorch for GPUs

        first, last = seen_keys(q, ctx)
        return kernels.relative(
            q, k, v, self.bank.mT, first, last, scale=ctx.scale, position_q=position_q, sinks=ctx.sinks
        )

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        """q_i.r_[i-j], scaled as q.k is: [B, H, Tq, Tk]."""
        # Each query is multiplied by the embedding of every distance once, and then each of its keys picks the product
        # of its distance: no tensor [Tq, Tk, D] is built. Without gaps the pick is a shift of the row, which is free.
        if ctx.has_gaps:
            scores = products(q, self.bank.mT, ctx.scale)  # [B, H, Tq, n]
            distance = ctx.distance.clamp(0, scores.size(-1) - 1)  # [Tq, Tk]
            return scores.gather(-1, distance.expand(*q.shape[:2], -1, -1))
        queries = q.size(2)
        keys = ctx.pos_k.size(0)
        embeddings = ctx.tables[:, ctx.length - keys :]  # of the distances keys - 1, .., 0: [D, Tk]
        return shifted(products(q, F.pad(embeddings, (0, queries)).mT, ctx.scale), keys)  # zeros for the future


class Profiles(Relative):
    """Relative profiles, as in Thinking Machines' Inkling: r_i.P[i-j] is added to the scaled score. The rows of P are
    profiles, each a bias as a function of the distance, and r_i are the weights with which token i mixes them.

    P is `distances` [rank, max_distance + 1]. `mix` [H, rank, dim] projects the layer's input to r_i, for each head. In
    Inkling queries and keys are also normed (model.qk_norm), keys and values convolved, and the score is q.k / D.

    Args:
        rank: number of profiles; the heads of a layer share them.
    """

    decayed = ("mix",)
    in_place = True

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
        rank_fits = r.size(3) <= MAX_RANK
        if rank_fits and has_kernel(q, ctx) and not overrides(self, Profiles, "bias", "tables"):
            return self._by_kernel(q, k, v, ctx, position_q=r)
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
