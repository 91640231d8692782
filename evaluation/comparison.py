"""Comparisons of lines measured on the same texts: paired differences, gains, safe and useful lengths; and the
answer in words and tables: which encoding, how far, how sure. What stands between two NUL is bold."""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd

from evaluation import statistics
from evaluation.frame import Runs
from evaluation.results import Kind
from evaluation.statistics import Estimate, Sample

BySeed = Mapping[int, Sample]
Cells = Mapping[tuple[str, str, int], BySeed]  # (line, name, length) -> ...
EFFECTIVE = 85.6  # percent: the threshold of RULER, which Llama-2-7B has at 4,096 tokens


class Table(NamedTuple):
    """One measure of all lines for which it was made on the same texts."""

    section: str
    train_len: int
    kind: str
    task: str  # "" for text
    unit: str
    eval: dict[str, Any]
    reference: str | None  # the line that differences are to
    lines: pd.DataFrame
    """By label, the best at the longest text first: the columns of one of its results, such as encoding (that reads),
    group and zero_shot; seeds; safe and useful lengths, None where unknown, of RULER those of `_effective`; far and
    far_gain (Estimate, of all that needs text from beyond train_len)."""
    stats: pd.DataFrame
    """By line, name and length, an `Estimate` or None in each column: mean; difference to the reference, and `behind`
    to the best line, both paired; gain, of text over the same text cut to train_len and read as trained, of far copies
    and RULER over the baseline in their files. Text has one line more: the reference cut to train_len. RULER has one
    name more, first: the mean."""

    @property
    def names(self) -> list[str]:
        return list(self.stats.index.unique("name"))

    @property
    def lengths(self) -> list[int]:
        return sorted(self.stats.index.unique("length"))

    @property
    def rows(self) -> list[str]:
        """The lines, and before them that of the text cut to train_len."""
        return [*self.stats.index.unique("line").difference(self.lines.index), *self.lines.index]

    @property
    def is_text(self) -> bool:
        """Whether the same tokens are scored at every length."""
        return self.kind == "lengths" and not self.task

    def get(self, line: str | None, length: int, column: str = "mean", name: str | None = None) -> Estimate | None:
        """One estimate, of the first name unless one is given; None where there is none."""
        return self.stats[column].get((line, name or self.names[0], length))

    def best(self, length: int) -> tuple[str, list[str]]:
        """The name at which the lines are worst, a task's hardest difficulty; and the lines, the best first."""
        means = self.stats["mean"].xs(length, level="length").map(lambda e: e.value).fillna(math.inf)  # NaN: diverged
        name = str(means.groupby("name").max().idxmax())
        ranked = means.xs(name, level="name").sort_index().sort_values(kind="stable").index
        return name, [line for line in ranked if line in self.lines.index]


def tables(runs: Runs, reference: str = "rope") -> list[Table]:
    """Every measure of the runs, by section and in the order of `Kind`; that of most lines comes first. Lines are
    compared with the line whose label or encoding is `reference`; without it with the first by name."""
    found = []
    keys = ["section", "kind", "task", "unit", "eval"]
    for (section, kind, task, unit, settings), part in runs.results.groupby(keys) if len(runs.results) else ():
        config = runs.runs.config[part.path.iloc[0]]
        tolerance = float(config.get("eval.task_tolerance" if task else "eval.tolerance", 0))
        about = section, config["train_len"], kind, task, unit, json.loads(settings)
        found.append(Table(*about, *_compared(part, reference, config["train_len"], tolerance)))
    return sorted(found, key=lambda t: (t.section, get_args(Kind).index(t.kind), -len(t.lines)))


def _stack(by_seed: BySeed, seeds: Iterable[int] | None = None) -> Sample:
    """The samples of these seeds, or of all, as one."""
    chosen = [by_seed[seed] for seed in sorted(by_seed if seeds is None else seeds)]
    return Sample(np.concatenate([s.values for s in chosen]), chosen[0].units)


def _difference(a: BySeed, b: BySeed) -> Estimate | None:
    """Over the seeds that both have."""
    both = a.keys() & b.keys()
    return statistics.difference(_stack(a, both), _stack(b, both)) if both else None


def _compared(part: pd.DataFrame, reference: str, train_len: int, tolerance: float) -> tuple[Any, Any, pd.DataFrame]:
    """reference, lines and stats of a table."""
    keys = ["line", "name", "length"]
    part = part.sort_values("line", kind="stable").set_index("seed", drop=False)
    cells, gains = ({key: own.to_dict() for key, own in part.groupby(keys, sort=False)[x]} for x in ("sample", "gain"))
    lines = part.drop_duplicates("line").set_index("line")
    kind, task = lines.iloc[0][["kind", "task"]]
    if kind == "ruler":
        cells, gains = ({**_over_tasks(x), **x} for x in (cells, gains))
    trained = lines[~lines.zero_shot].reset_index().drop_duplicates("group").set_index("group").line
    lines["base"] = lines.group.map(trained)
    named = trained[lines.encoding[trained].to_numpy() == reference]
    to = reference if reference in lines.index else next(iter([*named, *trained]), None)

    means = {key: statistics.estimate(_stack(own)) for key, own in cells.items()}
    sign = -1 if kind == "ruler" else 1
    values = pd.Series({key: sign * e.value for key, e in means.items()}).rename_axis(keys).fillna(math.inf)
    best = values.groupby(["name", "length"]).idxmin()
    stats: dict[Any, list[Estimate | None]] = {}
    for (line, name, n), own in cells.items():
        to_reference = _difference(own, cells.get((to, name, n), {})) if line != to else None
        gain = statistics.estimate(_stack(gains[line, name, n])) if kind in ("far_copies", "ruler") else None
        if kind == "lengths" and not task:
            gain = _difference(cells.get((lines.base[line], name, min(n, train_len)), {}), own)
        stats[line, name, n] = [means[line, name, n], to_reference, _difference(own, cells[best[name, n]]), gain]
    if kind == "lengths" and not task and (to, "text", train_len) in means:
        for n in sorted({n for *_, n in cells if n >= train_len}):
            stats[f"{to} cut to {train_len:,}", "text", n] = [means[to, "text", train_len], None, None, None]

    lines["seeds"] = part.groupby("line").seed.nunique()
    about: dict[str, list[Any]] = {}
    place = part.name.str.extract(r"(?:distance|depth) (\d+\.?\d*)", expand=False).astype(float)
    needs_far = (place if kind == "far_copies" else (1 - place) * part.length) >= train_len  # text beyond train_len
    for line, row in lines.iterrows():
        own = part[needs_far & (part.line == line)]
        far = dict.fromkeys(zip(own.line, own.name, own.length, strict=True))
        reach = _reach(cells, row, train_len, tolerance) if kind == "lengths" else (None, None)
        if kind == "ruler":
            reach = _effective({n: own for (who, name, n), own in stats.items() if (who, name) == (line, "mean")})
        about[str(line)] = [*reach, _pooled([cells[key] for key in far]), _pooled([gains[key] for key in far])]
    columns = ["safe", "useful", "far", "far_gain"]
    lines = lines.join(pd.DataFrame.from_dict(about, "index", dtype=object, columns=columns))
    worst = values.xs(max(n for *_, n in cells), level="length").groupby("line").max()
    order = worst.reindex(lines.index).sort_values(kind="stable").index  # those not measured at the longest come last
    frame = pd.DataFrame.from_dict(stats, "index", dtype=object, columns=["mean", "difference", "behind", "gain"])
    frame.index = pd.MultiIndex.from_tuples(stats, names=keys)
    return to, lines.loc[order], frame


def _reach(cells: Cells, line: pd.Series, train_len: int, tolerance: float) -> tuple[int | None, int | None]:
    """Safe and useful length of a line; of a task, whose tokens differ, the shortest safe one of its difficulties."""
    found = []
    for name in {name for own, name, _ in cells if own == line.name}:
        own = {n: x for (who, of, n), x in cells.items() if (who, of) == (line.name, name)}
        base = {n: x for (who, of, n), x in cells.items() if (who, of) == (line.base, name)}
        seeds = set.intersection(*map(set, [*own.values(), *base.values()]))
        if base and seeds:
            a, b = ({n: _stack(x, seeds) for n, x in by_length.items()} for by_length in (own, base))
            safe = statistics.safe_length(a, b, train_len, tolerance)
            found.append((safe, None if line.task else statistics.useful_length(a)))
    return min(found, key=lambda lengths: -1 if lengths[0] is None else lengths[0], default=(None, None))


def _over_tasks(cells: Cells) -> dict[Any, dict[int, Sample]]:
    """Of RULER: the mean over the tasks, of each over its depths, text by text."""
    parts: dict[tuple[str, int], dict[str, list[BySeed]]] = defaultdict(lambda: defaultdict(list))
    for (line, name, n), own in cells.items():
        parts[line, n][name.split()[0]].append(own)
    found = {}
    for (line, n), tasks in parts.items():
        first, *others = (own for task in tasks.values() for own in task)
        found[line, "mean", n] = {
            seed: Sample(np.mean([np.mean([own[seed].values for own in x], 0) for x in tasks.values()], 0), units)
            for seed, (_, units) in first.items()
            if all(seed in own for own in others)
        }
    return found


def _effective(own: Mapping[int, list[Estimate | None]]) -> tuple[int, int]:
    """Of RULER, by length: up to where the share of answers found is effective; and where their gain is above chance,
    its 95 % interval above 0."""
    found, gain = ({n: e for n, row in sorted(own.items()) if (e := row[column])} for column in (0, -1))
    effective = takewhile(lambda n: found[n].value >= EFFECTIVE, found)
    return max(effective, default=0), max(takewhile(lambda n: gain[n].low > 0, gain), default=0)


def _pooled(parts: list[BySeed]) -> Estimate | None:
    """Over several parts of a measure, text by text."""
    seeds = set.intersection(*map(set, parts)) if parts else set()
    samples = [_stack(part, seeds) for part in parts] if seeds else []
    return statistics.estimate(Sample(*(np.sum(x, axis=0) for x in zip(*samples, strict=True)))) if samples else None


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


def times(length: int, table: Table) -> str:
    return f"{length / table.train_len:g}x"


def which(table: Table, length: int) -> str:
    """Who is best at a length, and from whom the intervals do not separate it."""
    name, (first, *others) = table.best(length)
    hardest = f", in the hardest difficulty ({name})" if table.task else ""
    text = f"At {length:,} tokens ({times(length, table)}){hardest} the best is {bold(first)}: "
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
        short = table.best(table.train_len)[1][0]
        best, cut = table.get(first, length), table.get(short, table.train_len)
        if short != first and best and cut and cut.value < best.value:
            text += f", on which {bold(short)} is better: {amount(cut, table.unit)}"
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
        where = bold("at no length") if length == "none" else f"to {bold(length)}"
        texts.append(f"{where}: {listed(list(there.index), 6 if len(found) < 20 else 3)}")
    return [f"{what} {'; '.join(texts)}."] if texts else []


def mastered(table: Table) -> list[str]:
    """Of a task, in its hardest difficulty: how far at least 99 % are right, and which lines are far from it at 1x,
    where a safe length is no merit. To guess a bit is to have 50 % wrong."""
    wrong = table.stats["mean"].map(lambda e: e.value).groupby(["length", "line"]).max().unstack()
    right = (wrong <= 1).astype(int).cummin().sum().sort_values(ascending=False, kind="stable")
    lengths = {str(line): times([*wrong.index][n - 1], table) if n else "none" for line, n in right.items()}
    found = how_far("At least 99 % right", lengths)
    lost = [line for line in table.lines.index if table.train_len in wrong.index and wrong[line][table.train_len] > 25]
    return found + ([f"Has not learned the task at 1x (over 25 % wrong): {listed(lost)}."] if lost else [])


def used(table: Table, others: Sequence[Table]) -> str:
    """Which lines are safe to the longest length and gain from text beyond train_len, too: by how much."""
    gains = {line: (t.kind, e) for t in reversed(others) for line, e in t.lines.far_gain.items() if e and e.low > 0}
    using = {line: f"gain on {kind.replace('_', ' ')}: {amount(e, 'bits', '+')}" for line, (kind, e) in gains.items()}
    safe = table.lines.index[table.lines.safe == max(table.lengths)]
    found = [f"{bold(line)} ({using[line]})" for line in safe if line in using]
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
    """The measure of each line at each length, of text its gain over the text cut to train_len, and its paired
    difference to the reference; of far copies the gain; of RULER both, each task a row."""
    shown = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in table.eval.items()}
    settings = ", ".join(f"{k} {v}" for k, v in shown.items() if not isinstance(table.eval[k], str))  # a hash
    columns = {"mean": f"{table.unit.capitalize()} ({settings}), mean ± 95 % interval"}
    if table.kind == "far_copies":
        columns = {"gain": f"Gain in {table.unit} on far copies ({settings})"}
    if table.kind == "ruler":
        columns["gain"] = "Gain in bits over the text in which the answer is wrong"
    if table.is_text:
        columns["gain"] = f"Gain over the same text cut to {table.train_len:,} tokens, in {table.unit}"
    if table.kind == "lengths" and len(table.lines) > 1:
        columns["difference"] = f"Difference to {table.reference} in {table.unit}, paired by seed and text"
    grids = []
    for column, title in columns.items():
        text = functools.partial(amount, unit=table.unit, sign="+" * (column != "mean"))
        cells = table.stats[column].map(text)
        if table.kind == "ruler":
            wide = cells.unstack("length").loc[[(line, name) for line in table.lines.index for name in table.names]]
            wide.index = [f"{line}: {name}" for line, name in wide.index]
            wide.columns = [f"{n:,} ({times(n, table)})" for n in wide]
            grids.append(Grid(f"RULER: {title}", "", wide.fillna("")))
            continue
        wide = cells.unstack(["name", "length"])
        places = [(name, n) for name in table.names for n in table.lengths if (name, n) in wide]
        wide = wide.loc[table.rows if column == "mean" else table.lines.index, places].fillna("")
        wide.columns = [f"{name}, {n:,} ({times(n, table)})".removeprefix("text, ") for name, n in wide]
        grids.append(Grid(title, "", wide.rename_axis(None)))
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
    cuts = [line for t in found for line in t.rows if line not in t.lines.index]
    lines = dict.fromkeys([*cuts, *(line for t in found for line in t.lines.index)])
    note = "Safe: the longest text that is not worse than the same text cut to the training length. Useful: up to "
    note += "where longer text still helps. Far: what needs text from further back than the training length."
    frame = pd.DataFrame(columns, index=list(lines), dtype=object).fillna("")
    return [Grid("Disturbed or used", note, frame)] if columns else []
