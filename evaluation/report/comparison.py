"""Comparisons of lines measured on the same texts: paired differences, gains, safe and useful lengths."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd

from evaluation import statistics
from evaluation.report.frame import Runs
from evaluation.results import LOWER_IS_BETTER, Kind, Part
from evaluation.statistics import Estimate, Learned, Sample

LEARNED = 10.0  # percent of errors at the training length, on what was trained: at most so many if a seed has learned
BEST_POSSIBLE = "best possible"  # the row of the best possible predictor
BySeed = Mapping[int, Sample]
LINE_COLUMNS = ["encoding", "variant", "group", "zero_shot", "skipped", "step", "texts", "documents"]


class Key(NamedTuple):
    """What an estimate is of."""

    line: str
    part: str  # its label
    length: int


Cells = Mapping[Key, BySeed]
Estimates = dict[Key, Estimate]


@dataclass(frozen=True)
class Table:
    """One quantity of one measure, of all lines for which it was made on the same texts."""

    section: str
    train_len: int
    kind: str
    task: str  # the task of the data; "" for text
    quantity: str
    unit: str
    eval: dict[str, Any]
    reference: str | None  # the line that differences are to
    lines: pd.DataFrame  # by label, the best at the longest text first: LINE_COLUMNS, base (the line as trained), seeds
    parts: dict[str, Part]  # by label
    cells: Cells
    means: Estimates
    """Of a task the medians over the seeds that learned it, without an interval. Text has one line more than `lines`:
    the reference cut to train_len; and one for the best possible predictor, where it is known."""
    differences: Estimates  # to the reference, paired
    behind: Estimates  # to the best line, paired
    learned: dict[Key, Learned]  # of a task
    gains: Estimates  # of text: over the same text cut to train_len and read as trained, paired; of the optimum, too
    excess: Estimates  # of text whose optimum is known: above it, paired by text
    shares: Estimates  # of the optimum's gain that a line's gain is, beyond train_len, where the optimum gains
    safe: dict[str, int]  # lengths of the lines for which they are known, see `evaluation.statistics`
    useful: dict[str, int]

    @property
    def lengths(self) -> list[int]:
        return sorted({key.length for key in self.means})

    @property
    def rows(self) -> list[str]:
        """The lines, and before them that of the text cut to train_len and the best possible one."""
        every = dict.fromkeys(key.line for key in self.means)
        return [*(line for line in every if line not in self.lines.index), *self.lines.index]

    @property
    def is_text(self) -> bool:
        """Whether the same tokens are scored at every length."""
        return self.kind == "lengths" and not self.task

    @property
    def first_part(self) -> str:
        return next(iter(self.parts))

    def mean(self, line: str, length: int, part: str | None = None) -> Estimate | None:
        """The mean of a line, of the first part unless one is given."""
        return self.means.get(Key(line, part or self.first_part, length))

    def best(self, length: int) -> tuple[str, list[str]]:
        """The part at which the lines are worst, a task's hardest difficulty; and the lines, the best first."""
        badness: dict[Key, float] = {}
        for key, e in self.means.items():
            if key.length == length:
                badness[key] = _badness(e.value, self.quantity)
        worst: dict[str, float] = {}
        for key in sorted(badness):
            worst[key.part] = max(worst.get(key.part, -math.inf), badness[key])
        hardest = max(sorted(worst), key=worst.__getitem__)
        lines = [key.line for key in badness if key.part == hardest and key.line in self.lines.index]
        return hardest, sorted(lines, key=lambda line: (badness[Key(line, hardest, length)], line))

    def tied(self, best: Key) -> list[str]:
        """The lines that are not separated from the best one after Holm's correction, the best first."""
        _, (_, *others) = self.best(best.length)
        known = [line for line in others if best._replace(line=line) in self.behind]
        separated = statistics.separated([self.behind[best._replace(line=line)] for line in known])
        apart = {line for line, is_apart in zip(known, separated, strict=True) if is_apart}
        return [line for line in others if line not in apart]


def _badness(value: float, quantity: str) -> float:
    """The value such that lower is better; infinity for NaN, which is what a network that diverged has."""
    if math.isnan(value):
        return math.inf
    return value if LOWER_IS_BETTER[quantity] else -value


def tables(runs: Runs, reference: str = "rope") -> list[Table]:
    """Every quantity of every measure of the runs, by section and in the order of `Kind`; of most lines first.

    Args:
        reference: lines are compared with the line that has this label or encoding; without it with the first by name.
    """
    result = []
    keys = ["section", "kind", "quantity", "unit", "eval"]
    for _, rows in runs.results.groupby(keys):
        config = runs.configs[rows.path.iloc[0]]
        result.append(_compare(rows, runs.samples, runs.optima, config, reference))
    quantities = list(LOWER_IS_BETTER)

    def order(table: Table) -> tuple:
        kind = get_args(Kind).index(table.kind)
        return table.section, kind, -len(table.lines), quantities.index(table.quantity)

    return sorted(result, key=order)


def _compare(
    rows: pd.DataFrame, samples: Mapping[int, Sample], optima: Mapping[int, Sample], config: Mapping[str, Any],
    reference: str,
) -> Table:  # fmt: skip
    """The table of the rows of one quantity."""
    rows = rows.sort_values("line", kind="stable")
    first = rows.iloc[0]
    task = first.task if first.quantity == "error" else ""
    is_text = first.kind == "lengths" and not task
    train_len = config["train_len"]

    lines = rows.drop_duplicates("line").set_index("line")[LINE_COLUMNS]
    # The baseline of a line that reads zero-shot is the same weights read as trained.
    trained = lines[~lines.zero_shot].reset_index().drop_duplicates("group").set_index("group").line
    lines["base"] = lines.group.map(trained)
    lines["seeds"] = rows.groupby("line").seed.nunique()
    to = _reference(lines, list(trained), reference)

    # All that follows is computed from the sums in `cells`; the rows only say what is equal.
    cells = _cells(rows, samples)
    means = {key: statistics.estimate(_stack(by_seed)) for key, by_seed in cells.items()}
    learned: dict[Key, Learned] = {}
    differences: Estimates = {}
    behind: Estimates = {}
    gains: Estimates = {}
    safe: dict[str, int] = {}
    useful: dict[str, int] = {}
    excess: Estimates = {}
    shares: Estimates = {}
    if task:
        # Errors are bounded, and a seed may not have learned the task at all: Student's interval has no meaning.
        learned = _learned(cells, train_len)
        for key, of_seeds in learned.items():
            nothing = math.nan
            means[key] = means[key]._replace(
                value=of_seeds.median, low=nothing, high=nothing, std=nothing, error=nothing
            )
        safe = _safe_on_task(means, lines.base, train_len, float(config.get("eval.task_tolerance", 0)))
    else:
        differences, behind = _differences(cells, means, to, first.quantity)
    if is_text:
        gains = _gains(cells, lines.base, train_len)
        safe, useful = _reach(cells, lines.base, train_len, float(config.get("eval.tolerance", 0)))
    # The cut text is no line of its own: it is added after the lines are ordered and compared with each other.
    order = _order(lines, means, first.quantity)
    if is_text and to is not None:
        _add_truncated(to, train_len, cells, means, behind, first.quantity)
    optimum = _optimum(rows, optima)
    if is_text and optimum:
        excess = _excess(cells, optimum)
        best = {Key(BEST_POSSIBLE, "text", length): {0: sample} for length, sample in optimum.items()}
        means |= {key: statistics.estimate(_stack(of_optimum)) for key, of_optimum in best.items()}
        gains |= _gains(best, {BEST_POSSIBLE: BEST_POSSIBLE}, train_len)
        shares = _shares(cells, lines.base, optimum, gains, train_len)
    return Table(
        section=first.section,
        train_len=train_len,
        kind=first.kind,
        task=task,
        quantity=first.quantity,
        unit=first.unit,
        eval=json.loads(first.eval),
        reference=to,
        lines=lines.loc[order],
        parts=_parts(rows),
        cells=cells,
        means=means,
        differences=differences,
        behind=behind,
        learned=learned,
        gains=gains,
        excess=excess,
        shares=shares,
        safe=safe,
        useful=useful,
    )


def _reference(lines: pd.DataFrame, trained: list[str], reference: str) -> str | None:
    """The line with this label, or as trained with this encoding; else the first as trained, if there is one."""
    if reference in lines.index:
        return reference
    for line in trained:
        if lines.encoding[line] == reference:
            return line
    return trained[0] if trained else None


def _parts(rows: pd.DataFrame) -> dict[str, Part]:
    """The parts of the rows, by label, in the order in which they were measured."""
    parts = {}
    for row in rows.drop_duplicates("part").itertuples():
        parts[row.part] = Part(row.task, row.difficulty, row.depth, row.span_start, row.span_end, row.continuation)
    return parts


def _cells(rows: pd.DataFrame, samples: Mapping[int, Sample]) -> dict[Key, dict[int, Sample]]:
    """The samples of each line, part and length, by seed."""
    cells: dict[Key, dict[int, Sample]] = {}
    for row in rows.itertuples():
        by_seed = cells.setdefault(Key(row.line, row.part, row.length), {})
        by_seed[row.seed] = samples[row.Index]
    return cells


def _stack(by_seed: BySeed, seeds: Iterable[int] | None = None) -> Sample:
    """The samples of these seeds, or of all, as one."""
    chosen = [by_seed[seed] for seed in sorted(by_seed if seeds is None else seeds)]
    return Sample(np.concatenate([sample.values for sample in chosen]), chosen[0].units)


def _difference(a: BySeed | None, b: BySeed | None) -> Estimate | None:
    """`a` minus `b` over the seeds that both have; None if there are none."""
    if not a or not b:
        return None
    both = a.keys() & b.keys()
    return statistics.difference(_stack(a, both), _stack(b, both)) if both else None


def _best_lines(means: Estimates, quantity: str) -> dict[tuple[str, int], Key]:
    """The best line at each part and length; of equal ones the first."""
    best: dict[tuple[str, int], Key] = {}
    for key, e in means.items():
        place = (key.part, key.length)
        if place not in best or _badness(e.value, quantity) < _badness(means[best[place]].value, quantity):
            best[place] = key
    return best


def _differences(cells: Cells, means: Estimates, to: str | None, quantity: str) -> tuple[Estimates, Estimates]:
    """Paired differences to the line `to`, and to the best line."""
    best = _best_lines(means, quantity)
    to_reference: Estimates = {}
    behind: Estimates = {}
    for key, by_seed in cells.items():
        if key.line != to and to is not None:
            difference = _difference(by_seed, cells.get(key._replace(line=to)))
            if difference:
                to_reference[key] = difference
        difference = _difference(by_seed, cells[best[key.part, key.length]])
        if difference:
            behind[key] = difference
    return to_reference, behind


def _gains(cells: Cells, base: Mapping[str, str], train_len: int) -> Estimates:
    """How much lower the loss is than that of the weights as trained on the text cut to train_len tokens."""
    gains: Estimates = {}
    for key, by_seed in cells.items():
        cut = cells.get(Key(base[key.line], key.part, min(key.length, train_len)))
        gain = _difference(cut, by_seed)
        if gain:
            gains[key] = gain
    return gains


def _add_truncated(to: str, train_len: int, cells: Cells, means: Estimates, behind: Estimates, quantity: str) -> None:
    """Add the line of the reference on the text cut to train_len to `means` and `behind`, at every longer length."""
    cut = Key(to, "text", train_len)
    if cut not in means:
        return
    best = _best_lines(means, quantity)
    for length in sorted({key.length for key in cells if key.length >= train_len}):
        key = Key(f"{to} cut to {train_len:,}", "text", length)
        means[key] = means[cut]
        difference = _difference(cells[cut], cells[best["text", length]])
        if difference:
            behind[key] = difference


def _optimum(rows: pd.DataFrame, optima: Mapping[int, Sample]) -> dict[int, Sample]:
    """The best possible predictor at each length where it is known: it is the same for all lines."""
    optimum: dict[int, Sample] = {}
    for row in rows.itertuples():
        if row.Index in optima:
            optimum.setdefault(row.length, optima[row.Index])
    return optimum


def _excess(cells: Cells, optimum: Mapping[int, Sample]) -> Estimates:
    """How far each line is above the optimum. The optimum of a text has no noise, so that texts are paired with it."""
    excess: Estimates = {}
    for key, by_seed in cells.items():
        if key.length in optimum:
            own = _stack(by_seed)
            excess[key] = statistics.estimate(Sample(own.values - optimum[key.length].values, own.units))
    return excess


def _shares(
    cells: Cells, base: Mapping[str, str], optimum: Mapping[int, Sample], gains: Estimates, train_len: int
) -> Estimates:
    """Each line's share of the gain over the cut text that is possible, at the lengths beyond train_len."""
    shares: Estimates = {}
    for key, by_seed in cells.items():
        possible = gains.get(key._replace(line=BEST_POSSIBLE))
        # Where longer text is worth nothing, as to the best predictor, a share has no meaning.
        if key.length <= train_len or possible is None or not possible.low > 0:
            continue
        cut = cells.get(Key(base[key.line], key.part, train_len), {})
        seeds = by_seed.keys() & cut.keys()
        if seeds:
            long, short = _stack(by_seed, seeds), _stack(cut, seeds)
            gain = Sample(short.values - long.values, long.units)
            best_gain = Sample(optimum[train_len].values - optimum[key.length].values, long.units)
            shares[key] = statistics.share(gain, best_gain)
    return shares


def _order(lines: pd.DataFrame, means: Estimates, quantity: str) -> list[str]:
    """The lines by their worst part at the longest length. Those not measured there come last."""
    longest = max(key.length for key in means)
    worst: dict[str, float] = {}
    for key, e in means.items():
        if key.length == longest:
            worst[key.line] = max(worst.get(key.line, -math.inf), _badness(e.value, quantity))
    return sorted(lines.index, key=lambda line: (line not in worst, worst.get(line, 0.0)))


def _learned(cells: Cells, train_len: int) -> dict[Key, Learned]:
    """Errors of a task over the seeds that learned it: at the training length, on the difficulty that was trained."""
    errors: dict[Key, dict[int, float]] = {}
    for key, by_seed in cells.items():
        errors[key] = {seed: statistics.estimate(sample).value for seed, sample in by_seed.items()}
    result = {}
    trained_on = next(iter(cells)).part  # the first eval set of a task
    # Whether a seed has learned is asked where it was trained, and then holds for all lengths and difficulties:
    # so a median over lengths is of the same runs, and what breaks at longer text is seen to break.
    for key in cells:
        lengths = sorted(other.length for other in cells if other[:2] == (key.line, trained_on))
        short = [length for length in lengths if length <= train_len]
        learned = set()
        if lengths:
            at_training = errors[Key(key.line, trained_on, short[-1] if short else lengths[0])]
            learned = {seed for seed, error in at_training.items() if error <= LEARNED}
        result[key] = statistics.of_learned(errors[key], learned)
    return result


def _safe_on_task(means: Estimates, base: Mapping[str, str], train_len: int, tolerance: float) -> dict[str, int]:
    """The longest length up to which errors are hardly more than those of the line as trained, at train_len at most.

    The hardest part decides. Lines without that baseline are left out.
    """
    safe: dict[str, int] = {}
    for line in dict.fromkeys(key.line for key in means):
        own = sorted((key for key in means if key.line == line), key=lambda key: key.length)
        parts = {key.part for key in own}
        if any(Key(base[line], part, train_len) not in means for part in parts):
            continue
        safe[line] = 0
        for length in dict.fromkeys(key.length for key in own):
            for key in own:
                cut = means.get(Key(base[line], key.part, min(length, train_len)))
                if key.length == length and not (cut and means[key].value - cut.value <= tolerance):
                    break
            else:
                safe[line] = length
                continue
            break
    return safe


def _reach(
    cells: Cells, base: Mapping[str, str], train_len: int, tolerance: float
) -> tuple[dict[str, int], dict[str, int]]:
    """Safe and useful lengths of the lines on text, for those that have a baseline."""
    safe: dict[str, int] = {}
    useful: dict[str, int] = {}
    for line in dict.fromkeys(key.line for key in cells):
        of_line = {key.length: by_seed for key, by_seed in cells.items() if key.line == line}
        of_base = {key.length: by_seed for key, by_seed in cells.items() if key.line == base[line]}
        if not of_base:
            continue
        # Lengths are compared with each other, so that all are over the seeds that every one of them has.
        seeds = set.intersection(*map(set, [*of_line.values(), *of_base.values()]))
        if not seeds:
            continue
        measured = {length: _stack(by_seed, seeds) for length, by_seed in of_line.items()}
        cut = {length: _stack(by_seed, seeds) for length, by_seed in of_base.items()}
        length = statistics.safe_length(measured, cut, train_len, tolerance)
        if length is not None:
            safe[line] = length
        if len(measured) > 1:
            useful[line] = statistics.useful_length(measured)
    return safe, useful
