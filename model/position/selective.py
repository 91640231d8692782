"""Selective RoPE: how far queries and keys are turned between two tokens is made of the tokens between them."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention import attention, for_heads_of
from model.position.base import Context, Count, PositionEncoding, Shape
from model.position.ops import Base, inverse_frequencies, rotate_pairs, short_convolution

Width = Annotated[int, Field(ge=2)]


class SelectiveRoPE(PositionEncoding):
    """Selective RoPE (arXiv 2511.17388): pair (m, m + D/2) is rotated by base^(-2m/D) times the sum of phi_lm over the
    tokens l up to its own, phi a convolution over a projection of the layer's input. RoPE is phi = 1. Key heads have
    their own.

    Args:
        base: a larger one turns slowly at most.
        rank: of the projection.
        conv: tokens of the convolution.
    """

    def __init__(
        self, shape: Shape, *, base: Base = 500000.0, rank: Count = 16, conv: Width = 4, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        if shape.dim % shape.n_head or shape.head_dim % 2:
            raise ValueError(f"model.dim={shape.dim} must be a multiple of n_head={shape.n_head}, and head_dim even")
        self.base, self.lookback = base, conv - 2  # as in PaTH
        self.down = nn.Parameter(torch.zeros(rank, shape.dim))
        self.up = nn.Parameter(torch.zeros(shape.n_kv_head * shape.head_dim // 2, rank))
        self.kernel = nn.Parameter(torch.zeros(self.up.size(0), conv))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """As linear layers and convolutions start in PyTorch, uniform within fan_in^-1/2."""
        for p in self.parameters():
            nn.init.uniform_(p, -(p.size(1) ** -0.5), p.size(1) ** -0.5, generator)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """phi before its convolution, fp32 [B, T, Hkv D / 2]."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.float().unflatten(-1, (self.n_head, -1))
            x = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2)
            return {"phi": F.linear(F.linear(x, self.down.float()), self.up.float())}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            phi = short_convolution(state["phi"], self.kernel.float())
            frequencies = inverse_frequencies(self.head_dim, self.base, q.device)
            total = phi.to(frequencies.dtype).cumsum(1).unflatten(-1, (-1, len(frequencies))).transpose(1, 2)
            angle = total * frequencies  # [B, Hkv, Tk, D / 2]
            cos, sin = angle.cos().float(), angle.sin().float()
            newest = [for_heads_of(q, table[:, :, -q.size(2) :]) for table in (cos, sin)]
            q, k = rotate_pairs(q, *newest), rotate_pairs(k, cos, sin)
        return attention(q, k, v, ctx, window=self.window)
