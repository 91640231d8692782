"""Selective RoPE: the tokens between a key and a query decide by how much the two are rotated."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention import attention, for_heads_of
from model.position.base import Context, Count, PositionEncoding, Shape
from model.position.ops import (
    Base,
    cos_sin,
    inverse_frequencies,
    reset_as_linear,
    rotate_pairs,
    short_convolution,
    unit_vectors,
)

Width = Annotated[int, Field(ge=2)]


class SelectiveRoPE(PositionEncoding):
    """Selective RoPE (arXiv 2511.17388): pair (m, m + D/2) is rotated by base^(-2m/D) times the sum of phi_lm over the
    tokens l up to its own. RoPE is phi = 1.

    phi is a convolution, `kernel` [Hkv D / 2, conv], over a low-rank projection of the layer's input, `down`
    [rank, dim] and `up` [Hkv D / 2, rank]. Key heads have their own.

    Args:
        base: the larger it is, the slower the slowest pairs.
        rank: of the projection.
        conv: tokens of the convolution.
    """

    def __init__(
        self, shape: Shape, *, base: Base = 500000.0, rank: Count = 16, conv: Width = 4, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        if shape.dim % shape.n_head or shape.head_dim % 2:
            raise ValueError(f"model.dim={shape.dim} must be a multiple of n_head={shape.n_head}, and head_dim even")
        pairs = shape.n_kv_head * shape.head_dim // 2
        self.base = base
        self.lookback = conv - 2  # the rotation from key j to a query begins with phi of token j + 1
        self.down = nn.Parameter(torch.zeros(rank, shape.dim))
        self.up = nn.Parameter(torch.zeros(pairs, rank))
        self.kernel = nn.Parameter(torch.zeros(pairs, conv))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """As linear layers and convolutions start in PyTorch."""
        for p in self.parameters():
            reset_as_linear(p, generator)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """phi before its convolution, fp32 [B, T, Hkv D / 2]."""
        with torch.autocast(x.device.type, enabled=False):
            by_head = x.float().unflatten(-1, (self.n_head, -1))  # [B, T, H, dim / H]
            x = unit_vectors(by_head).flatten(-2)
            return {"phi": F.linear(F.linear(x, self.down.float()), self.up.float())}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            phi = short_convolution(state["phi"], self.kernel.float())
            inv_freq = inverse_frequencies(self.head_dim, self.base, q.device)
            # The sum grows with the text, so it is taken in the dtype of the frequencies, not in fp32.
            total = phi.to(inv_freq.dtype).cumsum(1)  # [B, Tk, Hkv D / 2]
            total = total.unflatten(-1, (-1, len(inv_freq))).transpose(1, 2)  # [B, Hkv, Tk, D / 2]
            cos, sin = cos_sin(total * inv_freq)
            queries = q.size(2)
            q = rotate_pairs(q, for_heads_of(q, cos[:, :, -queries:]), for_heads_of(q, sin[:, :, -queries:]))
            k = rotate_pairs(k, cos, sin)
        return attention(q, k, v, ctx)
