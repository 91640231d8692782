"""Draw what rotary scalings do: inverse frequency against pair of channels, with the wavelengths that matter.

python scripts/frequencies.py pe=rope,linear,ntk,yarn,llama3 head_dim=64 train_len=256 scale=8 out=frequencies.png

Each encoding is drawn as it reads scale * train_len tokens after training on train_len.
"""

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from pydantic import Field

import conf.cli
from conf.schema import ConfigError, Section, parse
from model import position
from model.position import Shape
from model.position.rotary import Rotary
from model.position.scaled import Scaled

MARKERS = "osD^vP*X"


class Arguments(Section):
    pe: str = Field("rope,linear,ntk,yarn,llama3", min_length=1)  # names of conf/pe
    head_dim: int = Field(64, ge=2)
    train_len: int = Field(256, ge=2)
    scale: float = Field(8.0, gt=1)
    base: float | None = None  # null: that of the encoding's own file
    out: str = "frequencies.png"


def frequencies(name: str, args: Arguments) -> torch.Tensor:
    """Inverse frequencies [head_dim / 2] with which the encoding reads a text of scale * train_len tokens."""
    options = conf.cli.compose(f"pe={name}")["pe"]
    cls = position.resolve(options["_target_"])
    if not issubclass(cls, Rotary):
        raise ConfigError(f"pe={name} has no frequencies to draw: it is not a rotary encoding")
    if args.base is not None:
        options["base"] = args.base
    if issubclass(cls, Scaled) and cls.unscaled == 1:  # its scale is target length / original length
        options["scale"] = args.scale
    pe = position.build(options, Shape(args.head_dim, 1, args.head_dim, args.train_len))
    reading = pe.readings()[-1]
    assert isinstance(reading, Rotary)
    return reading.frequencies(math.ceil(args.scale * args.train_len))[0]


def draw(curves: dict[str, torch.Tensor], args: Arguments) -> Figure:
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    longest = max(len(curve) for curve in curves.values())
    for i, (name, inv_freq) in enumerate(curves.items()):
        turning = inv_freq[inv_freq > 0]
        zeros = len(inv_freq) - len(turning)
        label = name + (f" ({zeros} more are zero)" if zeros else "")
        # Scalings coincide over long stretches: markers at staggered places keep each curve visible.
        every = max(longest // 8, 1)
        axes.plot(
            turning, marker=MARKERS[i % len(MARKERS)], markevery=(i * every // len(curves), every), ms=6, lw=1.8,
            alpha=0.9, label=label,
        )  # fmt: skip
    axes.set(
        yscale="log",
        xlim=(-0.5, longest - 0.5),
        xlabel="pair of channels i",
        ylabel="inverse frequency, radians per token",
        title=f"{args.head_dim} channels, trained on {args.train_len} tokens, reading {args.scale:g} times as many",
    )
    target = math.ceil(args.scale * args.train_len)
    for tokens, words, style in ((args.train_len, "training length", "--"), (target, "target length", ":")):
        axes.axhline(2 * math.pi / tokens, color="0.3", ls=style, lw=1)
        axes.annotate(
            f"wavelength = {words}, {tokens} tokens",
            (longest - 0.5, 2 * math.pi / tokens), xytext=(-6, 3), textcoords="offset points", ha="right",
            color="0.3", fontsize=9,
        )  # fmt: skip
    wavelengths = axes.secondary_yaxis("right", functions=(_reciprocal, _reciprocal))
    wavelengths.set_ylabel("wavelength, tokens")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", frameon=False)
    return figure


def _reciprocal(x: ArrayLike) -> np.ndarray:
    """From frequency to wavelength, and back; matplotlib also asks for that of 0."""
    return 2 * math.pi / np.maximum(np.asarray(x), 1e-30)


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, arguments, strings=True)
    out = Path(args.out)
    if out.suffix != ".png":
        raise ConfigError(f"out={args.out} must end in .png")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"out={args.out}: there is no such directory")
    names = list(dict.fromkeys(name.strip() for name in args.pe.split(",")))
    curves = {name: frequencies(name, args) for name in names}
    draw(curves, args).savefig(out, dpi=150)
    print(f"wrote {out}")


if __name__ == "__main__":
    conf.cli.script(main)
