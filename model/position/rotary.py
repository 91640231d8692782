"""Rotary encodings: queries and keys are rotated by an angle proportional to their position.

Three choices are independent of one another: the frequencies (and their scaling, see `scaled_rotary`), the layout of
the pairs, and the share of the channels that are rotated.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from model.position.base import Context, PositionEncoding, Shape

Device = torch.device | str | None
Layout = Literal["half", "interleaved"]


def exact_dtype(device: Device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64.

    At position 65,535 the rounding of a float32 frequency, 6e-8, already changes the angle by 4e-3 rad.
    """
    return torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64


def inverse_frequencies(dim: int, base: float | Tensor, device: Device = None) -> Tensor:
    """base^(-2i/dim) for i = 0..dim/2-1, in radians per token, `exact_dtype` [dim/2]; the highest comes first."""
    return base ** -(torch.arange(0, dim, 2, dtype=exact_dtype(device), device=device) / dim)


class Rotary(PositionEncoding):
    """RoPE (arXiv 2104.09864): pair i of a head's channels is rotated by position * base^(-2i/D).

    Args:
        base: the constant called theta.
        layout: which channels form pair i: "half", (i, i + D/2), as in GPT-NeoX and transformers;
            "interleaved", (2i, 2i + 1), as in the paper. Equivalent up to a permutation of the trained channels.
        partial_rotary_factor: share of the head's channels that are rotated, the first ones; the others carry no
            position.

    Raises:
        ValueError: base or partial_rotary_factor out of range, or an odd number of channels to pair.
    """

    zero_shot: tuple[str, ...] = ("yarn",)

    def __init__(
        self,
        shape: Shape,
        *,
        base: float = 10000.0,
        layout: Layout = "half",
        partial_rotary_factor: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(shape, **options)
        if not 1 < base < float("inf"):
            raise ValueError(f"pe.base={base:g} must be greater than 1 (RoPE uses 10000, Llama 3 500000)")
        if not 0 < partial_rotary_factor <= 1:
            raise ValueError(
                f"pe.partial_rotary_factor={partial_rotary_factor:g} must be in (0, 1]: the share of each head's "
                "channels that are rotated"
            )
        if layout not in ("half", "interleaved"):
            raise ValueError(f"pe.layout={layout!r} must be 'half' or 'interleaved'")
        self.rotary_dim = int(shape.head_dim * partial_rotary_factor)
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"a rotation needs an even number of channels, at least 2, but head_dim={shape.head_dim} with "
                f"pe.partial_rotary_factor={partial_rotary_factor:g} gives {self.rotary_dim}; change model.dim, "
                "model.n_head or pe.partial_rotary_factor"
            )
        self.base, self.layout, self.partial_rotary_factor = base, layout, partial_rotary_factor
        self.train_len = shape.train_len

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        """Inverse frequencies in a text of `length` tokens, `exact_dtype` [rotary_dim / 2]."""
        return inverse_frequencies(self.rotary_dim, self.base, device)

    @property
    def family(self) -> str:
        return f"rotary, {self.layout} layout, {self.rotary_dim} channels"

    def tables(self, pos: Tensor, length: int) -> Any:
        """cos and sin of the angles, fp32 [length, rotary_dim / 2]."""
        inv_freq = self.frequencies(length, pos.device)
        angle = pos[:, None].to(inv_freq.dtype) * inv_freq
        return angle.cos().float(), angle.sin().float()

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        cos, sin = ctx.tables
        return self.rotated(q, cos, sin), self.rotated(k, cos, sin)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [B, H, T, D], its pairs rotated by the angles of the last T rows of `cos` and `sin`."""
        cos, sin = cos[-x.size(2) :], sin[-x.size(2) :]
        rotated, kept = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        if self.layout == "half":
            a, b = rotated.chunk(2, dim=-1)  # [B, H, T, rotary_dim / 2] each
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        out = out.to(x.dtype)  # fp32 tables promote bf16 queries, so that only the result is rounded
        return out if kept.size(-1) == 0 else torch.cat((out, kept), dim=-1)


class PRope(Rotary):
    """p-RoPE (arXiv 2410.06205): the lowest frequencies are zero, so that their channels match at any distance.

    Args:
        proportion: share of the frequencies that are kept, the highest ones.
        factor: divisor of those frequencies, in training as in evaluation.
        The others are those of `Rotary`; the frequencies are those of the channels that are rotated.

    Raises:
        ValueError: proportion or factor out of range.
    """

    zero_shot: tuple[str, ...] = ()

    def __init__(self, shape: Shape, *, proportion: float = 0.75, factor: float = 1.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if not 0 < proportion <= 1:
            raise ValueError(f"pe.proportion={proportion:g} must be in (0, 1]: the share of the frequencies to keep")
        if not 0 < factor < float("inf"):
            raise ValueError(f"pe.factor={factor:g} must be a positive number: it divides frequencies")
        self.proportion, self.factor = proportion, factor

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        kept = torch.arange(self.rotary_dim // 2, device=device) < int(self.proportion * self.rotary_dim // 2)
        return super().frequencies(length, device) * kept / self.factor


class XPos(Rotary):
    """xPos (arXiv 2212.10554): besides the rotation, pair i of q.k decays as zeta_i^(distance / scale_base), where
    zeta_i = (2i + gamma D) / ((1 + gamma) D): fast where the frequency is high.

    Queries are multiplied by zeta^n and keys divided by it, n = (position - centre) / scale_base. The centre cancels
    in the scores; it keeps numbers in range. It is half of train_len whatever the text, so that a token's key does
    not depend on later tokens. The text ends where a factor would leave 2^100: `max_len`.

    Args:
        gamma: how far the fastest decay is from all or nothing; larger is slower.
        scale_base: tokens after which pair i has decayed by zeta_i.
        The others are those of `Rotary`.

    Raises:
        ValueError: gamma or scale_base out of range, or train_len beyond `max_len`; a longer text, in a forward pass.
    """

    zero_shot: tuple[str, ...] = ()

    def __init__(self, shape: Shape, *, gamma: float = 0.4, scale_base: float = 512.0, **options: Any) -> None:
        super().__init__(shape, **options)
        for name, value in (("gamma", gamma), ("scale_base", scale_base)):
            if not 0 < value < float("inf"):
                raise ValueError(f"pe.{name}={value:g} must be a positive number")
        self.gamma, self.scale_base, self.centre = gamma, scale_base, shape.train_len // 2
        self.max_len = self.centre + int(scale_base * 100 * math.log(2) / math.log((1 + gamma) / gamma))
        self._check(shape.train_len)

    def _check(self, length: int) -> None:
        assert self.max_len is not None
        if length > self.max_len:
            raise ValueError(
                f"a text of {length} tokens is beyond the {self.max_len} for which xPos's factors are finite numbers: "
                f"raise pe.scale_base={self.scale_base:g}, or use another encoding"
            )

    def tables(self, pos: Tensor, length: int) -> Any:
        """(cos, sin) for queries and for keys, the decay multiplied in."""
        self._check(length)
        cos, sin = super().tables(pos, length)
        channel = torch.arange(0, self.rotary_dim, 2, dtype=exact_dtype(pos.device), device=pos.device)
        zeta = (channel + self.gamma * self.rotary_dim) / ((1 + self.gamma) * self.rotary_dim)
        decay = (zeta ** ((pos[:, None] - self.centre).to(zeta.dtype) / self.scale_base)).float()
        return (cos * decay, sin * decay), (cos / decay, sin / decay)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = ctx.tables
        return self.rotated(q, *of_queries), self.rotated(k, *of_keys)
