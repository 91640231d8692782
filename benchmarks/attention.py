"""Attention with every encoding beside PyTorch's causal attention without one: time, and memory over the length."""

import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from app import cli
from benchmarks.measure import interleave, peak_memory, ratio, timed
from model import position
from model.attention import sdpa
from model.position import PositionEncoding, Shape
from model.position.layer import attend as attend_with
from model.position.layer import init_parameters, make_context
from training.hardware import tune

Passes = dict[str, Callable[[], Any]]  # "forward", and "both": forward and backward


def layer(options: Any, length: int, pe: PositionEncoding | None = None, small_gates: bool = True) -> Passes:
    """One layer's attention over random q, k, v [1, n_head, length, head_dim]; without an encoding, PyTorch's causal.

    It includes what a network computes once for all layers, such as angles: there an encoding costs less than here.
    CoPE has its worst case: gates so small that no position reaches the end of its table; else they are about 1/2.
    """
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, options.dtype)
    sizes = [(1, options.n_head, length, options.head_dim)] * 4 + [(1, length, options.n_head * options.head_dim)]
    q, k, v, grad, x = (torch.randn(size, generator=generator).to(options.device, dtype) for size in sizes)
    if small_gates:
        q, k = q.abs(), -1.5 * k.abs()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, x)] + list(pe.parameters() if pe else ())
    pos = torch.arange(length, device=options.device)

    def attend() -> Tensor:
        if pe is None:
            return sdpa(q, k, v, scale=options.head_dim**-0.5, causal=True)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.dtype != "float32"):
            return attend_with(pe, q, k, v, pe.state(x), make_context(pe, pos, length, length))

    def both() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(attend(), inputs, grad, allow_unused=True)

    return {"forward": torch.no_grad()(attend), "both": both}


def layers(options: Any, length: int) -> Iterator[tuple[str, Passes]]:
    """What is measured, with a name each: SDPA, encodings, and a window. A pattern costs what its parts cost."""
    yield "SDPA", layer(options, length)
    specs = options.encodings or sorted(path.stem for path in (cli.CONF_DIR / "pe").glob("*.yaml"))
    named = {str(spec).strip("{}").replace("'", ""): spec for spec in specs}
    named["nope, window of T/8"] = {"pe": "nope", "window": max(1, length // 8)}
    shape = Shape(options.n_head * options.head_dim, options.n_head, options.n_head, options.head_dim, length, 1)
    for name, spec in named.items():
        if "pattern" not in (encoding := cli.encoding(spec)):
            (pe,) = position.build_encodings(encoding, shape)
            init_parameters(pe, torch.Generator().manual_seed(0))
            yield name, layer(options, length, pe.to(options.device))
            if name == "cope":
                yield "cope, gates about 1/2", layer(options, length, pe, small_gates=False)


def attention(options: Any) -> list[dict[str, str]]:
    """Rows of a table: time as a ratio to SDPA's, which is in ms; memory of both passes beyond the inputs."""
    tune(options.device)
    rows: dict[str, dict[str, str]] = {}
    for length in options.lengths:
        base = layer(options, length)
        for name, passes in layers(options, length):
            print(f"{name} at {length}", file=sys.stderr, flush=True)
            row = rows.setdefault(name, {"": name})
            for what in ("forward", "both"):
                of_base, own = interleave(timed(base[what]), timed(passes[what]), options.rounds)
                row[f"{what}, {length:,}"] = f"{1e3 * median(own):.3g} ms" if name == "SDPA" else ratio(own, of_base)
            row[f"MB, {length:,}"] = f"{peak_memory(passes['both'], options.device) / 2**20:.1f}"
    return list(rows.values())
