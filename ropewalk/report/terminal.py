"""The end of a run on a terminal: one table that is never wrapped, and two sentences. All else is on the page."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from conf.schema import Config
from ropewalk.evaluation.results import Evaluation
from ropewalk.evaluation.statistics import Estimate
from ropewalk.files import printable
from ropewalk.report import markdown
from ropewalk.report.answer import amount, how_far_it_goes, mastered, retrieved, times
from ropewalk.report.comparison import BEST_POSSIBLE, SHOWN_AS_GAINS, Estimates, Key, Table, tables
from ropewalk.report.frame import load

WIDTH = 100  # columns at most; also those of a pipe, which has no width
Column = list[str]  # heading, second heading, and a cell for each row


def show(run: Path, cfg: Config, only: Iterable[Evaluation] | None = None) -> None:
    """Print the results of a run.

    Args:
        cfg: its tolerances decide what is safe, instead of those that the run was trained with.
        only: print only results with the same measure and settings as these.
    """
    runs = load(run)
    for config in runs.configs.values():
        config["eval.tolerance"] = cfg.eval.tolerance
        config["eval.task_tolerance"] = cfg.eval.task_tolerance
    shown = tables(runs)
    if only is not None:
        asked = [(e.kind, e.eval) for e in only]
        shown = [table for table in shown if (table.kind, table.eval) in asked]
    # By kind the table with the most texts; other settings are on the page. A run without text has its tasks.
    main: dict[str, Table] = {}
    for table in shown:
        if (table.kind, table.quantity) not in (("ruler", "gain"), *SHOWN_AS_GAINS):
            main.setdefault(table.kind, table)
    for kind in ("far_copies", "by_position"):
        if "lengths" in main or "ruler" in main:
            main.pop(kind, None)
    width = WIDTH
    if sys.stdout.isatty():
        width = min(WIDTH, shutil.get_terminal_size().columns)
    for table in main.values():
        print(printable("\n".join(lines(run.name, table, width))), end="\n\n")
        for sentence in sentences(table, shown, cfg.eval.tolerance):
            print("\n".join(wrapped(printable(markdown.to_plain(sentence)), width)))


def sentences(table: Table, others: Sequence[Table], tolerance: float) -> list[str]:
    """Return the answer that a table gives, in at most two sentences."""
    if table.is_text:
        return how_far_it_goes(table, tolerance)
    if table.kind == "ruler":
        return retrieved(others)
    return mastered(table) if table.task else []


def lines(run: str, table: Table, width: int) -> list[str]:
    """Return a table of one run as text: a row for each length, a column for each reading of its weights.

    Columns that do not fit into `width` are left out and counted.
    """
    texts = table.lines.texts.iloc[0]
    quantity = f"gain in {table.unit}" if table.quantity == "gain" else table.unit
    title = f"{run}, trained at {table.train_len:,} tokens: {quantity}, {texts:,} texts"

    rows = [Key("", part, length) for part in table.parts for length in table.lengths]
    if table.kind == "ruler":
        rows = [row for row in rows if row.part == "mean"]
    if table.kind == "reach":
        title += " (the share of what comes from a distance of at least so many tokens)"
        rows = [row for row in rows if row.part in ("attention", "gradient")]

    # The weights as they were trained come before other readings of them.
    columns = [_names(table, rows)]
    trained = list(table.lines.index[~table.lines.zero_shot])
    read = [line for line in table.lines.index if line not in trained]

    if table.is_text:
        title += ", and the gain over cutting the text"
        for line in trained:
            columns.append(_column(table, table.means, line, rows, table.unit, with_interval=False))
        if table.excess:
            columns.append(_column(table, table.means, BEST_POSSIBLE, rows, "best possible", with_interval=False))
        for line in trained + read:
            columns.append(_column(table, table.gains, line, rows, "gain"))
    else:
        for line in trained + read:
            columns.append(_column(table, table.means, line, rows, ""))
    return [*wrapped(title, width), *aligned(columns, width)]


def wrapped(sentence: str, width: int) -> list[str]:
    """Return a sentence in lines of at most `width` columns, broken between words alone."""
    return textwrap.wrap(sentence, width, break_long_words=False, break_on_hyphens=False)


def _names(table: Table, rows: Sequence[Key]) -> Column:
    """Return the first column: the length of each row, its part, or both where both differ."""
    if len(table.lengths) == 1:
        return ["", "", *[row.part for row in rows]]
    several_parts = len({row.part for row in rows}) > 1
    names = []
    for row in rows:
        name = f"{row.length:,} ({times(row.length, table)})"
        names.append(f"{name} {row.part}" if several_parts else name)
    return ["", "tokens", *names]


def _column(
    table: Table, estimates: Estimates, line: str, rows: Sequence[Key], heading: str, *, with_interval: bool = True
) -> Column:
    """Return a column of estimates of one line, with how its weights are read as heading."""
    base = None  # of the optimum, which is no line
    reading = ""
    if line in table.lines.index:
        base = str(table.lines.base[line])
        reading = reading_of(line, base)
    is_gain = estimates is table.gains
    sign = "+" if is_gain or table.quantity == "gain" else ""
    cells = []
    for row in rows:
        e = estimates.get(row._replace(line=line))
        # A text of at most train_len tokens is not cut: there is nothing to gain.
        if is_gain and line == base and row.length <= table.train_len:
            e = None
        if e is not None and not with_interval:
            e = Estimate(e.value, float("nan"), float("nan"), e.std, e.seeds, e.texts)
        cells.append(amount(e, table.unit, sign))
    return [heading, reading, *cells]


def reading_of(line: str, base: str) -> str:
    """Return how a line reads the weights of `base`, from its label: "as trained", "read as yarn x8"."""
    rest = line.removeprefix(base).strip()
    return rest.replace(" at scale ", " x").replace("at scale ", "x").removeprefix("read ") or "as trained"


def aligned(columns: Sequence[Column], width: int) -> list[str]:
    """Return columns as lines of text, the first aligned to the left; as many columns as fit."""
    texts = []
    used = 0
    for number, column in enumerate(columns):
        wide = max(map(len, column))
        if number == 0:
            texts.append([cell.ljust(wide) for cell in column])
            used = wide
            continue
        used += wide + 2
        # One column besides the names is always shown.
        if used > width and number > 1:
            break
        texts.append([cell.rjust(wide) for cell in column])
    result = ["  ".join(row).rstrip() for row in zip(*texts, strict=True)]
    left_out = len(columns) - len(texts)
    if left_out:
        result.append(f"({left_out} more columns are on the page)")
    return [row for row in result if row]
