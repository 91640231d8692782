"""Inverse frequencies of rotary encodings: one pure function for each published scaling.

Each returns `(inv_freq, attention_factor)`: float64 [dim/2], radians per token, highest first; and the factor
that queries and keys both get (so the logits get its square). `dim` is the number of rotated channels, `base` the
constant called theta in configurations. float64, because at position 65,535 a rounding of 6e-8 in a float32
frequency already turns the angle by 4e-3 rad; the tables are tiny, so it costs nothing.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Device = torch.device | str | None
Frequencies = tuple[Tensor, float]


def rope(dim: int, base: float, *, device: Device = None) -> Frequencies:
    """base^(-2i/dim), i = 0..dim/2-1. RoFormer, arXiv 2104.09864."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return base**-exponent, 1.0


def yarn(
    dim: int,
    base: float,
    *,
    scale: float,
    original_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    ramp: Literal["code", "paper"] = "code",
    device: Device = None,
) -> Frequencies:
    """Frequencies that turn more than `beta_fast` times within `original_len` are kept, those that turn less than
    `beta_slow` times are divided by `scale`, the rest blended; the logits are sharpened. YaRN, arXiv 2309.00071.

    `ramp` says along what the blend is linear: "code", the released code and its many ports, takes the channel index
    between the rounded channels of the two limits; "paper" (NTK-by-parts) takes the number of turns itself.
    They differ: dim 128, original_len 4096, channel 28 keeps 0.692 of its frequency by the code, 0.342 by the paper.
    """
    inv_freq, _ = rope(dim, base, device=device)
    if ramp == "code":

        def channel(turns: float) -> float:  # the channel that turns so often within original_len
            return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(channel(beta_fast)), 0), min(math.ceil(channel(beta_slow)), dim - 1)
        index = torch.arange(dim // 2, dtype=torch.float64, device=device)
        interpolated = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    else:
        turns = original_len * inv_freq / (2 * math.pi)
        interpolated = 1 - ((turns - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    blended = inv_freq / scale * interpolated + inv_freq * (1 - interpolated)
    return blended, yarn_attention_factor(scale)


def yarn_attention_factor(scale: float) -> float:
    """0.1 ln(scale) + 1, fitted by YaRN's authors to the lowest perplexity on LLaMA models."""
    return 0.1 * math.log(scale) + 1.0 if scale > 1 else 1.0
