"""The report: an answer in words, figures and tables, as one self-contained page, Markdown, CSV, or on a terminal."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
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
from evaluation.report.answer import Grid, amount, answer, numbers, overview
from evaluation.report.comparison import Table, tables
from evaluation.report.frame import Runs, load
from evaluation.results import Evaluation
from evaluation.statistics import Estimate

PAGE = "report.html"
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


class Section(NamedTuple):
    title: str
    words: dict[str, list[str]]  # heading -> sentences; what stands between two NUL is bold
    figures: list[Json]
    grids: list[Grid]  # the first one is open on the page


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
        dot = {"symbol": symbol, "size": 8, "maxdisplayed": 16}
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
    sign = "+" * (column != "mean")
    found = [(line, n, table.get(line, n, column, name)) for line in table.rows for n in table.lengths]
    return [(line, n, e.value, e.half, amount(e, table.unit, sign)) for line, n, e in found if e]


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
        note = "The same tokens with more and more text before them; lower is better. Gain: below 0 cut the text. "
    return draw(title, f"{note}Bars: 95 % intervals.", "%{x:,} tokens: %{customdata}", xaxis, panels, styles)


def by_place(table: Table, styles: Mapping[str, Json]) -> Json | None:
    """Far copies against their distance, and loss against position: what the numbers in the names say."""
    near = table.train_len / 4 if table.kind == "far_copies" else 0  # nearer copies are few: their bars hide the rest
    middle = {name: x for name in table.names if (x := sum(map(int, re.findall(r"\d+", name))) / 2) >= near}
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


def what_was_run(runs: Runs) -> list[Grid]:
    """In what the runs differ, the commands that made the numbers, and what was left out."""
    config = pd.DataFrame(list(runs.runs.config), index=runs.runs["name"])
    hidden = "name", "runs_dir", "eval.variants"
    config = config.drop(columns=[key for key in config if key in hidden or key.endswith("_target_")])
    config = config.map(lambda x: f"{x:g}" if isinstance(x, float) else json.dumps(x)).where(config.notna(), "")
    grids = [Grid("Runs, in what they differ", config.loc[:, config.nunique() > 1])]
    if len(runs.results):
        columns = ["command", "commit", "dirty", "diff_sha256", "device", "precision", "torch", "processor"]
        made = pd.DataFrame(list(runs.results.drop_duplicates(["path", "file"]).provenance), columns=columns)
        made = made.astype(object).fillna("").value_counts().rename("results").reset_index().set_index("command")
        grids.append(Grid("Commands that made the numbers", made))
    left_out = pd.DataFrame(runs.left_out, columns=["run", "why"]).set_index("run")
    return [*grids, Grid("Left out: broken, not finished, or there twice", left_out)]


def sections(runs: Runs, reference: str = "rope") -> list[Section]:
    """A section for each data set and train_len, text before tasks, and one on what was run."""
    every = tables(runs, reference)
    tasks = {t.section for t in every if t.task}
    made, firsts = [], []
    for title in sorted(runs.runs.section.unique(), key=lambda title: (title in tasks, title)):
        found = [t for t in every if t.section == title]
        firsts += [*{t.kind: t for t in reversed(found)}.values()]
        rows = runs.results[runs.results.section == title]
        encodings = dict(zip(rows.line, rows.encoding, strict=True))
        styles = line_styles(encodings, next((t.reference for t in found if t.kind == "lengths"), None))
        figures = [figure for t in found if (figure := DRAW[t.kind](t, styles))]
        grids = [grid for t in found if t.kind != "by_position" for grid in numbers(t)]
        made.append(Section(title, answer(found), figures, grids))
    if made:
        made[0].grids[:0] = overview(firsts)
    return [*made, Section("What was run", {}, [], what_was_run(runs))]


def html(runs: Runs, reference: str = "rope") -> str:
    """One page that needs no other file."""
    found, parts = sections(runs, reference), []
    figures: list[Json] = []
    encodings = dict(zip(runs.results.line, runs.results.encoding, strict=True))
    for i, section in enumerate(found):
        lists = [f"<dt>{x}</dt><dd>{'<br>'.join(map(escape, words))}</dd>" for x, words in section.words.items()]
        words = re.sub(r"\0([^\0]*)\0", r"<b>\1</b>", "".join(lists)).replace(" ± ", "&nbsp;±&nbsp;")
        drawn = []
        for number, figure in enumerate(section.figures, len(figures)):
            title, note = escape(figure["title"]), escape(figure["note"])
            plot = f'<div class="plot" id="f{number}" role="img" aria-label="{title}"></div>'
            drawn.append(f"<figure><figcaption>{title}<small>{note}</small></figcaption>{plot}</figure>")
        figures += section.figures
        grids = [_table(grid, encodings, "open" if grid is section.grids[0] else "") for grid in section.grids]
        head = f'<h2 id="s{i}">{escape(section.title)}</h2><dl>{words}</dl>'
        parts.append(f"<section>{head}{''.join(drawn[:1] + grids + drawn[1:])}</section>")
    links = [f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(found)]
    here = Path(__file__).parent
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        {name.replace(".", "_"): (here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")},
        title=escape(runs.runs.name.iloc[0] if len(runs.runs) == 1 else "Which position encoding, and how far?"),
        lead=f"Runs: {len(runs.runs):,}; left out: {len(runs.left_out)}. {' · '.join(links)}",
        body="\n".join(parts),
        figures=to_json_plotly(figures),  # escapes what would end the script
        plotly=get_plotlyjs(),
    )


def _table(grid: Grid, encodings: dict[str, str], state: str) -> str:
    """HTML, with the marker of its encoding before each line."""
    with pd.option_context("display.max_colwidth", None):
        table = grid.frame.rename_axis(None).to_html(border=0)
    for label in map(str, grid.frame.index):
        if encoding := encodings.get(label.rpartition(": ")[2]):
            (colour, symbol), cell = marker(encoding), f"{escape(label, quote=False)}</th>"
            table = table.replace(f"<th>{cell}", f'<th><i style="color:{colour}">{SYMBOLS[symbol]}</i> {cell}')
    title = escape(grid.title)
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    return f"<details {state}><summary>{title}</summary>{scroll}</details>"


def markdown(runs: Runs, reference: str = "rope") -> str:
    """The same words and tables, without figures."""

    def plain(text: object) -> str:
        return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text)).replace("\n", " ").replace("\0", "**")

    lines = []
    for section in sections(runs, reference):
        lines += [f"## {plain(section.title)}", ""]
        lines += [f"- {heading}: {plain(x)}" for heading, words in section.words.items() for x in words]
        for title, frame in section.grids:
            rows = [["", *frame.columns], ["---"] * (1 + frame.shape[1]), *frame.itertuples(name=None)]
            lines += ["", f"{plain(title)}.", "", *(f"| {' | '.join(map(plain, row))} |" for row in rows)]
        lines += [""]
    return "\n".join(lines)


def csv(runs: Runs, reference: str = "rope") -> str:
    """A row for each estimate: of every measure, line, name and length the mean, the differences and the gain."""
    found = []
    for t in tables(runs, reference):
        estimates = t.stats.rename_axis(columns="estimate").stack().dropna()
        rows = pd.DataFrame([*estimates], index=estimates.index, columns=Estimate._fields).reset_index()
        about = {key: getattr(t, key) for key in ("section", "train_len", "kind", "task", "unit", "reference")}
        found.append(rows.assign(**about, eval=json.dumps(t.eval)))
    return pd.concat(found).to_csv(index=False) if found else ""


def show(run: Path, cfg: Config, only: Iterable[Evaluation] | None = None) -> None:
    """Print the results of a run, or of it those that measured the same as `only`; tolerances are those of `cfg`."""
    asked = None if only is None else [(e.kind, e.eval) for e in only]
    found = load(run)
    for config in found.runs.config:
        config |= {f"eval.{key}": getattr(cfg.eval, key) for key in ("tolerance", "task_tolerance")}
    kept = [t for t in tables(found) if asked is None or (t.kind, t.eval) in asked]
    for grid in [grid for table in kept if table.kind != "by_position" for grid in numbers(table)]:
        print(f"{run.name}: {grid.title}\n{grid.frame.to_string(line_width=Console().width)}\n")
    for heading, sentences in answer(kept).items():
        for words in sentences:
            print(f"{heading}: {words}".replace("\0", ""))


def write_beside(run: Path) -> Path:
    """Write report.html of one run into its directory; returns where to look. A failure is a warning."""
    try:
        write_text(run / PAGE, html(load(run)))
    except Exception as error:  # what was measured is worth more than its picture
        warnings.warn(f"{PAGE} was not written: {error}", stacklevel=2)
        return run
    return run / PAGE
