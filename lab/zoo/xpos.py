"""xPos: a rotation with a decay."""

import math
from typing import Any

import torch
from torch import Tensor

from model.position.base import Context, Positive, Shape
from model.position.ops import exact_dtype, rotate_pairs
from model.position.rotary import Rotary


class XPos(Rotary):
    """xPos (arXiv 2212.10554): besides the rotation, pair i of q.k decays as zeta_i^(distance / scale_base), where
    zeta_i = (2i + gamma D) / ((1 + gamma) D): fast where the frequency is high.

    Queries are multiplied by zeta^n and keys divided by it, n = (position - centre) / scale_base. The centre, half of
    train_len, cancels in the scores and keeps numbers in range, up to where a factor would leave 2^100: `max_len`.

    Args:
        gamma: the larger it is, the slower the fastest decay.
        scale_base: tokens after which pair i has decayed by zeta_i.
    """

    def __init__(self, shape: Shape, *, gamma: Positive = 0.4, scale_base: Positive = 512.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.values:
            raise ValueError("pe.values=true: xPos has another factor for queries than for keys; leave it out")
        self.gamma = gamma
        self.scale_base = scale_base
        self.centre = shape.train_len // 2
        # The fastest decay is that of pair 0, zeta_0 = gamma / (1 + gamma): its factor reaches 2^100 first.
        tokens = scale_base * 100 * math.log(2) / math.log((1 + gamma) / gamma)
        self.max_len = self.centre + int(tokens)

    def remedy(self, length: int) -> str:
        return f"raise pe.scale_base={self.scale_base:g}, or use another encoding"

    def tables(self, pos: Tensor, length: int) -> Any:
        """(cos, sin) for queries and for keys, the decay multiplied in, fp32 [length, rotary_dim / 2] each."""
        cos, sin = super().tables(pos, length)
        dtype = exact_dtype(pos.device)
        width = self.rotary_dim
        channel = torch.arange(0, width, 2, dtype=dtype, device=pos.device)
        zeta = (channel + self.gamma * width) / ((1 + self.gamma) * width)  # [rotary_dim / 2]
        n = (pos[:, None] - self.centre).to(dtype) / self.scale_base  # [length, 1]
        decay = (zeta**n).float()  # [length, rotary_dim / 2]
        return (cos * decay, sin * decay), (cos / decay, sin / decay)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = ctx.tables
        return rotate_pairs(q, *of_queries, layout=self.layout), rotate_pairs(k, *of_keys, layout=self.layout)
