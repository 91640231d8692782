"""One long table of results. Figures, answers, pages, trackers and docs are made of it and of nothing else.

A row for each line, part of a measure and length over all its seeds, where `seed` is missing and `low` and `high` are
the 95 % interval over seeds and texts; and one for each run alone, with its seed and the interval over texts.

    table = results(load("runs"))
    over_seeds(table).query("measure == 'lengths'").pivot(index="line", columns="length", values="gain")
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ropewalk.evaluation import statistics
from ropewalk.evaluation.results import LOWER_IS_BETTER
from ropewalk.evaluation.statistics import Estimate, Sample, stacked
from ropewalk.report.frame import AFTER, COSTS, PROVENANCE, START, Runs, compared

BEST_POSSIBLE = "best possible"  # the line of the best possible predictor, where it is known
FAR = "far"  # the part that holds all parts which need text from beyond train_len
LEARNED = 10.0  # a seed has learned a task if at most so many percent of its answers are wrong where it was trained
OF_PART = ["task", "difficulty", "depth", "span_start", "span_end", "continuation"]
# The paired differences of a line. Each has columns of its `interval`.
PAIRED = {
    "gain": "loss of the line `base` on the text cut to `cut` tokens, its training length, minus the loss on all of it",
    "lead": "loss of the line `reference` on the text cut to its training length, minus the loss on all of it",
    "difference": "minus the reference at the same length",
    "behind": "minus the best line at the same length",
    "above": "minus the best possible predictor",
    "share": "of the gain that is possible",
}
OF_LINE = [  # columns that are the same in all rows of a line
    "train_len", "cut", "line", "base", "encoding", "variant", "scale", "reading", "zero_shot", "step", "settings",
    "reference", *COSTS,
]  # fmt: skip


def interval(column: str) -> list[str]:
    """Return the columns of a number and of the ends of its interval."""
    prefix = "" if column == "value" else f"{column}_"
    return [column, f"{prefix}low", f"{prefix}high"]


COLUMNS = [
    # Who was measured, and by what.
    "section", "data", "train_len", "cut", "line", "base", "encoding", "variant", "scale", "reading", "zero_shot",
    "step", "settings", "run", "path", "seed", "seeds",
    "measure", "quantity", "unit", "eval", *OF_PART, "part", "length", "times", "texts", "documents", "learned",
    # The numbers, and what they mean.
    *(name for column in ("value", *PAIRED) for name in interval(column)),
    "reference", "rank", "tied", "tolerance", "verdict", *COSTS, *PROVENANCE,
]  # fmt: skip


class Key(NamedTuple):
    """A cell of a table of one measure."""

    line: str
    part: str
    length: int


BySeed = Mapping[int, Sample]
Row = dict[str, Any]


def results(runs: Runs, reference: str = "rope") -> pd.DataFrame:
    """Return the long table.

    Args:
        reference: the label or encoding of the line that `difference` and `lead` are taken to. Of several lines of that
            encoding, or of all if none has it, it is the one with the most usual settings. The reference of a run that
            starts from a model is that model, if it was measured.
    """
    rows: list[Row] = []
    for _, of_measure in runs.results.groupby(["section", "kind", "quantity", "unit", "eval"]):
        rows += Measure(of_measure, runs, reference).rows()
    return pd.DataFrame(rows, columns=COLUMNS).astype({"seed": "Int64", "learned": "Int64", "rank": "Int64"})


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows over all seeds, without those of single runs."""
    return table[table.seed.isna()]


def losses_of_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a text's loss, whose tokens are the same at every length.

    Measures with other settings have other texts: that of most lines is taken, then that of most texts.

    Raises ValueError: the table has several sections, which have nothing in common.
    """
    rows = table[(table.measure == "lengths") & (table.quantity == "loss")]
    sections = rows.section.unique()
    if len(sections) > 1:
        raise ValueError(
            f"the runs are of {len(sections)} sections, and one at a time can be shown: choose them with only=, or with"
            f" frame[frame.section == {sections[0]!r}]; there is {'; '.join(sections)}"
        )
    if rows.empty:
        return rows
    sizes = rows.groupby("eval").agg(lines=("line", "nunique"), texts=("texts", "max"))
    settings = sizes.sort_values(["lines", "texts"], ascending=False, kind="stable").index[0]
    return rows[rows["eval"] == settings]


def verdict(low: float, high: float, tolerance: float) -> str:
    """Say what reading on is worth by the interval of the gain: "level", "better", "worse" or "undecided"."""
    rules = {
        "level": -tolerance < low and high < tolerance,
        # As it is shown: a gain of "+0.000" is none.
        "better": round(low, 3) > 0,
        "worse": round(high, 3) < 0,
        "undecided": True,
    }
    return next(word for word, holds in rules.items() if holds)


class Measure:
    """One quantity of one measure, of all lines that were measured on the same texts."""

    def __init__(self, rows: pd.DataFrame, runs: Runs, reference: str) -> None:
        rows = rows.join(runs.runs["name"].rename("run"), on="path").sort_values("line", kind="stable")
        first = rows.iloc[0]
        self.is_task = first.quantity == "error"
        self.sign = 1 if LOWER_IS_BETTER[first.quantity] else -1
        config = runs.runs.config[first.path]
        self.common: Row = {
            **first[["section", "quantity", "unit", "eval", "texts"]],
            "data": config["data.name"],
            "measure": first.kind,
            "tolerance": float(config.get("eval.tolerance", 0)),
        }

        # What the rows of a line, a part or a run have in common: dictionaries, as a look-up in a DataFrame takes a
        # hundred times as long.
        self.lines = _lines(rows, runs, reference)
        self.parts = rows.drop_duplicates("part").set_index("part", drop=False)[["part", *OF_PART]].to_dict("index")
        self.runs: dict[tuple[str, int], Row] = {(BEST_POSSIBLE, 0): {"run": "", "path": ""}}
        # The best possible predictor is a line of its own. It is exact, so it has no seeds.
        self.cells: dict[Key, dict[int, Sample]] = {}
        for row in rows[rows.optimum_sample.notna()].sort_values("length", kind="stable").itertuples():
            self.cells[Key(BEST_POSSIBLE, row.part, row.length)] = {0: row.optimum_sample}
        for row in rows.itertuples():
            self.cells.setdefault(Key(row.line, row.part, row.length), {})[row.seed] = row.sample
            self.runs[row.line, row.seed] = {name: getattr(row, name) for name in ("run", "path", *PROVENANCE)}
        if first.kind in ("far_copies", "ruler"):
            self._pool_far_parts()
        self.learned = _learned(rows) if self.is_task else set()
        self.means = {key: self._mean(key, by_seed) for key, by_seed in self.cells.items()}
        self.ranked = self._ranked()
        self.tied = {place: self._tied(place) for place in self.ranked}

    def rows(self) -> list[Row]:
        """Return the rows of all cells: over all seeds, and of each."""
        rows = []
        for key, by_seed in self.cells.items():
            row = self._row(key, by_seed)
            rows.append(row)
            if key.line != BEST_POSSIBLE:
                place = key.part, key.length
                row["rank"] = 1 + self.ranked[place].index(key.line)
                row["tied"] = key.line in self.tied[place]
                rows += [self._row(key, {seed: by_seed[seed]}, seed) for seed in sorted(by_seed)]
        return rows

    def _row(self, key: Key, by_seed: BySeed, seed: int | None = None) -> Row:
        """Return the row of a cell over these seeds."""
        of_runs = [self.runs[key.line, of_run] for of_run in sorted(by_seed)]
        first = of_runs[0]
        row = self.common | self.parts[key.part] | self.lines[key.line] | first
        row |= {
            "run": ", ".join(run["run"] for run in of_runs),
            "path": "" if seed is None else first["path"],
            "seed": seed,
            "seeds": len(by_seed),
            "length": key.length,
            "times": key.length / row["train_len"],
            "documents": next(iter(by_seed.values())).units.size,
        }
        if self.is_task:
            row["learned"] = sum((key.line, of_run) in self.learned for of_run in by_seed)
        mean = self.means[key] if seed is None else self._mean(key, by_seed)
        for column, e in {"value": mean, **self._paired(key, by_seed)}.items():
            row |= zip(interval(column), (e.value, e.low, e.high), strict=True)
        if "gain" in row:
            row["verdict"] = verdict(row["gain_low"], row["gain_high"], row["tolerance"])
        return row

    def _paired(self, key: Key, by_seed: BySeed) -> dict[str, Estimate]:
        """Return the paired differences of a cell by name; see `PAIRED`."""
        if self.is_task:
            return {}
        line = self.lines[key.line]
        cut = self._on_cut_text(line["base"], key)
        pairs: dict[str, tuple[BySeed, BySeed]] = {}
        if self.common["measure"] == "lengths":
            pairs |= {"gain": (cut, by_seed), "lead": (self._on_cut_text(line["reference"], key), by_seed)}

        best_possible = self.cells.get(key._replace(line=BEST_POSSIBLE), {})
        if key.line != BEST_POSSIBLE:
            best, *_ = self.ranked[key.part, key.length]
            pairs["behind"] = by_seed, self.cells[key._replace(line=best)]
            # The one row of the best possible predictor is compared with every seed.
            pairs["above"] = by_seed, {seed: row for seed in by_seed for row in best_possible.values()}
        if key.line != line["reference"]:
            pairs["difference"] = by_seed, self.cells.get(key._replace(line=line["reference"]), {})
        paired = {name: _estimate(_minus(*pair)) for name, pair in pairs.items()}

        gained = _minus(cut, by_seed)
        shorter = key._replace(line=BEST_POSSIBLE, length=min(key.length, line["cut"]))
        possible = _minus(self.cells.get(shorter, {}), best_possible)
        # If longer text is worth nothing even to the best predictor, a share has no meaning.
        if key.line != BEST_POSSIBLE and gained and possible and statistics.estimate(possible).low > 0:
            paired["share"] = statistics.share(gained, possible)
        return {name: e for name, e in paired.items() if e is not None}

    def _on_cut_text(self, line: str, key: Key) -> BySeed:
        """Return what a line measured on the text cut to its training length; nothing if there is no such line."""
        # The best possible predictor has no reference.
        if line not in self.lines:
            return {}
        cut = self.lines[line]["train_len"]
        return self.cells.get(Key(line, key.part, min(key.length, cut)), {})

    def _pool_far_parts(self) -> None:
        """Add a part that holds what all parts tell which need text from beyond train_len, summed text by text.

        It is over the seeds that have all of them: a seed with fewer would answer another question.
        """
        far: dict[Key, list[BySeed]] = {}
        longest = max(key.length for key in self.cells)
        for key, by_seed in self.cells.items():
            part = self.parts[key.part]
            # At least so many tokens back: words have a span, a needle its depth, and other parts are not far.
            distance = np.nan_to_num(part["span_start"], nan=(1 - part["depth"]) * key.length)
            if distance >= self.lines[key.line]["train_len"]:
                far.setdefault(Key(key.line, FAR, longest), []).append(by_seed)
        self.parts[FAR] = dict.fromkeys(OF_PART, math.nan) | {
            "part": FAR,
            "task": FAR,
            "difficulty": "",
            "continuation": "",
        }
        for key, parts in far.items():
            seeds = set.intersection(*map(set, parts))
            if seeds:
                self.cells[key] = {seed: _sum([part[seed] for part in parts]) for seed in seeds}

    def _mean(self, key: Key, by_seed: BySeed) -> Estimate:
        """Return the mean over texts and seeds.

        For a task it is the median over the seeds that learned it, or over all if none did, without an interval.
        """
        e = statistics.estimate(stacked([by_seed[seed] for seed in sorted(by_seed)]))
        if not self.is_task:
            return e
        # Errors are bounded, and some seeds may not have learned the task at all: Student's interval has no meaning.
        errors = {seed: statistics.estimate(sample).value for seed, sample in by_seed.items()}
        of_learned = [error for seed, error in errors.items() if (key.line, seed) in self.learned]
        return e._replace(value=float(np.median(of_learned or [*errors.values()])), low=math.nan, high=math.nan)

    def _ranked(self) -> dict[tuple[str, int], list[str]]:
        """Return the lines at each part and length, best first; equal ones by name."""
        ranked: dict[tuple[str, int], list[str]] = {}
        badness = {}
        for key, e in self.means.items():
            # A network that diverged has NaN, which comes last.
            badness[key] = math.inf if math.isnan(e.value) else self.sign * e.value
        for key in sorted(badness, key=lambda key: (badness[key], key)):
            if key.line != BEST_POSSIBLE:
                ranked.setdefault((key.part, key.length), []).append(key.line)
        return ranked

    def _tied(self, place: tuple[str, int]) -> set[str]:
        """Return the lines that are not told apart from the best, with it; none if it is told apart from all."""
        best, *others = self.ranked[place]
        # A network that diverged is not the best, however little is known of it.
        others = [line for line in others if not math.isnan(self.means[Key(line, *place)].value)]
        if self.is_task or not others:
            return set()
        of_best = self.cells[Key(best, *place)]
        behind = [_estimate(_minus(self.cells[Key(line, *place)], of_best)) for line in others]
        are_tied = statistics.tied(behind)
        tied = {line for line, is_tied in zip(others, are_tied, strict=True) if is_tied}
        return {best, *tied} if tied else set()


def _lines(rows: pd.DataFrame, runs: Runs, reference: str) -> dict[str, Row]:
    """Return OF_LINE of each line: what it is, what it is compared with, and its costs, medians over its runs."""
    lines = rows.drop_duplicates("line").set_index("line", drop=False)
    of_runs = runs.runs[["label", "settings"]].join(runs.runs.groupby("group")[COSTS].transform("median"))
    lines = lines.join(of_runs, on="path")
    # The baseline of weights that are read zero-shot is the same weights read as trained. That of a run that starts
    # from a model is the model, where it was measured before the training; that is also its reference.
    trained = lines[~lines.zero_shot].drop_duplicates("group").set_index("group").line
    start = START + lines.label
    has_start = start.isin(lines.index)
    lines["base"] = start.where(has_start, lines.group.map(trained))
    lines["cut"] = lines.base.map(lines.train_len).fillna(lines.train_len).astype(int)
    lines["reading"] = lines.reading.mask(lines.reading == "", has_start.map({True: AFTER, False: "as trained"}))
    if reference not in lines.index:
        of_encoding = [line for line in trained if lines.encoding[line] == reference]
        paths = lines.path[of_encoding or [*trained] or lines.index]
        settings = pd.DataFrame([compared(config) for config in runs.runs.config[paths]], paths.index).map(str)
        # The line that has most of the settings which are the most frequent among these.
        reference = settings.eq(settings.mode().iloc[0]).sum(axis=1).idxmax()
    lines["reference"] = start.where(has_start, reference)

    # The best possible predictor is like the reference, but for what it is.
    train_len = lines.train_len[lines.reference.iloc[0]]
    optimum = {"line": BEST_POSSIBLE, "base": BEST_POSSIBLE, "train_len": train_len, "cut": train_len}
    optimum |= dict.fromkeys(("encoding", "variant", "reading", "settings", "reference"), "") | {"zero_shot": False}
    return lines[OF_LINE].to_dict("index") | {BEST_POSSIBLE: optimum}


def _learned(rows: pd.DataFrame) -> set[tuple[str, int]]:
    """Return the line and seed of each run that learned the task: where it was trained, or at the nearest length."""
    # A seed that learned there counts at all lengths, so that a failure at longer text shows as one. The first
    # eval set of a task is like its training data.
    rows = rows[rows.part == rows.part.iloc[0]]
    from_trained = rows.length - rows.train_len
    rows = rows.assign(is_longer=from_trained > 0, distance=from_trained.abs()).sort_values(["is_longer", "distance"])
    nearest = rows.drop_duplicates(["line", "seed"])
    nearest = nearest[nearest.value <= LEARNED]
    return set(zip(nearest.line, nearest.seed, strict=True))


def _sum(samples: Sequence[Sample]) -> Sample:
    """Return the sum of several samples of the same texts."""
    values = np.sum([sample.values for sample in samples], axis=0)
    return Sample(values, np.sum([sample.units for sample in samples], axis=0))


def _minus(a: BySeed, b: BySeed) -> Sample | None:
    """Return `a` minus `b`, paired by seed and text; None if no seed has both."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    first = stacked([a[seed] for seed in seeds])
    second = stacked([b[seed] for seed in seeds])
    return Sample(first.values - second.values, first.units)


def _estimate(sample: Sample | None) -> Estimate | None:
    return statistics.estimate(sample) if sample else None
