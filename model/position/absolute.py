"""Absolute encodings: a vector for each position is added to the token embeddings; a scale divides the positions."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from model.position.base import Scaling, Shape
from model.position.ops import Base, exact_dtype, inverse_frequencies


class Sinusoidal(Scaling):
    """Fixed sines and cosines (arXiv 1706.03762): channel 2i is sin(p base^(-2i/dim)), channel 2i + 1 the cosine.

    As in the paper (section 3.4) the token embeddings are multiplied by dim^(1/2) first: otherwise the sines would
    drown those of a new network. At a scale, positions are divided by it. Nothing is learned.
    """

    def __init__(self, shape: Shape, *, base: Base = 10000.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if shape.dim % 2:
            raise ValueError(f"sines and cosines come in pairs: model.dim={shape.dim} must be even")
        self.dim = shape.dim
        self.base = base

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        # Positions take the dtype of the frequencies, float64 where there is one: angles grow with the text.
        inv_freq = inverse_frequencies(self.dim, self.base, pos.device)  # [dim/2]
        angle = pos[..., None].to(inv_freq.dtype) / self.active_scale * inv_freq  # [T, dim/2] or [B, T, dim/2]
        waves = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)  # [.., dim/2, 2] -> [.., dim]
        return x * math.sqrt(self.dim) + waves.to(x.dtype)


class Learned(Scaling):
    """A learned vector for each position, as in GPT-2: `table` [original_len, dim].

    At a scale, positions are divided by it, and their vectors are linear between two entries of the table. So the table
    reaches scale * original_len positions and no further. Positions beyond its last entry share that entry.
    """

    shared = True

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.table = nn.Parameter(torch.empty(self.original_len, shape.dim))

    @property
    def max_len(self) -> int:  # type: ignore[override]
        return int(self.active_scale * self.original_len)

    def remedy(self, length: int) -> str:
        scale = math.ceil(length / self.original_len)
        return f"read it with pe.scale={scale} or train at a longer train_len"

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.table, 0.0, 0.02, generator)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        if self.active_scale == 1:
            return x + self.table[pos].to(x.dtype)
        # The position lies between entries `low` and `high`; its fraction weighs them. Beyond the last entry both are
        # that entry, and the weight does not matter.
        scaled = pos.to(exact_dtype(pos.device)) / self.active_scale  # [T] or [B, T]
        low = scaled.floor().long()
        high = (low + 1).clamp(max=self.original_len - 1)
        weight = (scaled - low)[..., None].to(self.table.dtype)  # [T, 1] or [B, T, 1]
        return x + torch.lerp(self.table[low], self.table[high], weight).to(x.dtype)
