"""Rotary encodings: queries and keys are rotated by an angle proportional to their position."""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from model.position.base import Context, Count, PositionEncoding, Positive, Shape, Share

Base = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Device = torch.device | str | None


def exact_dtype(device: Device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64.

    At position 65,535 the rounding of a float32 frequency, 6e-8, already changes the angle by 4e-3 rad.
    """
    return torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64


def inverse_frequencies(dim: int, base: float | Tensor, device: Device = None) -> Tensor:
    """base^(-2i/dim) for i = 0..dim/2-1, in radians per token, `exact_dtype` [dim/2]; the highest comes first."""
    return base ** -(torch.arange(0, dim, 2, dtype=exact_dtype(device), device=device) / dim)


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """`x` [B, H, T, D], its pairs (see `Rotary`) rotated by the angles of which `cos` and `sin` [..., T, D/2] are."""
    half = layout == "half"
    a, b = x.chunk(2, dim=-1) if half else (x[..., 0::2], x[..., 1::2])  # [B, H, T, D/2] each
    pair = a * cos - b * sin, b * cos + a * sin
    out = torch.cat(pair, dim=-1) if half else torch.stack(pair, dim=-1).flatten(-2)
    return out.to(x.dtype)  # fp32 tables promote bf16 queries, so that only the result is rounded


class Rotary(PositionEncoding):
    """RoPE (arXiv 2104.09864): pair i of a head's channels is rotated by position * base^(-2i/D).

    Args:
        base: the constant called theta.
        layout: which channels form pair i: "half", (i, i + D/2), as in GPT-NeoX and transformers;
            "interleaved", (2i, 2i + 1), as in the paper. Equivalent up to a permutation of the trained channels.
        partial_rotary_factor: share of the head's channels that are rotated, the first ones.
        resonance: round every wavelength to whole tokens (arXiv 2403.00071), so that a pair meets the same angles again
            however long the text. In training as in evaluation, and after any scaling.
    """

    zero_shot = ("yarn",)

    def __init__(
        self, shape: Shape, *, base: Base = 10000.0, layout: Literal["half", "interleaved"] = "half",
        partial_rotary_factor: Share = 1.0, resonance: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        self.rotary_dim = int(shape.head_dim * partial_rotary_factor)
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            said = f"head_dim={shape.head_dim} with pe.partial_rotary_factor={partial_rotary_factor:g}"
            raise ValueError(f"a rotation needs an even number of channels, but {said} gives {self.rotary_dim}")
        self.base, self.layout, self.partial_rotary_factor = base, layout, partial_rotary_factor
        self.resonance = resonance

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        """Inverse frequencies in a text of `length` tokens, `exact_dtype` [rotary_dim / 2]."""
        return inverse_frequencies(self.rotary_dim, self.base, device)

    @property
    def family(self) -> str:
        waves = ", whole wavelengths" if self.resonance else ""
        return f"rotary, {self.layout} layout, {self.rotary_dim} channels{waves}"

    def tables(self, pos: Tensor, length: int) -> Any:
        """cos and sin of the angles, fp32 [length, rotary_dim / 2]."""
        inv_freq = self.frequencies(length, pos.device)
        if self.resonance:
            inv_freq = 2 * math.pi / (2 * math.pi / inv_freq).round().clamp(min=1)
        angle = pos[:, None].to(inv_freq.dtype) * inv_freq
        return angle.cos().float(), angle.sin().float()

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        cos, sin = ctx.tables
        return self.rotated(q, cos, sin), self.rotated(k, cos, sin)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [B, H, T, D], its pairs rotated by the angles of the last T rows of `cos` and `sin`."""
        cos, sin = cos[-x.size(2) :], sin[-x.size(2) :]
        rotated, kept = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        out = turned(rotated, cos, sin, layout=self.layout)
        return out if kept.size(-1) == 0 else torch.cat((out, kept), dim=-1)


class PRope(Rotary):
    """p-RoPE (arXiv 2410.06205): the lowest frequencies are zero, so that their channels match at any distance.

    Args:
        proportion: share of the frequencies that are kept, the highest ones; "auto": those that make a full turn within
            `original_len`, whose angles are all met in training.
        factor: divisor of those frequencies, in training as in evaluation.
        original_len: for auto: length in tokens the weights were first trained at; default train_len.
    """

    def __init__(
        self, shape: Shape, *, proportion: Share | Literal["auto"] = 0.75, factor: Positive = 1.0,
        original_len: Count | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        self.factor, self.original_len = factor, original_len or shape.train_len
        if isinstance(proportion, str):
            turns = super().frequencies(self.original_len) / factor * self.original_len / (2 * math.pi)
            kept = int((turns >= 1).sum())
            self.proportion = min(1.0, (2 * kept + 1) / self.rotary_dim)  # half a pair more: it is rounded down again
        else:
            self.proportion = proportion

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        kept = torch.arange(self.rotary_dim // 2, device=device) < int(self.proportion * self.rotary_dim // 2)
        return super().frequencies(length, device) * kept / self.factor


class XPos(Rotary):
    """xPos (arXiv 2212.10554): besides the rotation, pair i of q.k decays as zeta_i^(distance / scale_base), where
    zeta_i = (2i + gamma D) / ((1 + gamma) D): fast where the frequency is high.

    Queries are multiplied by zeta^n and keys divided by it, n = (position - centre) / scale_base. The centre, half of
    train_len, cancels in the scores and keeps numbers in range, up to where a factor would leave 2^100: `max_len`.

    Args:
        gamma: how far the fastest decay is from all or nothing; larger is slower.
        scale_base: tokens after which pair i has decayed by zeta_i.
    """

    def __init__(self, shape: Shape, *, gamma: Positive = 0.4, scale_base: Positive = 512.0, **options: Any) -> None:
        super().__init__(shape, **options)
        self.gamma, self.scale_base, self.centre = gamma, scale_base, shape.train_len // 2
        self.max_len = self.centre + int(scale_base * 100 * math.log(2) / math.log((1 + gamma) / gamma))

    def remedy(self, length: int) -> str:
        return f"raise pe.scale_base={self.scale_base:g}, or use another encoding"

    def tables(self, pos: Tensor, length: int) -> Any:
        """(cos, sin) for queries and for keys, the decay multiplied in."""
        cos, sin = super().tables(pos, length)
        channel = torch.arange(0, self.rotary_dim, 2, dtype=exact_dtype(pos.device), device=pos.device)
        zeta = (channel + self.gamma * self.rotary_dim) / ((1 + self.gamma) * self.rotary_dim)
        decay = (zeta ** ((pos[:, None] - self.centre).to(zeta.dtype) / self.scale_base)).float()
        return (cos * decay, sin * decay), (cos / decay, sin / decay)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = ctx.tables
        return self.rotated(q, *of_queries), self.rotated(k, *of_keys)
