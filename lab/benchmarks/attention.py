"""Attention with every encoding beside PyTorch's causal attention without one: time, and memory over the length."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from model.documents import places
from torch import Tensor

from lab.benchmarks.measure import Passes, at_length, compared, peak_memory
from model import position
from model.attention import sdpa
from model.position import PositionEncoding, Shape
from model.position.layer import attend as attend_with
from model.position.layer import init_parameters, make_context
from model.position.windowed import TrainingFree
from ropewalk.app import cli
from ropewalk.training.hardware import tune

BASE = "SDPA"


def layer(
    options: Any, length: int, pe: PositionEncoding | None = None, *, small_gates: bool = True, sinks: bool = False,
    document: int | None = None,
) -> Passes:  # fmt: skip
    """Return one layer's attention over random q, k, v [batch, n_head, length, head_dim].

    It includes work that a network does once for all layers, such as computing angles: in a network of several layers
    an encoding costs less than here.

    Args:
        options: sizes, dtype and device.
        length: tokens.
        pe: the encoding; None: PyTorch's causal attention without one.
        small_gates: make the gates of CoPE so small that no position reaches the end of its table, which is its worst
            case; otherwise they are about 1/2.
        sinks: with attention sinks.
        document: tokens of each document, of which a row holds several; None: one text a row. Needs kernels.

    Returns:
        "forward" and "both" passes; with `options.compiled` also "compiled", which is both.
    """
    # Drawn on the device: long texts of a large batch would take a CPU seconds a layer.
    generator = torch.Generator(options.device).manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=options.device).to(dtype)

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
    sink_logits = torch.zeros(options.n_head, device=options.device, requires_grad=True) if sinks else None
    if sink_logits is not None:
        inputs.append(sink_logits)
    pos = torch.arange(length, device=options.device)
    in_documents = None
    if document is not None:
        in_documents = places((pos % document).expand(options.batch, -1), None)

    def attend() -> Tensor:
        if pe is None:
            return sdpa(q, k, v, scale=options.head_dim**-0.5, causal=True)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype != "float32"):
            ctx = make_context(pe, pos, length, length, kernels=options.kernels is True, places=in_documents)
            return attend_with(pe, q, k, v, pe.state(x), replace(ctx, sinks=sink_logits))

    def both(attend: Callable[[], Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(attend(), inputs, grad, allow_unused=True)

    passes: Passes = {"forward": torch.no_grad()(attend), "both": partial(both, attend)}
    if options.compiled:
        passes["compiled"] = partial(both, torch.compile(attend, dynamic=False))
    return passes


def layers(options: Any) -> Iterator[tuple[str, Callable[[int], Passes]]]:
    """Yield what to measure: a name, and a function of the length that makes the layer.

    SDPA, the encodings, and NoPE in a window, with sinks and, where there are kernels, in documents.
    """
    yield BASE, partial(layer, options)
    specs = options.encodings or cli.encoding_names()
    named = {str(spec).strip("{}").replace("'", ""): spec for spec in specs}
    for name, spec in named.items():
        encoding = cli.encoding(spec)
        # A pattern costs what its parts cost, which are measured on their own.
        if "pattern" in encoding:
            continue
        yield name, partial(layer_of, options, encoding)
        if name == "cope":
            yield "cope, gates about 1/2", partial(layer_of, options, encoding, small_gates=False)

    nope = cli.encoding("nope")
    yield "nope, window of T/8", lambda length: layer_of(options, nope | {"window": max(1, length // 8)}, length)
    yield "nope, sinks", partial(layer_of, options, nope, sinks=True)
    if options.kernels is True:
        yield "nope, documents of T/8", lambda length: layer_of(options, nope, length, document=max(1, length // 8))


def layer_of(options: Any, encoding: dict[str, Any], length: int, **what: Any) -> Passes:
    """Return `layer` with an encoding of its own, trained at this length.

    A training-free extension is active: it was trained at a quarter of the length.
    """
    dim = options.n_head * options.head_dim
    shape = Shape(dim, options.n_head, options.n_head, options.head_dim, length, n_layer=1)
    (pe,) = position.build_encodings(encoding, shape)
    if isinstance(pe, TrainingFree):
        (pe,) = position.build_encodings(encoding, shape._replace(train_len=max(2, length // 4)))
        pe.active_scale = pe.scales[-1]
    init_parameters(pe, torch.Generator().manual_seed(0))
    return layer(options, length, pe.to(options.device), **what)


def measured(options: Any, name: str, make: Callable[[int], Passes], length: int, base: Passes) -> dict[str, str]:
    """Return cells: the time of each pass, as a ratio to SDPA's, which is in ms; "MB": memory of both passes.

    "off by" tells how far gradients of the compiled layer are from those of the layer itself.

    Args:
        name, make: one of `layers`.
        length: tokens.
        base: SDPA's passes at this length.
    """
    print(f"{name} at {options.batch} x {length}", file=sys.stderr, flush=True)
    if options.compiled:
        torch.compiler.reset()  # the graphs of a function are limited in number
    passes = make(length)
    cells = compared(passes, base, options.rounds, is_base=name == BASE)
    if options.compiled:
        cells["off by"] = f"{largest_difference(passes['both'](), passes['compiled']()):.1e}"
    megabytes = peak_memory(passes["both"], options.device) / 2**20
    return cells | {"MB": f"{megabytes:.1f}"}


def largest_difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Return the largest relative difference of a gradient that has 1,000 numbers or more: few differ by chance."""
    largest = 0.0
    for a, b in zip(expected, found, strict=True):
        if a is not None and b is not None and a.numel() >= 1000:
            difference = ((a.double() - b.double()).norm() / a.double().norm()).item()
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def attention(options: Any) -> list[dict[str, str]]:
    """Return rows of a table: times as ratios to SDPA's, which is in ms; memory of both passes beyond the inputs."""
    tune(options.device)
    bases = {length: layer(options, length) for length in options.lengths}
    rows = []
    for name, make in layers(options):
        row = {"": name}
        for length, base in bases.items():
            row |= at_length(measured(options, name, make, length, base), length)
        rows.append(row)
    return rows
