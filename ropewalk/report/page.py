"""The page of a report: an answer, a figure, a table, the rest collapsed; the same tables as Markdown, and as CSV."""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ropewalk.files import write_text
from ropewalk.report import frame
from ropewalk.report.answer import amount, answer, far_text, percent
from ropewalk.report.frame import PROVENANCE, Runs
from ropewalk.report.table import BEST_POSSIBLE, FAR, LEARNED, losses_of_text, over_seeds, results

PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("page.html.j2")
COSTS = {"parameters": "parameters", "step_ms": "ms a step", "peak_memory_mb": "MB at most"}
AS_GAINS = ("far_copies", "key_tokens")  # measures whose losses are only shown as the gain over the cut text
Cells = Mapping[str, str]  # by line


class Grid(NamedTuple):
    """A table of text."""

    title: str
    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]  # the name of each row, and its cells


class Section(NamedTuple):
    """What is said of the runs that can be compared. Figures are SVG for a wide page and for a phone."""

    title: str
    answer: Sequence[str]
    figures: Sequence[tuple[str, str]]
    grids: Sequence[Grid]
    colours: Mapping[str, str]  # names of variables, by line


def html(runs: Runs, reference: str = "rope") -> str:
    """Return one page that needs no other file and no script."""
    import jinja2

    from ropewalk.report import plot

    table = results(runs, reference)
    curves = frame.curves(runs)
    sections = []
    for title in titles(runs):
        of_title = table[table.section == title]
        figures, colours = drawn(of_title, curves[curves.section == title], reference)
        sections.append(Section(title, answer(of_title), figures, grids(of_title), colours))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    title = "Which position encoding, and how far?"
    if len(runs.runs) == 1:
        title = runs.runs["name"].iloc[0]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        summary=f"Runs: {len(runs.runs):,}; left out: {len(runs.left_out):,}.",
        sections=sections,
        what_was_run=what_was_run(runs, table),
        light=plot.LIGHT.variables,
        dark=plot.DARK.variables,
    )


def titles(runs: Runs) -> list[str]:
    """Return the sections, those with most lines first, then those of the shortest training."""
    facts = runs.runs.groupby("section").agg(lines=("group", "nunique"), train_len=("train_len", "min"))
    return (
        facts.reset_index()
        .sort_values(["lines", "train_len", "section"], ascending=[False, True, True])
        .section.tolist()
    )


def drawn(table: pd.DataFrame, curves: pd.DataFrame, reference: str) -> tuple[list[tuple[str, str]], Mapping[str, str]]:
    """Return the figures of a section, and the variable of each line's colour."""
    from ropewalk.report import plot

    draws = []
    lines = None
    colours: Mapping[str, str] = {}
    text = losses_of_text(table)
    if len(text):
        # Lines have the same colours in all figures.
        lines = plot.chosen(table)
        colours = plot.variables(table)
        reference = text.reference[text.reference != ""].iloc[0]
        if text.gain.notna().any():
            draws.append(lambda ax: plot.gain(table, ax, lines=lines))
        draws.append(lambda ax: plot.loss(table, ax, lines=lines))
    if any(name in curves and curves[name].notna().any() for name in plot.VALIDATION):
        draws.append(lambda ax: plot.curves(curves, ax, lines=lines, reference=reference))
    return [(plot.svg(draw), plot.svg(draw, plot.NARROW)) for draw in draws], colours


def grids(table: pd.DataFrame) -> list[Grid]:
    """Return the tables of a section: an overview, the numbers of each measure, and in what the lines differ."""
    rows = over_seeds(table)
    text = losses_of_text(rows)
    result = [overview(table, text)] if len(text) else []
    for (measure, quantity, _), of_measure in rows.groupby(["measure", "quantity", "eval"], sort=False):
        if measure not in AS_GAINS or quantity == "gain":
            result += numbers(of_measure)
    trained = rows[(rows.line == rows.base) & (rows.line != BEST_POSSIBLE)].drop_duplicates("line").set_index("line")
    columns = {"differs in": trained.settings, "runs": trained.run}
    return [*result, _grid("In what the lines differ, and the runs of each", trained.reset_index(), columns)]


def overview(table: pd.DataFrame, text: pd.DataFrame) -> Grid:
    """Return the first table: the verdict, gains, share, loss, far text and costs of each line, best first."""
    longest = text.length.max()
    last = text[text.length == longest].set_index("line")
    columns: dict[str, Cells] = {"reading on": last.verdict[last.index != BEST_POSSIBLE].dropna()}
    for name in ("train_len", "cut"):
        if text[name].nunique() > 1:
            columns[name] = last[name].dropna().map("{:,.0f}".format)
    for length in sorted(text.length[text.length > text.cut].unique(), reverse=True):
        columns[f"gain at {length:,}"] = _cells(text[text.length == length], "gain", "+")
    if not last.lead.equals(last.gain):  # of one run the reference is the run
        columns["over the reference on the cut text"] = _cells(text[text.length == longest], "lead", "+")
    columns[f"loss at {longest:,}"] = _cells(text[text.length == longest], "value")
    if last.share.notna().any():
        shares = {row.Index: percent(row.share, row.share_low, row.share_high) for row in last.itertuples()}
        columns["share of the possible, %"] = shares
    for (measure, part, quantity, _), rows in far_text(table).groupby(["measure", "part", "quantity", "eval"]):
        words = f"{measure.replace('_', ' ')}: {quantity} {part.replace(FAR, 'from far text')}"
        columns[words] = _cells(rows, "value", "+" if quantity == "gain" else "")
    for name, heading in COSTS.items():
        columns[heading] = {line: f"{value:,.0f}" for line, value in last[name].dropna().items()}
    return _grid(f"Gain over the cut text in {text.unit.iloc[0]}, and costs; best first", text, columns)


def numbers(rows: pd.DataFrame) -> list[Grid]:
    """Return the tables of a measure: its values, and differences to the reference and the best possible."""
    first = rows.iloc[0]
    references = " or ".join(sorted(set(rows.reference) - {""}))
    of_values = f"{first.measure.replace('_', ' ').capitalize()}: {first.quantity}, {first.unit}; {_settings(rows)}"
    if first.quantity == "error":
        of_values += f"; medians over the seeds that learned it, with at most {LEARNED:g} % errors in training"
    titles = {"value": of_values}
    several_lengths = first.part == "text" or rows.length.nunique() > 1
    if first.measure == "lengths":
        titles["difference"] = f"Minus {references}, paired by seed and text, in {first.unit}"
        titles["above"] = f"Above the best possible predictor, paired by text, in {first.unit}"
    result = []
    for column, title in titles.items():
        sign = "+" if first.quantity == "gain" or column != "value" else ""
        columns: dict[str, Cells] = {}
        for (part, length), of_column in rows.groupby(["part", "length"], sort=False):
            words = [part if part != "text" else "", f"{length:,} tokens" if several_lengths else ""]
            columns[", ".join(filter(None, words))] = _cells(of_column, column, sign)
        if first.quantity == "error":
            columns["seeds that learned it"] = {row.line: f"{row.learned} of {row.seeds}" for row in rows.itertuples()}
        result.append(_grid(title, rows, columns))
    return [grid for grid in result if grid.header]


def _settings(rows: pd.DataFrame) -> str:
    """Return the settings of a measure in words."""
    words = []
    for key, value in json.loads(rows["eval"].iloc[0]).items():
        if isinstance(value, list):
            value = " ".join(map(str, value))
        # A text is a hash, which means nothing to a reader.
        if not isinstance(value, str) or key == "lengths":
            words.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(words)


def _cells(rows: pd.DataFrame, column: str, sign: str = "") -> Cells:
    """Return a column's numbers with their intervals in words, by line."""
    low, high = ("low", "high") if column == "value" else (f"{column}_low", f"{column}_high")
    known = rows.dropna(subset=[column])
    digits = 3 if rows.unit.str.contains("bit").all() else 1
    return {
        line: amount(*numbers, sign, digits)
        for line, *numbers in zip(known.line, known[column], known[low], known[high], strict=True)
    }


def _grid(title: str, rows: pd.DataFrame, columns: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return columns of words as a table of lines, best at the longest text first; empty rows and columns are out."""
    rows = rows.sort_values(["length", "rank", "line"], ascending=[False, True, True], kind="stable")
    lines = sorted(rows.line.unique(), key=lambda line: line != BEST_POSSIBLE)
    columns = {name: cells for name, cells in columns.items() if any(str(cells.get(line, "")) for line in lines)}
    body = [(line, [str(cells.get(line, "")) for cells in columns.values()]) for line in lines]
    return Grid(title, list(columns), [row for row in body if any(row[1])])


def what_was_run(runs: Runs, table: pd.DataFrame) -> list[Grid]:
    """Return the commands that made the numbers, and what was left out."""
    of_runs = table[table.seed.notna()].drop_duplicates(["path", "line"])
    commands = of_runs[PROVENANCE].value_counts(dropna=False).reset_index()
    # The first column is narrow on a phone, so the commit leads: its first digits name it.
    rows = [(row.commit[:10], [str(getattr(row, name)) for name in PROVENANCE]) for row in commands.itertuples()]
    return [
        Grid("Commands that made the numbers", PROVENANCE, rows),
        Grid("Left out: broken, not finished, or there twice", ["why"], [(run, [why]) for run, why in runs.left_out]),
    ]


def markdown(runs: Runs, reference: str = "rope") -> str:
    """Return the same words and tables, without figures."""
    table = results(runs, reference)
    lines = []
    for title in titles(runs):
        of_title = table[table.section == title]
        lines += [f"## {escaped(title)}", "", *[f"- {escaped(sentence)}" for sentence in answer(of_title)]]
        for grid in grids(of_title):
            lines += ["", f"{escaped(grid.title)}.", ""]
            lines += markdown_table(["", *grid.header], [[name, *cells] for name, cells in grid.rows])
        lines.append("")
    return "\n".join(lines)


def escaped(text: object) -> str:
    """Escape any text, so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text).replace("\n", " "))


def markdown_table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table in Markdown; the cells are any text."""
    return [f"| {' | '.join(map(escaped, row))} |" for row in [header, ["---"] * len(header), *rows]]


def csv(runs: Runs, reference: str = "rope") -> str:
    """Return the long table. A text that a spreadsheet would compute begins with an apostrophe."""

    def no_formula(cell: Any) -> Any:
        is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t"))
        return f"'{cell}" if is_formula else cell

    return results(runs, reference).map(no_formula).to_csv(index=False)


def picture(runs: Runs, kind: str, reference: str = "rope") -> bytes:
    """Return the first figure, the gain over cutting the text, as "svg", "png" or "pdf".

    Raises ValueError: no run has measured its loss at several lengths.
    """
    from ropewalk.report import plot

    table = results(runs, reference)
    text = losses_of_text(table)
    ax = plot.new()
    if len(text) and not text.gain.notna().any():
        plot.loss(table, ax)
    else:
        plot.gain(table, ax)
    return plot.written(ax.figure, kind)


def write_beside(run: Path) -> Path:
    """Write report.html of one run into its directory, and return where to look. A failure only warns."""
    try:
        write_text(run / PAGE, html(frame.load(run)))
    except Exception as error:
        # The measurements are worth more than their picture: a bug here must not fail the run.
        warnings.warn(f"{PAGE} was not written: {error}", stacklevel=2)
        return run
    return run / PAGE
