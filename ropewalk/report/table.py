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
from ropewalk.evaluation.statistics import Estimate, Sample
from ropewalk.report.frame import BEFORE, PROVENANCE, Runs

BEST_POSSIBLE = "best possible"  # the line of the best possible predictor, where it is known
FAR = "far"  # the part that holds all parts which need text from beyond train_len
LEARNED = 10.0  # a seed has learned a task if at most so many percent of its answers are wrong where it was trained
OF_PART = ["task", "difficulty", "depth", "span_start", "span_end", "continuation"]
# Each of these has columns of its interval too, such as gain_low and gain_high.
PAIRED = {
    "gain": "loss of the line `base` on the text cut to `cut` tokens, its training length, minus the loss on all of it",
    "lead": "loss of the line `reference` on the text cut to its training length, minus the loss on all of it",
    "difference": "minus the reference at the same length",
    "behind": "minus the best line at the same length",
    "above": "minus the best possible predictor",
    "share": "of the gain that is possible",
}
INTERVALS = [f"{name}{end}" for name in PAIRED for end in ("", "_low", "_high")]
COLUMNS = [
    # Who was measured, and by what.
    "section", "data", "train_len", "cut", "line", "base", "encoding", "variant", "scale", "reading", "zero_shot",
    "step", "settings", "run", "path", "seed", "seeds",
    "measure", "quantity", "unit", "eval", *OF_PART, "part", "length", "times", "texts", "documents", "learned",
    # The numbers, and what they mean.
    "value", "low", "high", *INTERVALS, "reference", "rank", "tied", "tolerance", "verdict",
    "parameters", "tokens_per_s", "step_ms", "peak_memory_mb", *PROVENANCE,
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
        reference: the label or encoding of the line that `difference` and `lead` are taken to; if no line has it, the
            first that was trained. The reference of a run that starts from a model is that model, if it was measured.
    """
    rows: list[Row] = []
    for _, of_measure in runs.results.groupby(["section", "kind", "quantity", "unit", "eval"]):
        rows += Measure(of_measure, runs, reference).rows()
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype({"seed": "Int64", "learned": "Int64", "rank": "Int64"})


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows over all seeds, without those of single runs."""
    return table[table.seed.isna()]


def losses_of_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a text's loss, whose tokens are the same at every length.

    Measures with other settings have other texts: that of most lines is taken, then that of most texts.
    """
    rows = table[(table.measure == "lengths") & (table.quantity == "loss")]
    if rows.empty:
        return rows
    sizes = rows.groupby(["section", "eval"]).agg(lines=("line", "nunique"), texts=("texts", "max"))
    section, settings = sizes.sort_values(["lines", "texts"], ascending=False, kind="stable").index[0]
    return rows[(rows.section == section) & (rows["eval"] == settings)]


def verdict(low: float, high: float, tolerance: float) -> str:
    """Say what reading on is worth by the interval of the gain: "level", "better", "worse" or "undecided"."""
    if -tolerance < low and high < tolerance:
        return "level"
    # As it is shown: a gain of "+0.000" is none.
    if round(low, 3) > 0:
        return "better"
    if round(high, 3) < 0:
        return "worse"
    return "undecided"


def is_far(span_start: float, depth: float, length: int, train_len: int) -> bool:
    """Return whether a part needs text from beyond train_len: its words or its needle lie that far back.

    Args:
        span_start: the least distance in tokens; NaN for a needle.
        depth: of a needle, as a share of the text; NaN of parts without a distance, which are not far.
    """
    distance = (1 - depth) * length if math.isnan(span_start) else span_start
    return bool(distance >= train_len)


class Measure:
    """One quantity of one measure, of all lines that were measured on the same texts."""

    def __init__(self, rows: pd.DataFrame, runs: Runs, reference: str) -> None:
        rows = rows.sort_values("line", kind="stable")
        self.first = rows.iloc[0]
        self.is_task = self.first.quantity == "error"
        self.is_text = self.first.kind == "lengths" and not self.is_task
        self.configs = runs.configs
        self.runs = runs.runs.to_dict("index")
        self.tolerance = float(runs.configs[self.first.path].get("eval.tolerance", 0))

        # What is known of each line: dictionaries, as a look-up in a DataFrame takes a hundred times as long.
        lines = rows.drop_duplicates("line").set_index("line")
        self.lines = lines.to_dict("index")
        self.parts = rows.drop_duplicates("part").set_index("part").to_dict("index")
        # The baseline of weights that are read zero-shot is the same weights read as trained. That of a run that starts
        # from a model is the model, where it was measured before the training.
        self.start_of = {line: f"{runs.runs.label[path]} {BEFORE}" for line, path in lines.path.items()}
        trained = lines[~lines.zero_shot].reset_index().drop_duplicates("group").set_index("group").line
        self.base = lines.group.map(trained).to_dict()
        self.base |= {line: start for line, start in self.start_of.items() if start in self.lines}
        self.reference_of = self._references(list(trained), reference)
        self.costs = {line: self._costs(runs.runs, path) for line, path in lines.path.items()}

        # And of each of its cells.
        self.cells: dict[Key, dict[int, Sample]] = {}
        self.optimum: dict[int, Sample] = {}
        self.of_run: dict[tuple[str, int], Row] = {}
        for row in rows.itertuples():
            self.cells.setdefault(Key(row.line, row.part, row.length), {})[row.seed] = row.sample
            self.of_run[row.line, row.seed] = {name: getattr(row, name) for name in ("path", *PROVENANCE)}
            if row.optimum_sample is not None:
                self.optimum.setdefault(row.length, row.optimum_sample)
        self._pool_far_parts()
        self.learned = self._learned() if self.is_task else {}
        self.means = {key: self._mean(key, by_seed) for key, by_seed in self.cells.items()}
        self.ranked = self._ranked()
        self.tied = {place: self._tied(place) for place in self.ranked}

    def rows(self) -> list[Row]:
        """Return the rows of all cells: over all seeds, and of each."""
        rows = [self._of_optimum(length) for length in sorted(self.optimum)]
        for key, by_seed in self.cells.items():
            place = key.part, key.length
            rank = 1 + self.ranked[place].index(key.line)
            rows.append(self._row(key, by_seed) | {"rank": rank, "tied": key.line in self.tied[place]})
            rows += [self._row(key, {seed: by_seed[seed]}, seed) for seed in sorted(by_seed)]
        return rows

    def _row(self, key: Key, by_seed: BySeed, seed: int | None = None) -> Row:
        """Return the row of a cell over these seeds."""
        line = self.lines[key.line]
        first, *others = [self.of_run[key.line, of_run] for of_run in sorted(by_seed)]
        row = self._what(key.part, key.length, line["train_len"])
        row |= {name: line[name] for name in ("encoding", "variant", "scale", "zero_shot", "step")}
        row |= self.costs[key.line] | first
        row |= {
            "line": key.line,
            "base": self.base[key.line],
            "cut": self.lines.get(self.base[key.line], line)["train_len"],
            "reading": self._reading(key.line),
            "settings": self.runs[first["path"]]["settings"],
            "run": ", ".join(self.runs[run["path"]]["name"] for run in (first, *others)),
            "path": "" if seed is None else first["path"],
            "seed": seed,
            "seeds": len(by_seed),
            "documents": next(iter(by_seed.values())).units.size,
            "reference": self.reference_of[key.line],
        }
        if self.is_task:
            row["learned"] = len(self.learned.get(key.line, set()) & set(by_seed))
        row |= _columns("", self.means[key] if seed is None else self._mean(key, by_seed))
        for name, paired in self._paired(key, by_seed).items():
            row |= _columns(name, paired)
        return row | self._worth(row)

    def _what(self, part: str, length: int, train_len: int) -> Row:
        """Return the columns that say what was measured."""
        row = {name: self.parts[part][name] for name in OF_PART}
        return row | {
            "section": self.first.section,
            "data": self.configs[self.first.path]["data.name"],
            "train_len": train_len,
            "measure": self.first.kind,
            "quantity": self.first.quantity,
            "unit": self.first.unit,
            "eval": self.first["eval"],
            "part": part,
            "length": length,
            "times": length / train_len,
            "texts": self.first.texts,
        }

    def _worth(self, row: Row) -> Row:
        """Return the columns that say in a word what the gain in a row is worth, if there is one."""
        if "gain" not in row:
            return {}
        return {"tolerance": self.tolerance, "verdict": verdict(row["gain_low"], row["gain_high"], self.tolerance)}

    def _paired(self, key: Key, by_seed: BySeed) -> dict[str, Estimate | None]:
        """Return the paired differences of a cell by name; see `PAIRED`."""
        if self.is_task:
            return {}
        paired: dict[str, Estimate | None] = {}
        reference = self.reference_of[key.line]
        cut = self._on_cut_text(self.base[key.line], key)
        if self.is_text:
            paired["gain"] = _minus(cut, by_seed)
            paired["lead"] = _minus(self._on_cut_text(reference, key), by_seed)
        if key.length in self.optimum:
            # The optimum of a text is exact and has one row, which every seed is compared with.
            sample = _stack(by_seed, sorted(by_seed))
            values = sample.values - self.optimum[key.length].values
            paired["above"] = statistics.estimate(Sample(values, sample.units))
            paired["share"] = self._share(key, by_seed, cut)
        if key.line != reference:
            paired["difference"] = _minus(by_seed, self.cells.get(key._replace(line=reference), {}))
        best, *_ = self.ranked[key.part, key.length]
        paired["behind"] = _minus(by_seed, self.cells[key._replace(line=best)])
        return paired

    def _on_cut_text(self, line: Any, key: Key) -> BySeed:
        """Return what a line measured on the text cut to its training length; nothing if no line reads as trained."""
        if line not in self.lines:
            return {}
        length = min(key.length, self.lines[line]["train_len"])
        return self.cells.get(Key(line, key.part, length), {})

    def _share(self, key: Key, by_seed: BySeed, cut: BySeed) -> Estimate | None:
        """Return the share of the possible gain, where there is one."""
        seeds = sorted(by_seed.keys() & cut.keys())
        if not seeds:
            return None
        shorter = self.lines[self.base[key.line]]["train_len"]
        # If longer text is worth nothing even to the best predictor, a share has no meaning.
        possible = self._possible(key.length, shorter)
        if key.length <= shorter or possible is None or not possible.low > 0:
            return None
        long = _stack(by_seed, seeds)
        gain = Sample(_stack(cut, seeds).values - long.values, long.units)
        whole = self.optimum[shorter].values - self.optimum[key.length].values
        return statistics.share(gain, Sample(whole, gain.units))

    def _possible(self, length: int, shorter: int) -> Estimate | None:
        """Return the gain of the best possible predictor over the text cut to `shorter` tokens, if both are known."""
        cut = self.optimum.get(min(length, shorter))
        return statistics.difference(cut, self.optimum[length]) if cut else None

    def _of_optimum(self, length: int) -> Row:
        """Return the row of the best possible predictor."""
        train_len = self.lines[self.reference_of[self.first.line]]["train_len"]
        row = self._what("text", length, train_len) | {"line": BEST_POSSIBLE, "base": BEST_POSSIBLE, "cut": train_len}
        row |= dict.fromkeys(("encoding", "variant", "reading", "settings", "run", "path", "reference"), "")
        row |= {"zero_shot": False, "seeds": 1, "documents": self.optimum[length].units.size}
        row |= _columns("", statistics.estimate(self.optimum[length]))
        row |= _columns("gain", self._possible(length, train_len))
        return row | self._worth(row)

    def _pool_far_parts(self) -> None:
        """Add a part that holds what all parts tell which need text from beyond train_len, summed text by text.

        It is over the seeds that have all of them: a seed with fewer would answer another question.
        """
        if self.first.kind not in ("far_copies", "ruler"):
            return
        far: dict[Key, list[BySeed]] = {}
        longest = max(key.length for key in self.cells)
        for key, by_seed in self.cells.items():
            part = self.parts[key.part]
            if is_far(part["span_start"], part["depth"], key.length, self.lines[key.line]["train_len"]):
                for name in dict.fromkeys((FAR, f"{FAR} {part['continuation']}".strip())):
                    far.setdefault(Key(key.line, name, longest), []).append(by_seed)
        nothing = {"task": FAR, "difficulty": "", "depth": math.nan, "span_start": math.nan, "span_end": math.nan}
        for key, parts in far.items():
            seeds = set.intersection(*map(set, parts))
            if seeds:
                self.cells[key] = {seed: _sum([part[seed] for part in parts]) for seed in seeds}
                self.parts[key.part] = nothing | {"continuation": key.part.removeprefix(FAR).strip()}

    def _mean(self, key: Key, by_seed: BySeed) -> Estimate:
        """Return the mean over texts and seeds; for a task the median over the seeds that learned it."""
        e = statistics.estimate(_stack(by_seed, sorted(by_seed)))
        if not self.is_task:
            return e
        # Errors are bounded, and some seeds may not have learned the task at all: Student's interval has no meaning.
        median = statistics.of_learned(_means(by_seed), self.learned.get(key.line, set())).median
        return e._replace(value=median, low=math.nan, high=math.nan)

    def _learned(self) -> dict[str, set[int]]:
        """Return the seeds of each line that learned the task: where it was trained, or at the nearest length."""
        # A seed that learned there counts at all lengths, so that a failure at longer text shows as one. The first
        # eval set of a task is like its training data.
        learned = {}
        trained_on = next(iter(self.cells)).part
        for line, facts in self.lines.items():
            lengths = [key.length for key in self.cells if (key.line, key.part) == (line, trained_on)]
            if lengths:
                nearest = max((n for n in lengths if n <= facts["train_len"]), default=min(lengths))
                errors = _means(self.cells[Key(line, trained_on, nearest)])
                learned[line] = {seed for seed, error in errors.items() if error <= LEARNED}
        return learned

    def _ranked(self) -> dict[tuple[str, int], list[str]]:
        """Return the lines at each part and length, best first; equal ones by name."""
        ranked: dict[tuple[str, int], list[str]] = {}
        sign = 1 if LOWER_IS_BETTER[self.first.quantity] else -1
        # A network that diverged has NaN, which comes last.
        badness = {key: math.inf if math.isnan(e.value) else sign * e.value for key, e in self.means.items()}
        for key in sorted(badness, key=lambda key: (badness[key], key)):
            ranked.setdefault((key.part, key.length), []).append(key.line)
        return ranked

    def _tied(self, place: tuple[str, int]) -> set[str]:
        """Return the lines that are not told apart from the best, with it; none if it is told apart from all."""
        best, *others = self.ranked[place]
        # A network that diverged is not the best, however little is known of it.
        others = [line for line in others if not math.isnan(self.means[Key(line, *place)].value)]
        if self.is_task or not others:
            return set()
        behind = [_minus(self.cells[Key(line, *place)], self.cells[Key(best, *place)]) for line in others]
        tied = {line for line, is_tied in zip(others, statistics.tied(behind), strict=True) if is_tied}
        return tied | {best} if tied else set()

    def _costs(self, runs: pd.DataFrame, path: str) -> dict[str, float]:
        """Return what a line costs in training: medians over its runs."""
        of_group = runs[runs.group == runs.group[path]]
        costs = of_group[["parameters", "tokens_per_s", "peak_memory_mb"]].median().to_dict()
        config = self.configs[path]
        tokens = config.get("trainer.batch_size", math.nan) * config["train_len"]  # of a step
        return costs | {"step_ms": 1000 * tokens / (costs["tokens_per_s"] or math.nan)}  # 0 of a run without steps

    def _references(self, trained: Sequence[str], wanted: str) -> dict[str, str]:
        """Return what each line is compared with: the model it starts from, or one line for all."""
        common = wanted
        if wanted not in self.lines:
            of_encoding = [line for line in trained if self.lines[line]["encoding"] == wanted]
            common = next(iter([*of_encoding, *trained, *self.lines]))
        return {line: start if start in self.lines else common for line, start in self.start_of.items()}

    def _reading(self, line: str) -> str:
        """Return how a line reads its weights: "as trained", "read as yarn x8", "before"."""
        start = self.start_of[line]
        words = line.removeprefix(start.removesuffix(f" {BEFORE}")).strip()
        if words:
            words = words.replace(f"{BEFORE} read", f"{BEFORE}, read")
            return words.replace(" at scale ", " x").replace("at scale ", "x")
        return "after" if start in self.lines else "as trained"


def _stack(by_seed: BySeed, seeds: Sequence[int]) -> Sample:
    """Return the samples of these seeds as one."""
    return statistics.stacked([by_seed[seed] for seed in seeds])


def _sum(samples: Sequence[Sample]) -> Sample:
    """Return the sum of several samples of the same texts."""
    values = np.sum([sample.values for sample in samples], axis=0)
    return Sample(values, np.sum([sample.units for sample in samples], axis=0))


def _means(by_seed: BySeed) -> dict[int, float]:
    """Return the mean of each seed."""
    return {seed: statistics.estimate(sample).value for seed, sample in by_seed.items()}


def _minus(a: BySeed, b: BySeed) -> Estimate | None:
    """Return `a` minus `b`, paired by seed and text; None if no seed has both."""
    seeds = sorted(a.keys() & b.keys())
    return statistics.difference(_stack(a, seeds), _stack(b, seeds)) if seeds else None


def _columns(name: str, e: Estimate | None) -> dict[str, float]:
    """Return an estimate as columns."""
    if e is None:
        return {}
    prefix = f"{name}_" if name else ""
    return {name or "value": e.value, f"{prefix}low": e.low, f"{prefix}high": e.high}
