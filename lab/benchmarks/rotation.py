"""Rotations in real and in complex arithmetic, eager and compiled: the same values, at different speeds."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks.measure import Passes, Row, compared
from model.position import Shape
from model.position.ops import rotate_pairs
from model.position.rotary import Rotary

ARITHMETIC = ("real, half layout", "real, interleaved", "complex, interleaved")


def rotate_complex(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate channels (2i, 2i + 1) of `x` [B, H, T, D] by a product of complex numbers with `turn` [T, D/2]."""
    # PyTorch has no complex bf16: such queries are rotated in fp32, and the result is rounded.
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # [B, H, T, D/2]
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def rotation(options: Any, length: int, *, arithmetic: str, compiled: bool) -> Passes:
    """Return the rotation of a random x [1, n_head, length, head_dim] in one of `ARITHMETIC`."""
    generator = torch.Generator().manual_seed(0)
    size = (1, options.n_head, length, options.head_dim)
    x, grad = torch.randn(2, *size, generator=generator).to(options.device, getattr(torch, options.dtype))
    x.requires_grad_()
    shape = Shape(options.n_head * options.head_dim, options.n_head, options.n_head, options.head_dim, length, 1)
    # Outside the measurement: a network computes the angles once for all layers.
    cos, sin = Rotary(shape).tables(torch.arange(length, device=options.device), length)
    layout = "half" if "half" in arithmetic else "interleaved"
    rotate: Callable[[Tensor], Tensor] = partial(rotate_pairs, cos=cos, sin=sin, layout=layout)
    if arithmetic == "complex, interleaved":
        rotate = partial(rotate_complex, turn=torch.complex(cos, sin))
    if compiled:
        torch.compiler.reset()  # of functions with the same code the compiler keeps few versions
        rotate = torch.compile(rotate, dynamic=False)
    return {"forward": torch.no_grad()(partial(rotate, x)), "both": lambda: torch.autograd.grad(rotate(x), x, grad)}


def rotations(options: Any) -> Iterator[Row]:
    """Yield rows of a table: each arithmetic beside real pairs in the half layout."""
    makers = {}
    for compiled, arithmetic in itertools.product((False, True), ARITHMETIC):
        name = f"{arithmetic}, {'compiled' if compiled else 'eager'}"
        makers[name] = partial(rotation, options, arithmetic=arithmetic, compiled=compiled)
    return compared(options, makers)
