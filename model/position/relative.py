"""Relative position embeddings: every distance has a learned vector, which the query meets beside the key."""

from typing import Any

import torch
from torch import Tensor, nn

from model.attention import attend
from model.position.base import Context, PositionEncoding, Shape


class Relative(PositionEncoding):
    """Relative embeddings of the keys (Shaw et al., arXiv 1803.02155): q_i.(k_j + r_[i-j]) / sqrt(D).

    The heads of a layer share its embeddings, the layers do not. They start normal with std D^-1/2, as in the
    released code of CoPE, whose rival this is. Memory grows with Tq x Tk: the bias depends on the query.

    Args:
        max_distance: the cap: keys at this distance and further share the last of max_distance + 1 embeddings.
            Default: no cap within the training length (train_len - 1), beyond it the last one is reused.
    """

    linear_memory = False

    per_layer = True

    def __init__(self, shape: Shape, *, max_distance: int | None = None) -> None:
        super().__init__(shape)
        if max_distance is not None and max_distance < 0:
            raise ValueError(f"pe.max_distance={max_distance} must be a number of tokens, or null for train_len - 1")
        self.max_distance = shape.train_len - 1 if max_distance is None else max_distance
        self.train_len = shape.train_len
        self.distances = nn.Parameter(torch.zeros(shape.head_dim, self.max_distance + 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        shape = self.distances.shape
        self.distances.copy_(torch.empty(shape).normal_(0.0, self.head_dim**-0.5, generator=generator))

    def relative_bias(self, q: Tensor, ctx: Context) -> Tensor:
        """q_i.r_[i-j], scaled as q.k is: [B, H, Tq, Tk]."""
        at_distance = q @ self.distances.to(q.dtype)  # [B, H, Tq, max_distance + 1]: no [Tq, Tk, D] is ever built
        distance = (ctx.pos_q[:, None] - ctx.pos_k[None, :]).clamp(0, self.max_distance)  # [Tq, Tk]
        return at_distance.gather(-1, distance.expand(*q.shape[:2], -1, -1)) * ctx.scale

    def attention(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        visible = ctx.pos_q[:, None] >= ctx.pos_k[None, :]
        bias = self.relative_bias(q, ctx).masked_fill(~visible, -torch.inf)
        return attend(q, k, v, scale=ctx.scale, mask=bias)

    def resolved(self) -> dict[str, Any]:
        return {**super().resolved(), "max_distance": self.max_distance}

    def describe(self) -> list[str]:
        if self.max_distance < self.train_len:
            return []
        return [
            f"relative: training at {self.train_len} tokens never reaches the embeddings of distances "
            f"{self.train_len} to {self.max_distance}; longer texts would read them as they were initialised"
        ]
