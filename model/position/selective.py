"""Selective RoPE: the tokens between a key and a query decide how far the one is rotated against the other."""

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
    """Selective RoPE (arXiv 2511.17388): pair (m, m + D/2) of a token's channels is rotated by base^(-2m/D) times the
    sum of phi_lm over the tokens l up to this one. With phi = 1 it is RoPE.

    phi is a low-rank projection of the layer's normed input, by `down` [rank, dim] and `up` [Hkv D / 2, rank], followed
    by a convolution over the tokens, `kernel` [Hkv D / 2, conv]. Each key head has its own.

    Args:
        base: the larger it is, the slower the slowest pairs.
        rank: rank of the projection.
        conv: width of the convolution, in tokens.
    """

    def __init__(
        self, shape: Shape, *, base: Base = 500000.0, rank: Count = 16, conv: Width = 4, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        if shape.dim % shape.n_head or shape.head_dim % 2:
            raise ValueError(f"model.dim={shape.dim} must be a multiple of n_head={shape.n_head}, and head_dim even")
        pairs = shape.n_kv_head * shape.head_dim // 2
        self.base = base
        # The rotation of a query against key j sums phi from token j + 1 on, and phi of token j + 1 reads `conv` tokens
        # up to its own: so the cache must keep conv - 2 tokens before key j.
        self.lookback = conv - 2
        self.down = nn.Parameter(torch.zeros(rank, shape.dim))
        self.up = nn.Parameter(torch.zeros(pairs, rank))
        self.kernel = nn.Parameter(torch.zeros(pairs, conv))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start all parameters as PyTorch starts linear layers and convolutions."""
        for p in self.parameters():
            reset_as_linear(p, generator)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """phi before its convolution, fp32 [B, T, Hkv D / 2]."""
        # In fp32: an angle is the sum of phi over many tokens, in which rounding errors add up.
        with torch.autocast(x.device.type, enabled=False):
            # The input is normed in H equal parts, not as a whole.
            by_head = x.float().unflatten(-1, (self.n_head, -1))  # [B, T, H, dim / H]
            x = unit_vectors(by_head).flatten(-2)  # [B, T, dim]
            low_rank = F.linear(x, self.down.float())  # [B, T, rank]
            return {"phi": F.linear(low_rank, self.up.float())}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            # `state` holds phi before its convolution, so that the cache can serve the convolution of later tokens.
            phi = short_convolution(state["phi"], self.kernel.float())  # [B, Tk, Hkv D / 2]
            # Angles of all tokens, of which the queries are the newest.
            inv_freq = inverse_frequencies(self.head_dim, self.base, q.device)  # [D / 2]
            # The sum grows with the text, so it is taken in the dtype of the frequencies, not in fp32. Where a window
            # has dropped the beginning, all sums lack the same terms, and differences of angles stay as they are.
            total = phi.to(inv_freq.dtype).cumsum(1)  # [B, Tk, Hkv D / 2]
            total = total.unflatten(-1, (-1, len(inv_freq))).transpose(1, 2)  # [B, Hkv, Tk, D / 2]
            cos, sin = cos_sin(total * inv_freq)  # fp32 [B, Hkv, Tk, D / 2] each
            queries = q.size(2)
            q_cos = for_heads_of(q, cos[:, :, -queries:])  # [B, H, Tq, D / 2]
            q_sin = for_heads_of(q, sin[:, :, -queries:])
            q = rotate_pairs(q, q_cos, q_sin)
            k = rotate_pairs(k, cos, sin)
        return attention(q, k, v, ctx)
