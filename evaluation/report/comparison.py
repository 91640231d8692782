"""Comparisons of lines measured on the same texts: paired differences, gains, safe and useful lengths."""

import json
import math
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd

from evaluation import statistics
from evaluation.report.frame import Runs
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
    and RULER over the baseline in their files. Text has one line more: the reference cut to train_len."""

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
            cut = _difference(cells[to, "text", train_len], cells[best["text", n]])
            stats[f"{to} cut to {train_len:,}", "text", n] = [means[to, "text", train_len], None, cut, None]

    frame = pd.DataFrame.from_dict(stats, "index", dtype=object, columns=["mean", "difference", "behind", "gain"])
    frame.index = pd.MultiIndex.from_tuples(stats, names=keys)

    lines["seeds"] = part.groupby("line").seed.nunique()
    about: dict[str, list[Any]] = {}
    place = part.name.str.extract(r"(?:distance|depth) (\d+\.?\d*)", expand=False).astype(float)
    needs_far = (place if kind == "far_copies" else (1 - place) * part.length) >= train_len  # text beyond train_len
    for line, row in lines.iterrows():
        reach: tuple[int | None, int | None] = None, None
        if kind == "lengths":
            reach = _reach(cells, row, train_len, tolerance)
        elif kind == "ruler":
            reach = _effective(frame.xs((line, "mean"), level=["line", "name"]).sort_index())
        far = part[needs_far & (part.line == line)]
        about[str(line)] = [*reach, _pooled(far, "sample"), _pooled(far, "gain")]
    columns = ["safe", "useful", "far", "far_gain"]
    lines = lines.join(pd.DataFrame.from_dict(about, "index", dtype=object, columns=columns))
    worst = values.xs(max(n for *_, n in cells), level="length").groupby("line").max()
    order = worst.reindex(lines.index).sort_values(kind="stable").index  # those not measured at the longest come last
    return to, lines.loc[order], frame


def _reach(cells: Cells, line: pd.Series, train_len: int, tolerance: float) -> tuple[int | None, int | None]:
    """Safe and useful length of a line; of a task, whose tokens differ, the shortest safe one of its difficulties."""
    found = []
    for name in {name for own, name, _ in cells if own == line.name}:
        own, base = ({n: x for (*at, n), x in cells.items() if at == [who, name]} for who in (line.name, line.base))
        seeds = set.intersection(*map(set, [*own.values(), *base.values()]))
        if base and seeds:
            a, b = ({n: _stack(x, seeds) for n, x in by_length.items()} for by_length in (own, base))
            safe = statistics.safe_length(a, b, train_len, tolerance)
            found.append((safe, None if line.task or len(a) < 2 else statistics.useful_length(a)))
    return min(found, key=lambda lengths: -1 if lengths[0] is None else lengths[0], default=(None, None))


def _effective(stats: pd.DataFrame) -> tuple[int, int]:
    """Of RULER's mean by length: up to where the share of answers found is effective; and where their gain is above
    chance, its 95 % interval above 0."""
    effective = takewhile(lambda n: stats["mean"][n].value >= EFFECTIVE, stats.index)
    return max(effective, default=0), max(takewhile(lambda n: stats.gain[n].low > 0, stats.index), default=0)


def _pooled(rows: pd.DataFrame, column: str) -> Estimate | None:
    """Over several parts of a measure, text by text; over the seeds that have them all."""
    seeds = [list(own) for _, own in rows.groupby(level="seed")[column]]
    whole = [zip(*own, strict=True) for own in seeds if len(own) == max(map(len, seeds))]
    pooled = [Sample(*(np.sum(x, axis=0) for x in parts)) for parts in whole]
    return statistics.estimate(_stack(dict(enumerate(pooled)))) if pooled else None
