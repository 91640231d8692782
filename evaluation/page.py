"""The report: an answer in words, figures and tables, as one self-contained page, Markdown, CSV, or on a terminal."""

import json
import re
import warnings
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

import pandas as pd
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs
from rich.console import Console

from conf.schema import Config
from evaluation import charts, comparison
from evaluation.answer import Grid, answer, numbers, overview
from evaluation.charts import SYMBOLS, Json, marker
from evaluation.frame import Runs, load
from evaluation.results import Evaluation
from evaluation.statistics import Estimate
from model.files import write_text

PAGE = "report.html"


class Section(NamedTuple):
    title: str
    words: dict[str, list[str]]  # heading -> sentences; what stands between two NUL is bold
    figures: list[Json]
    grids: list[Grid]  # the first one is open on the page


def what_was_run(runs: Runs) -> list[Grid]:
    """In what the runs differ, the commands that made the numbers, and what was left out."""
    config = pd.DataFrame(list(runs.runs.config), index=runs.runs["name"])
    hidden = "name", "runs_dir", "eval.variants"
    config = config.drop(columns=[key for key in config if key in hidden or key.endswith("_target_")])
    config = config.map(json.dumps).where(config.notna(), "")
    grids = [Grid("Runs", "In what they differ.", config.loc[:, config.nunique() > 1])]
    if len(runs.results):
        made = pd.DataFrame(list(runs.results.drop_duplicates(["path", "file"]).provenance)).drop(columns="time")
        made = made.astype(object).fillna("").value_counts().rename("results").reset_index().set_index("command")
        grids.append(Grid("Commands", "That made the numbers.", made))
    left_out = pd.DataFrame(runs.left_out, columns=["run", "why"]).set_index("run")
    return [*grids, Grid("Left out", "Broken, not finished, or there twice.", left_out)]


def sections(runs: Runs, reference: str = "rope") -> list[Section]:
    """A section for each data set and train_len, text before tasks, and one on what was run."""
    every = comparison.tables(runs, reference)
    tasks = {t.section for t in every if t.task}
    made, firsts = [], []
    for title in sorted(runs.runs.section.unique(), key=lambda title: (title in tasks, title)):
        found = [t for t in every if t.section == title]
        firsts += [*{t.kind: t for t in reversed(found)}.values()]
        rows = runs.results[runs.results.section == title]
        encodings = dict(zip(rows.line, rows.encoding, strict=True))
        styles = charts.line_styles(encodings, next((t.reference for t in found if t.kind == "lengths"), None))
        figures = [figure for t in found if (figure := charts.DRAW[t.kind](t, styles))]
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
        words = re.sub(r"\0([^\0]*)\0", r"<b>\1</b>", "".join(lists))
        drawn = []
        for number, figure in enumerate(section.figures, len(figures)):
            title, note = escape(figure["title"]), escape(figure["note"])
            plot = f'<div class="plot" id="f{number}" role="img" aria-label="{title}"></div>'
            drawn.append(f"<figure><figcaption>{title}<small>{note}</small></figcaption>{plot}</figure>")
        figures += section.figures
        tables = [_table(grid, encodings, "open" if grid is section.grids[0] else "") for grid in section.grids]
        head = f'<h2 id="s{i}">{escape(section.title)}</h2><dl>{words}</dl>'
        parts.append(f"<section>{head}{''.join(drawn[:1] + tables + drawn[1:])}</section>")
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
    for line in grid.frame.index.intersection(list(encodings)):
        (colour, symbol), label = marker(encodings[line]), f"{escape(line, quote=False)}</th>"
        table = table.replace(f"<th>{label}", f'<th><i style="color:{colour}">{SYMBOLS[symbol]}</i> {label}')
    title = escape(grid.title)
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
    return f"<details {state}><summary>{title}<small>{escape(grid.note)}</small></summary>{scroll}</details>"


def markdown(runs: Runs, reference: str = "rope") -> str:
    """The same words and tables, without figures."""

    def plain(text: object) -> str:
        return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text)).replace("\n", " ").replace("\0", "**")

    lines = []
    for section in sections(runs, reference):
        lines += [f"## {plain(section.title)}", ""]
        lines += [f"- {heading}: {plain(x)}" for heading, words in section.words.items() for x in words]
        for title, note, frame in section.grids:
            rows = [["", *frame.columns], ["---"] * (1 + frame.shape[1]), *frame.itertuples(name=None)]
            lines += ["", f"{plain(title)}. {note}", "", *(f"| {' | '.join(map(plain, row))} |" for row in rows)]
        lines += [""]
    return "\n".join(lines)


def csv(runs: Runs, reference: str = "rope") -> str:
    """A row for each estimate: of every measure, line, name and length the mean, the differences and the gain."""
    found = []
    for t in comparison.tables(runs, reference):
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
    kept = [t for t in comparison.tables(found) if asked is None or (t.kind, t.eval) in asked]
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
