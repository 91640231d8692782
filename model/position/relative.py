"""Relative position embeddings: every distance has a learned vector, which the query meets beside the key."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.position.base import Context, PositionEncoding, Shape
from model.position.bias import shifted

Cap = Annotated[int, Field(ge=0)]


class Relative(PositionEncoding):
    """Relative embeddings of the keys (Shaw et al., arXiv 1803.02155): q_i.(k_j + r_[i-j]) / sqrt(D).

    The heads of a layer share its embeddings, which start normal with std D^-1/2, as in the released code of CoPE.

    Args:
        max_distance: keys at this distance and further share the last embedding; default train_len - 1.
    """

    def __init__(self, shape: Shape, *, max_distance: Cap | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        self.max_distance = shape.train_len - 1 if max_distance is None else max_distance
        self.distances = nn.Parameter(torch.zeros(shape.head_dim, self.max_distance + 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        shape = self.distances.shape
        self.distances.copy_(torch.empty(shape).normal_(0.0, self.head_dim**-0.5, generator=generator))

    def tables(self, pos: Tensor, length: int) -> Tensor:
        """The embeddings of the distances length - 1, .., 0: [D, length]."""
        return self.distances[:, (pos.flip(0) - pos[0]).clamp(max=self.max_distance)]

    def bias(self, q: Tensor, ctx: Context) -> Tensor:
        """q_i.r_[i-j], scaled as q.k is: [B, H, Tq, Tk]."""
        if ctx.has_gaps:
            at = ctx.distance.clamp(0, self.max_distance).expand(*q.shape[:2], -1, -1)
            return ((q * ctx.scale) @ self.distances.to(q.dtype)).gather(-1, at)
        queries, keys = q.size(2), ctx.pos_k.size(0)
        own = F.pad(ctx.tables[:, ctx.length - keys :].to(q.dtype), (0, queries))
        return shifted((q * ctx.scale) @ own, keys)  # no [Tq, Tk, D] is ever built
