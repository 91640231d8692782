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
from ropewalk.training.hardware import tune

ARITHMETIC = ("real, half layout", "real, interleaved", "complex, interleaved")


def rotate_complex(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate channels (2i, 2i + 1) of `x` [B, H, T, D] by a product of complex numbers with `turn` [T, D/2]."""
    # PyTorch has no complex bf16: such queries are rotated in fp32, and the result is rounded.
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # [B, H, T, D/2]
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def rotation(options: Any, length: int, arithmetic: str, compiled: bool) -> Passes:
    """Return the rotation of a random x [1, n_head, length, head_dim] in one of `ARITHMETIC`."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    size = (1, options.n_head, length, options.head_dim)
    x, grad = (torch.randn(size, generator=generator).to(options.device, dtype) for _ in range(2))
    x.requires_grad_()

    layout = "half" if "half" in arithmetic else "interleaved"
    shape = Shape(options.n_head * options.head_dim, options.n_head, options.n_head, options.head_dim, length, 1)
    # Outside the measurement: a network computes the angles once for all layers.
    cos, sin = Rotary(shape).tables(torch.arange(length, device=options.device), length)
    turn = torch.complex(cos, sin)

    def rotate(x: Tensor) -> Tensor:
        if arithmetic == "complex, interleaved":
            return rotate_complex(x, turn)
        return rotate_pairs(x, cos, sin, layout=layout)

    function: Callable[[Tensor], Tensor] = rotate
    if compiled:
        # All functions compiled here share one code object, of which the compiler keeps few versions. Without a reset
        # it would silently run the later ones eagerly.
        torch.compiler.reset()
        function = torch.compile(rotate, dynamic=False)

    forward = torch.no_grad()(partial(function, x))
    return {"forward": forward, "both": lambda: torch.autograd.grad(function(x), x, grad)}


def rotations(options: Any) -> Iterator[Row]:
    """Yield rows of a table: times as ratios to that of the first row, which is in ms."""
    tune(options.device)
    bases = {length: rotation(options, length, ARITHMETIC[0], compiled=False) for length in options.lengths}
    for arithmetic, compiled in itertools.product(ARITHMETIC, (False, True)):
        row = {"": f"{arithmetic}, {'compiled' if compiled else 'eager'}"}
        for length, base in bases.items():
            is_base = arithmetic == ARITHMETIC[0] and not compiled
            passes = base if is_base else rotation(options, length, arithmetic, compiled)
            row |= compared(passes, base, length, options.rounds)
        yield row
