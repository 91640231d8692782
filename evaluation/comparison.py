"""Comparisons of lines that were measured on the same texts: paired differences, gains, safe and useful lengths."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from evaluation import statistics
from evaluation.frame import Runs
from evaluation.statistics import Estimate, Reach, Sample

BySeed = Mapping[int, Any]  # seed -> row of the results
Cells = Mapping[tuple[str, int], BySeed]  # (name, length) -> ...


class Table(NamedTuple):
    """One measure of all lines for which it was made on the same texts."""

    section: str
    train_len: int
    kind: str
    task: str  # "" for text
    unit: str
    eval: dict[str, Any]
    tolerance: float
    reference: str | None  # the line that differences are to
    lines: pd.DataFrame
    """By label, the best at the longest text first: encoding (that reads), group, zero_shot, seeds, row (one of its
    results), reach (`statistics.Reach`), far and far_gain (Estimate, of all that needs text from beyond train_len)."""
    stats: pd.DataFrame
    """By line, name and length, an `Estimate` or None in each column: mean; difference to the reference, and `behind`
    to the best line, both paired; gain, of text over the same text cut to train_len and read as trained, of far copies
    and passkeys over the baseline in their files."""

    @property
    def names(self) -> list[str]:
        return list(self.stats.index.unique("name"))

    @property
    def lengths(self) -> list[int]:
        return sorted(self.stats.index.unique("length"))

    @property
    def is_text(self) -> bool:
        """Whether the same tokens are scored at every length."""
        return self.kind == "lengths" and not self.task

    def get(self, line: str | None, length: int, column: str = "mean", name: str | None = None) -> Estimate | None:
        """One estimate, of the first name unless one is given; None where there is none."""
        return self.stats[column].get((line, name or self.names[0], length))

    def best(self, length: int) -> tuple[str, list[str]]:
        """The name at which the lines are worst, a task's hardest difficulty; and the lines, the best first."""
        means = self.stats["mean"].xs(length, level="length").map(lambda e: e.value)
        name = str(means.groupby("name").max().idxmax())
        return name, [*means.xs(name, level="name").sort_index().sort_values(kind="stable").index]


def tables(runs: Runs, reference: str = "rope") -> list[Table]:
    """Every measure of the runs; of each section and kind that of most lines comes first.

    Args:
        reference: label or encoding of the line that the others are compared with.
    """
    found = []
    keys = ["section", "kind", "task", "unit", "eval"]
    for key, part in runs.results.groupby(keys) if len(runs.results) else ():
        config = runs.runs.config[part.path.iloc[0]]
        section, kind, task, unit, settings = key
        tolerance = float(config.get("eval.task_tolerance" if task else "eval.tolerance", 0))
        about = section, config["train_len"], kind, task, unit, json.loads(settings), tolerance
        found.append(Table(*about, *_compared(part, reference, config["train_len"], tolerance)))
    return sorted(found, key=lambda t: (t.section, t.kind, -len(t.lines)))


def stack(by_seed: BySeed, column: str = "sample", seeds: Iterable[int] | None = None) -> Sample:
    """The samples of several seeds as one, in the order of the seeds."""
    chosen = [getattr(by_seed[seed], column) for seed in sorted(by_seed if seeds is None else seeds)]
    return Sample(np.concatenate([s.values for s in chosen]), chosen[0].units)


def _difference(a: BySeed, b: BySeed) -> Estimate | None:
    """Over the seeds that both have."""
    both = a.keys() & b.keys()
    return statistics.difference(stack(a, seeds=both), stack(b, seeds=both)) if both else None


def _compared(part: pd.DataFrame, reference: str, train_len: int, tolerance: float) -> tuple[Any, ...]:
    """reference, lines and stats of a table."""
    cells: dict[str, dict[Any, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for r in part.itertuples():
        cells[r.line][r.name, r.length][r.seed] = r
    first = {line: next(iter(next(iter(own.values())).values())) for line, own in cells.items()}
    trained = {r.group: line for line, r in sorted(first.items()) if not r.zero_shot}
    named = [line for line in trained.values() if first[line].encoding == reference]
    to = reference if reference in cells else next(iter(named), None)
    means = {(line, *at): statistics.estimate(stack(by)) for line, own in cells.items() for at, by in own.items()}
    sign = -1 if r.kind == "passkeys" else 1
    best: dict[Any, str] = {}  # at each name and length
    for line, *at in sorted(means, key=lambda key: (sign * means[key].value, key[0])):
        best.setdefault(tuple(at), line)
    stats, lines = [], []
    for line, own in cells.items():
        base = cells.get(trained.get(first[line].group, ""), {})
        for at, by_seed in own.items():
            name, length = at
            gain = None
            if r.kind == "lengths" and not r.task:
                gain = _difference(base.get((name, min(length, train_len)), {}), by_seed)
            elif r.kind in ("far_copies", "passkeys"):
                gain = statistics.estimate(stack(by_seed, "gain"))
            to_reference = _difference(by_seed, cells[to].get(at, {})) if to and to != line else None
            behind = _difference(by_seed, cells[best[at]][at])
            stats.append((line, *at, means[line, *at], to_reference, behind, gain))
        far = [by_seed for (name, n), by_seed in own.items() if _is_far(r.kind, name, n, train_len)]
        reach = _reach(own, base, train_len, tolerance, first[line]) if r.kind == "lengths" else None
        seeds = len(set().union(*own.values()))
        about = first[line].encoding, first[line].group, first[line].zero_shot, seeds, first[line], reach
        lines.append((line, *about, _pooled(far, "sample"), _pooled(far, "gain")))
    columns = ["line", "name", "length", "mean", "difference", "behind", "gain"]
    frame = pd.DataFrame(stats, columns=columns, dtype=object).set_index(columns[:3])
    worst = (
        frame["mean"].map(lambda e: sign * e.value).xs(max(n for *_, n in means), level="length").groupby("line").max()
    )
    order = worst.reindex(sorted(cells)).sort_values(kind="stable").index  # those not measured at the longest come last
    columns = ["line", "encoding", "group", "zero_shot", "seeds", "row", "reach", "far", "far_gain"]
    return to, pd.DataFrame(lines, columns=columns, dtype=object).set_index("line").loc[order], frame


def _reach(own: Cells, base: Cells, train_len: int, tolerance: float, about: Any) -> Reach | None:
    """Safe and useful length; of a task the shortest of its difficulties."""
    found = []
    for name in {name for name, _ in own}:
        a, b = ({n: by_seed for (other, n), by_seed in cells.items() if other == name} for cells in (own, base))
        if seeds := set.intersection(*map(set, [*a.values(), *b.values()])) if b else set():
            x, y = ({n: stack(by_seed, seeds=seeds) for n, by_seed in cells.items()} for cells in (a, b))
            complete, paired = not about.skipped, not about.task
            found.append(statistics.reach(x, y, train_len, tolerance, complete=complete, paired=paired))
    return min(found, key=lambda r: (-1 if r.safe is None else r.safe, r.safe_open), default=None)


def _is_far(kind: str, name: str, length: int, train_len: int) -> bool:
    """Whether this part of a measure needs text from beyond train_len."""
    number = re.match(r"(?:distance|depth) ([\d.]+)", name)
    if not number or kind not in ("far_copies", "passkeys"):
        return False
    return (float(number[1]) if kind == "far_copies" else (1 - float(number[1])) * length) >= train_len


def _pooled(parts: list[dict[int, Any]], column: str) -> Estimate | None:
    """Over several parts of a measure, text by text."""
    seeds = set.intersection(*map(set, parts)) if parts else set()
    samples = [stack(by_seed, column, seeds) for by_seed in parts] if seeds else []
    return statistics.estimate(Sample(*(np.sum(x, axis=0) for x in zip(*samples, strict=True)))) if samples else None
