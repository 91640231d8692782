"""One long table of results. Figures, answers, pages, trackers and docs are made of it and of nothing else.

A row for each line, part of a measure and length over all its seeds, where `seed` is missing and `low` and `high` are
the 95 % interval over seeds and texts; and one for each run alone, with its seed and the interval over texts.

    table = results(load("runs"))
    over_seeds(table).query("measure == 'lengths'").pivot(index="line", columns="length", values="gain")
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
WHO = ["section", "data", "train_len", "cut", "line", "base", "encoding", "variant", "scale", "reading", "zero_shot"]
WHO += ["step", "settings", "run", "path", "seed", "seeds"]
WHAT = ["measure", "quantity", "unit", "eval", "task", "difficulty", "depth", "span_start", "span_end", "continuation"]
WHAT += ["part", "length", "times", "texts", "documents", "learned"]
# Each of these has columns of its interval too, such as gain_low and gain_high.
PAIRED = {
    "gain": "loss of the line `base` on the text cut to `cut` tokens, its training length, minus the loss on all of it",
    "lead": "loss of the line `reference` on the text cut to its training length, minus the loss on all of it",
    "difference": "minus the reference at the same length",
    "behind": "minus the best line at the same length",
    "above": "minus the best possible predictor",
    "share": "of the gain that is possible",
}
RANKS = ["reference", "rank", "tied", "tolerance", "verdict"]
COSTS = ["parameters", "tokens_per_s", "step_ms", "peak_memory_mb"]
INTERVALS = [f"{name}{end}" for name in PAIRED for end in ("", "_low", "_high")]
COLUMNS = [*WHO, *WHAT, "value", "low", "high", *INTERVALS, *RANKS, *COSTS, *PROVENANCE]
OF_PART = ["task", "difficulty", "depth", "span_start", "span_end", "continuation"]


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
        self.config = runs.configs[self.first.path]
        self.tolerance = float(self.config.get("eval.tolerance", 0))

        # What is known of each line: dictionaries, as a look-up in a DataFrame takes a hundred times as long.
        lines = rows.drop_duplicates("line").set_index("line")
        self.lines = lines.to_dict("index")
        self.parts = rows.drop_duplicates("part").set_index("part").to_dict("index")
        self.label_of = {line: runs.runs.label[path] for line, path in lines.path.items()}
        # The baseline of weights that are read zero-shot is the same weights read as trained. That of a run that starts
        # from a model is the model, where it was measured before the training.
        self.start_of = {line: f"{label} {BEFORE}" for line, label in self.label_of.items()}
        trained = lines[~lines.zero_shot].reset_index().drop_duplicates("group").set_index("group").line
        self.base = lines.group.map(trained).to_dict()
        self.base |= {line: start for line, start in self.start_of.items() if start in self.lines}
        self.cut_of = {line: self.lines[base]["train_len"] for line, base in self.base.items() if base in self.lines}
        self.reference_of = self._references(list(trained), reference)
        self.runs = runs.runs.to_dict("index")
        self.provenance = rows.drop_duplicates("path").set_index("path")[PROVENANCE].to_dict("index")
        self.costs = {line: self._costs(runs, path) for line, path in lines.path.items()}

        # And of each of its cells.
        self.cells: dict[Key, dict[int, Sample]] = {}
        self.optimum: dict[int, Sample] = {}
        self.path_of: dict[tuple[str, int], str] = {}
        for row in rows.itertuples():
            self.cells.setdefault(Key(row.line, row.part, row.length), {})[row.seed] = runs.samples[row.Index]
            self.path_of[row.line, row.seed] = row.path
            if row.Index in runs.optima:
                self.optimum.setdefault(row.length, runs.optima[row.Index])
        self._pool_far_parts()
        self.learned = self._learned() if self.is_task else {}
        self.means = {key: self._mean(key, by_seed) for key, by_seed in self.cells.items()}
        self.ranked = self._ranked()
        self.tied = {place: self._tied(place) for place in self.ranked}

    def rows(self) -> list[Row]:
        """Return the rows of all cells: over all seeds, and of each."""
        rows = [self._of_optimum(length) for length in sorted(self.optimum)]
        for key, by_seed in self.cells.items():
            rows.append(self._row(key, by_seed) | self._rank(key))
            rows += [self._row(key, {seed: by_seed[seed]}, seed) for seed in sorted(by_seed)]
        return rows

    def _row(self, key: Key, by_seed: BySeed, seed: int | None = None) -> Row:
        """Return the row of a cell over these seeds."""
        line = self.lines[key.line]
        paths = [self.path_of[key.line, of_run] for of_run in sorted(by_seed)]
        row = self._what(key.part, key.length, line["train_len"])
        row |= {name: line[name] for name in ("encoding", "variant", "scale", "zero_shot", "step")}
        row |= self.costs[key.line] | self.provenance[paths[0]]
        row |= {
            "line": key.line,
            "base": self.base[key.line],
            "cut": self.cut_of.get(key.line, line["train_len"]),
            "reading": self._reading(key.line),
            "settings": self.runs[paths[0]]["settings"],
            "run": ", ".join(self.runs[path]["name"] for path in paths),
            "path": paths[0] if seed is not None else "",
            "seed": seed,
            "seeds": len(by_seed),
            "documents": next(iter(by_seed.values())).units.size,
            "reference": self.reference_of[key.line],
        }
        if self.is_task:
            row["learned"] = len(self.learned.get(key.line, set()) & set(by_seed))
        row |= _columns("", self.means[key] if seed is None else self._mean(key, by_seed))
        for name, paired in self._paired(key, by_seed):
            row |= _columns(name, paired)
        if "gain" in row:
            row |= self._worth(row["gain_low"], row["gain_high"])
        return row

    def _what(self, part: str, length: int, train_len: int) -> Row:
        """Return the columns that say what was measured."""
        row = {name: self.parts[part][name] for name in OF_PART}
        return row | {
            "section": self.first.section,
            "data": self.config["data.name"],
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

    def _worth(self, low: float, high: float) -> Row:
        """Return the columns that say in a word what a gain is worth."""
        return {"tolerance": self.tolerance, "verdict": verdict(low, high, self.tolerance)}

    def _paired(self, key: Key, by_seed: BySeed) -> Iterator[tuple[str, Estimate]]:
        """Yield the paired differences of a cell by name; see `PAIRED`."""
        if self.is_task:
            return
        reference = self.reference_of[key.line]
        if self.is_text:
            yield from _minus("gain", self.cells.get(self._cut(self.base[key.line], key)), by_seed)
            yield from _minus("lead", self.cells.get(self._cut(reference, key)), by_seed)
        if key.length in self.optimum:
            yield "above", _above(by_seed, self.optimum[key.length])
            yield from self._share(key, by_seed)
        if key.line != reference:
            yield from _minus("difference", by_seed, self.cells.get(key._replace(line=reference)))
        best, *_ = self.ranked[key.part, key.length]
        yield from _minus("behind", by_seed, self.cells[key._replace(line=best)])

    def _cut(self, line: Any, key: Key) -> Key | None:
        """Return the cell of a line on the text cut to the training length; None if no line reads as trained."""
        if line not in self.lines:
            return None
        return key._replace(line=line, length=min(key.length, self.lines[line]["train_len"]))

    def _share(self, key: Key, by_seed: BySeed) -> Iterator[tuple[str, Estimate]]:
        """Yield the share of the possible gain, where there is one."""
        cut = self.cells.get(self._cut(self.base[key.line], key), {})
        seeds = sorted(by_seed.keys() & cut.keys())
        if not seeds or key.length <= self.cut_of[key.line]:
            return
        # If longer text is worth nothing even to the best predictor, a share has no meaning.
        shorter = self.cut_of[key.line]
        if not dict(self._possible(key.length, shorter)).get("gain", _NOTHING).low > 0:
            return
        long = _stack(by_seed, seeds)
        gain = Sample(_stack(cut, seeds).values - long.values, long.units)
        possible = self.optimum[shorter].values - self.optimum[key.length].values
        yield "share", statistics.share(gain, Sample(possible, gain.units))

    def _possible(self, length: int, shorter: int) -> Iterator[tuple[str, Estimate]]:
        """Yield the gain of the best possible predictor over the text cut to `shorter` tokens, where both are known."""
        cut = self.optimum.get(min(length, shorter))
        if cut:
            yield "gain", statistics.difference(cut, self.optimum[length])

    def _of_optimum(self, length: int) -> Row:
        """Return the row of the best possible predictor."""
        train_len = self.lines[self.reference_of[self.first.line]]["train_len"]
        row = self._what("text", length, train_len) | {"line": BEST_POSSIBLE, "base": BEST_POSSIBLE, "cut": train_len}
        row |= {name: "" for name in ("encoding", "variant", "reading", "settings", "run", "path", "reference")}
        row |= {"zero_shot": False, "seeds": 1, "documents": self.optimum[length].units.size}
        row |= _columns("", statistics.estimate(self.optimum[length]))
        for name, gain in self._possible(length, train_len):
            row |= _columns(name, gain) | self._worth(gain.low, gain.high)
        return row

    def _pool_far_parts(self) -> None:
        """Add a part that holds what all parts tell which need text from beyond train_len, summed text by text.

        It is over the seeds that have all of them: a seed with fewer would answer another question.
        """
        if self.first.kind not in ("far_copies", "ruler"):
            return
        far: dict[Key, dict[int, list[Sample]]] = {}
        longest = max(key.length for key in self.cells)
        for key, by_seed in self.cells.items():
            part = self.parts[key.part]
            if is_far(part["span_start"], part["depth"], key.length, self.lines[key.line]["train_len"]):
                names = {FAR, f"{FAR} {part['continuation']}".strip()}
                for name in names:
                    of_key = far.setdefault(Key(key.line, name, longest), {})
                    for seed, sample in by_seed.items():
                        of_key.setdefault(seed, []).append(sample)
        nothing = {"task": FAR, "difficulty": "", "depth": math.nan, "span_start": math.nan, "span_end": math.nan}
        for key, of_key in far.items():
            n_parts = max(map(len, of_key.values()))
            complete = {seed: samples for seed, samples in of_key.items() if len(samples) == n_parts}
            self.cells[key] = {seed: _sum(samples) for seed, samples in complete.items()}
            self.parts[key.part] = nothing | {"continuation": key.part.removeprefix(FAR).strip()}

    def _mean(self, key: Key, by_seed: BySeed) -> Estimate:
        """Return the mean over texts and seeds; for a task the median over the seeds that learned it."""
        e = statistics.estimate(_stack(by_seed, sorted(by_seed)))
        if not self.is_task:
            return e
        # Errors are bounded, and some seeds may not have learned the task at all: Student's interval has no meaning.
        errors = {seed: statistics.estimate(sample).value for seed, sample in by_seed.items()}
        median = statistics.of_learned(errors, self.learned.get(key.line, set())).median
        return e._replace(value=median, low=math.nan, high=math.nan)

    def _learned(self) -> dict[str, set[int]]:
        """Return the seeds of each line that learned the task: where it was trained, or at the nearest length."""
        # A seed that learned there counts at all lengths, so that a failure at longer text shows as one. The first
        # eval set of a task is like its training data, and the keys of a line and part are sorted by length.
        trained_on = next(iter(self.cells)).part
        trained_at: dict[str, Key] = {}
        for key in sorted(self.cells):
            is_trained = key.length <= self.lines[key.line]["train_len"]
            if key.part == trained_on and (is_trained or key.line not in trained_at):
                trained_at[key.line] = key
        learned = {}
        for line, key in trained_at.items():
            errors = {seed: statistics.estimate(sample).value for seed, sample in self.cells[key].items()}
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

    def _rank(self, key: Key) -> Row:
        """Return the place of a line at its length, and whether it is not told apart from the best."""
        place = key.part, key.length
        return {"rank": 1 + self.ranked[place].index(key.line), "tied": key.line in self.tied[place]}

    def _tied(self, place: tuple[str, int]) -> set[str]:
        """Return the lines that are not told apart from the best, with it; none if it is told apart from all."""
        best, *others = self.ranked[place]
        # A network that diverged is not the best, however little is known of it.
        others = [line for line in others if not math.isnan(self.means[Key(line, *place)].value)]
        if self.is_task or not others:
            return set()
        behind = []
        for line in others:
            found = dict(_minus("", self.cells[Key(line, *place)], self.cells[Key(best, *place)]))
            behind.append(found.get(""))
        tied = {line for line, is_tied in zip(others, statistics.tied(behind), strict=True) if is_tied}
        return tied | {best} if tied else set()

    def _costs(self, runs: Runs, path: str) -> dict[str, float]:
        """Return what a line costs in training: medians over its runs."""
        of_group = runs.runs[runs.runs.group == runs.runs.group[path]]
        costs = of_group[["parameters", "tokens_per_s", "peak_memory_mb"]].median().to_dict()
        config = runs.configs[path]
        tokens = config.get("trainer.batch_size", math.nan) * config["train_len"]  # of a step
        speed = costs["tokens_per_s"] or math.nan  # 0 of a run without steps
        return costs | {"step_ms": 1000 * tokens / speed}

    def _references(self, trained: Sequence[str], wanted: str) -> dict[str, str]:
        """Return what each line is compared with: the model it starts from, or one line for all."""
        common = wanted
        if wanted not in self.lines:
            of_encoding = [line for line in trained if self.lines[line]["encoding"] == wanted]
            common = next(iter([*of_encoding, *trained, *self.lines]))
        return {line: start if start in self.lines else common for line, start in self.start_of.items()}

    def _reading(self, line: str) -> str:
        """Return how a line reads its weights: "as trained", "read as yarn x8", "before"."""
        words = line.removeprefix(self.label_of[line]).strip().replace(f"{BEFORE} read", f"{BEFORE}, read")
        if words:
            return words.replace(" at scale ", " x").replace("at scale ", "x")
        return "after" if self.start_of[line] in self.lines else "as trained"


_NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)


def _stack(by_seed: BySeed, seeds: Sequence[int]) -> Sample:
    """Return the samples of these seeds as one."""
    return statistics.stacked([by_seed[seed] for seed in seeds])


def _sum(samples: Sequence[Sample]) -> Sample:
    """Return the sum of several samples of the same texts."""
    values = np.sum([sample.values for sample in samples], axis=0)
    return Sample(values, np.sum([sample.units for sample in samples], axis=0))


def _minus(name: str, a: BySeed | None, b: BySeed | None) -> Iterator[tuple[str, Estimate]]:
    """Yield the name and `a` minus `b`, paired by seed and text; nothing if no seed has both."""
    seeds = sorted((a or {}).keys() & (b or {}).keys())
    if a and b and seeds:
        yield name, statistics.difference(_stack(a, seeds), _stack(b, seeds))


def _above(by_seed: BySeed, optimum: Sample) -> Estimate:
    """Return how far the loss is above that of the best possible predictor, paired by text."""
    # The optimum of a text is exact and has one row, which every seed is compared with.
    sample = _stack(by_seed, sorted(by_seed))
    return statistics.estimate(Sample(sample.values - optimum.values, sample.units))


def _columns(name: str, e: Estimate) -> dict[str, float]:
    """Return an estimate as columns."""
    prefix = f"{name}_" if name else ""
    return {name or "value": e.value, f"{prefix}low": e.low, f"{prefix}high": e.high}
