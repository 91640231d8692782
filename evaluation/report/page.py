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
from rich.console import Console

from common.files import write_text
from conf.schema import Config
from evaluation.report import markdown as words_of
from evaluation.report.answer import Grid, amount, answer, numbers, overview
from evaluation.report.comparison import BEST_POSSIBLE, Estimates, Key, Table, tables
from evaluation.report.frame import PROVENANCE, Runs, load
from evaluation.results import Evaluation

PAGE = "report.html"
# Told apart with the kinds of colour blindness that tests simulate, on white and on black.
PALETTE = ("#0563f2", "#fc115d", "#4aab8b", "#ac01a8", "#905b8a", "#1ba6f3", "#ac9f09", "#a04102")
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "cross": "✚", "x": "✖", "star": "★"}
DASHES = ("solid", "6px,4px", "2px,3px", "10px,3px,2px,3px")  # of the lines of one encoding
BEST: dict[str, Any] = {"mode": "lines", "line": {"color": "#8a8f98", "dash": "solid", "width": 1.5}}
GREY: dict[str, Any] = {"mode": "lines", "line": {"color": "#8a8f98", "dash": "dot"}}
HIDDEN = ("name", "runs_dir", "eval.variants")  # options in which it says nothing that runs differ
Json = dict[str, Any]
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
    """Colour and symbol for each encoding.

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
        chosen[encoding] = min(candidates, key=lambda look: (taken.count(look), taken_colours.count(look[0])))
    return chosen


def line_styles(encodings: Mapping[str, str], look_of: Looks, reference: str | None) -> dict[str, Json]:
    """Style of each line of a section: colour and symbol by encoding, dashes by line.

    Args:
        encodings: the encoding that reads, by line.
        reference: the line that is drawn thicker.
    """
    styles: dict[str, Json] = {BEST_POSSIBLE: BEST}
    drawn = dict.fromkeys(encodings.values(), 0)  # lines of each encoding that have a style
    for line, encoding in sorted(encodings.items(), key=lambda item: (" read as " in item[0], item)):
        colour, symbol = look_of[encoding]
        dash = DASHES[drawn[encoding] % len(DASHES)]
        drawn[encoding] += 1
        width = 3.5 if line == reference else 2
        styles[line] = {
            "mode": "lines+markers",
            "line": {"color": colour, "dash": dash, "width": width},
            "marker": {"symbol": symbol, "size": 8, "maxdisplayed": 16},
        }
    return styles


def plotly_text(text: str) -> str:
    """Text that Plotly shows as it is: it reads some HTML, and fills in what %{...} names."""
    return escape(text).replace("%{", "%&#123;")


def draw(
    title: str, note: str, hover: str, xaxis: Json, panels: Sequence[Panel], styles: Mapping[str, Json]
) -> Json | None:
    """A figure of lines through points with their intervals, grey without a style; None if there are no points."""
    traces: list[Json] = []
    layout: Json = {"annotations": []}
    in_legend: set[str] = set()
    # Plotly numbers the axes of panels from 2 on: x, x2, x3. A line has one entry in the legend for all panels. Where
    # the panels stand is decided by page.js, which knows the width of the page.
    for i, panel in enumerate(panels):
        number = str(i + 1) if i else ""
        layout[f"xaxis{number}"] = xaxis
        layout[f"yaxis{number}"] = panel.yaxis
        layout["annotations"].append(_panel_title(panel.title, number))
        for line in dict.fromkeys(point.line for point in panel.points):
            points = sorted((p for p in panel.points if p.line == line), key=lambda point: point.x)
            name = plotly_text(line)
            trace = {
                "type": "scatter",
                "name": name,
                "legendgroup": name,
                "showlegend": line not in in_legend,
                "xaxis": f"x{number}",
                "yaxis": f"y{number}",
                "x": [point.x for point in points],
                "y": [float(f"{point.y:.5g}") for point in points],
                "error_y": {"array": [0 if math.isnan(point.half) else point.half for point in points], "width": 3},
                "customdata": [point.text for point in points],
                "hovertemplate": f"<b>%{{fullData.name}}</b><br>{hover}<extra></extra>",
            }
            traces.append(trace | styles.get(line, GREY))
            in_legend.add(line)
    if not traces:
        return None
    return {"title": title, "note": note, "data": traces, "layout": layout, "panels": len(panels)}


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
    """A point for each estimate of a part, at its length."""
    points = []
    for line in table.rows:
        for length in table.lengths:
            e = estimates.get(Key(line, part, length))
            if e:
                points.append(Point(line, length, e.value, e.half, amount(e, table.unit, sign)))
    return points


def by_length(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """A figure of loss, errors or answers found against length; of text also the gain over the cut text."""
    xaxis: Json = {"type": "log", "tickvals": table.lengths, "ticktext": [f"{n:,}" for n in table.lengths]}
    xaxis["title"] = {"text": f"text length in tokens (trained at {table.train_len:,})"}
    yaxis: Json = {"rangemode": "normal" if table.is_text or table.quantity == "gain" else "tozero"}
    panels = []
    for part in table.parts:
        title = table.unit if table.is_text else f"{table.unit}: {part}"
        panels.append(Panel(title, yaxis, points_of(table, table.means, part)))
    title, note = "Error against length", ""
    if table.kind == "ruler":
        title = "RULER: answers found"
        note = "A needle is at depth 0 at the start of the text, at 1 right before the question. "
        if table.quantity == "gain":
            title = "RULER: gain"
            note += "Gain: how much more probable an answer is than after a text in which it is wrong. "
    elif table.is_text:
        gains = points_of(table, table.gains, table.first_part, "+")
        panels.append(Panel(f"gain over the text cut to {table.train_len:,} tokens", {"zerolinewidth": 3}, gains))
        title = "Loss against text length"
        note = "The same tokens with more and more text before them; lower is better. Gain: below 0 cut the text. "
    note += "Medians over the seeds that learned the task." if table.task else "Bars: 95 % intervals."
    return draw(title, note, "%{x:,} tokens: %{customdata}", xaxis, panels, styles)


def far_copies(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """A figure of the gain on far copies against their distance."""
    points: dict[str, list[Point]] = {}  # by continuation
    ticks = {}
    for name, part in table.parts.items():
        x = (part.first + part.last) / 2
        if x >= table.train_len / 4:  # nearer ones are few: their bars hide the rest
            ticks[x] = f"{part.first:.0f}-{part.last:.0f}"
            of_part = points_of(table, table.means, name, "+")
            points.setdefault(part.continuation, []).extend(p._replace(x=x, text=f"{name}: {p.text}") for p in of_part)
    note = "Tokens after words that occurred before: how much better they are predicted with the whole text than when "
    note += f"cut to {table.train_len:,} tokens, which hides earlier occurrences. At 0 far text is not used; a network "
    note += "that copies blindly loses where the text goes on otherwise."
    xaxis: Json = {"type": "log", "title": {"text": "tokens since the same words last occurred"}}
    xaxis |= {"tickvals": list(ticks), "ticktext": list(ticks.values())}
    titles = {"": "gain", "same": "gain where the text goes on as before", "other": "gain where it goes on otherwise"}
    panels = []
    for continuation, of_continuation in points.items():
        panels.append(Panel(f"{titles[continuation]}, {table.unit}", {"zerolinewidth": 3}, of_continuation))
    return draw("Far copies", note, "%{customdata}", xaxis, panels, styles)


def by_position(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """A figure of the loss against position, as the difference to the reference."""
    points = []
    for name, part in table.parts.items():
        x = (part.first + part.last) / 2
        found = points_of(table, table.differences, name, "+")
        points += [p._replace(x=x, text=f"positions {name}: {p.text}") for p in found]
    note = "One pass over the longest texts. The same tokens are compared, so what is left is the encoding."
    xaxis: Json = {"title": {"text": "position in the text, tokens"}}
    panel = Panel(f"{table.unit}, difference to {table.reference}", {"zerolinewidth": 3}, points)
    return draw("Loss by position", note, "%{customdata}", xaxis, [panel], styles)


def figure(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """The figure of a table; None where there is none."""
    if table.kind == "by_position":
        return by_position(table, styles)
    if table.kind == "far_copies":
        return far_copies(table, styles) if table.quantity == "gain" else None
    return by_length(table, styles)


def grids_of(table: Table) -> list[Grid]:
    """The tables of text for a table, without those that nobody would read."""
    if table.kind == "by_position" or (table.kind, table.quantity) == ("far_copies", "loss"):
        return []
    return numbers(table)


def what_was_run(runs: Runs) -> list[Grid]:
    """In what the runs differ, the commands that made the numbers, and what was left out."""
    config = pd.DataFrame([runs.configs[path] for path in runs.runs.index], index=runs.runs["name"])
    config = config.drop(columns=[key for key in config if key in HIDDEN or key.endswith("_target_")])
    config = config.map(lambda x: f"{x:g}" if isinstance(x, float) else json.dumps(x)).where(config.notna(), "")
    grids = [Grid("Runs, in what they differ", config.loc[:, config.nunique() > 1])]
    if len(runs.results):
        files = runs.results.drop_duplicates(["path", "file"])
        commands = files[PROVENANCE].value_counts().rename("results").reset_index().set_index("command")
        grids.append(Grid("Commands that made the numbers", commands))
    left_out = pd.DataFrame(runs.left_out, columns=["run", "why"]).set_index("run")
    return [*grids, Grid("Left out: broken, not finished, or there twice", left_out)]


def sections(runs: Runs, reference: str = "rope") -> list[Section]:
    """A section for each data set and train_len, text before tasks, and one on what was run."""
    every = tables(runs, reference)
    tasks = {table.section for table in every if table.task}
    look_of = looks(runs.results.encoding)
    result = []
    first_of_kind: list[Table] = []
    for title in sorted(runs.runs.section.unique(), key=lambda title: (title in tasks, title)):
        own = [table for table in every if table.section == title]
        of_kind: dict[tuple[str, str], Table] = {}
        for table in own:
            of_kind.setdefault((table.kind, table.quantity), table)
        first_of_kind += of_kind.values()
        rows = runs.results[runs.results.section == title]
        references = [table.reference for table in own if table.kind == "lengths"]
        encodings = dict(zip(rows.line, rows.encoding, strict=True))
        styles = line_styles(encodings, look_of, references[0] if references else None)
        figures = [drawn for table in own if (drawn := figure(table, styles))]
        grids = [grid for table in own for grid in grids_of(table)]
        result.append(Section(title, answer(own), figures, grids))
    # The overview is of all sections, and stands where a reader begins.
    if result:
        result[0].grids[:0] = overview(first_of_kind)
    return [*result, Section("What was run", {}, [], what_was_run(runs))]


def html(runs: Runs, reference: str = "rope") -> str:
    """One page that needs no other file."""
    parts, links = [], []
    figures: list[Json] = []
    encodings = dict(zip(runs.results.line, runs.results.encoding, strict=True))
    for i, section in enumerate(sections(runs, reference)):
        parts.append(_section(section, i, len(figures), encodings))
        links.append(f'<a href="#s{i}">{escape(section.title)}</a>')
        figures += section.figures
    here = Path(__file__).parent
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        page_css=(here / "page.css").read_text(encoding="utf-8"),
        page_js=(here / "page.js").read_text(encoding="utf-8"),
        title=escape(runs.runs.name.iloc[0] if len(runs.runs) == 1 else "Which position encoding, and how far?"),
        lead=f"Runs: {len(runs.runs):,}; left out: {len(runs.left_out)}. {' · '.join(links)}",
        body="\n".join(parts),
        figures=to_json_plotly(figures),  # escapes what would end the script
        plotly=get_plotlyjs(),
    )


def _section(section: Section, number: int, first_figure: int, encodings: Mapping[str, str]) -> str:
    """A section as HTML: the answer, the first figure, the tables, and the other figures."""
    answers = ""
    for heading, sentences in section.words.items():
        lines = "<br>".join(words_of.to_html(sentence) for sentence in sentences)
        answers += f"<dt>{heading}</dt><dd>{lines.replace(' ± ', '&nbsp;±&nbsp;')}</dd>"
    figures = []
    for i, drawn in enumerate(section.figures, first_figure):
        title, note = escape(drawn["title"]), escape(drawn["note"])
        plot = f'<div class="plot" id="f{i}" role="img" aria-label="{title}"></div>'
        figures.append(f"<figure><figcaption>{title}<small>{note}</small></figcaption>{plot}</figure>")
    look_of = looks(encodings.values())
    grids = [_table(grid, encodings, look_of, grid is section.grids[0]) for grid in section.grids]
    head = f'<h2 id="s{number}">{escape(section.title)}</h2><dl>{answers}</dl>'
    return f"<section>{head}{''.join(figures[:1] + grids + figures[1:])}</section>"


def _table(grid: Grid, encodings: Mapping[str, str], look_of: Looks, is_open: bool) -> str:
    """A table as HTML, with the marker of its encoding before each line."""
    with pd.option_context("display.max_colwidth", None):
        table = grid.frame.rename_axis(None).to_html(border=0)
    # pandas has no place for a mark beside a label: it is put into the HTML, whose cells are escaped as here.
    for label in map(str, grid.frame.index):
        encoding = encodings.get(label.rpartition(": ")[2])
        if encoding:
            colour, symbol = look_of[encoding]
            cell = f"{escape(label, quote=False)}</th>"
            table = table.replace(f"<th>{cell}", f'<th><i style="color:{colour}">{SYMBOLS[symbol]}</i> {cell}')
    title = escape(grid.title)
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{scroll}</details>"


def markdown(runs: Runs, reference: str = "rope") -> str:
    """The same words and tables, without figures."""
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
    """A row for each estimate: of every quantity, line, part and length the mean, the differences and the gain."""
    rows = []
    for table in tables(runs, reference):
        about = {name: getattr(table, name) for name in ("section", "train_len", "kind", "quantity", "unit")}
        about |= {"reference": table.reference, "eval": json.dumps(table.eval)}
        columns = {"mean": table.means, "difference": table.differences, "behind": table.behind, "gain": table.gains}
        columns |= {"above the optimum": table.excess, "share of the possible gain": table.shares}
        for name, estimates in columns.items():
            for key, e in estimates.items():
                part = table.parts[key.part]._asdict()
                part = part | {"span_start": part.pop("first"), "span_end": part.pop("last")}
                rows.append(key._asdict() | part | {"estimate": name} | e._asdict() | about)
    return pd.DataFrame(rows).to_csv(index=False) if rows else ""


def show(run: Path, cfg: Config, only: Iterable[Evaluation] | None = None) -> None:
    """Print the results of a run, or of it those that measured the same as `only`; tolerances are those of `cfg`."""
    runs = load(run)
    for config in runs.configs.values():
        config["eval.tolerance"] = cfg.eval.tolerance
        config["eval.task_tolerance"] = cfg.eval.task_tolerance
    kept = tables(runs)
    if only is not None:
        asked = [(e.kind, e.eval) for e in only]
        kept = [table for table in kept if (table.kind, table.eval) in asked]
    for table in kept:
        for grid in grids_of(table):
            print(f"{run.name}: {grid.title}\n{grid.frame.to_string(line_width=Console().width)}\n")
    for heading, sentences in answer(kept).items():
        for sentence in sentences:
            print(f"{heading}: {words_of.to_plain(sentence)}")


def write_beside(run: Path) -> Path:
    """Write report.html of one run into its directory; returns where to look. A failure is a warning."""
    try:
        write_text(run / PAGE, html(load(run)))
    except Exception as error:  # what was measured is worth more than its picture
        warnings.warn(f"{PAGE} was not written: {error}", stacklevel=2)
        return run
    return run / PAGE
