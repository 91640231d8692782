"""RoPE with learned frequencies and a learned temperature.

What for: what a released model of 2026 reads long text with, beside p-RoPE and `ssmax`. Shown: nothing yet.
Leaves: if five seeds on Markov texts gain no more with it than with those two.
"""

from typing import Any

import torch
from torch import Tensor, nn

from model.attention import exactly
from model.position.base import Context, PositionEncoding, Shape
from model.position.ops import Base, cos_sin, exact_dtype, inverse_frequencies, rotate_pairs


class LearnedRotary(PositionEncoding):
    """RoPE whose pair m turns exp(alpha_m) times as fast, and whose query i of head h is multiplied by
    scale_h ln(i + 1) + offset_h, as in Mistral Large 4 (transformers: models/mistral_large4).

    `alpha` [D / 2] and `scale` [H] start at 0, `offset` [H] at 1: that is RoPE. Each layer learns its own, where that
    model has one `alpha` for all layers.

    Args:
        base: of the frequencies before training.
    """

    def __init__(self, shape: Shape, *, base: Base = 10000.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if shape.head_dim % 2:
            raise ValueError(f"model.head_dim={shape.head_dim} must be even: pairs of channels are rotated")
        self.base = base
        self.alpha = nn.Parameter(torch.zeros(shape.head_dim // 2))
        self.scale_by_head = nn.Parameter(torch.zeros(shape.n_head))
        self.offset = nn.Parameter(torch.ones(shape.n_head))

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.alpha)
        nn.init.zeros_(self.scale_by_head)
        nn.init.ones_(self.offset)

    def tables(self, pos: Tensor, length: int) -> Any:
        """The positions, `exact_dtype` [length, 1]."""
        return pos[:, None].to(exact_dtype(pos.device))

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        pos = ctx.tables
        with torch.autocast(q.device.type, enabled=False):
            inv_freq = inverse_frequencies(self.head_dim, self.base, q.device)  # [D / 2]
            alpha = exactly(self.alpha)
            cos, sin = cos_sin(pos * inv_freq * alpha.to(pos.dtype).exp(), alpha.dtype)  # [T, D / 2] each
            log_pos = pos[-q.size(2) :].log1p().to(alpha.dtype)  # [Tq, 1]
            by_head = exactly(self.scale_by_head)[:, None, None]  # [H, 1, 1]
            factor = by_head * log_pos + exactly(self.offset)[:, None, None]  # [H, Tq, 1]
        q = (q * factor).to(q.dtype)
        return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
