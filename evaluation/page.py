"""The report: an answer in words, figures and tables, as one self-contained page, as Markdown or as CSV."""

import json
import re
import warnings
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

import pandas as pd
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from evaluation import charts, comparison
from evaluation.answer import Grid, answer, numbers, overview
from evaluation.charts import SYMBOLS, Figure, look
from evaluation.frame import Runs, load
from model.files import write_text

PAGE = "report.html"


class Section(NamedTuple):
    title: str
    words: dict[str, list[str]]  # heading -> sentences; what stands between two NUL is bold
    figures: list[Figure]
    grids: list[Grid]  # the first one is open on the page


def provenance(runs: Runs) -> list[Grid]:
    """In what the runs differ, what they share, the commands that made the numbers, and what was left out."""
    config = pd.DataFrame(list(runs.runs.config)).drop(columns=["name", "runs_dir"], errors="ignore")
    config = config.map(lambda v: json.dumps(v, default=str)).fillna("")
    took = runs.runs.filter(regex=r"^training\.(parameters\.total|tokens|tokens_per_s)$").reset_index(drop=True)
    took = took.map(lambda v: f"{v:,.0f}" if isinstance(v, int | float) and v == v else "")
    rows = took.join(config.loc[:, config.nunique() > 1])
    grids = [Grid("Runs", "What the training took, and in what they differ.", rows.set_index(runs.runs["name"]))]
    shared = config.loc[:, config.nunique() == 1].head(1).T.rename(columns={0: "value"})
    grids.append(Grid("Settings", "That all runs share.", shared))
    if len(runs.results):
        made = pd.DataFrame(list(runs.results.drop_duplicates(["path", "file"]).provenance)).drop(columns="time")
        made = made.astype(str).value_counts().rename("results").reset_index().set_index("command")
        grids.append(Grid("Commands", "That made the numbers.", made))
    why = pd.DataFrame({"why": [reason for _, reason in runs.left_out]}, index=[path for path, _ in runs.left_out])
    return [*grids, Grid("Left out", "Broken, or not finished.", why)]


def build(runs: Runs, reference: str = "rope") -> list[Section]:
    """A section for each data set and train_len, text before tasks, and one on what was run."""
    every = sorted(comparison.tables(runs, reference), key=lambda t: [*charts.DRAW].index(t.kind))
    tasks = {t.section for t in every if t.task}
    sections, firsts = [], []
    for title in sorted(runs.runs.section.unique(), key=lambda title: (title in tasks, title)):
        about, found = runs.runs[runs.runs.section == title], [t for t in every if t.section == title]
        main = {t.kind: t for t in reversed(found)}
        firsts += [t for t in found if main[t.kind] is t]
        encodings = dict(zip(about.label, about.encoding, strict=True))
        for t in found:
            encodings |= t.lines.encoding.to_dict()
        pen = charts.Pen(encodings, main.get("lengths"))
        figures = [charts.DRAW[t.kind](t, pen) for t in found]
        figures += [charts.curves(runs, about, metric, pen) for metric in charts.CURVES]
        figures += [charts.frequencies(runs, main["lengths"], pen)] if "lengths" in main else []
        grids = [grid for t in found if t.kind != "by_position" for grid in numbers(t)]
        sections.append(Section(title, answer(found), [f for f in figures if f], grids))
    if sections:
        sections[0].grids[:0] = overview(firsts)
    return [*sections, Section("What was run", {}, [], provenance(runs))]


def html(runs: Runs, reference: str = "rope") -> str:
    """One page that needs no other file."""
    sections, parts = build(runs, reference), []
    figures: list[dict] = []
    encodings = dict(zip(runs.runs.label, runs.runs.encoding, strict=True))
    encodings |= dict(zip(runs.results.line, runs.results.encoding, strict=True))
    for i, section in enumerate(sections):
        lists = [f"<dt>{x}</dt><dd>{'<br>'.join(map(escape, words))}</dd>" for x, words in section.words.items()]
        drawn = []
        for figure in section.figures:
            plot = f'<div class="plot" id="f{len(figures)}" role="img" aria-label="{escape(figure.title)}"></div>'
            drawn.append(f"<figure><figcaption>{_title(figure)}</figcaption>{plot}</figure>")
            figures.append(figure._asdict())
        tables = [_table(grid, encodings, "open" if grid is section.grids[0] else "") for grid in section.grids]
        words = re.sub(r"\0([^\0]*)\0", r"<b>\1</b>", "".join(lists))
        head = f'<h2 id="s{i}">{escape(section.title)}</h2><dl>{words}</dl>'
        parts.append(f"<section>{head}{''.join(drawn[:1] + tables + drawn[1:])}</section>")
    links = [f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(sections)]
    here = Path(__file__).parent
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(runs.runs.name.iloc[0] if len(runs.runs) == 1 else "Which position encoding, and how far?"),
        lead=f"Runs: {len(runs.runs):,}; left out: {len(runs.left_out)}. {' · '.join(links)}",
        body="\n".join(parts),
        figures=to_json_plotly(figures),  # escapes what would end the script
        plotly=get_plotlyjs(),
        style=(here / "page.css").read_text(encoding="utf-8"),
        script=(here / "page.js").read_text(encoding="utf-8"),
    )


def _title(part: Figure | Grid) -> str:
    return f"{escape(part.title)}<small>{escape(part.note)}</small>"


def _table(grid: Grid, encodings: dict[str, str], state: str) -> str:
    """HTML, with the marker of its encoding before each line."""
    with pd.option_context("display.max_colwidth", None):
        table = grid.frame.rename_axis(None).to_html(border=0)
    for line in grid.frame.index.intersection(list(encodings)):
        (colour, symbol), label = look(encodings[line]), f"{escape(line, quote=False)}</th>"
        table = table.replace(f"<th>{label}", f'<th><i style="color:{colour}">{SYMBOLS[symbol]}</i> {label}')
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(grid.title)}">{table}</div>'
    return f"<details {state}><summary>{_title(grid)}</summary>{scroll}</details>"


def markdown(runs: Runs, reference: str = "rope") -> str:
    """The same words and tables, without figures."""

    def plain(text: object) -> str:
        return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text)).replace("\n", " ").replace("\0", "**")

    lines = []
    for section in build(runs, reference):
        lines += [f"## {plain(section.title)}", ""]
        lines += [f"- {heading}: {plain(x)}" for heading, words in section.words.items() for x in words]
        for title, note, frame in section.grids:
            rows = [["", *frame.columns], ["---"] * (1 + frame.shape[1]), *frame.itertuples(name=None)]
            lines += ["", f"{plain(title)}. {note}", "", *(f"| {' | '.join(map(plain, row))} |" for row in rows)]
        lines += [""]
    return "\n".join(lines)


def csv(runs: Runs, reference: str = "rope") -> str:
    """A row for each line, name and length of every measure, with all estimates in full."""
    found = []
    for t in comparison.tables(runs, reference):
        rows = t.stats.reset_index().join(t.lines[["encoding", "zero_shot", "reach"]], on="line")
        for column in ("mean", "difference", "behind", "gain", "reach"):
            parts = pd.DataFrame([e._asdict() if e else {} for e in rows.pop(column)], index=rows.index)
            rows = rows.join(parts.add_prefix(f"{column}_"))
        about = {key: getattr(t, key) for key in ("section", "train_len", "kind", "task", "unit", "reference")}
        found.append(rows.assign(**about, eval=json.dumps(t.eval)))
    return pd.concat(found).to_csv(index=False) if found else ""


def write_beside(run: Path) -> Path:
    """Write report.html of one run into its directory; returns where to look. A failure is a warning."""
    try:
        write_text(run / PAGE, html(load(run)))
    except Exception as error:  # what was measured is worth more than its picture
        warnings.warn(f"{PAGE} was not written: {error}", stacklevel=2)
        return run
    return run / PAGE
