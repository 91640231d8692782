"""Comparisons of lines measured on the same texts: paired differences, gains, safe and useful lengths."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from ropewalk.evaluation import statistics
from ropewalk.evaluation.results import KINDS, LOWER_IS_BETTER, Part
from ropewalk.evaluation.statistics import Estimate, Learned, Sample
from ropewalk.report.frame import Runs

# A seed has learned a task if at most so many percent of its answers are wrong, at the training length and on the
# difficulty it was trained on.
LEARNED = 10.0
# In bits: safe lengths are given at each of them, besides the tolerance of the runs.
TOLERANCES = (0.005, 0.01, 0.02, 0.05, 0.1)
# The row of the best possible predictor.
BEST_POSSIBLE = "best possible"
# Measure and quantity of losses that are shown only as the gain over the cut text.
SHOWN_AS_GAINS = (("far_copies", "loss"), ("key_tokens", "loss"))
BySeed = Mapping[int, Sample]
LINE_COLUMNS = ["encoding", "variant", "group", "zero_shot", "skipped", "step", "texts", "documents"]


class Key(NamedTuple):
    """One cell of a table."""

    line: str
    part: str  # its label
    length: int


Cells = Mapping[Key, BySeed]
Estimates = dict[Key, Estimate]


@dataclass(frozen=True)
class Table:
    """One quantity of one measure, for all lines that were measured on the same texts."""

    section: str
    train_len: int
    kind: str
    # The task of the data; "" for text.
    task: str
    quantity: str
    unit: str
    eval: dict[str, Any]
    # The line that differences are taken to.
    reference: str | None
    # Indexed by label, best at the longest text first. Columns: LINE_COLUMNS, `base` (the line as trained), `seeds`.
    lines: pd.DataFrame
    # By label.
    parts: dict[str, Part]
    cells: Cells
    # For a task: medians over the seeds that learned it, without an interval. For text there are lines that `lines` has
    # not: the reference on the text cut to train_len and, if it is known, the best possible predictor.
    means: Estimates
    # Paired differences to the reference.
    differences: Estimates
    # Paired differences to the best line.
    behind: Estimates
    # For a task only.
    learned: dict[Key, Learned]
    # For text only: the gain over the same text cut to train_len and read as trained, paired. The best possible
    # predictor has one too.
    gains: Estimates
    # For text whose optimum is known: how far a line is above it, paired by text.
    excess: Estimates
    # A line's gain as a share of the optimum's gain, at lengths beyond train_len where the optimum gains.
    shares: Estimates
    # Lengths by line, where they are defined; see `ropewalk.evaluation.statistics`.
    safe: dict[str, int]
    useful: dict[str, int]
    # For text only: the safe lengths at the tolerance of the runs and at each of `TOLERANCES`.
    safe_at: dict[float, dict[str, int]]

    @property
    def lengths(self) -> list[int]:
        return sorted({key.length for key in self.means})

    @property
    def rows(self) -> list[str]:
        """The lines, after those of the text cut to train_len and of the best possible predictor."""
        measured = dict.fromkeys(key.line for key in self.means)
        added = [line for line in measured if line not in self.lines.index]
        return added + list(self.lines.index)

    @property
    def is_text(self) -> bool:
        """True if the same tokens are scored at every length."""
        return self.kind == "lengths" and not self.task

    def best(self, length: int) -> tuple[str, list[str]]:
        """Return the hardest part at a length (a task has a part for each difficulty), and its lines, best first."""
        badness: dict[Key, float] = {}
        worst: dict[str, float] = {}
        for key, e in self.means.items():
            if key.length == length:
                badness[key] = _badness(e.value, self.quantity)
                worst[key.part] = max(worst.get(key.part, -math.inf), badness[key])
        # Equal parts and lines are ordered by name, so that a report does not depend on the order of files.
        hardest = max(sorted(worst), key=worst.__getitem__)
        lines = []
        for key, value in badness.items():
            if key.part == hardest and key.line in self.lines.index:
                lines.append((value, key.line))
        return hardest, [line for _, line in sorted(lines)]

    def tied(self, best: Key) -> list[str]:
        """Return the lines that are not separated from the best one, best first; see `statistics.tied`."""
        _, (_, *others) = self.best(best.length)
        are_tied = statistics.tied([self.behind.get(best._replace(line=line)) for line in others])
        return [line for line, is_tied in zip(others, are_tied, strict=True) if is_tied]


def _badness(value: float, quantity: str) -> float:
    """Return the value with a sign such that lower is better."""
    # A network that diverged has NaN, which would compare as neither better nor worse.
    if math.isnan(value):
        return math.inf
    return value if LOWER_IS_BETTER[quantity] else -value


def tables(runs: Runs, reference: str = "rope") -> list[Table]:
    """Return a table for every quantity of every measure.

    They are ordered by section, then as in KINDS, then by the number of trained lines and of texts, most first.

    Args:
        reference: the label or encoding of the line to compare with. If there is none, the first by name is taken.
    """
    result = []
    for _, rows in runs.results.groupby(["section", "kind", "quantity", "unit", "eval"]):
        config = runs.configs[rows.path.iloc[0]]
        result.append(_compare(rows, runs.samples, runs.optima, config, reference))
    kinds = [*KINDS, *sorted({*runs.results.kind} - {*KINDS})]
    quantities = list(LOWER_IS_BETTER)

    def order(table: Table) -> tuple:
        trained = int((~table.lines.zero_shot).sum())
        size = (-trained, -int(table.lines.texts.max()), -len(table.lines))
        return table.section, kinds.index(table.kind), size, quantities.index(table.quantity)

    return sorted(result, key=order)


def _compare(
    rows: pd.DataFrame, samples: Mapping[int, Sample], optima: Mapping[int, Sample], config: Mapping[str, Any],
    reference: str,
) -> Table:  # fmt: skip
    """Return the table of the rows of one quantity."""
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
    reference_line = _reference(lines, list(trained), reference)

    # All that follows is computed from the sums in `cells`; the rows only say what is equal.
    cells = _cells(rows, samples)
    means = {key: statistics.estimate(_stack(by_seed, by_seed)) for key, by_seed in cells.items()}

    # What a kind of table does not have stays empty.
    learned: dict[Key, Learned] = {}
    differences: Estimates = {}
    behind: Estimates = {}
    gains: Estimates = {}
    safe: dict[str, int] = {}
    useful: dict[str, int] = {}
    safe_at: dict[float, dict[str, int]] = {}
    excess: Estimates = {}
    shares: Estimates = {}

    if task:
        # Errors are bounded, and some seeds may not have learned the task at all: Student's interval has no meaning.
        learned = _learned(cells, train_len)
        nan = math.nan
        for key, of_seeds in learned.items():
            means[key] = means[key]._replace(value=of_seeds.median, low=nan, high=nan, std=nan, error=nan)
        safe = _safe_on_task(means, lines.base, train_len, float(config.get("eval.task_tolerance", 0)))
    else:
        if reference_line is not None:
            partners = {key: key._replace(line=reference_line) for key in cells if key.line != reference_line}
            differences = _differences(cells, cells, partners)
        behind = _differences(cells, cells, _best_keys(means, first.quantity))
    if is_text:
        gains = _gains(cells, lines.base, train_len)
        tolerance = float(config.get("eval.tolerance", 0))
        safe_at, useful = _reach(cells, lines.base, train_len, {tolerance, *TOLERANCES})
        safe = safe_at[tolerance]
    # The cut text and the optimum are no lines of their own: they are added after the lines are ordered and compared.
    order = _order(lines, means, first.quantity)
    if is_text and reference_line is not None:
        _add_truncated(reference_line, train_len, cells, means, behind, first.quantity)
    optimum = _optimum(rows, optima)
    if is_text and optimum:
        excess = _excess(cells, optimum)
        best: Cells = {Key(BEST_POSSIBLE, "text", length): {0: sample} for length, sample in optimum.items()}
        means |= {key: statistics.estimate(by_seed[0]) for key, by_seed in best.items()}
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
        reference=reference_line,
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
        safe_at=safe_at,
    )


def _reference(lines: pd.DataFrame, trained: list[str], reference: str) -> str | None:
    """Return the line with this label, else the one trained with this encoding, else the first that was trained."""
    if reference in lines.index:
        return reference
    for line in trained:
        if lines.encoding[line] == reference:
            return line
    return trained[0] if trained else None


def _parts(rows: pd.DataFrame) -> dict[str, Part]:
    """Return the parts of the rows, by label, in the order in which they were measured."""
    parts = {}
    for row in rows.drop_duplicates("part").itertuples():
        parts[row.part] = Part(row.task, row.difficulty, row.depth, row.span_start, row.span_end, row.continuation)
    return parts


def _cells(rows: pd.DataFrame, samples: Mapping[int, Sample]) -> dict[Key, dict[int, Sample]]:
    """Return the samples of each line, part and length, by seed."""
    cells: dict[Key, dict[int, Sample]] = {}
    for row in rows.itertuples():
        by_seed = cells.setdefault(Key(row.line, row.part, row.length), {})
        by_seed[row.seed] = samples[row.Index]
    return cells


def _stack(by_seed: BySeed, seeds: Collection[int]) -> Sample:
    """Return the samples of these seeds as one."""
    # Sorted, so that the rows of two stacks are of the same seeds and can be paired.
    return statistics.stacked([by_seed[seed] for seed in sorted(seeds)])


def _differences(a: Cells, b: Cells, partners: Mapping[Key, Key]) -> Estimates:
    """Return cells of `a` minus their partners in `b`, paired by seed and text; left out where no seed has both."""
    differences: Estimates = {}
    for key, partner in partners.items():
        of_a = a.get(key, {})
        of_b = b.get(partner, {})
        shared = of_a.keys() & of_b.keys()
        if shared:
            differences[key] = statistics.difference(_stack(of_a, shared), _stack(of_b, shared))
    return differences


def _best_keys(means: Estimates, quantity: str) -> dict[Key, Key]:
    """Return for each key that of the best line at its part and length; the first of equal ones."""
    best: dict[tuple[str, int], Key] = {}
    for key, e in means.items():
        leader = best.setdefault((key.part, key.length), key)
        if _badness(e.value, quantity) < _badness(means[leader].value, quantity):
            best[key.part, key.length] = key
    return {key: best[key.part, key.length] for key in means}


def _gains(cells: Cells, base: Mapping[str, str], train_len: int) -> Estimates:
    """Return how much lower the loss is than that of the weights as trained on the text cut to train_len tokens."""
    cut = {}
    for key in cells:
        baseline = key._replace(line=base[key.line], length=min(key.length, train_len))
        if baseline in cells:
            cut[key] = cells[baseline]
    return _differences(cut, cells, {key: key for key in cut})


def _add_truncated(
    reference: str, train_len: int, cells: Cells, means: Estimates, behind: Estimates, quantity: str
) -> None:
    """Add the line of the reference on the text cut to train_len to `means` and `behind`, at every longer length."""
    cut = Key(reference, "text", train_len)
    if cut not in means:
        return
    truncated = {}
    partners = {}
    for key, best in _best_keys(means, quantity).items():
        if key.length >= train_len:
            added = key._replace(line=f"{reference} cut to {train_len:,}")
            truncated[added] = cells[cut]
            partners[added] = best
    for key in sorted(truncated):
        means[key] = means[cut]
    behind |= _differences(truncated, cells, partners)


def _optimum(rows: pd.DataFrame, optima: Mapping[int, Sample]) -> dict[int, Sample]:
    """Return the sums of the best possible predictor by length, where it is known."""
    # It is the same for all lines: the texts are.
    optimum: dict[int, Sample] = {}
    for row in rows.itertuples():
        if row.Index in optima:
            optimum.setdefault(row.length, optima[row.Index])
    return optimum


def _excess(cells: Cells, optimum: Mapping[int, Sample]) -> Estimates:
    """Return how far each line is above the optimum, paired by text."""
    excess: Estimates = {}
    for key, by_seed in cells.items():
        if key.length in optimum:
            line = _stack(by_seed, by_seed)
            # The optimum of a text is exact and has one row, which every seed is compared with.
            excess[key] = statistics.estimate(Sample(line.values - optimum[key.length].values, line.units))
    return excess


def _shares(
    cells: Cells, base: Mapping[str, str], optimum: Mapping[int, Sample], gains: Estimates, train_len: int
) -> Estimates:
    """Return the share that each line has of the possible gain over the cut text, at the lengths beyond train_len."""
    shares: Estimates = {}
    for key, by_seed in cells.items():
        possible = gains.get(key._replace(line=BEST_POSSIBLE))
        # If longer text is worth nothing even to the best predictor, a share has no meaning.
        if key.length <= train_len or possible is None or not possible.low > 0:
            continue
        cut = cells.get(Key(base[key.line], key.part, train_len), {})
        seeds = by_seed.keys() & cut.keys()
        if seeds:
            long = _stack(by_seed, seeds)
            short = _stack(cut, seeds)
            gain = Sample(short.values - long.values, long.units)
            best_gain = Sample(optimum[train_len].values - optimum[key.length].values, long.units)
            shares[key] = statistics.share(gain, best_gain)
    return shares


def _order(lines: pd.DataFrame, means: Estimates, quantity: str) -> list[str]:
    """Return the lines by their worst part at the longest length. Those not measured there come last."""
    longest = max(key.length for key in means)
    worst: dict[str, float] = {}
    for key, e in means.items():
        if key.length == longest:
            worst[key.line] = max(worst.get(key.line, -math.inf), _badness(e.value, quantity))
    return sorted(lines.index, key=lambda line: (line not in worst, worst.get(line, 0.0)))


def _learned(cells: Cells, train_len: int) -> dict[Key, Learned]:
    """Return the errors of a task over the seeds that learned it."""
    errors: dict[Key, dict[int, float]] = {}
    for key, by_seed in cells.items():
        errors[key] = {seed: statistics.estimate(sample).value for seed, sample in by_seed.items()}
    # The cell in which each line was trained: the first eval set of a task, which is like its training data, at
    # train_len, or at the nearest length that was measured. Keys are sorted by length within a line and part.
    trained_on = next(iter(cells)).part
    trained_at: dict[str, Key] = {}
    for key in sorted(cells):
        if key.part == trained_on and (key.length <= train_len or key.line not in trained_at):
            trained_at[key.line] = key
    # A seed that learned there counts at all lengths and difficulties. So medians at different lengths are over the
    # same runs, and a failure at longer text shows as one.
    result = {}
    for key, of_seeds in errors.items():
        learned = set()
        if key.line in trained_at:
            at_training = errors[trained_at[key.line]]
            learned = {seed for seed, error in at_training.items() if error <= LEARNED}
        result[key] = statistics.of_learned(of_seeds, learned)
    return result


def _safe_on_task(means: Estimates, base: Mapping[str, str], train_len: int, tolerance: float) -> dict[str, int]:
    """Return the longest length up to which the errors of each line are hardly more than those of its baseline.

    The baseline is the line as trained, at train_len at most. Every difficulty must pass. Lines without that baseline
    are left out.
    """
    keys_of: dict[str, list[Key]] = {}
    for key in means:
        keys_of.setdefault(key.line, []).append(key)
    safe: dict[str, int] = {}
    for line, keys in keys_of.items():
        if any(key._replace(line=base[line], length=train_len) not in means for key in keys):
            continue
        unsafe = []
        for key in keys:
            cut = means.get(key._replace(line=base[line], length=min(key.length, train_len)))
            # Written so that NaN is unsafe.
            if cut is None or not means[key].value - cut.value <= tolerance:
                unsafe.append(key.length)
        limit = min(unsafe, default=math.inf)
        safe[line] = max((key.length for key in keys if key.length < limit), default=0)
    return safe


def _reach(
    cells: Cells, base: Mapping[str, str], train_len: int, tolerances: Collection[float]
) -> tuple[dict[float, dict[str, int]], dict[str, int]]:
    """Return the safe lengths at each tolerance, and the useful ones, of the lines on text that have a baseline."""
    lengths_of: dict[str, dict[int, BySeed]] = {}
    for key, by_seed in cells.items():
        lengths_of.setdefault(key.line, {})[key.length] = by_seed

    safe_at: dict[float, dict[str, int]] = {tolerance: {} for tolerance in sorted(tolerances)}
    useful: dict[str, int] = {}
    for line, of_line in lengths_of.items():
        of_base = lengths_of.get(base[line], {})
        # Lengths are compared with each other, so all must be over the same seeds: those that every length has.
        every = [*of_line.values(), *of_base.values()]
        seeds = set.intersection(*map(set, every))
        if not of_base or not seeds:
            continue

        measured = {length: _stack(by_seed, seeds) for length, by_seed in of_line.items()}
        cut = {length: _stack(by_seed, seeds) for length, by_seed in of_base.items()}

        # How far it is safe, at each tolerance, and how far more text still helped.
        for tolerance, safe in safe_at.items():
            length = statistics.safe_length(measured, cut, train_len, tolerance)
            if length is not None:
                safe[line] = length
        if len(measured) > 1:
            useful[line] = statistics.useful_length(measured)
    return safe_at, useful
