"""Attention with every encoding beside PyTorch's causal attention without one: time, and memory over the length."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks.measure import Passes, Row, compared, peak_memory
from model import position
from model.position import PositionEncoding, Shape
from model.position.layer import init_parameters, make_context
from model.position.windowed import TrainingFree
from ropewalk import plugins
from ropewalk.app import cli
from ropewalk.training.hardware import tune

BASE = "SDPA"


def layer(options: Any, length: int, pe: PositionEncoding | None = None, *, small_gates: bool = True) -> Passes:
    """Return one layer's attention over random q, k, v [batch, length, n_head, head_dim].

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
    # Drawn on the device: long texts of a large batch would take a CPU seconds a layer.
    generator = torch.Generator(options.device).manual_seed(0)
    dtype = getattr(torch, options.dtype)
    heads = (options.batch, length, options.n_head, options.head_dim)
    q, k, v, grad = (torch.randn(heads, generator=generator, device=options.device).to(dtype) for _ in range(4))
    x = q.flatten(2).clone()  # the input of the layer, which some encodings read
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
            q_heads, k_heads, v_heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q_heads, k_heads, v_heads, is_causal=True)
            return out.transpose(1, 2)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype != "float32"):
            return make_context(pe, pos, length, length).attend(pe, q, k, v, pe.state(x), layer=0)

    def both(attend: Callable[[], Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(attend(), inputs, grad, allow_unused=True)

    passes: Passes = {"forward": torch.no_grad()(attend), "both": partial(both, attend)}
    if options.compiled:
        torch.compiler.reset()  # the graphs of a function are limited in number
        passes["compiled"] = partial(both, torch.compile(attend, dynamic=False))
    return passes


def layers(options: Any) -> Iterator[tuple[str, Callable[[int], Passes]]]:
    """Yield what to measure: a name, and a function of the length that makes the layer."""
    for spec in options.encodings or cli.encoding_names():
        encoding = cli.encoding(spec)
        # A pattern costs what its parts cost, which are measured on their own.
        if "pattern" in encoding:
            continue
        yield encoding["name"], partial(layer_of, options, encoding)
        if encoding["name"] == "cope":
            yield "cope, gates about 1/2", partial(layer_of, options, encoding, small_gates=False)
    nope = cli.encoding("nope")
    yield "nope, window of T/8", lambda length: layer_of(options, nope | {"window": max(1, length // 8)}, length)


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
    if options.kernels is True:
        plugins.kernels().install([pe])
    return layer(options, length, pe.to(options.device), **what)


def attention(options: Any) -> Iterator[Row]:
    """Yield rows of a table: times as ratios to SDPA's, which is in ms; memory of both passes beyond the inputs."""
    tune(options.device)
    bases = {length: layer(options, length) for length in options.lengths}
    for name, make in [(BASE, bases.__getitem__), *layers(options)]:
        row = {"": name}
        for length, base in bases.items():
            print(f"{name} at {options.batch} x {length}", file=sys.stderr, flush=True)
            passes = make(length)
            row |= compared(passes, base, length, options.rounds)
            row[f"MB, {length:,}"] = f"{peak_memory(passes['both'], options.device) / 2**20:.1f}"
        yield row
