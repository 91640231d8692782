"""Inverse frequencies of rotary encodings: one pure function for each published scaling.

Each returns `(inv_freq, attention_factor)`: float64 [dim/2], radians per token, highest first; and the factor
that queries and keys both get (so the logits get its square). `dim` is the number of rotated channels, `base` the
constant called theta in configurations, `scale` target length / original length, `original_len` the tokens the
weights were trained at. float64, because at position 65,535 a rounding of 6e-8 in a float32 frequency already turns
the angle by 4e-3 rad; the tables are tiny, so it costs nothing.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Device = torch.device | str | None
Frequencies = tuple[Tensor, float]


def exact_dtype(device: Device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64


def rope(dim: int, base: float | Tensor, *, device: Device = None) -> Frequencies:
    """base^(-2i/dim), i = 0..dim/2-1. RoFormer, arXiv 2104.09864."""
    exponent = torch.arange(0, dim, 2, dtype=exact_dtype(device), device=device) / dim
    return base**-exponent, 1.0


def linear(dim: int, base: float, *, scale: float, device: Device = None) -> Frequencies:
    """Every frequency divided by `scale`: position interpolation, arXiv 2306.15595."""
    return rope(dim, base, device=device)[0] / scale, 1.0


def ntk(dim: int, base: float, *, scale: float | Tensor, device: Device = None) -> Frequencies:
    """The base is raised until the lowest frequency is divided by `scale`, while the highest stays.

    "NTK-aware", by bloc97, 2023; described in arXiv 2309.00071. `dim` must be at least 4.
    """
    return rope(dim, base * scale ** (dim / (dim - 2)), device=device)


def dynamic_ntk(
    dim: int, base: float, *, scale: float, original_len: int, length: int, device: Device = None
) -> Frequencies:
    """`ntk` whose scale follows the text: 1 up to `original_len` tokens, then 1 + scale (length / original_len - 1).

    By emozilla, 2023; described in arXiv 2309.00071. At `scale` 0 it is RoPE, at 1 the length divides the lowest
    frequency.
    """
    # A tensor, not a float, so that torch.compile has one graph for all lengths.
    tokens = torch.full((), length, dtype=exact_dtype(device), device=device).clamp(min=original_len)
    return ntk(dim, base, scale=1 + scale * (tokens / original_len - 1), device=device)


def ntk_by_parts(
    dim: int,
    base: float,
    *,
    scale: float,
    original_len: int,
    alpha: float = 1.0,
    beta: float = 32.0,
    device: Device = None,
) -> Frequencies:
    """Frequencies that turn at least `beta` times within `original_len` are kept, those that turn at most `alpha` times
    divided by `scale`, and between them the blend is linear in the number of turns.

    arXiv 2309.00071, section 3.2. With alpha = 1, beta = 4 it is the scaling of Llama 3.1 (arXiv 2407.21783), whose
    low and high frequency factors are these two numbers.
    """
    inv_freq, _ = rope(dim, base, device=device)
    turns = original_len * inv_freq / (2 * math.pi)
    return _blend(inv_freq, scale, 1 - (turns - alpha) / (beta - alpha)), 1.0


def yarn(
    dim: int,
    base: float,
    *,
    scale: float,
    original_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    ramp: Literal["code", "unrounded", "paper"] = "code",
    attention_factor: float | None = None,
    device: Device = None,
) -> Frequencies:
    """Frequencies that turn more than `beta_fast` times within `original_len` are kept, those that turn less than
    `beta_slow` times are divided by `scale`, the rest blended; the logits are sharpened. YaRN, arXiv 2309.00071.

    `ramp` says along what the blend is linear: "code", the released code and its many ports, takes the channel index
    between the rounded channels of the two limits, "unrounded" between the limits themselves; "paper" (NTK-by-parts)
    takes the number of turns itself. They differ: dim 128, original_len 4096, channel 28 keeps 0.692 of its frequency
    by the code, 0.342 by the paper. `attention_factor` None is `yarn_attention_factor`.
    """
    factor = attention_factor or yarn_attention_factor(scale)
    if ramp == "paper":
        parts = ntk_by_parts(
            dim, base, scale=scale, original_len=original_len, alpha=beta_slow, beta=beta_fast, device=device
        )
        return parts[0], factor
    inv_freq, _ = rope(dim, base, device=device)
    low, high = yarn_limits(
        dim, base, original_len=original_len, beta_fast=beta_fast, beta_slow=beta_slow, rounded=ramp == "code"
    )
    index = torch.arange(dim // 2, dtype=inv_freq.dtype, device=device)
    return _blend(inv_freq, scale, (index - low) / max(high - low, 1e-3)), factor


def yarn_limits(
    dim: int, base: float, *, original_len: int, beta_fast: float, beta_slow: float, rounded: bool
) -> tuple[float, float]:
    """The channels, numbered from 0, up to which `yarn` keeps a frequency, and from which it divides it."""

    def channel(turns: float) -> float:  # the channel that turns so often within original_len
        return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(beta_fast), channel(beta_slow)
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def yarn_attention_factor(scale: float) -> float:
    """0.1 ln(scale) + 1, fitted by YaRN's authors to the lowest perplexity on LLaMA models."""
    return 0.1 * math.log(scale) + 1.0 if scale > 1 else 1.0


def longrope(
    dim: int,
    base: float,
    *,
    scale: float,
    original_len: int,
    length: int,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    attention_factor: float | None = None,
    device: Device = None,
) -> Frequencies:
    """Every frequency divided by a factor of its own, out of `long_factor` [dim/2] where the text is longer than
    `original_len`, else out of `short_factor`; the logits are sharpened at every length. LongRoPE, arXiv 2402.13753.

    `attention_factor` None is sqrt(1 + ln(scale) / ln(original_len)).
    """
    inv_freq, _ = rope(dim, base, device=device)
    short, long = (torch.tensor(f, dtype=inv_freq.dtype, device=device) for f in (short_factor, long_factor))
    # Chosen by a tensor for the reason given in `dynamic_ntk`.
    factors = torch.where(torch.full((), length, device=device) > original_len, long, short)
    return inv_freq / factors, attention_factor or math.sqrt(1 + math.log(scale) / math.log(original_len))


def p_rope(dim: int, base: float, *, proportion: float, factor: float = 1.0, device: Device = None) -> Frequencies:
    """The `proportion` highest of RoPE's frequencies divided by `factor`, the others zero. arXiv 2410.06205."""
    inv_freq, _ = rope(dim, base, device=device)
    kept = torch.arange(dim // 2, device=device) < int(proportion * dim // 2)
    return inv_freq * kept / factor, 1.0


def _blend(inv_freq: Tensor, scale: float, interpolated: Tensor) -> Tensor:
    """Frequencies between those given (where `interpolated` is 0 or less) and those over `scale` (1 or more)."""
    share = interpolated.clamp(0, 1)
    return inv_freq / scale * share + inv_freq * (1 - share)
