"""The gallery that `scripts/draw.py` writes: pictures of encodings, and of a trained run's attention and gates."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from pydantic import Field

import ropewalk
from conf.schema import Count, Section
from data.tasks.base import Generated
from lab.pictures import pictures
from model.position import Shape
from model.position.cope import CoPE
from model.position.rotary import Rotary
from ropewalk.app.cli import encoding, encoding_names
from ropewalk.files import write_bytes, write_text
from ropewalk.report import plot

Draw = Callable[[Axes], None]
PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Encodings</title><style>:root{color-scheme:light dark}body{font:1rem/1.45 system-ui,sans-serif;max-width:84rem;
margin:auto;padding:1rem}h1{font-size:1.6rem}h2{font-size:1.1rem}
svg{width:420px;max-width:100%;margin:4px;border:1px solid #8884;border-radius:6px;vertical-align:top}
pre{white-space:pre-wrap;overflow-wrap:anywhere}</style>
<h1>What encodings do</h1>
<p>Scores: the natural log of a key's weight against the largest, for equal queries and keys, by distance.
Learned parameters are set by hand, to show what can be learned; only the attention and the gates of a run are measured.
The bluer a token, the more it counts, or the more is forgotten at it.</p>
"""


class Arguments(Section):
    encodings: list[str | dict[str, Any]] | None
    run: str | None
    text: str | None
    out: str
    formats: list[Literal["html", "svg", "png", "pdf"]] = Field(min_length=1)
    n_head: Count
    head_dim: Count
    train_len: int = Field(ge=2)
    length: int = Field(ge=2)
    cache_dir: str


def write(args: Arguments) -> None:
    """Draw what is asked for, and write it as `args.formats`."""
    drawn = drawn_encodings(args)
    words: list[str] = []
    if args.run:
        of_run, words = drawn_run(args)
        drawn |= of_run
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    pictures_of_page = []
    for name, draw in drawn.items():
        picture = plot.on_its_own(plot.svg(draw, pictures.SIZE))
        pictures_of_page.append(picture)
        if "svg" in args.formats:
            write_text(out / f"{name}.svg", picture)
        for kind in {"png", "pdf"}.intersection(args.formats):
            ax = plot.new(pictures.SIZE)
            draw(ax)
            write_bytes(out / f"{name}.{kind}", plot.written(ax, kind))
    if "html" in args.formats:
        write_text(out / "index.html", PAGE + "\n".join([*pictures_of_page, *words]))
    print(f"wrote {len(drawn)} pictures to {out} ({', '.join(args.formats)})")


def drawn_encodings(args: Arguments) -> dict[str, Draw]:
    """Return what draws each picture of the encodings, by the name of its file."""
    wanted = args.encodings or []
    if args.encodings is None and not args.run:
        wanted = [*encoding_names()]
    shape = Shape(args.n_head * args.head_dim, args.n_head, args.n_head, args.head_dim, args.train_len, 1)
    drawn: dict[str, Draw] = {}
    for spec in wanted:
        options = encoding(spec, "encodings")
        name = options["name"]
        parts = pictures.built(options, shape)
        pe = parts[0][1]
        # RoPE's own turns, and those of encodings that change them.
        if isinstance(pe, Rotary) and "pattern" not in options:
            plain = pictures.turns(pe, args.length, scaled=False)
            scaled = pictures.turns(pe, args.length, scaled=True)
            if name == "rope" or not torch.equal(plain, scaled):
                drawn[f"{name}-turns"] = partial(pictures.draw_turns, name, pe, args.length)
        drawn[name] = partial(pictures.draw_scores, name, parts, args.length)
    if args.encodings is None and not args.run:
        # Options of the network belong to the whole gallery.
        drawn["lookups"] = partial(pictures.draw_lookups, encoding("nope", "encodings"))
    return drawn


def drawn_run(args: Arguments) -> tuple[dict[str, Draw], list[str]]:
    """Return what draws the attention of a trained run at two lengths, and its text coloured by its gates."""
    model = ropewalk.load(str(args.run), cache_dir=args.cache_dir)
    # A text of the user's, or the first of the validation data.
    if args.text:
        ids = model.encode(Path(args.text).read_text(encoding="utf-8"))[: args.length]
    else:
        model.data.prepare()
        ids = model.data.validation(args.length, args.length).batch(0, 1)[0][0]

    # A picture at the training length and one at all of the text.
    drawn: dict[str, Draw] = {}
    for length in sorted({min(model.net.train_len, len(ids)), len(ids)}):
        layers = pictures.attention_of(model.net, ids[:length])
        title = f"{Path(str(args.run)).name}, {length:,} tokens"
        drawn[f"attention-{length}"] = partial(pictures.draw_attention, title, layers)

    # The text once for each layer that has gates, coloured by them.
    pieces = [model.data.decode([token]) for token in ids.tolist()]
    if isinstance(model.data, Generated):
        # Symbols of a task are words, which a text has spaces between.
        pieces = [f"{piece} " for piece in pieces]
    words: list[str] = []
    for number, layer in enumerate(layers, start=1):
        gates = pictures.gates_of(layer)
        if gates is not None:
            # The head whose gates differ most tells most.
            head = int(gates.std(-1).argmax())
            verb = "count, seen from the last token" if isinstance(layer.pe, CoPE) else "forget at each token"
            words.append(f"<h2>Layer {number}, head {head + 1}: what its gates {verb}</h2>")
            words.append(pictures.coloured(pieces, gates[head]))
    return drawn, words
