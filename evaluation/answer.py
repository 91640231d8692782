"""The answer in words and tables: which encoding, how far, how sure. What stands between two NUL is bold."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from evaluation.comparison import Table
from evaluation.statistics import Estimate


class Grid(NamedTuple):
    """A table of text, with its labels as index."""

    title: str
    note: str
    frame: pd.DataFrame


def bold(text: str) -> str:
    return f"\0{text}\0"


def amount(e: Estimate | None, unit: str, sign: str = "") -> str:
    """2.051 ± 0.069"""
    digits = 3 if "bit" in unit else 1
    if e is None or math.isnan(e.value):
        return ""
    return f"{e.value:{sign}.{digits}f}" + ("" if math.isnan(e.half) else f" ± {e.half:.{digits}f}")


def listed(items: Sequence[str], most: int = 6) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def times(length: int | None, is_open: bool, table: Table) -> str:
    """8x, or >= 8x if nothing longer was measured"""
    if length is None:
        return ""
    return f"{'>= ' if is_open else ''}{length / table.train_len:g}x" if length else "none"


def cut_label(table: Table) -> str:
    return f"{table.reference} cut to {table.train_len:,}"


def which(table: Table, length: int) -> str:
    """Who is best at a length, and from whom the intervals do not separate it."""
    name, ranked = table.best(length)
    hardest = f", in the hardest difficulty ({name})" if table.task else ""
    text = f"At {length:,} tokens ({times(length, False, table)}){hardest}: {bold(ranked[0])}, "
    text += f"{amount(table.get(ranked[0], length, name=name), table.unit)} {table.unit}"
    behind = {line: table.get(line, length, "behind", name) for line in ranked[1:]}
    if tied := [line for line, e in behind.items() if e is None or not e.separated]:
        text += f", not separated from {listed(tied, 4)}"
    elif behind:
        text += f", then {ranked[1]} ({amount(behind[ranked[1]], table.unit, '+')})"
    if length > table.train_len and (gain := table.get(ranked[0], length, "gain", name)):
        size = amount(gain._replace(value=abs(gain.value)), table.unit)
        than = f"{size} {'better' if gain.value > 0 else 'worse'} than" if gain.separated else "not separated from"
        text += f"; {than} the same text cut to {table.train_len:,} tokens"
    return f"{text}."


def how_far(table: Table, what: str) -> str:
    """The lines for each "safe" or "useful" length."""
    places = {line: (getattr(r, what), getattr(r, f"{what}_open")) for line, r in table.lines.reach.items() if r}
    texts = []
    for n in sorted({place for place in places.values() if place[0] is not None}, reverse=True):
        most = "at most " if what == "useful" and n[0] == table.lengths[0] else ""
        where = f"to {most}{bold(times(*n, table))}" if n[0] else bold("at no length")
        there = [str(line) for line in places if places[line] == n]
        texts.append(f"{where}: {listed(there, 6 if len(places) < 20 else 3)}")
    beyond = " Beyond, cut the text." if what == "safe" and table.is_text else ""
    return f"{what.capitalize()} {'; '.join(texts)}.{beyond}" if texts else ""


def used(table: Table, others: Sequence[Table]) -> str:
    """Which lines are safe to the longest length and gain from text beyond train_len, too."""
    found = []
    for line in [line for line, reach in table.lines.reach.items() if reach and reach.safe_open]:
        far = [(t.kind, t.lines.far[line], t.lines.far_gain[line]) for t in others if line in t.lines.index]
        texts = [f"{gain.value:+.2f} bits on far copies" for kind, _, gain in far if gain and kind == "far_copies"]
        texts += [f"{e.value:.0f} % of far passkeys" for kind, e, _ in far if e and kind == "passkeys"]
        if any(gain and gain.low > 0 for _, _, gain in far):
            found.append(f"{bold(str(line))} ({', '.join(texts)})")
    end = f"safe to {times(max(table.lengths), False, table)} and using text from beyond {table.train_len:,} tokens"
    return f"Both {end}: {listed(found)}." if found else f"No line is both {end}."


def answer(found: Sequence[Table]) -> dict[str, list[str]]:
    """Sentences about the tables of one section, by heading."""
    table = next((t for t in found if t.kind == "lengths"), None)
    if table is None:
        return {}
    far = [t for t in found if t.kind in ("far_copies", "passkeys")]
    n, texts = (
        table.lines.seeds,
        f"{table.lines.row.iloc[0].sample.units.size:,} {'sequences' if table.task else 'texts'}",
    )
    seeds = f"{n.min()} to {n.max()}" if n.min() < n.max() else n.min()
    sure = f"± is the 95 % interval over {seeds} seeds and {texts}; differences are paired by seed and text."
    if n.max() == 1:
        sure = f"± is the 95 % interval over {texts} of one training run each: another seed may differ by more."
    words = {
        "Which": [which(table, n) for n in dict.fromkeys((table.train_len, max(table.lengths))) if n in table.lengths],
        "How far": [how_far(table, "safe"), how_far(table, "useful")],
        "Far text": [used(table, far)] if far else [],
        "How sure": [sure],
    }
    return {heading: kept for heading, sentences in words.items() if (kept := [x for x in sentences if x])}


def numbers(table: Table) -> list[Grid]:
    """The measure of each line at each length, and its paired difference to the reference; of far copies the gain."""
    settings = ", ".join(f"{k} {v}" for k, v in table.eval.items() if isinstance(v, int | float))
    columns = {"mean": f"{table.unit.capitalize()} ({settings}), mean ± 95 % interval"}
    if table.kind == "far_copies":
        columns = {"gain": f"Gain in {table.unit} on far copies ({settings})"}
    elif table.kind == "lengths" and table.reference and len(table.lines) > 1:
        columns["difference"] = f"Difference to {table.reference} in {table.unit}, paired by seed and text"
    grids = []
    for column, title in columns.items():
        sign = "" if column == "mean" else "+"
        wide = table.stats[column].map(lambda e, sign=sign: amount(e, table.unit, sign)).unstack(["name", "length"])
        places = [(name, n) for name in table.names for n in table.lengths if (name, n) in wide]
        wide = wide.loc[table.lines.index, places].fillna("")
        if column == "mean" and table.is_text and table.reference:
            cut = [amount(table.get(table.reference, min(n, table.train_len)), table.unit) for _, n in wide]
            wide = pd.concat([pd.DataFrame([cut], index=[cut_label(table)], columns=wide.columns), wide])
        of_length = {n: f"{n:,} ({times(n, False, table)})" for n in table.lengths}
        shown = [len(table.names) > 1, len(table.lengths) > 1]
        wide.columns = [", ".join(x for x, s in zip((name, of_length[n]), shown, strict=True) if s) for name, n in wide]
        grids.append(Grid(title, "", wide))
    return grids


def overview(found: Sequence[Table]) -> list[Grid]:
    """Disturbed or used: how far a line is safe and useful, beside what it retrieves from far text; of all sections."""
    columns: dict[str, dict[str, str]] = {}
    cuts = [cut_label(t) for t in found if t.is_text and t.reference]
    for t in sorted(found, key=lambda t: (t.task, t.section, t.kind != "lengths")):
        several = len({x.section for x in found if x.task == t.task}) > 1
        where = f"{t.section}: " if several else f"{t.task}: " if t.task else ""
        if t.kind == "lengths":
            for what in ("safe", "useful")[: 1 + t.is_text]:
                reach = {x: (getattr(r, what), getattr(r, f"{what}_open")) for x, r in t.lines.reach.items() if r}
                columns[f"{where}{what} to"] = {x: times(*place, t) for x, place in reach.items()}
            for n in dict.fromkeys((min(t.train_len, max(t.lengths)), max(t.lengths))):
                name, ranked = t.best(n)
                values = {x: amount(t.get(x, n, name=name), t.unit) for x in ranked}
                if t.is_text and t.reference:
                    values[cut_label(t)] = amount(t.get(t.reference, min(n, t.train_len)), t.unit)
                columns[f"{where}{f'{name}, %' if t.task else t.unit} at {times(n, False, t)}"] = values
        elif t.kind == "far_copies":
            columns[f"{where}gain on far copies"] = {x: amount(e, t.unit, "+") for x, e in t.lines.far_gain.items()}
        elif t.kind == "passkeys":
            columns[f"{where}far passkeys found, %"] = {x: amount(e, "%") for x, e in t.lines.far.items()}
    lines = dict.fromkeys([*cuts, *(line for t in found for line in t.lines.index)])
    note = (
        "Safe: the longest text that is not worse than the same text cut to the training length. Useful: up to where "
        "longer text still helps. Far: what needs text from further back than the training length."
    )
    return [Grid("Disturbed or used", note, pd.DataFrame(columns, index=list(lines)).fillna(""))] if columns else []
