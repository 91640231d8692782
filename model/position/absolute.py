"""Absolute encodings: a vector for each position is added to the token embeddings.

A scale interpolates positions (p = p' / scale), so that a text `scale` times as long meets only positions between
those of the training.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from model.position.base import Shape
from model.position.rotary import exact_dtype, inverse_frequencies
from model.position.scaled import Scaled


class Sinusoidal(Scaled):
    """Fixed sines and cosines (arXiv 1706.03762): channel 2i is sin(p base^(-2i/dim)), channel 2i + 1 the cosine.

    As in the paper (section 3.4) the token embeddings are multiplied by dim^(1/2) first: those of a new network are
    so small that the sines would drown them, and training would be slow.

    Args:
        base: the constant 10000 of the paper.
        The others are those of `Scaled`.

    Raises:
        ValueError: base out of range, or an odd width.
    """

    def __init__(self, shape: Shape, *, base: float = 10000.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if not 1 < base < float("inf"):
            raise ValueError(f"pe.base={base:g} must be greater than 1 (the paper uses 10000)")
        if shape.dim % 2:
            raise ValueError(f"sines and cosines come in pairs: model.dim={shape.dim} must be even")
        self.dim, self.base = shape.dim, base

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        inv_freq = inverse_frequencies(self.dim, self.base, pos.device)
        angle = pos[:, None].to(inv_freq.dtype) / self.active_scale * inv_freq  # [T, dim/2]
        return x * math.sqrt(self.dim) + torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(x.dtype)


class Learned(Scaled):
    """A learned vector for each of `original_len` positions (GPT-2); at a scale, interpolated linearly between them.

    The scaled table reaches scale * original_len positions, those beyond its last vector sharing it, and no further.

    Raises:
        ValueError: train_len is beyond the table, at construction; a longer text is, in a forward pass.
    """

    shared = True

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.table = nn.Parameter(torch.empty(self.original_len, shape.dim))
        self._check(shape.train_len)

    @property
    def max_len(self) -> int:  # type: ignore[override]
        return int(self.active_scale * self.original_len)

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.table.copy_(torch.empty(self.table.shape).normal_(0.0, 0.02, generator=generator))

    def _check(self, length: int) -> None:
        if length > self.max_len:
            raise ValueError(
                f"a text of {length} tokens is beyond the learned table of {self.original_len} positions at scale "
                f"{self.active_scale:g}, which ends at {self.max_len}: read it with "
                f"pe.scale={-(-length // self.original_len)} or train at a longer train_len"
            )

    def tables(self, pos: Tensor, length: int) -> None:
        # Checked here rather than in `embed`, where the largest position would have to be fetched from the device.
        self._check(length)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        if self.active_scale == 1:
            return x + self.table[pos].to(x.dtype)
        p = pos.to(exact_dtype(pos.device)) / self.active_scale
        low = p.floor().long()
        high = (low + 1).clamp(max=self.original_len - 1)
        weight = (p - low)[:, None].to(self.table.dtype)
        return x + torch.lerp(self.table[low], self.table[high], weight).to(x.dtype)
