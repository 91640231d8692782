"""The gallery that `scripts/draw.py` writes: pictures of encodings, and of a trained run's attention."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from matplotlib.axes import Axes
from pydantic import Field

import ropewalk
from conf.files import write_bytes, write_text
from conf.options import by_name, encoding, encoding_names
from conf.schema import Count, Section
from lab.pictures import pictures
from model.position import Shape
from model.position.rotary import Rotary
from ropewalk.report import plot

Draw = Callable[[Axes], None]
PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>Encodings</title>
<style>body{font:1rem/1.45 system-ui,sans-serif;max-width:84rem;margin:auto;padding:1rem}
h1{font-size:1.6rem}.wide{overflow-x:auto}
svg{width:420px;max-width:100%;height:auto;margin:4px;border:1px solid #8884}
.wide svg{width:72rem;max-width:none}</style>
<h1>What encodings do</h1>
<p>Scores: the natural log of a key's weight against the largest, for equal queries and keys, by distance.
Learned parameters are set by hand, to show what can be learned; only the attention of a run is measured.</p>
"""


class Arguments(Section):
    encodings: Annotated[list[str | dict[str, Any]], Field(min_length=1)] | None
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
    if args.run:
        drawn |= drawn_run(args.run, args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    pictures_of_page = []
    for name, draw in drawn.items():
        ax = plot.new(pictures.SIZE)
        draw(ax)
        wide = name.startswith(("gates-", "left-"))  # a column for each token
        picture = plot.svg(ax)
        pictures_of_page.append(f"<div class=wide>{picture}</div>" if wide else picture)
        for kind in {"svg", "png", "pdf"}.intersection(args.formats):
            write_bytes(out / f"{name}.{kind}", plot.written(ax, kind))
    if "html" in args.formats:
        write_text(out / "index.html", PAGE + "\n".join(pictures_of_page))
    print(f"wrote {len(drawn)} pictures to {out} ({', '.join(args.formats)})")


def drawn_encodings(args: Arguments) -> dict[str, Draw]:
    """Return what draws each picture of the encodings, by the name of its file."""
    is_whole = args.encodings is None and not args.run
    wanted = encoding_names() if is_whole else args.encodings or []
    shape = Shape(args.n_head * args.head_dim, args.n_head, args.n_head, args.head_dim, args.train_len, 1)
    drawn: dict[str, Draw] = {}
    for name, options in by_name(wanted, "encodings").items():
        parts = pictures.built(options, shape)
        label, pe = parts[0]
        # RoPE's own turns, and those of encodings that change them; parts of a pattern, which have a label, have none.
        if not label and isinstance(pe, Rotary) and (name == "rope" or type(pe).frequencies is not Rotary.frequencies):
            drawn[f"{name}-turns"] = partial(pictures.draw_turns, name, pe, args.length)
        drawn[name] = partial(pictures.draw_scores, name, parts, shape, args.length)
    if is_whole:
        # Options of the network belong to the whole gallery.
        drawn["lookups"] = partial(pictures.draw_lookups, encoding("nope", "encodings"))
    return drawn


def drawn_run(run: str, args: Arguments) -> dict[str, Draw]:
    """Return what draws the attention of a trained run at two lengths, and what CoPE counts and FoX keeps in a text."""
    model = ropewalk.load(run, cache_dir=args.cache_dir)
    # A text of the user's, or the first of the validation data.
    if args.text:
        ids = model.encode(Path(args.text).read_text(encoding="utf-8"))[: args.length]
    else:
        model.data.prepare()
        ids = model.data.validation(args.length, args.length).batch(0, 1)[0][0]

    # A picture at the training length and one at all of the text.
    drawn: dict[str, Draw] = {}
    for length in sorted({min(model.net.train_len, len(ids)), len(ids)}):
        ranges, shares = pictures.attention_of(model.net, ids[:length])
        title = f"{Path(run).name}, {length:,} tokens"
        drawn[f"attention-{length}"] = partial(pictures.draw_attention, title, ranges, shares)

    ids = ids[: model.net.train_len] if args.text else pictures.question(model.data, model.net.train_len)
    words = [repr(model.data.decode([token]))[1:-1] for token in ids.tolist()]
    for layer, kind, shares in pictures.counted(model.net, ids):
        title = f"{Path(run).name}, layer {layer}"
        drawn[f"{kind}-{layer}"] = partial(pictures.draw_counted, title, kind, shares, words)
    return drawn
