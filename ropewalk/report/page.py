"""The page of a report: an answer, a figure, a table, the rest collapsed; the same tables as Markdown, and as CSV.

On a terminal a run ends with a table and the answer.
"""

import contextlib
import json
import math
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from conf.files import printable, write_text
from conf.schema import Config
from ropewalk.evaluation.results import Evaluation
from ropewalk.report import frame
from ropewalk.report.answer import answer, far_text, number, percent
from ropewalk.report.frame import BROKEN, PROVENANCE, START, LeftOut, Runs, attempt
from ropewalk.report.table import BEST_POSSIBLE, LEARNED, by_length, of_one_setting, over_seeds, results
from ropewalk.run.directory import RunDir, read_training
from ropewalk.run.processes import rank_zero_only

PAGE = "report.html"
COST_HEADINGS = {"parameters": "parameters", "tokens_per_s": "tokens/s", "peak_memory_mb": "MB at most"}
Grid = tuple[str, pd.DataFrame]  # a title, and a table of text whose index are the names of its rows


def html(runs: Runs, reference: str = "rope") -> str:
    """Return one page that needs no other file and no script."""
    import jinja2

    from ropewalk.report import plot

    table = results(runs, reference)
    curves = frame.curves(runs)
    shown = []
    for title, of_title in sections(runs, table):
        figures = []
        for draw in drawings(of_title, curves[curves.section == title]):
            with attempt(f"a figure of {title}", runs.left_out), contextlib.suppress(plot.NothingError):
                figures.append([plot.svg(draw(plot.new(size))) for size in (plot.SIZE, plot.NARROW)])
        shown.append(
            {
                "title": title,
                "answer": answers(title, of_title, runs.left_out),
                "figures": figures,
                "grids": grids(of_title, runs.left_out),
            }
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=runs.runs["name"].iloc[0] if len(runs.runs) == 1 else "Which position encoding, and how far?",
        summary=f"Runs: {len(runs.runs):,}; left out: {len(runs.left_out):,}.",
        sections=shown,
        what_was_run=what_was_run(runs, table),
    )


def sections(runs: Runs, table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the title and the rows of each section, those with most runs first."""
    return [(title, table[table.section == title]) for title in runs.runs.section.value_counts().index]


def drawings(table: pd.DataFrame, curves: pd.DataFrame) -> list[Callable[[Any], Any]]:
    """Return functions that draw the figures of a section into Axes."""
    from ropewalk.report import plot

    # Lines have the same colours in all figures.
    coloured = [line for line in plot.chosen(table) if line in set(curves.label)]
    return [
        partial(plot.gain, table),
        partial(plot.errors, table),
        partial(plot.gain, table, over="reference"),
        partial(plot.curves, curves, lines=coloured or None, reference=table.reference.max()),
    ]


def answers(title: str, table: pd.DataFrame, left_out: LeftOut) -> list[str]:
    """Return the answer of a section in sentences; none if it cannot be told, which is added to `left_out`."""
    with attempt(f"the answer of {title}", left_out):
        return answer(table)
    return []


def grids(table: pd.DataFrame, left_out: LeftOut) -> list[Grid]:
    """Return the tables of a section: an overview, the numbers of each measure, and in what the lines differ.

    A table that cannot be made is added to `left_out`.
    """
    rows = over_seeds(table)
    text = by_length(rows)
    result = []
    with attempt("the overview", left_out):
        if len(text):
            result.append(overview(table, text))
    for (measure, quantity, _), of_measure in rows.groupby(["measure", "quantity", "eval"], sort=False):
        with attempt(f"the tables of {measure}", left_out):
            # Losses of far copies are only shown as the gain over the cut text.
            if measure != "far_copies" or quantity == "gain":
                result += numbers(of_measure)
    with attempt("the table of costs", left_out):
        result.append(costs(rows))
    return [(title, cells) for title, cells in result if cells.size]


def costs(rows: pd.DataFrame) -> Grid:
    """Return the table of what each line was trained with, and what that took."""
    is_read_otherwise = rows.zero_shot.astype(bool) | rows.line.str.startswith(START) | (rows.line == BEST_POSSIBLE)
    trained = rows[~is_read_otherwise].drop_duplicates("line").set_index("line")
    columns = {"differs in": trained.settings, "runs": trained.run}
    columns |= {title: trained[name].map("{:,.0f}".format, na_action="ignore") for name, title in COST_HEADINGS.items()}
    return _grid("How the lines differ, their costs and runs", trained.reset_index(), columns)


def overview(table: pd.DataFrame, text: pd.DataFrame) -> Grid:
    """Return the first table: the verdict, gains, loss, share and far text of each line, lowest loss first."""
    longest = text.length.max()
    last = text[text.length == longest].set_index("line", drop=False)
    lines = last[last.line != BEST_POSSIBLE]
    columns = {"reading on": lines.verdict}
    for name in ("train_len", "cut"):
        if text[name].nunique() > 1:
            columns[name] = lines[name].map("{:,.0f}".format)
    for length in sorted(text.length[text.length > text.cut].unique(), reverse=True):
        columns[f"gain at {length:,}"] = _cells(text[text.length == length], "gain")
    if not lines.lead.equals(lines.gain):  # of one run the reference is the run
        references = " or ".join(sorted(set(lines.reference)))
        columns[f"over {references} on the cut text"] = _cells(last, "lead")
    columns[f"loss at {longest:,}"] = _cells(last)
    shares = map(percent, last.share, last.share_low, last.share_high)
    columns["% of the possible"] = pd.Series(list(shares), last.index)
    for (measure, quantity), rows in far_text(table).groupby(["measure", "quantity"]):
        words = f"{measure.replace('_', ' ')}: {quantity} from far text"
        columns[words] = _cells(of_one_setting(rows))
    return _grid(f"Gain over the cut text in {text.unit.iloc[0]}; lowest loss first", text, columns)


def numbers(rows: pd.DataFrame) -> list[Grid]:
    """Return the tables of a measure: its values, and differences to the reference and the best possible."""
    first = rows.iloc[0]
    # Hashes mean nothing to a reader. Short settings lead: they tell two tables of a measure apart.
    chosen = {key: value for key, value in json.loads(first["eval"]).items() if key not in ("texts", "tokenizer")}
    ordered = sorted(chosen.items(), key=lambda setting: isinstance(setting[1], list))
    settings = ", ".join(f"{key.replace('_', ' ')} {str(value).strip('[]')}" for key, value in ordered)
    titles = {"value": f"{first.quantity}, {first.unit}"}
    if first.quantity == "error":
        learned = f"medians and ranges of the seeds that learned it (at most {LEARNED:g} %), or of all if none did"
        titles = {"value": f"{first.unit}; {learned}"}
    elif first.measure == "lengths":
        references = " or ".join(sorted(set(rows.reference) - {""}))
        titles["difference"] = f"minus {references}, paired by seed and text, in {first.unit}"
        titles["above"] = f"above the best possible predictor, paired by text, in {first.unit}"
    has_lengths = first.part == "text" or rows.length.nunique() > 1
    rows = rows.sort_values("span_start", kind="stable")  # rows of an archive are in another order
    result = []
    for column, title in titles.items():
        columns = {}
        for (part, length), of_column in rows.groupby(["part", "length"], sort=False):
            heading = f"{part}, {length:,} tokens".removeprefix("text, ") if has_lengths else part
            columns[heading] = _cells(of_column, column)
        if first.quantity == "error":
            of_seeds = rows.drop_duplicates("line").set_index("line")
            columns["seeds that learned it"] = of_seeds.learned.astype(str) + " of " + of_seeds.seeds.astype(str)
        measure = first.measure.replace("_", " ").capitalize()
        result.append(_grid(f"{measure} ({settings}): {title}", rows, columns))
    return result


def _cells(rows: pd.DataFrame, column: str = "value") -> pd.Series:
    """Return a column's numbers with their intervals in words, by line."""
    return pd.Series([number(row, column) for row in rows.itertuples()], rows.line.tolist())


def _grid(title: str, rows: pd.DataFrame, columns: Mapping[str, pd.Series]) -> Grid:
    """Return columns of words by line as a table, best at the longest text first; empty rows and columns are out."""
    rows = rows.sort_values(["length", "rank", "line"], ascending=[False, True, True], kind="stable")
    lines = sorted(rows.line.unique(), key=lambda line: line != BEST_POSSIBLE)
    cells = pd.DataFrame(columns, index=lines, dtype=object).fillna("")
    is_full = cells != ""
    return title, cells.loc[is_full.any(axis=1), is_full.any()]


def what_was_run(runs: Runs, table: pd.DataFrame) -> list[Grid]:
    """Return the commands that made the numbers, and what was left out."""
    commands = table[table.seed.notna()][PROVENANCE].drop_duplicates()
    commands = commands.assign(diff_sha256=commands.diff_sha256.str[:10])
    left_out = pd.DataFrame(runs.left_out, columns=["run", "why"]).set_index("run")
    # The first column is narrow on a phone, so the commit leads: its first digits name it.
    return [
        ("Commands that made the numbers", commands.drop(columns="commit").set_index(commands.commit.str[:10])),
        ("Left out: broken, not finished, or there twice", left_out),
    ]


def markdown(runs: Runs, reference: str = "rope") -> str:
    """Return the same words and tables, without figures."""
    lines = []
    for title, table in sections(runs, results(runs, reference)):
        sentences = [f"- {escaped(sentence)}" for sentence in answers(title, table, runs.left_out)]
        lines += [f"## {escaped(title)}", "", *sentences, ""]
        for heading, cells in grids(table, runs.left_out):
            rows = list(cells.itertuples(name=None))
            lines += [f"{escaped(heading)}.", "", *markdown_table([["", *cells], *rows]), ""]
    return "\n".join(lines)


def escaped(text: object) -> str:
    """Escape any text, so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text).replace("\n", " "))


def markdown_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table in Markdown, whose first row is the header; the cells are any text."""
    return [f"| {' | '.join(map(escaped, row))} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]


def csv(runs: Runs, reference: str = "rope") -> str:
    """Return the long table. A text that a spreadsheet would compute begins with an apostrophe."""
    return results(runs, reference).replace(r"^([=+\-@\t])", r"'\1", regex=True).to_csv(index=False)


def show(run: Path, cfg: Config, only: Iterable[Evaluation] | None = None) -> None:
    """Print the results of a run: a table with a row for each reading of its weights, and the answer.

    Args:
        cfg: its tolerance decides what is level, instead of that which the run was trained with.
        only: print only results with the same measure and settings as these.
    """
    runs = frame.load(run)
    for config in runs.runs.config:
        config["eval.tolerance"] = cfg.eval.tolerance
    table = results(runs)
    if only is None:
        shown = grids(table, runs.left_out)[:1]  # an overview: the page has all else
    else:
        # The settings of a measure are written as by `frame`.
        asked = {(e.kind, json.dumps(e.eval, sort_keys=True)) for e in only}
        # Not table[...]: of an empty table an empty list would choose no columns.
        table = table.loc[[measured in asked for measured in zip(table.measure, table["eval"], strict=True)]]
        # The measure by_position has a row for each of many positions: it is shown only if nothing else was asked for.
        others = table[table.measure != "by_position"]
        shown = grids(table if others.empty else others, runs.left_out)
    for what, reason in runs.left_out:
        if reason.startswith(BROKEN):
            print(printable(f"left out: {what}: {reason}"), file=sys.stderr)
    for title, cells in shown:
        print(printable(f"{run.name}: {title}\n{plain(cells)}\n"))
    print(*map(printable, answer(table)), sep="\n")


def plain(cells: pd.DataFrame) -> str:
    """Return a table in plain text: on a terminal as many columns as fit in, elsewhere all."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    shown = len(cells.columns)
    text = cells.to_string()
    while shown > 1 and len(text.partition("\n")[0]) > width:
        shown -= 1
        text = cells.iloc[:, :shown].to_string()
    left_out = cells.columns[shown:]
    return f"{text}\nnot shown, for lack of width: {', '.join(left_out)}" if len(left_out) else text


def write_beside(run: Path) -> Path:
    """Write report.html of one run into its directory, and return where to look. A failure only warns."""
    try:
        write_text(run / PAGE, html(frame.load(run)))
    except Exception as error:
        # The measurements are worth more than their picture: a bug here must not fail the run.
        warnings.warn(f"{PAGE} was not written: {error}", stacklevel=2)
        return run
    return run / PAGE


@rank_zero_only
def show_results(run: RunDir) -> None:
    """Print the results of a complete run, and write its page."""
    show(run.path, run.cfg)
    record = read_training(run.path)
    validation = record["validation"]
    units = {
        "loss": "nats per token",
        "bits_per_byte": "bits per byte",
        "error": "% wrong",
    }
    loss = ", ".join(f"{validation[key]:.4f} {unit}" for key, unit in units.items() if validation[key] is not None)
    print(f"validation loss {loss}, on {validation['tokens']:,} tokens in windows of {validation['length']}")
    print(
        f"trained {record['steps']} steps, {record['tokens']:,} tokens in {record['seconds']:.0f} s:"
        f" {record['tokens_per_s']:,.0f} tokens/s"
    )
    print(f"to look at: {write_beside(run.path)}")
