"""Attention with every encoding beside PyTorch's causal attention without one: time, and memory over the length."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app import cli
from benchmarks.measure import Passes, compared, peak_memory
from model import position
from model.attention import sdpa
from model.position import PositionEncoding, Shape
from model.position.layer import attend as attend_with
from model.position.layer import init_parameters, make_context
from training.hardware import tune

BASE = "SDPA"


def layer(options: Any, length: int, pe: PositionEncoding | None = None, small_gates: bool = True) -> Passes:
    """Return one layer's attention over random q, k, v [batch, n_head, length, head_dim].

    It includes work that a network does once for all layers, such as computing angles: in a network of several layers
    an encoding costs less than here.

    Args:
        options: sizes, dtype and device.
        length: tokens.
        pe: the encoding; None: PyTorch's causal attention without one.
        small_gates: make the gates of CoPE so small that no position reaches the end of its table, which is its worst
            case; otherwise they are about 1/2.

    Returns:
        "forward" and "both" passes; with `options.compiled` also "compiled", which is both.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(options.device, dtype)

    heads = (options.batch, options.n_head, length, options.head_dim)
    q = random(*heads)
    k = random(*heads)
    v = random(*heads)
    grad = random(*heads)
    # The input of the layer, which some encodings read.
    x = random(options.batch, length, options.n_head * options.head_dim)
    if small_gates:
        # A gate is the sigmoid of q.k, which these signs make negative for all pairs.
        q = q.abs()
        k = -1.5 * k.abs()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, x)]
    if pe is not None:
        inputs += pe.parameters()
    pos = torch.arange(length, device=options.device)

    def attend() -> Tensor:
        if pe is None:
            return sdpa(q, k, v, scale=options.head_dim**-0.5, causal=True)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype != "float32"):
            ctx = make_context(pe, pos, length, length, kernels=options.kernels is True)
            return attend_with(pe, q, k, v, pe.state(x), ctx)

    def both(attend: Callable[[], Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(attend(), inputs, grad, allow_unused=True)

    passes: Passes = {"forward": torch.no_grad()(attend), "both": partial(both, attend)}
    if options.compiled:
        passes["compiled"] = partial(both, torch.compile(attend, dynamic=False))
    return passes


def layers(options: Any, length: int) -> Iterator[tuple[str, Passes]]:
    """Yield names and layers to measure: SDPA, encodings, and a window."""
    yield BASE, layer(options, length)
    specs = options.encodings or cli.encoding_names()
    named = {str(spec).strip("{}").replace("'", ""): spec for spec in specs}
    named["nope, window of T/8"] = {"pe": "nope", "window": max(1, length // 8)}
    dim = options.n_head * options.head_dim
    shape = Shape(dim, options.n_head, options.n_head, options.head_dim, length, n_layer=1)
    # Every encoding gets a layer of its own, of the same shape.
    for name, spec in named.items():
        encoding = cli.encoding(spec)
        # A pattern costs what its parts cost, which are measured on their own.
        if "pattern" in encoding:
            continue
        (pe,) = position.build_encodings(encoding, shape)
        init_parameters(pe, torch.Generator().manual_seed(0))
        pe = pe.to(options.device)
        yield name, layer(options, length, pe)
        if name == "cope":
            yield "cope, gates about 1/2", layer(options, length, pe, small_gates=False)


def attention(options: Any) -> list[dict[str, str]]:
    """Return rows of a table: times as ratios to SDPA's, which is in ms; memory of both passes beyond the inputs."""
    tune(options.device)
    rows: dict[str, dict[str, str]] = {}
    for length in options.lengths:
        base = layer(options, length)
        for name, passes in layers(options, length):
            print(f"{name} at {options.batch} x {length}", file=sys.stderr, flush=True)
            if options.compiled:
                torch.compiler.reset()  # the graphs of a function are limited in number
            row = rows.setdefault(name, {"": name})
            row |= compared(passes, base, options.rounds, length, is_base=name == BASE)
            megabytes = peak_memory(passes["both"], options.device) / 2**20
            row[f"MB, {length:,}"] = f"{megabytes:.1f}"
    return list(rows.values())
