"""Figures of a comparison, as Plotly's JSON."""

import re
from collections.abc import Mapping
from html import escape
from typing import Any
from zlib import crc32

import pandas as pd

from evaluation.answer import SIGN, amount
from evaluation.comparison import Table

# Told apart with the kinds of colour blindness that tests simulate, on white and on black.
PALETTE = ("#0563f2", "#fc115d", "#4aab8b", "#ac01a8", "#905b8a", "#1ba6f3", "#ac9f09", "#a04102")
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "cross": "✚", "x": "✖", "star": "★"}
DASHES = ("solid", "6px,4px", "2px,3px", "10px,3px,2px,3px")  # of the lines of one encoding
# A row shares a marker, a column a colour: what is often compared differs in colour. Other names are looked up by hash.
NAMED = [
    "rope", "yarn", "alibi", "cope", "nope", "linear", "ntk", "dynamic_ntk",
    "p_rope", "llama3", "t5", "cope_rope", "longrope", "kerple", "xpos", "learned",
    "hybrid", "sinusoidal", "ntk_by_parts", "cope_relative", "relative", "relative_capped", "fire", "fox",
    "rerope", "path", "stick_breaking", "pope", "selective_rope", "nape", "profiles", "abf",
    "dca", "self_extend", "window", "sinks_window", "leaky_rerope", "fox_rope", "path_fox",
]  # fmt: skip
Json = dict[str, Any]
Point = tuple[str, float, float, float, str]  # line, x, y, half of the interval, text
Panels = Mapping[str, tuple[Json, list[Point]]]


def marker(encoding: str) -> tuple[str, str]:
    """Colour and marker of an encoding, the same on every page."""
    i = NAMED.index(encoding) if encoding in NAMED else crc32(encoding.encode()) % (len(PALETTE) * len(SYMBOLS))
    return PALETTE[i % len(PALETTE)], list(SYMBOLS)[i // len(PALETTE)]


def line_styles(encodings: Mapping[str, str], reference: str | None) -> dict[str, Json]:
    """How the lines of a section look, {line: encoding}: colour and marker by encoding, dashes by line."""
    found: dict[str, Json] = {}
    for line, encoding in sorted(encodings.items(), key=lambda item: (" read as " in item[0], item)):
        colour, symbol = marker(encoding)
        dash = DASHES[sum(encodings[other] == encoding for other in found) % len(DASHES)]
        stroke = {"color": colour, "dash": dash, "width": 3.5 if line == reference else 2}
        dot = {"symbol": symbol, "size": 8, "maxdisplayed": 8}
        found[line] = {"mode": "lines+markers", "line": stroke, "marker": dot}
    return found


def shown(words: str) -> str:
    """Words that Plotly shows as they are: it reads some HTML, and fills in what %{...} names."""
    return escape(words).replace("%{", "%&#123;")


def draw(title: str, note: str, hover: str, xaxis: Json, panels: Panels, styles: Mapping[str, Json]) -> Json | None:
    """Lines through points, with their 95 % intervals, grey without a style; None if there are no points. `panels` are
    {title: (y axis, points)}."""
    data: list[Json] = []
    layout: Json = {"annotations": []}
    named = set()
    for i, (panel, (yaxis, found)) in enumerate(panels.items()):
        number = i + 1 if i else ""
        x, y = f"x{number}", f"y{number}"
        layout |= {f"xaxis{number}": xaxis, f"yaxis{number}": yaxis}
        place = {"xref": f"{x} domain", "yref": f"{y} domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
        layout["annotations"].append({"text": f"<b>{shown(panel)}</b>", "showarrow": False} | place)
        for line, points in pd.DataFrame(found, columns=["line", "x", "y", "half", "text"]).groupby("line", sort=False):
            points = points.sort_values("x", kind="stable")
            trace = {
                "type": "scatter", "name": shown(line), "legendgroup": shown(line), "showlegend": line not in named,
                "xaxis": x, "yaxis": y, "x": points.x.tolist(), "y": [float(f"{y:.5g}") for y in points.y],
                "error_y": {"array": points.half.tolist(), "width": 3}, "customdata": points.text.tolist(),
                "hovertemplate": f"<b>%{{fullData.name}}</b><br>{hover}<extra></extra>",
            }  # fmt: skip
            data.append(trace | styles.get(line, {"mode": "lines", "line": {"color": "#8a8f98", "dash": "dot"}}))
            named.add(line)
    return {"title": title, "note": note, "data": data, "layout": layout, "panels": len(panels)} if data else None


def collect(table: Table, column: str, name: str) -> list[Point]:
    """A point for each estimate in a column of the table, for one name, at its length."""
    found = [(line, n, table.get(line, n, column, name)) for line in table.rows for n in table.lengths]
    return [(line, n, e.value, e.half, amount(e, table.unit, SIGN[column])) for line, n, e in found if e]


def by_length(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """Loss, errors or answers found against length; of text and RULER also the gain over the baseline."""
    xaxis: Json = {"type": "log", "tickvals": table.lengths, "ticktext": [f"{n:,}" for n in table.lengths]}
    xaxis["title"] = {"text": f"text length in tokens (trained at {table.train_len:,})"}
    titles = {name: table.unit if name == "text" else f"{table.unit}: {name}" for name in table.names}
    yaxis: Json = {"rangemode": "normal" if table.is_text else "tozero"}
    panels = {title: (yaxis, collect(table, "mean", name)) for name, title in titles.items()}
    title, note = "Error against length", ""
    if table.kind == "ruler":
        title = "RULER"
        panels |= {"gain in bits, mean": ({"zerolinewidth": 3}, collect(table, "gain", "mean"))}
        note = "A needle is at depth 0 at the start of the text, at 1 right before the question. Gain: how much more "
        note += "probable an answer is than after a text in which it is wrong; above 0 there are traces of it. "
    elif table.is_text:
        gain = f"gain over the text cut to {table.train_len:,} tokens"
        panels[gain] = {"zerolinewidth": 3}, collect(table, "gain", "text")
        title = "Loss against text length"
        note = "The same tokens with more and more text before them; lower is better. Second panel: above 0 far text "
        note += "helps, below 0 it is better to cut the text. "
    return draw(title, f"{note}Bars: 95 % intervals.", "%{x:,} tokens: %{customdata}", xaxis, panels, styles)


def by_place(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """Far copies against their distance, and loss against position: what the numbers in the names say."""
    middle = {name: sum(map(int, re.findall(r"\d+", name))) / 2 for name in table.names}
    column = "gain" if table.kind == "far_copies" else "difference"
    points = [(p[0], x, *p[2:4], f"{name}: {p[4]}") for name, x in middle.items() for p in collect(table, column, name)]
    if table.kind == "by_position":
        title, panel = "Loss by position", f"{table.unit}, difference to {table.reference}"
        note = "One pass over the longest texts. The same tokens are compared, so what is left is the encoding."
        xaxis: Json = {"title": {"text": "position in the text, tokens"}}
    else:
        title, panel = "Far copies", f"gain, {table.unit}"
        note = "Tokens that complete a repeated sequence: how much better they are predicted with the whole text than "
        note += f"when cut to {table.train_len:,} tokens, which hides earlier occurrences. At 0 far text is not used."
        xaxis = {"type": "log", "title": {"text": "tokens since the same words last occurred"}}
        xaxis |= {"tickvals": [*middle.values()], "ticktext": [name.removeprefix("distance ") for name in middle]}
    return draw(title, note, "%{customdata}", xaxis, {panel: ({"zerolinewidth": 3}, points)}, styles)


DRAW = {"lengths": by_length, "far_copies": by_place, "ruler": by_length, "by_position": by_place}
