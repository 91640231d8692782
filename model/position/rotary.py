"""Rotary encodings: queries and keys are turned by an angle proportional to their position.

Three choices are independent of one another: the frequencies (and their scaling), the layout of the pairs, and the
fraction of the channels that turn.
"""

import copy
import math
from typing import Any, Literal, Self

import torch
from torch import Tensor

from model.position import frequencies as fr
from model.position.base import PositionEncoding, Shape

Layout = Literal["half", "interleaved"]


class Rotary(PositionEncoding):
    """RoPE (arXiv 2104.09864): pair i of a head's channels turns by position * base^(-2i/D).

    Args:
        base: the constant called theta.
        layout: which channels form pair i: "half", (i, i + D/2), as in GPT-NeoX and transformers;
            "interleaved", (2i, 2i + 1), as in the paper. Equivalent up to a permutation of the trained channels.
        fraction: share of the head's channels that turn, the first ones; the others carry no position.

    Raises:
        ValueError: base or fraction out of range, or an odd number of channels to pair.
    """

    def __init__(
        self, shape: Shape, *, base: float = 10000.0, layout: Layout = "half", fraction: float = 1.0
    ) -> None:
        super().__init__(shape)
        if base <= 1:
            raise ValueError(f"pe.base={base:g} must be greater than 1 (RoPE uses 10000, Llama 3 500000)")
        if not 0 < fraction <= 1:
            raise ValueError(f"pe.fraction={fraction:g} must be in (0, 1]: the share of each head's channels that turn")
        if layout not in ("half", "interleaved"):
            raise ValueError(f"pe.layout={layout!r} must be 'half' or 'interleaved'")
        self.dim = int(shape.head_dim * fraction)  # channels that turn
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"a rotation needs an even number of channels, at least 2, but head_dim={shape.head_dim} with "
                f"pe.fraction={fraction:g} gives {self.dim}; change model.dim, model.n_head or pe.fraction"
            )
        self.base, self.layout, self.train_len = base, layout, shape.train_len

    def frequencies(self, length: int, device: fr.Device = None) -> fr.Frequencies:
        """(inverse frequencies float64 [dim/2], attention factor) for a text of `length` tokens."""
        return fr.rope(self.dim, self.base, device=device)

    def tables(self, pos: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, fp32 [T, dim/2]."""
        inv_freq, _ = self.frequencies(length, pos.device)
        angle = pos[:, None].double() * inv_freq
        return angle.cos().float(), angle.sin().float()

    def rotate(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = table
        turned, kept = x[..., : self.dim], x[..., self.dim :]
        if self.layout == "half":
            a, b = turned.chunk(2, dim=-1)  # [B, H, T, dim/2] each
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        out = out.to(x.dtype)  # fp32 tables promote bf16 queries, so that only the result is rounded
        return out if kept.size(-1) == 0 else torch.cat((out, kept), dim=-1)


class ScaledRotary(Rotary):
    """Base of the scalings: how a model trained at `original_len` reads longer text.

    So `scale` is at work where the text is longer than `original_len`: in training at a longer train_len, and in the
    second reading of an evaluation. Training at `original_len` itself runs at scale 1, which is RoPE bit for bit.

    Args:
        scale: target length / original length, at least 1.
        train_scale: train at this scale instead, whatever the lengths. From scratch the scaled frequencies are then
            merely other frequencies, and extrapolate worse than RoPE's.
        original_len: length in tokens the weights were trained at before any extension; default train_len.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        scale: float = 4.0,
        train_scale: float | None = None,
        original_len: int | None = None,
        **rotary: Any,
    ) -> None:
        super().__init__(shape, **rotary)
        for name, value in (("scale", scale), ("train_scale", train_scale)):
            if value is not None and not 1 <= value < float("inf"):
                raise ValueError(f"pe.{name}={value:g} must be at least 1: target length / original length")
        if original_len is not None and original_len < 1:
            raise ValueError(f"pe.original_len={original_len} must be a positive number of tokens")
        self.original_len = original_len or shape.train_len
        self.scale = scale
        self.train_scale = train_scale or (scale if shape.train_len > self.original_len else 1.0)
        self.active = self.train_scale

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        """What `frequencies` returns at a `scale` above 1."""
        raise NotImplementedError

    def frequencies(self, length: int, device: fr.Device = None) -> fr.Frequencies:
        if self.active == 1:
            return super().frequencies(length, device)
        return self.scaled(self.active, length, device)

    @property
    def temperature(self) -> float:
        # In the softmax scale rather than in cos and sin, where it would miss the channels that do not turn.
        return self.frequencies(self.original_len)[1] ** 2

    @property
    def label(self) -> str:
        return f"scale {self.active:g}" + (", as trained" if self.active == self.train_scale else "")

    def at_scale(self, scale: float) -> Self:
        """This encoding reading at another scale; parameters are shared."""
        reading = copy.copy(self)
        reading.active = scale
        return reading

    def readings(self) -> list[Self]:
        return [self.at_scale(scale) for scale in dict.fromkeys((self.train_scale, self.scale))]

    def reading_for(self, length: int) -> Self:
        return self.at_scale(max(self.scale, self.train_scale) if length > self.original_len else self.train_scale)

    def describe(self) -> list[str]:
        name = type(self).__name__.lower()
        plan = f"trains at scale {self.train_scale:g}" + (" (RoPE)" if self.train_scale == 1 else "")
        if self.scale != self.train_scale:
            plan += f", is evaluated at scale {self.train_scale:g} and {self.scale:g}"
        lines = [f"{name}: {plan}; original length {self.original_len} tokens"]
        if self.scale > 1:
            lines += self.at_scale(self.scale)._describe_frequencies(name)
        return lines

    def _describe_frequencies(self, name: str) -> list[str]:
        plain, _ = super().frequencies(self.original_len)
        scaled, factor = self.frequencies(round(self.scale * self.original_len))
        ratio = scaled / plain  # 1: kept, 1/scale: interpolated
        kept = int((ratio > 1 - 1e-9).sum())
        divided = int((ratio < (1 + 1e-9) / self.scale).sum())
        total = ratio.numel()
        line = (
            f"at scale {self.scale:g}: {kept} of {total} frequencies kept, {total - kept - divided} blended, {divided} "
            f"interpolated; longest wavelength {2 * math.pi / scaled.min().item():.0f} tokens; logit temperature {factor**2:.4f}"
        )
        if kept > 1:
            return [line]
        hint = f"at most one frequency is kept: {name}'s defaults are meant for longer training lengths and larger heads"
        return [line, hint]


class Yarn(ScaledRotary):
    """YaRN (arXiv 2309.00071): low frequencies are interpolated, high ones kept, the logits sharpened.

    Args:
        beta_fast, beta_slow: turns within original_len above which a frequency is kept, below which it is divided by
            the scale.
        ramp: how the blend between them runs, "code" or "paper"; see `frequencies.yarn`.
        The others are those of `ScaledRotary`.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        ramp: Literal["code", "paper"] = "code",
        **scaled: Any,
    ) -> None:
        super().__init__(shape, **scaled)
        if not 0 < beta_slow < beta_fast:
            raise ValueError(f"pe.beta_slow={beta_slow:g} must lie between 0 and pe.beta_fast={beta_fast:g}")
        if ramp not in ("code", "paper"):
            raise ValueError(f"pe.ramp={ramp!r} must be 'code' or 'paper'")
        self.options = dict(beta_fast=beta_fast, beta_slow=beta_slow, ramp=ramp)

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        return fr.yarn(self.dim, self.base, scale=scale, original_len=self.original_len, device=device, **self.options)
