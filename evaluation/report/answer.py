"""The answer in words and in tables of text: which encoding, how far, how sure. What stands between two NUL is bold."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from evaluation.report.comparison import EFFECTIVE, Table
from evaluation.statistics import Estimate


class Grid(NamedTuple):
    """A table of text, with its labels as index."""

    title: str
    frame: pd.DataFrame


def amount(e: Estimate | None, unit: str, sign: str = "") -> str:
    """2.051 ± 0.069"""
    digits = 3 if "bit" in unit else 1
    if e is None or math.isnan(e.value):
        return ""
    value = round(e.value, digits) + 0.0  # no -0.000
    return f"{value:{sign}.{digits}f}" + ("" if math.isnan(e.half) else f" ± {e.half:.{digits}f}")


def listed(items: Sequence[str], most: int = 6) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def times(length: int, table: Table) -> str:
    return f"{length / table.train_len:g}x"


def which(table: Table, length: int) -> str:
    """Who is best at a length, and from whom the intervals do not separate it."""
    name, (first, *others) = table.best(length)
    hardest = f", in the difficulty that is worst there ({name})" if table.task else ""
    best = f"the best is \0{first}\0:" if others else f"\0{first}\0 has"
    text = f"At {length:,} tokens ({times(length, table)}){hardest} {best} "
    text += f"{amount(table.get(first, length, name=name), table.unit)} {table.unit}"
    behind = {line: table.get(line, length, "behind", name) for line in others}
    if tied := [line for line, e in behind.items() if e is None or not e.separated]:
        text += f", not separated from {listed(tied, 4)}"
    elif behind:
        text += f", then {others[0]} ({amount(behind[others[0]], table.unit, '+')})"
    if length > table.train_len and (gain := table.get(first, length, "gain", name)):
        size = amount(gain._replace(value=abs(gain.value)), table.unit)
        than = f"{size} {'better' if gain.value > 0 else 'worse'} than" if gain.separated else "not separated from"
        text += f"; {first} is {than} itself on the same text cut to {table.train_len:,} tokens"
        cut = table.get(table.rows[0], length, "behind")  # the first row of text: the reference on the cut text
        if table.is_text and first != table.reference and cut and cut.high < 0:
            text += f", on which \0{table.reference}\0 is better ({amount(cut, table.unit, '+')})"
    return f"{text}."


def reached(table: Table, what: str) -> dict[str, str]:
    """The "safe" or "useful" length of each line, the longest first: 8x; >= 8x if nothing longer was measured; <= 0.5x
    if text beyond the shortest was never useful; none."""
    found = {}
    for line, n in table.lines[what].dropna().sort_values(ascending=False, kind="stable").items():
        more = n == max(table.lengths) and not table.lines.skipped[line]
        bound = ">= " if more else "<= " if table.is_text and what == "useful" and n == min(table.lengths) else ""
        found[line] = bound + times(n, table) if n else "none"
    return found


def how_far(what: str, found: Mapping[str, str]) -> list[str]:
    """The lines that are `what` to each length, in a sentence; none if none was found."""
    lengths, texts = pd.Series(found, dtype=object), []
    for length, there in lengths.groupby(lengths, sort=False):
        where = "\0at no length\0" if length == "none" else f"to \0{length}\0"
        texts.append(f"{where}: {listed(list(there.index), 6 if len(found) < 20 else 3)}")
    return [f"{what} {'; '.join(texts)}."] if texts else []


def mastered(table: Table) -> list[str]:
    """Of a task, in its hardest difficulty: how far at least 99 % are right. Without that a safe length is no merit."""
    wrong = table.stats["mean"].map(lambda e: e.value).groupby(["length", "line"]).max().unstack()
    right = (wrong <= 1).astype(int).cummin().sum().sort_values(ascending=False, kind="stable")
    lengths = {str(line): times([*wrong.index][n - 1], table) if n else "none" for line, n in right.items()}
    return how_far("At least 99 % right", lengths)


def used(table: Table, others: Sequence[Table]) -> str:
    """Which lines are safe to the longest length and gain from text beyond train_len, too: by how much."""
    using: dict[str, str] = {}
    for t in reversed(others):
        gains = {line: e for line, e in t.lines.far_gain.items() if e and round(e.low, 3) > 0}  # as it is shown
        using |= {line: f"gain on {t.kind.replace('_', ' ')}: {amount(e, 'bits', '+')}" for line, e in gains.items()}
    safe = table.lines.index[table.lines.safe == max(table.lengths)]
    found = [f"\0{line}\0 ({using[line]})" for line in safe if line in using]
    end = f"safe to {times(max(table.lengths), table)} and using text from beyond {table.train_len:,} tokens"
    return f"Both {end}: {listed(found)}." if found else f"No line is both {end}."


def answer(found: Sequence[Table]) -> dict[str, list[str]]:
    """Sentences about the tables of one section, by heading."""
    table, ruler = (next((t for t in found if t.kind == kind), None) for kind in ("lengths", "ruler"))
    retrieved = []
    if ruler:
        retrieved += how_far(f"Effective (at least {EFFECTIVE} % found)", reached(ruler, "safe"))
        retrieved += how_far("Above chance (gain above 0)", reached(ruler, "useful"))
    if table is None:
        return {"RULER": retrieved} if retrieved else {}
    far = [t for t in found if t.kind in ("far_copies", "ruler")]
    n, size = table.lines.seeds, table.lines["sample"].iloc[0].units.size
    texts = f"{size:,} {'sequences' if table.task else 'texts'}"
    seeds = (f"{n.min()} to " if n.min() < n.max() else "") + ("1 seed" if n.max() == 1 else f"{n.max()} seeds")
    sure = f"± is the 95 % interval over {seeds} and {texts}; differences are paired by seed and text."
    if n.min() == 1:
        sure += " Over one seed it covers the texts alone: another training run may differ by more."
    safe = "hardly more errors than at the training length" if table.task else "not worse than cutting the text"
    reach = how_far(f"Safe ({safe})", reached(table, "safe"))
    reach += mastered(table) if table.task else how_far("Useful (longer text still helped)", reached(table, "useful"))
    words = {
        "Which": [which(table, n) for n in dict.fromkeys((table.train_len, max(table.lengths))) if n in table.lengths],
        "How far": reach,
        "Far text": [used(table, far)] if far else [],
        "RULER": retrieved,
        "How sure": [sure],
    }
    return {heading: sentences for heading, sentences in words.items() if sentences}


def numbers(table: Table) -> list[Grid]:
    """The measure of each line, its gain over the baseline, and its paired difference to the reference. The columns are
    lengths; where there is only one, difficulties, depths or distances."""
    shown = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in table.eval.items()}
    settings = ", ".join(f"{k} {v}" for k, v in shown.items() if not isinstance(table.eval[k], str))  # a hash
    titles = {"mean": f"{table.unit.capitalize()} ({settings}), mean ± 95 % interval"}
    if table.kind == "far_copies":
        titles = {"gain": f"Gain in {table.unit} on far copies ({settings})"}
    elif table.kind == "ruler":
        gain = "RULER: Gain in bits over the text in which the answer is wrong"
        titles = {"mean": f"RULER: {titles['mean']}", "gain": gain}
    elif table.is_text:
        titles["gain"] = f"Gain over the same text cut to {table.train_len:,} tokens, in {table.unit}"
    if table.kind == "lengths" and len(table.lines) > 1:
        titles["difference"] = f"Difference to {table.reference} in {table.unit}, paired by seed and text"
    grids = []
    for column, title in ((c, t) for c, t in titles.items() if table.stats[c].notna().any()):
        sign, rows = "+" * (column != "mean"), table.rows if column == "mean" else list(table.lines.index)
        cells = table.stats[column].map(lambda e, sign=sign: amount(e, table.unit, sign))
        if len(table.lengths) == 1 < len(table.names):
            wide = cells.droplevel("length").unstack("name").reindex(index=rows, columns=table.names)
        else:
            wide = cells.unstack("length").reindex([(line, name) for name in table.names for line in rows])
            wide.index = [f"{name}: {line}" if len(table.names) > 1 else line for line, name in wide.index]
            wide.columns = [f"{n:,} ({times(n, table)})" for n in wide]
        grids.append(Grid(title, wide.fillna("").rename_axis(index=None, columns=None)))
    return grids


def overview(found: Sequence[Table]) -> list[Grid]:
    """Disturbed or used: how far a line is safe and useful, beside what it retrieves from far text; of all sections."""
    columns: dict[str, dict[str, str]] = {}
    for t in sorted(found, key=lambda t: (t.task, t.section, t.kind != "lengths")):
        several = len({x.section for x in found if x.task == t.task}) > 1
        where = f"{t.section}: " if several else f"{t.task}: " if t.task else ""
        if t.kind == "lengths":
            columns |= {f"{where}{what} to": reached(t, what) for what in ("safe", "useful")[: 1 + t.is_text]}
            for n in sorted({t.train_len, max(t.lengths)} & {*t.lengths}):
                name, _ = t.best(n)
                measure = f"{name}, %" if t.task else t.unit
                values = {line: amount(t.get(line, n, name=name), t.unit) for line in t.rows}
                columns[f"{where}{measure} at {times(n, t)}"] = values
        elif t.kind == "far_copies":
            columns[f"{where}gain on far copies"] = {x: amount(e, t.unit, "+") for x, e in t.lines.far_gain.items()}
        elif t.kind == "ruler":
            reach = {"effective": "safe", "above chance": "useful"}
            columns |= {f"{where}RULER, {word} to": reached(t, what) for word, what in reach.items()}
            columns[f"{where}far needles found, %"] = {x: amount(e, "%") for x, e in t.lines.far.items()}
    trained = {line for t in found for line in t.lines.index}
    lines = sorted(dict.fromkeys(line for t in found for line in t.rows), key=trained.__contains__)  # cut text first
    frame = pd.DataFrame(columns, index=lines, dtype=object).fillna("")
    return [Grid("Disturbed or used", frame)] if columns else []
