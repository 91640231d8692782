"""A comparison as text: Markdown to read, CSV to compute with."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from evaluation.compare import QUANTITIES, Comparison, Line, Section, Spread, Table

TRAINING = {"tokens_per_s": "tokens/s", "peak_memory_mb": "memory, MB", "parameters": "parameters"}
SPREAD = "Means over the seeds, ± half of the range between them; - where an encoding has no position."


NAMED = 3  # in an answer: how many others, at most


class Answer(NamedTuple):
    """A sentence: where, what is best, and how the others follow."""

    where: str  # "At 1,024 tokens, 8 times the training length"
    best: str
    rest: str  # " (bits per byte: 2.16 ± 0.01); then ..."


def answers(section: Section) -> list[Answer]:
    """What the largest table of a section says of its longest texts, and of those as long as in training."""
    if not section.tables:
        return []
    table = section.tables[0]
    lengths = [table.measure.lengths[-1], *(n for n in table.measure.lengths if n == section.train_len)]
    return [_answer(table, length, section.train_len) for length in dict.fromkeys(lengths) if table.verdict(length)]


def _answer(table: Table, length: int, train_len: int) -> Answer:
    verdict = table.verdict(length)
    assert verdict
    what, decimals = QUANTITIES[table.quantity]
    line, spread = verdict.best
    times = "the training length" if length == train_len else f"{length / train_len:g} times the training length"
    rest = f" ({what}: {spread.format(decimals)}{', one seed' if len(spread.values) == 1 else ''})"
    if verdict.equal:
        more = len(verdict.equal) - NAMED
        rest += f"; the seeds do not separate it from {_named(verdict.equal, decimals)}"
        rest += f" and {more} more" if more > 0 else ""
    elif verdict.others:
        rest += f"; then {_named(verdict.others, decimals)}"
    return Answer(f"At {length:,} tokens, {times}", line.label, rest)


def _named(lines: Sequence[tuple[Line, Spread]], decimals: int) -> str:
    return ", ".join(f"{line.label} ({spread.format(decimals)})" for line, spread in lines[:NAMED])


def markdown(comparison: Comparison) -> str:
    """A heading for each training set and length; below it a table for each quantity and slice."""
    parts = [SPREAD]
    for section in comparison.sections:
        parts += [f"## {_inline(section.title)}"] if section.tables else []
        parts += [f"{where}: **{_inline(best)}**{_inline(rest)}." for where, best, rest in answers(section)]
        for table in section.tables:
            for name in table.slices:
                for quantity in table.quantities:
                    parts += [_inline(caption(table, name, quantity)), _table(table, name, quantity)]
    if comparison.left_out:
        lines = [f"- `{_inline(str(path))}`: {_inline(reason)}" for path, reason in comparison.left_out]
        parts += ["## Left out", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def caption(table: Table, slice_name: str, quantity: str) -> str:
    """What the numbers of a table are."""
    what = QUANTITIES[quantity][0]
    what = what[0].upper() + what[1:]
    tokens, sequences = next((t, n) for name, t, n in table.measure.amounts if name == slice_name)
    if table.measure.task:
        return f"{what}, slice {slice_name}: {sequences:,} sequences at each length."
    return f"{what} of the same {tokens:,} tokens of {sequences:,} texts, by context length."


def _table(table: Table, slice_name: str, quantity: str) -> str:
    decimals = QUANTITIES[quantity][1]
    head = ["", "seeds", *(f"{length:,}" for length in table.measure.lengths), *TRAINING.values()]
    rows = [
        [
            _inline(line.label),
            ", ".join(map(str, line.seeds)),
            *(_cell(line.spread(slice_name, length, quantity), decimals) for length in table.measure.lengths),
            *(_cell(line.group.training(name, line.seeds), 0) for name in TRAINING),
        ]
        for line in table.lines
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *rows])


def _cell(spread: Spread | None, decimals: int) -> str:
    return "-" if spread is None else spread.format(decimals)


def _inline(text: str) -> str:
    """Names come from configurations: nothing in them may end a cell or begin a tag."""
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("`", "&#96;"), ("\n", " ")):
        text = text.replace(mark, entity)
    return text


def as_csv(comparison: Comparison) -> str:
    """A line for each group, reading, slice and length: means and half ranges over the seeds; empty where unknown."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(), lineterminator="\n")
    writer.writeheader()
    for section in comparison.sections:
        for table in section.tables:
            for line in table.lines:
                for name in table.slices:
                    for length in table.measure.lengths:
                        where = {"data": section.data, "train_len": section.train_len, "task": table.measure.task}
                        writer.writerow(where | _record(line, name, length))
    return out.getvalue()


def _columns() -> list[str]:
    fixed = ["data", "train_len", "task", "group", "encoding", "reading", "seeds", "runs", "slice", "length"]
    return fixed + [name + kind for name in (*QUANTITIES, *TRAINING) for kind in ("", "_half_range")]


def _record(line: Line, slice_name: str, length: int) -> dict[str, object]:
    record: dict[str, object] = {
        "group": line.group.label,
        "encoding": line.group.encoding,
        "reading": line.reading,
        "seeds": _joined(line.seeds),
        "runs": _joined(line.group.runs[seed].path for seed in line.seeds),
        "slice": slice_name,
        "length": length,
    }
    spreads = {name: line.spread(slice_name, length, name) for name in QUANTITIES}
    spreads |= {name: line.group.training(name, line.seeds) for name in TRAINING}
    for name, spread in spreads.items():
        record[name] = spread and spread.mean
        record[f"{name}_half_range"] = spread and spread.half_range
    return record


def _joined(values: Iterable[object]) -> str:
    return " ".join(map(str, values))
