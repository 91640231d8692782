"""Attention of every encoding beside PyTorch's causal attention without one: time and memory over the length."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

import conf.cli
from benchmarks.measure import Kind, Pairs, beside, growth, in_fresh_process
from benchmarks.report import Outcome, Table, progress
from conf.schema import ConfigError, Section, parse
from model import position
from model.attention import attend
from model.machine import forget_past_work, keep_freed_memory, peak_memory, tune_cpu
from model.position import PositionEncoding, Shape
from model.position import cope as plain
from model.position.cope import CoPE
from model.position.rotary import Rotary

SDPA, SPARSE, DEFINITION = "SDPA", "gates that never clamp", "by its definition"


def listed(text: str) -> list[int]:
    """Integers of a command line: "1024,2048", with or without brackets."""
    try:
        return sorted({int(part) for part in text.strip("[]").split(",")})
    except ValueError:
        raise ValueError("should be whole numbers, such as 1024,2048") from None


class Arguments(Section):
    """Sizes are those of queries [batch, n_head, length, head_dim], with as many heads of keys."""

    pe: str = "all"  # or names of conf/pe
    lengths: Annotated[list[int], BeforeValidator(listed)] = Field([1024, 2048, 4096], min_length=1)
    batch: int = Field(1, ge=1)
    n_head: int = Field(8, ge=1)
    head_dim: int = Field(64, ge=2)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rounds: int = Field(5, ge=1)
    threads: int = Field(0, ge=0)  # 0: as PyTorch chooses
    clock: Kind = "wall"  # of the tables; JSON has both
    onednn: bool = True  # false: fp32 products by MKL, as PyTorch has them on AMD's processors if nobody tells it
    memory: bool = True  # also memory, each figure in a process of its own
    definition: int = Field(2048, ge=0)  # the longest text for CoPE by its definition, which holds all scores
    rotary: bool = True  # also the rotation by itself: real against complex, eager against compiled
    out: str | None = None  # JSON file


@dataclass(frozen=True)
class Request:
    args: Arguments
    device: str
    encodings: dict[str, dict[str, Any]]


def read(arguments: dict[str, str]) -> Request:
    """Raises ConfigError, or Hydra's error for an encoding that does not exist."""
    args = parse(Arguments, arguments, strings=True)
    if min(args.lengths) < 2:
        raise ConfigError(f"lengths={min(args.lengths)}: a text needs at least 2 tokens to attend")
    gpu = torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        raise ConfigError("device=cuda: there is no GPU here")
    device = args.device if args.device != "auto" else "cuda" if gpu else "cpu"
    names = args.pe.split(",")
    if args.pe == "all":
        names = sorted(path.stem for path in (conf.cli.CONF_DIR / "pe").glob("*.yaml"))
    encodings = {name: conf.cli.compose(f"pe={name}")["pe"] for name in names}
    for options in encodings.values():
        for length in args.lengths:
            with torch.device("meta"):
                position.build(options, shape_of(args, length))
    return Request(args, device, encodings)


def shape_of(args: Arguments, length: int) -> Shape:
    return Shape(args.n_head * args.head_dim, args.n_head, args.head_dim, length)


class Case:
    """One layer's attention over random queries and keys, or with `sparse` ones that make every gate of CoPE small.

    `forward` and `both` (with the backward pass) include all that the encoding does for a layer. What is made once for
    a network, such as angles or a bias, is in each call too: with many layers it counts for less.
    """

    def __init__(
        self, args: Arguments, device: str, length: int, options: dict[str, Any] | None, variant: str = ""
    ) -> None:
        shape = shape_of(args, length)
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, args.dtype)

        def normal() -> Tensor:
            size = args.batch, args.n_head, length, args.head_dim
            return torch.randn(size, generator=generator).to(device, dtype)

        self.q, self.k, self.v, self.grad = (normal() for _ in range(4))
        if variant == SPARSE:
            self.q, self.k = self.q.abs(), -1.5 * self.k.abs()
        self.x = torch.zeros(args.batch, length, shape.dim, device=device, dtype=dtype)
        self.pos = torch.arange(length, device=device)
        self.pe: PositionEncoding | None = None
        self.inputs = [self.q.requires_grad_(), self.k.requires_grad_(), self.v.requires_grad_()]
        if options is not None:
            self.pe = position.build(options, shape).to(device)
            with torch.no_grad():
                self.pe.reset_parameters(generator)
            self.inputs += list(self.pe.parameters())
        self.attention = self._by_definition if variant == DEFINITION else self._attention

    def _attention(self) -> Tensor:
        if self.pe is None:
            return attend(self.q, self.k, self.v, scale=self.q.size(-1) ** -0.5, causal=True)
        pe, k = self.pe, self.k
        ctx = pe.context(self.pos, self.pos, len(self.pos), whole=True)
        k = pe.cached_keys(pe.rotate_key(k, ctx.rot_k), self.x)
        return pe.attention(pe.rotate(self.q, ctx.rot_q), k, self.v, ctx)

    def _by_definition(self) -> Tensor:
        assert isinstance(self.pe, CoPE)
        visible = self.pos[:, None] >= self.pos
        scale = self.q.size(-1) ** -0.5
        return plain.cope_attention(self.q, self.k, self.v, self.pe.table, scale=scale, visible=visible)

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.attention()

    def both(self) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(self.attention(), self.inputs, self.grad, allow_unused=True)


def held(args: Arguments, device: str, length: int, options: dict[str, Any] | None, variant: str, what: str) -> int:
    """Bytes that the pass `what` takes beyond its inputs. To be called in a fresh process."""
    if args.threads:
        torch.set_num_threads(args.threads)
    getattr(Case(args, device, min(length, 64), options, variant), what)()  # what libraries keep from their first use
    case = Case(args, device, length, options, variant)
    forget_past_work()
    before = peak_memory(device)
    getattr(case, what)()
    return peak_memory(device) - before


def measure(request: Request) -> Outcome:
    args, device = request.args, request.device
    if args.threads:
        torch.set_num_threads(args.threads)
    if device == "cpu":
        tune_cpu() if args.onednn else keep_freed_memory()
    measurements: list[dict[str, Any]] = []
    for length in args.lengths:
        for what in ("forward", "both"):
            measurements += _at(request, length, what)
    tables = _tables(args, measurements)
    if args.rotary:
        rows = rotations(args, device)
        tables.append(Table(f"Rotation of q, forward and backward, {args.lengths[0]:,} tokens", rows))
    shape = f"q, k, v [{args.batch}, {args.n_head}, T, {args.head_dim}], {args.dtype}"
    note = f"{shape}; {args.clock} time, medians of {args.rounds} pairs, each beside SDPA."
    return Outcome(tables, measurements, [note])


def _variants(request: Request, length: int) -> dict[str, tuple[dict[str, Any], str]]:
    """What is measured: name -> (options, variant)."""
    found = {}
    for name, options in request.encodings.items():
        found[name] = options, ""
        if name == "cope":
            found[f"{name}, {SPARSE}"] = options, SPARSE
            if length <= request.args.definition:
                found[f"{name}, {DEFINITION}"] = options, DEFINITION
    return found


def _at(request: Request, length: int, what: str) -> list[dict[str, Any]]:
    args, device = request.args, request.device
    progress(f"attention over {length} tokens, {what}")
    variants = _variants(request, length)
    base = Case(args, device, length, None)
    functions: dict[str, Callable[[], Any]] = {
        name: getattr(Case(args, device, length, options, variant), what)
        for name, (options, variant) in variants.items()
    }
    pairs = beside(getattr(base, what), functions, rounds=args.rounds, device=device)

    def bytes_of(options: dict[str, Any] | None, variant: str) -> int | None:
        if not args.memory:
            return None
        if device == "cuda":  # its allocator counts by itself
            return held(args, device, length, options, variant, what)
        return in_fresh_process(held, args, device, length, options, variant, what)

    own = bytes_of(None, "")
    every = Pairs([], [clock for pair in pairs.values() for clock in pair.base])
    rows = [{"encoding": SDPA, "length": length, "pass": what, "bytes": own} | _seconds(every)]
    for name, (options, variant) in variants.items():
        row = {"encoding": name, "length": length, "pass": what, "bytes": bytes_of(options, variant)}
        ratios = {f"{kind}_ratio": pairs[name].ratio(kind)._asdict() for kind in ("wall", "cpu")}
        rows.append(row | _seconds(pairs[name]) | ratios)
    return rows


def _seconds(pairs: Pairs) -> dict[str, float]:
    return {"wall": pairs.seconds("wall"), "cpu": pairs.seconds("cpu")}


def _tables(args: Arguments, measurements: list[dict[str, Any]]) -> list[Table]:
    """For each pass the ratios to SDPA, by length, with the exponent of growth."""
    tables = []
    for what, title in (("forward", "Forward"), ("both", "Forward and backward")):
        found = {(m["encoding"], m["length"]): m for m in measurements if m["pass"] == what}
        names = list(dict.fromkeys(name for name, _ in found))
        for key, quantity in ((args.clock, "time"), *([("bytes", "memory beyond the inputs")] if args.memory else [])):
            unit, factor = ("ms", 1e3) if quantity == "time" else ("MB", 2.0**-20)
            rows = []
            for name in names:
                values = [found.get((name, n), {}).get(key) for n in args.lengths]
                base = [found[SDPA, n][key] for n in args.lengths]
                shown: list[float | None] = []
                for n, value, of_sdpa in zip(args.lengths, values, base, strict=True):
                    if value is None or name == SDPA:
                        shown.append(value if value is None else value * factor)
                    elif quantity == "time":
                        shown.append(found[name, n][f"{key}_ratio"]["median"])
                    else:
                        shown.append(value / of_sdpa if of_sdpa else None)
                row: dict[str, Any] = {"": f"{SDPA}, {unit}" if name == SDPA else name}
                row |= {f"{n:,}": value for n, value in zip(args.lengths, shown, strict=True)}
                rows.append(row | {"grows as T^": growth(args.lengths, values)})
            tables.append(Table(f"{title}: {quantity} as a ratio to SDPA, by length", rows))
    return tables


def rotate_complex(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """The interleaved rotation as a product of complex numbers: pairs [B, H, T, D/2] times cos + i sin."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(*table)).flatten(-2).to(x.dtype)


def rotations(args: Arguments, device: str) -> list[dict[str, Any]]:
    """The rotation alone, as a ratio to the real half layout, eager, which a network uses unless compiled."""
    progress("rotation")
    length = args.lengths[0]
    shape = shape_of(args, length)
    half, interleaved = Rotary(shape, layout="half"), Rotary(shape, layout="interleaved")
    size = args.batch, args.n_head, length, args.head_dim
    x = torch.randn(size, device=device, dtype=getattr(torch, args.dtype), requires_grad=True)
    table = half.tables(torch.arange(length, device=device), length)
    torch.testing.assert_close(rotate_complex(x, table), interleaved.rotate(x, table))

    def both(rotate: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(rotate(x, table).sum(), x)

    ways = {
        "real, half": half.rotate,
        "real, interleaved": interleaved.rotate,
        "complex, interleaved": rotate_complex,
    }
    functions = {(name, "eager"): both(rotate) for name, rotate in ways.items()}
    functions |= {(name, "compiled"): both(torch.compile(rotate, fullgraph=True)) for name, rotate in ways.items()}
    try:
        pairs = beside(both(half.rotate), functions, rounds=args.rounds, device=device)  # type: ignore[arg-type]
    except Exception as error:  # the compiler's errors have no common class
        progress(f"not compiled: {str(error).strip().splitlines()[0]}")
        functions = {key: function for key, function in functions.items() if key[1] == "eager"}
        pairs = beside(both(half.rotate), functions, rounds=args.rounds, device=device)  # type: ignore[arg-type]
    return [
        {"": name}
        | {mode: pairs[name, mode].ratio(args.clock).median for way, mode in functions if way == name}  # type: ignore[index]
        | {"eager, ms": 1000 * pairs[name, "eager"].seconds(args.clock)}  # type: ignore[index]
        for name in ways
    ]
