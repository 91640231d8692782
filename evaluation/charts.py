"""Figures of a comparison, as Plotly's JSON."""

import json
import math
import re
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pandas as pd

from evaluation.answer import amount, cut_label
from evaluation.comparison import Table
from evaluation.frame import Runs
from model import position
from model.gpt import GPTConfig
from model.position.rotary import Rotary

# Told apart with the kinds of colour blindness that tests simulate, on white and on black.
PALETTE = ("#0563f2", "#fc115d", "#4aab8b", "#ac01a8", "#905b8a", "#1ba6f3", "#ac9f09", "#a04102")
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "cross": "✚", "x": "✖", "star": "★"}
DASHES = ("solid", "6px,4px", "2px,3px", "10px,3px,2px,3px")  # of the lines of one encoding
# A row shares a marker, a column a colour: what is often compared differs in colour. Other names are looked up by hash.
NAMED = [
    "rope", "yarn", "alibi", "cope", "nope", "linear", "ntk", "dynamic_ntk",
    "p_rope", "llama3", "t5", "cope_rope", "longrope", "kerple", "xpos", "fox",
    "hybrid", "path", "ntk_by_parts", "cope_relative", "self_extend", "rerope", "fire", "sinusoidal",
    "dca", "pope", "nape", "relative", "window", "relative_capped", "learned", "ssmax",
]  # fmt: skip
VISIBLE = 16  # lines that are drawn at first; others by a click on the legend
CURVES = {  # metric -> title and unit
    "val/bits_per_byte": ("Validation during training", "bits per byte"),
    "val/error": ("Validation during training", "error in percent"),
    "train/loss": ("Training loss", "nats per token"),
}
POINT = ["panel", "line", "x", "y", "up", "down", "text"]
Point = tuple[str, str, float, float, float, float, str]
Json = dict[str, Any]
Axes = Mapping[str, tuple[Json, Json]]  # title of a panel -> its axes


class Figure(NamedTuple):
    title: str
    note: str
    data: list[Json]
    layout: Json
    panels: int
    width: int = 420  # of a panel, at least, in pixels


def look(encoding: str) -> tuple[str, str]:
    """Colour and marker of an encoding, the same on every page."""
    known = encoding in NAMED
    i = NAMED.index(encoding) if known else crc32(encoding.encode()) % (len(PALETTE) * len(SYMBOLS))
    return PALETTE[i % len(PALETTE)], list(SYMBOLS)[i // len(PALETTE)]


def shown(words: str) -> str:
    """Words that Plotly shows as they are: it reads some HTML, and fills in what %{...} names."""
    return escape(words).replace("%{", "%&#123;")


def axis(title: str = "", **more: Any) -> Json:
    return {"title": {"text": title}} | more


def panels(axes: Axes) -> Json:
    """The layout of panels. The page puts them beside each other as far as there is room."""
    layout: Json = {"annotations": []}
    for i, (title, (xaxis, yaxis)) in enumerate(axes.items()):
        n = str(i + 1) if i else ""
        layout |= {f"xaxis{n}": xaxis, f"yaxis{n}": yaxis}
        layout["annotations"].append({
            "text": f"<b>{shown(title)}</b>", "showarrow": False, "xref": f"x{n} domain", "yref": f"y{n} domain",
            "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom",
        })  # fmt: skip
    return layout


class Pen:
    """How the lines of a section look: colour and marker by encoding, dashes by line."""

    def __init__(self, encodings: Mapping[str, str], main: Table | None) -> None:
        self.looks: dict[str, Json] = {}
        for line, encoding in sorted(encodings.items(), key=lambda item: (" read as " in item[0], item)):
            colour, symbol = look(encoding)
            dash = DASHES[sum(encodings[other] == encoding for other in self.looks) % len(DASHES)]
            width = 3.5 if main and line == main.reference else 2
            self.looks[line] = {"mode": "lines+markers", "line": {"color": colour, "dash": dash, "width": width}}
            self.looks[line]["marker"] = {"symbol": symbol, "size": 8, "maxdisplayed": 8}
        if main and len(main.lines) > VISIBLE:  # at first the best, what breaks, the reference and its readings
            own = main.lines.index[main.lines.group == main.lines.group.get(main.reference)]
            for line in main.lines.index[VISIBLE - 3 : -3].difference(own):
                self.looks[line]["visible"] = "legendonly"

    def draw(self, title: str, note: str, points: list[Point], hover: str, axes: Axes) -> Figure | None:
        """Lines through points, with their 95 % intervals; None if there are none."""
        data, named = [], set()
        for (panel, line), part in pd.DataFrame(points, columns=POINT).groupby(["panel", "line"], sort=False):
            n, part = [*axes].index(panel) + 1, part.sort_values("x", kind="stable")
            trace = {
                "type": "scatter", "name": shown(line), "legendgroup": shown(line), "showlegend": line not in named,
                "xaxis": f"x{n}", "yaxis": f"y{n}", "x": part.x.tolist(), "y": [float(f"{y:.5g}") for y in part.y],
                "error_y": {"array": part.up.tolist(), "arrayminus": part.down.tolist(), "thickness": 1.2, "width": 3},
                "customdata": part.text.tolist(),
                "hovertemplate": f"<b>%{{fullData.name}}</b><br>{hover}<extra></extra>",
            }  # fmt: skip
            data.append(trace | self.looks.get(line, {"mode": "lines", "line": {"color": "#8a8f98", "dash": "dot"}}))
            named.add(line)
        return Figure(title, note, data, panels(axes), len(axes)) if data else None


def collect(table: Table, column: str, titles: Mapping[str, str], x: Mapping[str, float] | None = None) -> list[Point]:
    """A point for each estimate in a column of the table, by name in the panels `titles`; at its length, or at `x`."""
    points: list[Point] = []
    for (line, name, n), e in table.stats[column].loc[list(table.lines.index)].items():
        if e:
            at, text = x[name] if x else n, amount(e, table.unit, "" if column == "mean" else "+")
            points.append((titles[name], line, at, e.value, e.half, e.half, text))
    return points


def by_length(table: Table, pen: Pen) -> Figure | None:
    """Loss or error against length; of text also against the same text cut to train_len."""
    ticks: Json = {"type": "log", "tickvals": table.lengths, "ticktext": [f"{n:,}" for n in table.lengths]}
    xaxis = axis(f"text length in tokens (trained at {table.train_len:,})", **ticks)
    titles = {name: table.unit + (f": {name}" if table.task else "") for name in table.names}
    points, hover = collect(table, "mean", titles), "%{x:,} tokens: %{customdata}"
    axes = {title: (xaxis, axis()) for title in titles.values()}
    if not table.is_text:
        return pen.draw("Error against length", "Bars: 95 % intervals.", points, hover, axes)
    if cut := table.get(table.reference, table.train_len):
        lengths = [n for n in table.lengths if n >= table.train_len]
        points += [(table.unit, cut_label(table), n, cut.value, 0, 0, f"{cut.value:.3f}") for n in lengths]
    scale, second = table.tolerance or 0.02, f"{table.unit} more than cut to {table.train_len:,} tokens"
    for (line, _, n), e in table.stats.gain.items():
        if e:
            down, y, up = np.arcsinh([-e.high / scale, -e.value / scale, -e.low / scale])
            points.append((second, line, n, y, up - y, y - down, amount(e._replace(value=-e.value), table.unit, "+")))
    values = [0, *(sign * t for t in (scale, 0.1, 0.3, 1, 3, 10) if t >= scale for sign in (-1, 1))]
    ticks = {"ticktext": [f"{x:+g}" if x else "0" for x in values], "tickvals": np.arcsinh(np.array(values) / scale)}
    note = (
        "The same tokens with more and more text before them; lower is better, bars are 95 % intervals. Second panel: "
        f"above +{scale:g} it is safer to cut the text, below 0 far text helps (logarithmic beyond ±{scale:g})."
    )
    return pen.draw(
        "Loss against text length", note, points, hover, axes | {second: (xaxis, axis(zerolinewidth=3, **ticks))}
    )


def far_copies(table: Table, pen: Pen) -> Figure | None:
    starts, title = {name: int(re.findall(r"\d+", name)[0]) for name in table.names}, f"gain, {table.unit}"
    points = collect(table, "gain", dict.fromkeys(starts, title), starts)
    ticks = {"tickvals": [*starts.values()], "ticktext": [name.removeprefix("distance ") for name in starts]}
    note = (
        "Tokens that complete a repeated sequence: how much better they are predicted with the whole text than with it "
        f"cut to {table.train_len:,} tokens, which hides earlier occurrences. At 0 far text is not used."
    )
    axes = {title: (axis("tokens since the same words last occurred", type="log", **ticks), axis(zerolinewidth=3))}
    return pen.draw("Far copies", note, points, "%{x:,} tokens back or more: %{customdata}", axes)


def by_position(table: Table, pen: Pen) -> Figure | None:
    middle = {name: float(np.mean([int(x) for x in re.findall(r"\d+", name)])) for name in table.names}
    title = f"{table.unit}, difference to {table.reference}"
    points = collect(table, "difference", dict.fromkeys(middle, title), middle)
    note = "One pass over the longest texts. The same tokens are compared, so what is left is the encoding."
    axes = {title: (axis("position in the text, tokens"), axis(zerolinewidth=3))}
    return pen.draw("Loss by position", note, points, "position %{x:,.0f}: %{customdata}", axes)


def passkeys(table: Table, pen: Pen) -> Figure | None:
    data = []
    for i, line in enumerate(table.lines.index, 1):
        z = [[e.value if (e := table.get(line, n, name=name)) else None for n in table.lengths] for name in table.names]
        data.append({
            "type": "heatmap", "x": [f"{n:,}" for n in table.lengths], "y": [name.split()[-1] for name in table.names],
            "z": z, "texttemplate": "%{z:.0f}", "xgap": 2, "ygap": 2, "coloraxis": "coloraxis", "xaxis": f"x{i}",
            "yaxis": f"y{i}", "hovertemplate": "%{x} tokens, depth %{y}: %{z:.0f} % found<extra></extra>",
        })  # fmt: skip
    xaxis = axis(type="category", showgrid=False)
    note = (
        "Percent of the keys found that a long text told once. Across: the length of the text in tokens; down: the "
        "depth of the key, from 0, the start of the text, to 1, right before the question."
    )
    layout = panels({line: (xaxis, xaxis | {"autorange": "reversed"}) for line in table.lines.index})
    return Figure("Passkeys", note, data, layout, len(data), 300)


def curves(runs: Runs, about: pd.DataFrame, metric: str, pen: Pen) -> Figure | None:
    """A metric during the training of some runs: the mean over the seeds; an unfinished run by itself."""
    rows = runs.curves.reindex(columns=["path", "tokens", metric]).dropna().join(about, on="path", how="inner")
    title, unit = CURVES[metric]
    points: list[Point] = []
    lines = rows.label.where(rows.done.astype(bool), rows.label + " (not finished: " + rows["name"] + ")")
    for line, part in rows.groupby(lines):
        mean = part.groupby("tokens")[metric].mean()
        mean = mean.iloc[:: math.ceil(len(mean) / 100)].astype(float)
        points += [(unit, str(line), x, y, 0, 0, f"{y:.3f}") for x, y in mean.items()]
    axes = {unit: (axis("training tokens"), axis())}
    return pen.draw(title, "Mean over the seeds.", points, "%{x:.3s} tokens: %{customdata}", axes)


def frequencies(runs: Runs, table: Table, pen: Pen) -> Figure | None:
    """The frequencies with which rotary encodings read the longest text."""
    longest, title, hover = max(table.lengths), "radians per token", "pair %{x}: a turn in %{customdata} tokens"
    points: list[Point] = []
    for line, row in table.lines.row.items():
        model = {k.removeprefix("model."): v for k, v in runs.runs.config[row.path].items() if k.startswith("model.")}
        try:
            built = position.build(json.loads(row.pe), GPTConfig(**model).shape(table.train_len))
            for encoding in [x for x in built if isinstance(x, Rotary)][:1]:
                encoding.active_scale = row.scale
                f = [x for x in encoding.frequencies(longest).tolist() if x > 0]
                points += [(title, str(line), i, x, 0, 0, f"{2 * math.pi / x:,.4g}") for i, x in enumerate(f)]
        except Exception:  # of a user's own package, of another version, or damaged: it has no line
            continue
    width = max((p[2] for p in points), default=0)
    for n in dict.fromkeys((table.train_len, longest)) if points else ():
        points += [(title, f"one turn in {n:,} tokens", x, 2 * math.pi / n, 0, 0, f"{n:,}") for x in (0, width)]
    note = (
        f"How fast each pair of channels turns in a text of {longest:,} tokens. Pairs below the line of "
        f"{table.train_len:,} turn less than once in training: longer texts bring angles that they never saw."
    )
    axes = {title: (axis("pair of channels"), axis(type="log", exponentformat="power", dtick=1))}
    return pen.draw("Frequencies of the rotary encodings", note, points, hover, axes)


DRAW = {"lengths": by_length, "far_copies": far_copies, "passkeys": passkeys, "by_position": by_position}
