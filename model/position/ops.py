"""Tensor operations that several encodings share: rotations, shifts, sums, limits, a convolution."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

Base = Annotated[float, Field(gt=1, allow_inf_nan=False)]  # of the geometric series of rotary frequencies
Device = torch.device | str | None


def exact_dtype(device: Device) -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs, which have no float64.

    At position 65,535 the rounding of a float32 frequency, 6e-8, already changes the angle by 4e-3 rad.
    """
    if device is not None and torch.device(device).type == "mps":
        return torch.float32
    return torch.float64


def inverse_frequencies(dim: int, base: float | Tensor, device: Device = None) -> Tensor:
    """Return base^(-2i/dim) for i = 0..dim/2-1, in radians per token, the highest first: `exact_dtype` [dim/2]."""
    channel = torch.arange(0, dim, 2, dtype=exact_dtype(device), device=device)
    return base ** -(channel / dim)


def cos_sin(angle: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles in `exact_dtype`, in `dtype` and of the same shape."""
    # Rounded only now: an angle of thousands of radians is too coarse in fp32, its cosine is not.
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """Rotate the pairs of channels of `x` by angles.

    Args:
        x: [B, H, T, D], of any dtype, which the result has too.
        cos, sin: cosine and sine of the angles, fp32 [..., T, D/2]. They promote bf16 queries, so that only the result
            is rounded.
        layout: which channels form pair i: "half", (i, i + D/2), or "interleaved", (2i, 2i + 1).
    """
    if layout == "half":
        a, b = x.chunk(2, dim=-1)  # [B, H, T, D/2] each
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a = x[..., 0::2]  # [B, H, T, D/2]
        b = x[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)  # [.., D/2, 2] -> [.., D]
    return rotated.to(x.dtype)


def shifted(rows: Tensor, keys: int) -> Tensor:
    """Turn values by query and distance into values by query and key, without a gather.

    Args:
        rows: [..., Tq, keys + Tq]. In every row column m holds the value of the distance keys - 1 - m; columns from
            `keys` on are the future. `rows` is expanded, or starts at the beginning of its storage.
        keys: number of keys; the queries are the newest of their tokens.

    Returns:
        [..., Tq, keys].
    """
    queries = rows.size(-2)
    if queries == 1:
        return rows[..., :keys]
    # The last query reads its row from column 0 on, the query before it, one token older, from column 1 on, and so the
    # first one from column Tq - 1. With the rows laid end to end, a step of one row less one column leads from a query
    # to the next. One strided view does it all; slices would cost the gradient two passes more.
    flat = rows.flatten(-2)  # [..., Tq (keys + Tq)]
    size = (*rows.shape[:-1], keys)
    stride = (*flat.stride()[:-1], rows.size(-1) - 1, 1)
    return flat.as_strided(size, stride, storage_offset=queries - 1)


def sums_to_the_end(x: Tensor) -> Tensor:
    """Sums of each element of the last dimension and all elements after it; same shape."""
    return x.flip(-1).cumsum(-1).flip(-1)


def bounded(x: Tensor, low: float, high: float | None = None) -> Tensor:
    """Clamp x, but with the gradient of x itself, so that a parameter pushed beyond a limit can come back."""
    return x + (x.clamp(low, high) - x).detach()


def unit_vectors(x: Tensor) -> Tensor:
    """Scale the vectors in the last dimension to length 1; same shape. A vector of zeros stays one."""
    squared = x.square().sum(-1, keepdim=True)
    return x * (squared + 1e-6).rsqrt()


def short_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel of `x` [B, T, C] with its own `kernel` [C, width], over a token and those before it."""
    # Zeros stand in for the tokens before the first, so no token sees a later one.
    past = kernel.size(1) - 1
    padded = F.pad(x.mT, (past, 0))  # [B, C, past + T]
    return F.conv1d(padded, kernel[:, None], groups=kernel.size(0)).mT


def without_low_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Set the bits of `x` that `dtype` cannot hold to zero; same shape and dtype. What is left out has no gradient.

    `x.to(dtype)` and back would round instead, and a compiler is free to drop the two conversions.

    Args:
        x: fp32, or float64.
        dtype: bf16 or fp16, or fp32.
    """
    kept = -round(math.log2(torch.finfo(dtype).eps))  # bits of the significand, without its leading one
    has = -round(math.log2(torch.finfo(x.dtype).eps))
    as_integers = torch.int64 if x.dtype == torch.float64 else torch.int32
    bits = x.detach().view(as_integers)
    return (bits & -(1 << (has - kept))).view(x.dtype)


def reset_as_linear(weight: Tensor, generator: torch.Generator, bias: Tensor | None = None) -> None:
    """Fill `weight` [..., fan_in], and then `bias`, as `nn.Linear` starts: uniform within fan_in^-1/2, in place."""
    bound = weight.size(-1) ** -0.5
    nn.init.uniform_(weight, -bound, bound, generator)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound, generator)
