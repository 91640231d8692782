"""Tables of text: the estimates of a measure in words, and the overview of a section."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from ropewalk.report import retrieval
from ropewalk.report.answer import Column, amount, percent, reached, times, useful
from ropewalk.report.comparison import BEST_POSSIBLE, Estimates, Key, Table

MEASURES = {  # in the titles of their tables
    "far_copies": "far copies",
    "key_tokens": "key tokens",
    "ruler": "RULER",
    "reach": "reach, the share of what is read from a distance of at least so many tokens",
}


class Grid(NamedTuple):
    """A table of text, with its labels as index."""

    title: str
    frame: pd.DataFrame
    best: frozenset[tuple[str, str]] = frozenset()  # row and column of the cells that are separated from all others


def numbers(table: Table) -> list[Grid]:
    """Return tables of means, gains over the cut text, safe lengths, what the optimum allows, and differences."""
    lines = list(table.lines.index)
    grids = [_grid(table, _title(table), table.means, table.rows)]
    if table.gains:
        title = f"Gain over the same text cut to {table.train_len:,} tokens, in {table.unit}"
        gaining = [row for row in table.rows if row == BEST_POSSIBLE or row in lines]
        grids.append(_grid(table, title, table.gains, gaining, "+"))

    # The best possible loss is known only for some texts.
    if table.excess:
        title = f"{table.unit.capitalize()} above the optimum, paired by text"
        grids.append(_grid(table, title, table.excess, lines, "+"))
    if table.shares:
        title = f"Share in percent of the gain over {table.train_len:,} tokens that longer text makes possible"
        grids.append(_shares(table, title))

    if table.is_text and table.safe:
        columns = {f"{tolerance:g}": reached(table, safe) for tolerance, safe in table.safe_at.items()}
        title = f"Safe length by tolerance in {table.unit}"
        grids.append(Grid(title, pd.DataFrame(columns, index=lines).fillna("")))

    if table.kind == "lengths" and table.differences:
        title = f"Difference to {table.reference} in {table.unit}, paired by seed and text"
        grids.append(_grid(table, title, table.differences, lines, "+"))
    return grids


def settings_of(table: Table) -> str:
    """Return the settings of a measure in words."""
    words = []
    for key, value in table.eval.items():
        if isinstance(value, list):
            value = " ".join(map(str, value))
        elif isinstance(value, str):
            continue  # a hash, which means nothing to a reader
        words.append(f"{key} {value}")
    return ", ".join(words)


def _title(table: Table) -> str:
    """Return the title of the table of means: measure, unit, settings, and what a cell holds."""
    title = table.unit.capitalize()
    if table.quantity == "gain":
        title = f"Gain in {table.unit}"
    if table.kind in MEASURES:
        title = f"{MEASURES[table.kind]}: {title}"
    content = "seeds that learned and their median" if table.task else "mean ± 95 % interval"
    title = f"{title} ({settings_of(table)}), {content}"
    if table.is_text and "target_tokens" in table.eval:
        title += f"; in a row each target has its length less {table.eval['target_tokens']} to 1 tokens before it"
    return title


def _shares(table: Table, title: str) -> Grid:
    """Return the shares of the possible gain. A heading has the length, and the gain that is possible there."""
    lengths = sorted({key.length for key in table.shares})
    rows: dict[str, Column] = {}
    for line in table.lines.index:
        row = rows.setdefault(line, {})
        for length in lengths:
            best = table.gains[Key(BEST_POSSIBLE, "text", length)]
            heading = f"{length:,} ({times(length, table)}), of {best.value:.3f}"
            row[heading] = percent(table.shares.get(Key(line, "text", length)))
    return Grid(title, pd.DataFrame.from_dict(rows, "index").fillna(""))


def _grid(table: Table, title: str, estimates: Estimates, lines: Sequence[str], sign: str = "") -> Grid:
    """Return estimates in words. The columns are lengths; if there is only one length, the parts."""
    if table.quantity == "gain":
        sign = "+"
    several_parts = len(table.parts) > 1
    parts_are_columns = several_parts and len(table.lengths) == 1
    rows: dict[str, Column] = {}
    for part in table.parts:
        for line in lines:
            label = f"{part}: {line}" if several_parts and not parts_are_columns else line
            row = rows.setdefault(label, {})
            for length in table.lengths:
                key = Key(line, part, length)
                cell = amount(estimates.get(key), table.unit, sign)
                if key in table.learned:
                    of_seeds = table.learned[key]
                    cell = f"{of_seeds.learned} of {of_seeds.seeds}: {cell}"
                heading = part if parts_are_columns else f"{length:,} ({times(length, table)})"
                row[heading] = cell
    return Grid(title, pd.DataFrame.from_dict(rows, "index").fillna(""))


def overview(tables: Sequence[Table], costs: Mapping[str, Column]) -> list[Grid]:
    """Return one table of a section, a row for each line: how far it is safe and useful, what it retrieves and costs.

    Args:
        tables: one for each measure.
        costs: the columns of the costs.
    """
    columns: dict[str, Column] = {}
    lines: dict[str, None] = {}
    best: set[tuple[str, str]] = set()
    # The rows are in the order of the first table, the lengths, by the loss at the longest text.
    for table in tables:
        lines |= dict.fromkeys(table.rows)
        columns |= _summary(table)
        if table.is_text:
            for length in {table.train_len, max(table.lengths)} & set(table.lengths):
                part, (first, *others) = table.best(length)
                if others and not table.tied(Key(first, part, length)):
                    best.add((first, f"{table.unit} at {times(length, table)}"))
    if not columns:
        return []
    columns |= costs
    frame = pd.DataFrame(columns, index=list(lines), dtype=object).fillna("")
    return [Grid("Overview, best at the longest text first", frame, frozenset(best))]


def _summary(table: Table) -> dict[str, Column]:
    """Return the columns of one table in the overview, by heading."""
    measure = (table.kind, table.quantity)
    columns: dict[str, Column] = {}
    if table.kind == "lengths":
        columns = _summary_of_lengths(table)
    elif measure == ("far_copies", "gain"):
        columns["gain on far copies"] = _far(table, "+")
        otherwise = _far(table, "+", "other")
        # Results of earlier versions have only text that goes on as before.
        if otherwise:
            columns["of it where the text goes on otherwise"] = otherwise
    elif measure == ("key_tokens", "gain"):
        columns["gain on key tokens"] = _of_key_tokens(table)
    elif measure == ("ruler", "found"):
        columns["RULER, effective to"] = reached(table, retrieval.effective(table))
        columns["far needles found, %"] = _far(table, "")
    elif measure == ("ruler", "gain"):
        columns["RULER, above chance to"] = reached(table, retrieval.above_chance(table))
    return columns


def _far(table: Table, sign: str, continuation: str | None = None) -> Column:
    """Return the mean of each line over the parts that need text from beyond train_len, in words."""
    means = retrieval.pooled(table, continuation)
    return {line: amount(e, table.unit, sign) for line, e in means.items()}


def _of_key_tokens(table: Table) -> Column:
    """Return the gain of each line on key tokens, in words."""
    cells: Column = {}
    for line in table.lines.index:
        cells[line] = amount(table.means.get(Key(line, "key", max(table.lengths))), table.unit, "+")
    return cells


def _summary_of_lengths(table: Table) -> dict[str, Column]:
    """Return the columns of a measure of lengths in the overview, by heading."""
    columns: dict[str, Column] = {}
    longest = max(table.lengths)
    shares = {key.line: percent(e) for key, e in table.shares.items() if key.length == longest}
    if shares:
        columns[f"share of the possible gain at {times(longest, table)}, %"] = shares

    # Loss or error at the training length and at the longest one.
    shown = {table.train_len, longest}
    for length in sorted(shown.intersection(table.lengths)):
        part, _ = table.best(length)
        cells = {}
        for line in table.rows:
            cells[line] = amount(table.means.get(Key(line, part, length)), table.unit)
        measure = f"{part}, %" if table.task else table.unit
        columns[f"{measure} at {times(length, table)}"] = cells

    # How much the longest text helps, and how far text can grow.
    if table.gains and longest > table.train_len:
        gains = {key.line: amount(e, table.unit, "+") for key, e in table.gains.items() if key.length == longest}
        columns[f"gain at {times(longest, table)}"] = gains
    columns["safe to"] = reached(table, table.safe)
    if table.is_text:
        columns["useful to"] = useful(table)
    return columns
