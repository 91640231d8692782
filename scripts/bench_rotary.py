"""Time the rotation of queries: real against complex arithmetic, eager against compiled.

python scripts/bench_rotary.py length=1024 threads=1

Prints milliseconds, and the ratio to the real half layout, eager, which is what a network uses unless compiled.
"""

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.benchmark import Timer

import conf.cli
from conf.schema import Section, parse
from model.position import Shape
from model.position.rotary import Rotary


class Arguments(Section):
    batch: int = Field(8, ge=1)
    n_head: int = Field(8, ge=1)
    length: int = Field(1024, ge=1)
    head_dim: int = Field(64, ge=2)
    threads: int = Field(1, ge=1)


def rotate_complex(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """The interleaved rotation as a product of complex numbers: pairs [B, H, T, D/2] times cos + i sin."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(*table)).flatten(-2).to(x.dtype)


def milliseconds(function: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor], x: Tensor, table: object) -> float:
    """Median time of a forward and a backward pass."""

    def step() -> None:
        x.grad = None
        function(x, table).sum().backward()  # type: ignore[arg-type]

    step()  # compiles
    return (
        1000
        * Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        .blocked_autorange(min_run_time=1)
        .median
    )


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, arguments, strings=True)
    torch.set_num_threads(args.threads)
    x = torch.randn(args.batch, args.n_head, args.length, args.head_dim, requires_grad=True)
    shape = Shape(args.n_head * args.head_dim, args.n_head, args.head_dim, args.length)
    half, interleaved = Rotary(shape, layout="half"), Rotary(shape, layout="interleaved")
    table = half.tables(torch.arange(args.length), args.length)
    torch.testing.assert_close(rotate_complex(x, table), interleaved.rotate(x, table))
    ways = {
        "real, half": half.rotate,
        "real, interleaved": interleaved.rotate,
        "complex, interleaved": rotate_complex,
    }
    print(f"q {list(x.shape)} fp32, forward and backward, {args.threads} CPU thread(s), torch {torch.__version__}")
    base = None
    for name, rotate in ways.items():
        for mode, function in (("eager", rotate), ("compiled", torch.compile(rotate, fullgraph=True))):
            ms = milliseconds(function, x, table)
            base = base or ms
            print(f"{name:22}{mode:10}{ms:8.2f} ms{ms / base:8.2f} x", flush=True)


if __name__ == "__main__":
    conf.cli.script(main)
