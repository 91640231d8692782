"""Figures of a comparison as Plotly's JSON.

Every trace says in its `meta` which rows of the tables it belongs to: the page shows the traces of the rows it shows.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import ValidationError

from evaluation.compare import QUANTITIES, Comparison, Group, Line, Section, Table
from evaluation.retrieval import Cell
from evaluation.runs import Run

# To be told apart on white and on black. Longer lists repeat: hovering names a line.
COLOURS = (
    "#3d7ede", "#e57431", "#25a473", "#de1c46", "#a361fb", "#028a9b", "#c331aa", "#aa5f04", "#749c0b", "#ff68a0",
    "#657d52", "#76acfc", "#19bf2f", "#aaa95c", "#8f6c92", "#48b8bb", "#ce6877", "#8f84dd", "#c597d4", "#e65fde",
    "#aa928f", "#1e8526",
)  # fmt: skip
DASHES = ("solid", "6px,4px", "2px,3px", "10px,3px,2px,3px")  # of the lines of one encoding
SYMBOLS = ("circle", "square", "diamond", "triangle-up")  # when these are used up
POINTS = 100  # of a training curve, at most


class Figure(NamedTuple):
    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


class Look(NamedTuple):
    colour: str
    dash: str
    symbol: str


class Key:
    """Which row of which table a line is, and what it looks like in all figures."""

    def __init__(self, comparison: Comparison) -> None:
        tables = [table for section in comparison.sections for table in section.tables]
        trained = sorted({run.encoding for run in comparison.runs})
        swapped = sorted({line.encoding for table in tables for line in table.lines}.difference(trained))
        self.colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate([*trained, *swapped])}
        self._rows: dict[int, str] = {}
        self._lines: dict[int, list[Line]] = defaultdict(list)  # of a group
        self._looks: dict[int, Look] = {}
        for s, section in enumerate(comparison.sections):
            for t, table in enumerate(section.tables):
                for i, line in enumerate(table.lines):
                    self._rows[id(line)] = f"s{s}t{t}r{i}"
                    self._lines[id(line.group)].append(line)
            labels: dict[str, list[str]] = defaultdict(list)  # encoding -> of its lines
            for group in section.groups:
                lines = sorted(self._lines[id(group)], key=lambda line: line.label)
                for line in lines:
                    self._looks[id(line)] = self._look(line.encoding, line.label, labels[line.encoding])
                own = next((line.label for line in lines if not line.swap), group.label)
                self._looks[id(group)] = self._look(group.encoding, own, labels[group.encoding])

    def _look(self, encoding: str, label: str, labels: list[str]) -> Look:
        if label not in labels:
            labels.append(label)
        many, i = divmod(labels.index(label), len(DASHES))
        return Look(self.colours[encoding], DASHES[i], SYMBOLS[many % len(SYMBOLS)])

    def row(self, line: Line, seed: int | None = None) -> str:
        """Of the mean over the seeds, or of one of them."""
        return self._rows[id(line)] + ("" if seed is None else f"-{seed}")

    def look(self, thing: Line | Group) -> Look:
        return self._looks[id(thing)]

    def lines(self, group: Group, reading: str | None = None) -> list[Line]:
        """Of all tables; those of one reading, or all if none has it."""
        lines = self._lines[id(group)]
        return [line for line in lines if line.reading == reading] or lines

    def rows(self, group: Group, reading: str | None, seeds: Iterable[int | None]) -> list[str]:
        """Those that there are."""
        known = [(line, seed) for line in self.lines(group, reading) for seed in seeds if seed in (None, *line.seeds)]
        return [self.row(line, seed) for line, seed in known]


def by_length(table: Table, slice_name: str, quantity: str, train_len: int, key: Key) -> Figure:
    """One of the table's quantities against context length, on one slice."""
    decimals = QUANTITIES[quantity][1]
    beside = next((other for other in table.quantities if other != quantity), None)
    other = "" if beside is None else f"{QUANTITIES[beside][0]}: %{{customdata:.{QUANTITIES[beside][1]}f}}"
    hover = f"%{{fullData.name}}<br>%{{x:,}} tokens: <b>%{{y:.{decimals}f}}</b><br>{other}<extra></extra>"
    data = []
    for line in table.lines:
        for seed in (None, *line.seeds):
            spreads = {n: line.spread(slice_name, n, quantity, seed) for n in table.measure.lengths}
            known = {n: s for n, s in spreads.items() if s}
            others = [line.spread(slice_name, n, beside, seed) for n in known] if beside else []
            trace = _line(line.label, key.look(line), [key.row(line, seed)], seed) | {
                "x": list(known),
                "y": _thin(s.mean for s in known.values()),
                "customdata": _thin(s.mean if s else None for s in others),
                "hovertemplate": hover,
            }
            if seed is None and len(line.seeds) > 1:
                trace["error_y"] = {
                    "array": _thin(max(s.values.values()) - s.mean for s in known.values()),
                    "arrayminus": _thin(s.mean - min(s.values.values()) for s in known.values()),
                    "thickness": 1.2, "width": 3,
                }  # fmt: skip
            data.append(trace)
    ticks = list(table.measure.lengths)
    layout = _axes("context length, tokens", QUANTITIES[quantity][0]) | _train_len(train_len, ticks[0], ticks[-1])
    layout["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [f"{n:,}" for n in ticks]}
    bars = "Bars: from the best seed to the worst." if any("error_y" in trace for trace in data) else ""
    if table.measure.task:
        layout["yaxis"]["rangemode"] = "tozero"
        return Figure(f"Error on {slice_name}", bars, data, layout)
    note = f"The same tokens, with more and more text before them. {bars}"
    return Figure("Loss against context length", note, data, layout)


def by_position(table: Table, train_len: int, key: Key) -> Figure:
    data = []
    for line in table.lines:
        bins = {seed: {(b.start, b.stop): b.loss for b in found} for seed, found in line.bins.items()}
        for seed in (None, *line.seeds):
            chosen = [bins[seed]] if seed is not None else list(bins.values())
            places = [place for place in chosen[0] if all(place in other for other in chosen)]
            data.append(
                _line(line.label, key.look(line), [key.row(line, seed)], seed, "lines")
                | {
                    "x": [(start + stop) / 2 for start, stop in places],
                    "y": _thin(fmean(other[place] for other in chosen) for place in places),
                    "hovertemplate": "%{fullData.name}<br>position %{x:,.0f}: <b>%{y:.3f}</b><extra></extra>",
                }
            )
    layout = _axes("position in the text, tokens", "loss in nats per token")
    layout |= _train_len(train_len, 0, table.measure.lengths[-1])
    return Figure("Loss by position", "One pass over the longest texts.", [t for t in data if t["x"]], layout)


def training(section: Section, metric: str, title: str, unit: str, key: Key) -> Figure:
    """A metric during training: the mean of the finished runs of a group, and every other run by itself."""
    data = []
    for group in section.groups:
        curves = {seed: _curve(run, metric) for seed, run in group.runs.items()}
        finished = [seed for seed, run in group.runs.items() if run.training and curves[seed]]
        chosen: dict[int | None, list[Mapping[int, float]]] = {None: [curves[seed] for seed in finished]}
        chosen |= {seed: [curve] for seed, curve in curves.items()}
        for seed, over in chosen.items():
            if not over or not over[0]:
                continue
            x, y = _buckets([(t, fmean(c[t] for c in over)) for t in over[0] if all(t in c for c in over)])
            label, rows = group.label, key.rows(group, None, [seed])
            if seed is not None and seed not in finished:
                label, rows = f"{label} (at {group.runs[seed].progress})", []
            mode = "lines" if len(x) > 20 else "lines+markers"
            trace = _line(label, key.look(group), rows, seed, mode) | {"x": x, "y": _thin(y)}
            trace["meta"]["encoding"] = group.encoding
            trace["hovertemplate"] = "%{fullData.name}<br>%{x:.3s} tokens: <b>%{y:.3f}</b><extra></extra>"
            data.append(trace)
    some = any(len(trace["x"]) > 1 for trace in data)
    return Figure(title, "", data if some else [], _axes("training tokens", unit))


def frequencies(section: Section, key: Key) -> Figure:
    """The inverse frequencies with which rotary encodings read the longest text."""
    from model.gpt import GPTConfig
    from model.position import build
    from model.position.rotary import Rotary

    data = []
    longest = max((n for table in section.tables for n in table.measure.lengths), default=section.train_len)
    for group in section.groups:
        try:
            shape = GPTConfig(**group.first.section("model")).shape(section.train_len)
            readings = build(group.first.section("pe"), shape).readings()
        except (ValueError, TypeError, ValidationError):  # of another version of this program
            continue
        for reading in readings:
            if not isinstance(reading, Rotary):
                continue
            inverse = reading.frequencies(longest)[0].tolist()
            turning = [(i, f) for i, f in enumerate(inverse) if f > 0]
            lines = key.lines(group, reading.label)
            label = lines[0].label if lines else group.label
            rows = key.rows(group, reading.label, (None, *group.runs))
            data.append(
                _line(label, key.look(lines[0] if lines else group), rows, None)
                | {
                    "x": [i for i, _ in turning],
                    "y": _thin(f for _, f in turning),
                    "customdata": _thin(2 * math.pi / f for _, f in turning),
                    "hovertemplate": "%{fullData.name}<br>pair %{x}: <b>%{y:.3~g}</b> radians per token<br>"
                    "a turn in %{customdata:,.4~r} tokens<extra></extra>",
                }
            )
            data[-1]["meta"]["encoding"] = group.encoding
    layout = _axes("pair of channels", "radians per token")
    layout["yaxis"] |= {"type": "log", "exponentformat": "power", "dtick": 1}
    layout["shapes"] = [
        _rule(f"{n:,} tokens", "left", y0=2 * math.pi / n, y1=2 * math.pi / n, x0=0, x1=1, xref="paper")
        for n in dict.fromkeys((section.train_len, longest))
    ]
    note = f"Inverse frequencies in a text of {longest:,} tokens, but for zeros. Dotted: one turn in so many tokens."
    return Figure("Frequencies of the rotary encodings", note, data, layout)


def passkeys(section: Section, key: Key) -> list[Figure]:
    """A heat map for each group and reading: the gain, mean over the seeds, by length and depth; all in one scale."""
    found: dict[tuple[int, str, bool], dict[tuple[Any, ...], list[list[Cell]]]] = {}
    for i, group in enumerate(section.groups):
        for run in group.runs.values():
            for reading, swap, asked, cells in _asked(run):
                places = tuple((cell.length, cell.depth) for cell in cells)
                alike = found.setdefault((i, reading, swap), {})
                alike.setdefault((asked, cells[0].trials, places), []).append(cells)
    every = [cell for alike in found.values() for runs in alike.values() for cells in runs for cell in cells]
    most = max([1.0, *(abs(cell.gain) for cell in every if math.isfinite(cell.gain))])
    figures = []
    for (i, reading, swap), alike in found.items():
        group = section.groups[i]
        for (_, trials, places), runs in alike.items():
            lengths, depths = (sorted(set(values)) for values in zip(*places, strict=True))
            gain = {place: fmean(cells[i].gain for cells in runs) for i, place in enumerate(places)}
            exact = {place: fmean(cells[i].exact for cells in runs) for i, place in enumerate(places)}
            encoding = reading.partition(",")[0] if swap else group.encoding
            trace = {
                "type": "heatmap",
                "x": [f"{n:,}" for n in lengths],
                "y": [f"{d:.2f}" for d in depths],
                "z": [_thin(gain.get((n, d)) for n in lengths) for d in depths],
                "text": [[f"{exact[n, d]:.0%}" if (n, d) in exact else "" for n in lengths] for d in depths],
                "texttemplate": "%{text}",
                "hovertemplate": "%{x} tokens, depth %{y}<br>gain <b>%{z:+.2f}</b> bits<br>"
                "%{text} of the keys found<extra></extra>",
                "zmin": -most, "zmax": most, "autocolorscale": True, "xgap": 2, "ygap": 2,
                "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "bits", "side": "right"}},
                "meta": _meta(key.rows(group, reading, (None, *group.runs)), None) | {"encoding": encoding},
            }  # fmt: skip
            layout = _axes("context length, tokens", "depth")
            layout["xaxis"] |= {"type": "category", "showgrid": False, "ticks": ""}
            layout["yaxis"] |= {
                "type": "category",
                "showgrid": False,
                "ticks": "",
                "autorange": "reversed",
            }  # as one reads
            note = f"{trials:,} trials, {len(runs)} seed{'s' if len(runs) > 1 else ''}"
            figures.append(Figure(f"Passkeys: {group.read(reading, swap)}", note, [trace], layout))
    return figures


def _asked(run: Run) -> Iterator[tuple[str, bool, int, list[Cell]]]:
    """Of each way to read a run: the reading, whether it is a swap, the seed of the texts, and what was found."""
    for results in filter(None, (run.passkey, run.passkey_swap)):
        for label in dict.fromkeys(cell.reading for cell in results.cells):
            own = label.removeprefix(f"{run.encoding}, ")  # a swap begins with the run's own readings
            swap = results is run.passkey_swap and own == label
            if results is run.passkey or swap or not run.passkey:
                yield own, swap, results.seed, [cell for cell in results.cells if cell.reading == label]


def text(words: str) -> str:
    """Words that Plotly shows as they are: it reads some HTML, and fills in what %{...} names."""
    return escape(words).replace("%{", "%&#123;")


def _line(label: str, look: Look, rows: Sequence[str], seed: int | None, mode: str = "lines+markers") -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": text(label if seed is None else f"{label}, seed {seed}"),
        "mode": mode,
        "line": {"color": look.colour, "dash": look.dash, "width": 2},
        "marker": {"symbol": look.symbol, "size": 6},
        "meta": _meta(rows, seed),
    }


def _meta(rows: Sequence[str], seed: int | None) -> dict[str, Any]:
    """Without rows, the page shows a trace by the filters alone."""
    return {"rows": list(rows), "seed": "" if seed is None else str(seed), "encoding": ""}


def _axes(x: str, y: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _train_len(train_len: int, low: int, high: int) -> dict[str, Any]:
    """A line where training ended, in a figure from `low` to `high`."""
    anchor = "left" if train_len <= low else "right" if train_len >= high else "center"
    return {"shapes": [_rule("train_len", anchor, x0=train_len, x1=train_len, y0=0, y1=1, yref="paper")]}


def _rule(words: str, anchor: str, **place: Any) -> dict[str, Any]:
    """A line across the figure, and words at its end."""
    label = {"text": words, "font": {"size": 11}, "textangle": 0, "yanchor": "bottom", "xanchor": anchor}
    end = "start" if anchor == "left" and place["x0"] != place["x1"] else "end"
    return {"type": "line", "layer": "below", "label": label | {"textposition": end}} | place


def _thin(values: Iterable[float | None]) -> list[float | None]:
    """Four digits are enough for a picture; what is not a number JSON cannot say."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.4g}") for v in values]


def _curve(run: Run, metric: str) -> Mapping[int, float]:
    """Tokens -> value."""
    return {row.get("tokens", 0): row[metric] for row in run.metrics if isinstance(row.get(metric), float | int)}


def _buckets(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """At most POINTS points: the means of neighbours, at the last of them."""
    size = math.ceil(len(points) / POINTS) or 1
    pieces = [points[i : i + size] for i in range(0, len(points), size)]
    return [piece[-1][0] for piece in pieces], [fmean(value for _, value in piece) for piece in pieces]
