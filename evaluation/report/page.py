"""The report: an answer in words, figures and tables, as one self-contained page, Markdown, CSV, or on a terminal."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple
from zlib import crc32

import pandas as pd
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from common.files import write_text
from evaluation.report import markdown as words_of
from evaluation.report.answer import Grid, amount, answer, find, numbers, overview
from evaluation.report.comparison import BEST_POSSIBLE, Estimates, Key, Table, tables
from evaluation.report.frame import PROVENANCE, Runs, load

PAGE = "report.html"
# These can be told apart with the kinds of colour blindness that the tests simulate, on white and on black.
PALETTE = ("#0563f2", "#fc115d", "#4aab8b", "#ac01a8", "#905b8a", "#1ba6f3", "#ac9f09", "#a04102")
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "cross": "✚", "x": "✖", "star": "★"}
DASHES = ("solid", "6px,4px", "2px,3px", "10px,3px,2px,3px")  # for the lines of one encoding
BEST: dict[str, Any] = {"mode": "lines", "line": {"color": "#8a8f98", "dash": "solid", "width": 1.5}}
GREY: dict[str, Any] = {"mode": "lines", "line": {"color": "#8a8f98", "dash": "dot"}}
HIDDEN = ("name", "runs_dir", "eval.variants")  # options that explain no difference between runs
Json = dict[str, Any]
ZERO_LINE: Json = {"zerolinewidth": 3}  # for an axis on which 0 means no difference
Looks = Mapping[str, tuple[str, str]]  # colour and symbol, by encoding


class Section(NamedTuple):
    title: str
    words: dict[str, list[str]]  # heading -> sentences in Markdown
    figures: list[Json]
    grids: list[Grid]  # the first one is open on the page


class Point(NamedTuple):
    """A point of a figure with its interval, from y - half to y + half."""

    line: str
    x: float
    y: float
    half: float
    text: str


class Panel(NamedTuple):
    title: str
    yaxis: Json
    points: list[Point]


def looks(encodings: Iterable[str]) -> Looks:
    """Choose a colour and a symbol for each encoding.

    A hash of the name chooses, so that most encodings look the same on every page. Colours, and then pairs, are shared
    only when all are taken.
    """
    chosen: dict[str, tuple[str, str]] = {}
    for encoding in sorted(set(encodings)):
        start = crc32(encoding.encode()) % len(PALETTE)
        colours = PALETTE[start:] + PALETTE[:start]
        candidates = [(colour, symbol) for symbol in SYMBOLS for colour in colours]
        taken = list(chosen.values())
        taken_colours = [colour for colour, _ in taken]
        # min() keeps the first of equals: the candidate nearest to where the hash points.
        chosen[encoding] = min(candidates, key=lambda look: (taken.count(look), taken_colours.count(look[0])))
    return chosen


def line_styles(encodings: Mapping[str, str], look_of: Looks, reference: str | None) -> dict[str, Json]:
    """Return the style of each line of a section: colour and symbol by encoding, dashes by line.

    Args:
        encodings: the encoding that reads, by line.
        reference: the line that is drawn thicker.
    """
    styles: dict[str, Json] = {BEST_POSSIBLE: BEST}
    n_styled = dict.fromkeys(encodings.values(), 0)
    # Lines as trained come first, so that they are solid.
    for line in sorted(encodings, key=lambda line: (" read as " in line, line)):
        encoding = encodings[line]
        colour, symbol = look_of[encoding]
        dash = DASHES[n_styled[encoding] % len(DASHES)]
        n_styled[encoding] += 1
        width = 3.5 if line == reference else 2
        styles[line] = {
            "mode": "lines+markers",
            "line": {"color": colour, "dash": dash, "width": width},
            "marker": {"symbol": symbol, "size": 8, "maxdisplayed": 16},
        }
    return styles


def plotly_text(text: str) -> str:
    """Escape text for Plotly, which reads some HTML and fills in what %{...} names."""
    return escape(text).replace("%{", "%&#123;")


def draw(
    title: str, note: str, hover: str, xaxis: Json, panels: Sequence[Panel], styles: Mapping[str, Json]
) -> Json | None:
    """Return a figure of lines through points with their intervals; None if there are no points.

    Args:
        hover: what is shown at a point, as a template of Plotly.
        styles: by line; lines without one are grey.
    """
    traces: list[Json] = []
    layout: Json = {"annotations": []}
    in_legend: set[str] = set()
    # page.js decides where the panels stand, as it knows the width of the page.
    for i, panel in enumerate(panels):
        # Plotly numbers the axes of panels from 2 on: x, x2, x3.
        number = str(i + 1) if i else ""
        layout[f"xaxis{number}"] = xaxis
        layout[f"yaxis{number}"] = panel.yaxis
        layout["annotations"].append(_panel_title(panel.title, number))
        points_of_line: dict[str, list[Point]] = {}
        for point in panel.points:
            points_of_line.setdefault(point.line, []).append(point)
        for line, points in points_of_line.items():
            trace = _trace(line, points, number, hover)
            # A line has one entry in the legend for all panels.
            trace["showlegend"] = line not in in_legend
            in_legend.add(line)
            traces.append(trace | styles.get(line, GREY))
    if not traces:
        return None
    return {"title": title, "note": note, "data": traces, "layout": layout, "panels": len(panels)}


def _trace(line: str, points: Sequence[Point], number: str, hover: str) -> Json:
    """Return one line of a panel, without its style."""
    points = sorted(points, key=lambda point: point.x)
    name = plotly_text(line)
    halves = [0 if math.isnan(point.half) else point.half for point in points]
    return {
        "type": "scatter",
        "name": name,
        "legendgroup": name,
        "showlegend": True,
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
        "x": [point.x for point in points],
        "y": [float(f"{point.y:.5g}") for point in points],
        "error_y": {"array": halves, "width": 3},
        "customdata": [point.text for point in points],
        "hovertemplate": f"<b>%{{fullData.name}}</b><br>{hover}<extra></extra>",
    }


def _panel_title(title: str, number: str) -> Json:
    """An annotation above the left end of a panel."""
    return {
        "text": f"<b>{plotly_text(title)}</b>",
        "showarrow": False,
        "xref": f"x{number} domain",
        "yref": f"y{number} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
    }


def points_of(table: Table, estimates: Estimates, part: str, sign: str = "") -> list[Point]:
    """Return a point for each estimate of a part, at its length."""
    points = []
    for line in table.rows:
        for length in table.lengths:
            e = estimates.get(Key(line, part, length))
            if e:
                points.append(Point(line, length, e.value, e.half, amount(e, table.unit, sign)))
    return points


def points_over_spans(table: Table, estimates: Estimates, name: str, label: str) -> list[Point]:
    """Return the points of the part `name`, in the middle of the distances or positions that it covers."""
    part = table.parts[name]
    middle = (part.first + part.last) / 2
    points = []
    for point in points_of(table, estimates, name, "+"):
        points.append(point._replace(x=middle, text=f"{label}: {point.text}"))
    return points


def by_length(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """Draw loss, errors or answers found against length; for text also the gain over the cut text."""
    xaxis: Json = {
        "type": "log",
        "tickvals": table.lengths,
        "ticktext": [f"{length:,}" for length in table.lengths],
        "title": {"text": f"text length in tokens (trained at {table.train_len:,})"},
    }
    # Shares begin at zero. Losses differ by little, and gains may be negative.
    yaxis: Json = {"rangemode": "normal" if table.is_text or table.quantity == "gain" else "tozero"}
    panels = []
    for part in table.parts:
        title = table.unit if table.is_text else f"{table.unit}: {part}"
        panels.append(Panel(title, yaxis, points_of(table, table.means, part)))
    title = "Error against length"
    note = ""
    if table.kind == "ruler":
        title = "RULER: answers found"
        note = "A needle is at depth 0 at the start of the text, at 1 right before the question. "
        if table.quantity == "gain":
            title = "RULER: gain"
            note += "Gain: how much more probable an answer is than after a text in which it is wrong. "
    elif table.is_text:
        gains = points_of(table, table.gains, "text", "+")
        panels.append(Panel(f"gain over the text cut to {table.train_len:,} tokens", ZERO_LINE, gains))
        title = "Loss against text length"
        note = "The same tokens with more and more text before them; lower is better. Gain: below 0 cut the text. "
    note += "Medians over the seeds that learned the task." if table.task else "Bars: 95 % intervals."
    return draw(title, note, "%{x:,} tokens: %{customdata}", xaxis, panels, styles)


def far_copies(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """Draw the gain on far copies against their distance, in a panel for each continuation."""
    points: dict[str, list[Point]] = {}
    ticks = {}
    for name, part in table.parts.items():
        middle = (part.first + part.last) / 2
        # Nearer copies are few, and their wide intervals would hide the rest.
        if middle >= table.train_len / 4:
            ticks[middle] = f"{part.first:.0f}-{part.last:.0f}"
            points.setdefault(part.continuation, []).extend(points_over_spans(table, table.means, name, name))
    note = "Tokens after words that occurred before: how much better they are predicted with the whole text than when "
    note += f"cut to {table.train_len:,} tokens, which hides earlier occurrences. At 0 far text is not used; a network "
    note += "that copies blindly loses where the text goes on otherwise."
    xaxis: Json = {
        "type": "log",
        "title": {"text": "tokens since the same words last occurred"},
        "tickvals": list(ticks),
        "ticktext": list(ticks.values()),
    }
    # Results of earlier versions do not tell the continuations apart.
    titles = {"": "gain", "same": "gain where the text goes on as before", "other": "gain where it goes on otherwise"}
    panels = []
    for continuation, of_continuation in points.items():
        panels.append(Panel(f"{titles[continuation]}, {table.unit}", ZERO_LINE, of_continuation))
    return draw("Far copies", note, "%{customdata}", xaxis, panels, styles)


def by_position(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """Draw the loss against position, as the difference to the reference."""
    points = []
    for name in table.parts:
        points += points_over_spans(table, table.differences, name, f"positions {name}")
    note = "One pass over the longest texts. The same tokens are compared, so what is left is the encoding."
    xaxis: Json = {"title": {"text": "position in the text, tokens"}}
    panel = Panel(f"{table.unit}, difference to {table.reference}", ZERO_LINE, points)
    return draw("Loss by position", note, "%{customdata}", xaxis, [panel], styles)


def figure(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """Draw a table; None if there is no figure for it."""
    if table.kind == "by_position":
        return by_position(table, styles)
    if table.kind == "far_copies":
        return far_copies(table, styles) if table.quantity == "gain" else None
    return by_length(table, styles)


def grids_of(table: Table) -> list[Grid]:
    """Return the tables of text for a table; none for those that are read as a figure or a gain."""
    if table.kind == "by_position" or (table.kind, table.quantity) == ("far_copies", "loss"):
        return []
    return numbers(table)


def what_was_run(runs: Runs) -> list[Grid]:
    """Return how the runs differ, the commands that made the numbers, and what was left out."""
    config = pd.DataFrame([runs.configs[path] for path in runs.runs.index], index=runs.runs["name"])
    config = config.drop(columns=[key for key in config if key in HIDDEN or key.endswith("_target_")])
    # Values become text before they are compared: lists cannot be counted. A key that a run lacks stays empty.
    words = config.map(lambda value: f"{value:g}" if isinstance(value, float) else json.dumps(value))
    words = words.where(config.notna(), "")
    grids = [Grid("Runs, in what they differ", words.loc[:, words.nunique() > 1])]
    if len(runs.results):
        files = runs.results.drop_duplicates(["path", "file"])
        commands = files[PROVENANCE].value_counts().rename("results").reset_index().set_index("command")
        grids.append(Grid("Commands that made the numbers", commands))
    left_out = pd.DataFrame(runs.left_out, columns=["run", "why"]).set_index("run")
    grids.append(Grid("Left out: broken, not finished, or there twice", left_out))
    return grids


def sections(runs: Runs, reference: str = "rope") -> list[Section]:
    """Return a section for each data set and train_len, text before tasks, and one on what was run."""
    all_tables = tables(runs, reference)
    tasks = {table.section for table in all_tables if table.task}
    # Looks are chosen over all sections, so that an encoding looks the same in each.
    look_of = looks(runs.results.encoding)
    result = []
    first_of_kind: dict[tuple[str, str, str], Table] = {}
    for title in sorted(runs.runs.section.unique(), key=lambda title: (title in tasks, title)):
        rows = runs.results[runs.results.section == title]
        encodings = dict(zip(rows.line, rows.encoding, strict=True))
        of_section = [table for table in all_tables if table.section == title]
        main = find(of_section, "lengths")
        styles = line_styles(encodings, look_of, main.reference if main else None)
        figures = []
        grids = []
        for table in of_section:
            # Results on other texts have tables of their own; the overview takes the one with most lines.
            first_of_kind.setdefault((title, table.kind, table.quantity), table)
            grids += grids_of(table)
            drawn = figure(table, styles)
            if drawn:
                figures.append(drawn)
        result.append(Section(title, answer(of_section), figures, grids))
    # The overview covers all sections, and stands where a reader begins.
    if result:
        result[0].grids[:0] = overview(list(first_of_kind.values()))
    result.append(Section("What was run", {}, [], what_was_run(runs)))
    return result


def html(runs: Runs, reference: str = "rope") -> str:
    """Return one page that needs no other file."""
    parts = []
    summary = [f"Runs: {len(runs.runs):,}; left out: {len(runs.left_out)}."]
    links = []
    figures: list[Json] = []
    encodings = dict(zip(runs.results.line, runs.results.encoding, strict=True))
    for i, section in enumerate(sections(runs, reference)):
        parts.append(_section(section, i, len(figures), encodings))
        links.append(f'<a href="#s{i}">{escape(section.title)}</a>')
        figures += section.figures
    summary.append(" · ".join(links))
    title = "Which position encoding, and how far?"
    if len(runs.runs) == 1:
        title = runs.runs.name.iloc[0]
    here = Path(__file__).parent
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        page_css=(here / "page.css").read_text(encoding="utf-8"),
        page_js=(here / "page.js").read_text(encoding="utf-8"),
        title=escape(title),
        lead=" ".join(summary),
        body="\n".join(parts),
        figures=to_json_plotly(figures),  # escapes what would end the script
        plotly=get_plotlyjs(),
    )


def _section(section: Section, number: int, first_figure: int, encodings: Mapping[str, str]) -> str:
    """Return a section as HTML: the answer, the first figure, the tables, and the other figures."""
    answers = ""
    for heading, sentences in section.words.items():
        lines = "<br>".join(words_of.to_html(sentence) for sentence in sentences)
        # A number and its interval stay on one line.
        lines = lines.replace(" ± ", "&nbsp;±&nbsp;")
        answers += f"<dt>{heading}</dt><dd>{lines}</dd>"
    figures = []
    # page.js finds the data of a figure by its number on the page.
    for i, drawn in enumerate(section.figures, first_figure):
        title = escape(drawn["title"])
        note = escape(drawn["note"])
        plot = f'<div class="plot" id="f{i}" role="img" aria-label="{title}"></div>'
        figures.append(f"<figure><figcaption>{title}<small>{note}</small></figcaption>{plot}</figure>")
    look_of = looks(encodings.values())
    grids = []
    for i, grid in enumerate(section.grids):
        grids.append(_table(grid, encodings, look_of, is_open=i == 0))
    head = f'<h2 id="s{number}">{escape(section.title)}</h2><dl>{answers}</dl>'
    body = "".join(figures[:1] + grids + figures[1:])
    return f"<section>{head}{body}</section>"


def _table(grid: Grid, encodings: Mapping[str, str], look_of: Looks, is_open: bool) -> str:
    """Return a table as HTML, with the marker of its encoding before each line."""
    # pandas would cut long cells short.
    with pd.option_context("display.max_colwidth", None):
        table = grid.frame.rename_axis(None).to_html(border=0)
    # pandas has no place for a marker beside a label: it is put into the HTML, whose cells are escaped as here.
    for label in map(str, grid.frame.index):
        line = label.rpartition(": ")[2]
        if line in encodings:
            colour, symbol = look_of[encodings[line]]
            marker = f'<i style="color:{colour}">{SYMBOLS[symbol]}</i>'
            cell = f"{escape(label, quote=False)}</th>"
            table = table.replace(f"<th>{cell}", f"<th>{marker} {cell}")
    title = escape(grid.title)
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{scroll}</details>"


def markdown(runs: Runs, reference: str = "rope") -> str:
    """Return the same words and tables, without figures."""
    lines = []
    for section in sections(runs, reference):
        lines += [f"## {words_of.escaped(section.title)}", ""]
        for heading, sentences in section.words.items():
            lines += [f"- {heading}: {sentence}" for sentence in sentences]
        for title, frame in section.grids:
            lines += ["", f"{words_of.escaped(title)}.", ""]
            lines += words_of.table(["", *frame.columns], frame.itertuples(name=None))
        lines.append("")
    return "\n".join(lines)


def csv(runs: Runs, reference: str = "rope") -> str:
    """Return a row for each estimate: the means, differences and gains of every quantity, line, part and length."""
    rows = []
    for table in tables(runs, reference):
        of_table = {
            "section": table.section,
            "train_len": table.train_len,
            "kind": table.kind,
            "quantity": table.quantity,
            "unit": table.unit,
            "reference": table.reference,
            "eval": json.dumps(table.eval),
        }
        columns = {"mean": table.means, "difference": table.differences, "behind": table.behind, "gain": table.gains}
        columns |= {"above the optimum": table.excess, "share of the possible gain": table.shares}
        for name, estimates in columns.items():
            for key, e in estimates.items():
                part = table.parts[key.part]._asdict()
                # The names that the columns of `ropewalk.runs` have, too.
                part["span_start"] = part.pop("first")
                part["span_end"] = part.pop("last")
                rows.append(key._asdict() | part | {"estimate": name} | e._asdict() | of_table)
    return pd.DataFrame(rows).to_csv(index=False) if rows else ""


def write_beside(run: Path) -> Path:
    """Write report.html of one run into its directory, and return where to look. A failure only warns."""
    try:
        write_text(run / PAGE, html(load(run)))
    except Exception as error:
        # The measurements are worth more than their picture: a bug here must not fail the run.
        warnings.warn(f"{PAGE} was not written: {error}", stacklevel=2)
        return run
    return run / PAGE
