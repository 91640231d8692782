"""One long table of results. Figures, answers, pages, trackers and docs are made of it and of nothing else.

A row for each line, part of a measure and length over all its seeds, where `seed` is missing and `low` and `high` are
the 95 % interval over seeds and texts; and one for each run alone, with its seed and the interval over texts.

    table = results(load("runs"))
    over_seeds(table).query("measure == 'lengths'").pivot(index="line", columns="length", values="gain")
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ropewalk.evaluation import statistics
from ropewalk.evaluation.results import LOWER_IS_BETTER
from ropewalk.evaluation.statistics import Estimate, Sample, stacked
from ropewalk.report.frame import AFTER, COSTS, PROVENANCE, START, Runs, attempt, compared

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
    "train_len", "cut", "base", "encoding", "variant", "scale", "reading", "zero_shot", "step", "settings",
    "reference", "reference_len", *COSTS,
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


CELL = ["line", "part", "length"]
EXACT = -1  # the seed of the best possible predictor, which has none: it is compared with every seed
BySeed = Mapping[int, Sample]
Samples = Mapping[tuple[str, str, int], BySeed]  # by CELL and seed


def results(runs: Runs, reference: str = "rope") -> pd.DataFrame:
    """Return the long table.

    Args:
        runs: what cannot be compared is added to its `left_out`.
        reference: the label or encoding of the line that `difference` and `lead` are taken to. Of several lines of that
            encoding, or of all if none has it, it is the one with the most usual settings. The reference of a run that
            starts from a model is that model, if it was measured.
    """
    tables = [pd.DataFrame(columns=COLUMNS)]
    for (section, kind, *_), rows in runs.results.groupby(["section", "kind", "quantity", "unit", "eval"]):
        tables += attempt(f"{kind} of {section}", runs.left_out, _compared, rows, runs, reference)
    table = pd.concat(tables, ignore_index=True).infer_objects()
    return table.astype({"seed": "Int64", "learned": "Int64", "rank": "Int64"})


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows over all seeds, without those of single runs."""
    return table[table.seed.isna()]


def by_length(table: pd.DataFrame, quantity: str = "loss") -> pd.DataFrame:
    """Return the rows of a text's loss, whose tokens are the same at every length, or of the "error" of a task.

    Measures with other settings have other texts: that of most lines is taken, then that of most texts.

    Raises ValueError: the table has several sections, which have nothing in common.
    """
    rows = table[(table.measure == "lengths") & (table.quantity == quantity)]
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


def headline(table: pd.DataFrame) -> pd.DataFrame:
    """Return what a table is about: the rows of a text's loss, or else of the errors of a task."""
    losses = by_length(table)
    return by_length(table, "error") if losses.empty else losses


def worst_part(rows: pd.DataFrame) -> str:
    """Return the part with the largest value at the longest text, of equal ones the first by name."""
    longest = over_seeds(rows[rows.length == rows.length.max()])
    return str(longest.groupby("part").value.max().idxmax())


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


def _compared(rows: pd.DataFrame, runs: Runs, reference: str) -> list[pd.DataFrame]:
    """Return the part of the long table about one quantity of one measure, of all lines measured on the same texts."""
    rows = rows.join(runs.runs["name"].rename("run"), on="path").sort_values("line", kind="stable")
    first = rows.iloc[0]
    config = runs.runs.config[first.path]
    lines = _lines(rows, runs, reference)
    seeds = _of_seeds(rows, lines)
    samples: dict[tuple[str, str, int], dict[int, Sample]] = {}
    for row in seeds.itertuples():
        samples.setdefault((row.line, row.part, row.length), {})[row.seed] = row.sample

    # For each cell a row over all its seeds, and then one for each seed.
    cells = seeds.drop_duplicates("cell").assign(seed=None, path="")
    cells["run"] = cells.cell.map(seeds.groupby("cell").run.agg(", ".join))
    table = pd.concat([cells, seeds[seeds.line != BEST_POSSIBLE].astype({"seed": object})])
    table = table.sort_values("cell", kind="stable", ignore_index=True).join(lines, on="line")
    table = table.assign(
        **first[["section", "quantity", "unit", "eval", "texts"]],
        data=config["data.name"],
        measure=first.kind,
        tolerance=float(config.get("eval.tolerance", 0)),
        times=table.length / table.train_len,
    )
    own: list[BySeed] = []
    for row in table.itertuples():
        by_seed = samples[row.line, row.part, row.length]
        own.append(by_seed if row.seed is None else {row.seed: by_seed[row.seed]})
    table["seeds"] = list(map(len, own))
    table["documents"] = [next(iter(by_seed.values())).units.size for by_seed in own]
    table = _with(table, "value", _estimates([stacked([*by_seed.values()]) for by_seed in own]))
    is_task = first.quantity == "error"
    if is_task:
        table = _over_learned(table)
    sign = 1 if LOWER_IS_BETTER[first.quantity] else -1
    table = _ranked(table, sign)
    behind = _estimates(_minus(own, _find(samples, table.best, table)))
    # What is better over the seeds that both have is not told apart from the best over all seeds.
    table["tied"] = _tied(table, [e if e and sign * e.value >= 0 else None for e in behind])
    if not is_task:
        table = _paired(table, own, samples, behind)
    return [table.reindex(columns=COLUMNS).astype(object)]


def _of_seeds(rows: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each cell and seed, in this order, with its `sample` and the number of its `cell`.

    The best possible predictor is a line of its own.
    """
    exact = rows[rows.optimum_sample.notna()].sort_values("length", kind="stable")
    exact = exact.drop_duplicates(["part", "length"], keep="last")
    exact = exact.assign(line=BEST_POSSIBLE, seed=EXACT, sample=exact.optimum_sample, run="", path="")
    exact[PROVENANCE] = np.nan
    both = pd.concat([exact, rows, *_far(rows, lines)], ignore_index=True)
    both = both[[*CELL, *OF_PART, "seed", "sample", "run", "path", *PROVENANCE]]
    both["cell"] = both.groupby(CELL, sort=False).ngroup()
    return both.drop_duplicates(["cell", "seed"], keep="last").sort_values(["cell", "seed"])


def _far(rows: pd.DataFrame, lines: pd.DataFrame) -> list[pd.DataFrame]:
    """Return rows of the part FAR: all parts which need text from beyond train_len, summed text by text.

    It is over the seeds that have all of them: a seed with fewer would answer another question.
    """
    if rows.kind.iloc[0] not in ("far_copies", "ruler"):
        return []
    # At least so many tokens back: words have a span, a needle its depth, and other parts are not far.
    distance = rows.span_start.fillna((1 - rows.depth) * rows.length)
    far = rows[distance >= rows.line.map(lines.train_len)]
    parts = far.drop_duplicates(CELL).line.value_counts()
    sums = []
    for (line, _), of_seed in far.groupby(["line", "seed"]):
        if len(of_seed) == parts[line]:
            values = np.sum([sample.values for sample in of_seed["sample"]], axis=0)
            units = np.sum([sample.units for sample in of_seed["sample"]], axis=0)
            sums.append(of_seed.iloc[:1].assign(sample=[Sample(values, units)]))
    empty = {"depth": np.nan, "span_start": np.nan, "span_end": np.nan, "difficulty": "", "continuation": ""}
    return [pooled.assign(part=FAR, task=FAR, length=rows.length.max(), **empty) for pooled in sums]


def _with(table: pd.DataFrame, column: str, estimates: Sequence[Estimate | None]) -> pd.DataFrame:
    """Return a table with a number and its interval as columns."""
    numbers = [(np.nan, np.nan, np.nan) if e is None else (e.value, e.low, e.high) for e in estimates]
    return table.assign(**dict(zip(interval(column), np.transpose(numbers), strict=True)))


def _over_learned(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a task, over all seeds for those that learned it, or for all if none did.

    Their value is the median, as some seeds may not have learned the task at all; `low` and `high` are the smallest and
    the largest of several. `learned` is the number of seeds that did.
    """
    # A seed that learned at the training length counts at all lengths, so that a failure at longer text shows as one.
    # If it was not measured there, the nearest length serves. The first eval set is like the training data.
    seeds = table[table.seed.notna()]
    from_trained = seeds.length - seeds.train_len
    nearest = seeds.assign(is_longer=from_trained > 0, distance=from_trained.abs())
    nearest = nearest[nearest.part == nearest.part.iloc[0]].sort_values(["is_longer", "distance"])
    nearest = nearest.drop_duplicates(["line", "seed"])
    learned = pd.MultiIndex.from_frame(nearest.loc[nearest.value <= LEARNED, ["line", "seed"]])
    seeds = seeds.assign(learned=pd.MultiIndex.from_frame(seeds[["line", "seed"]]).isin(learned))
    table["learned"] = seeds.learned.reindex(table.index)

    of_cells = seeds.groupby("cell").learned
    counted = seeds[seeds.learned | ~of_cells.transform("any")].groupby("cell").value
    numbers = counted.agg(value="median", low="min", high="max")
    numbers.loc[counted.size() == 1, ["low", "high"]] = np.nan  # of one seed there is no range
    over_all = table.seed.isna()
    table.loc[over_all, "learned"] = table.cell.map(of_cells.sum())
    table[["low", "high"]] = np.nan
    for column in numbers:
        table.loc[over_all, column] = table.cell.map(numbers[column])
    return table


def _ranked(table: pd.DataFrame, sign: int) -> pd.DataFrame:
    """Return a table with the `rank` of each cell at its part and length, best first, and the `best` line there.

    Args:
        sign: 1 if less is better, -1 if more is.
    """
    # A network that diverged has NaN, which comes last; equal lines are by name.
    badness = (sign * table.value).fillna(np.inf)
    cells = table.assign(badness=badness)[table.seed.isna() & (table.line != BEST_POSSIBLE)]
    cells = cells.sort_values(["badness", "line"])
    places = cells.groupby(["part", "length"])
    table["rank"] = places.cumcount().add(1).reindex(table.index)
    best = places.line.first().rename("best")
    return table.join(best, on=["part", "length"])


def _tied(table: pd.DataFrame, behind: Sequence[Estimate | None]) -> pd.Series:
    """Return which cells are not told apart from the best of their part and length, with that one if there are any."""
    # A network that diverged is not the best, however little is known of it.
    is_tied = pd.Series(np.nan, table.index, dtype=object)
    cells = table[table["rank"].notna()]
    is_tied[cells.index] = False
    for _, at_place in cells[cells.value.notna()].groupby(["part", "length"]):
        others = at_place.index[at_place["rank"] > 1]
        found = statistics.tied([behind[number] for number in others])
        is_tied[others] = found
        is_tied[at_place.index[at_place["rank"] == 1]] = any(found)
    return is_tied


def _paired(
    table: pd.DataFrame, own: Sequence[BySeed], samples: Samples, behind: Sequence[Estimate | None]
) -> pd.DataFrame:
    """Return a table with the columns of `PAIRED` and the `verdict`."""
    # A line is not compared with itself.
    reference = table.reference.mask(table.reference == table.line)
    optimum = pd.Series(BEST_POSSIBLE, table.index).mask(table.line == BEST_POSSIBLE)
    best_possible = _find(samples, optimum, table)
    on_cut_text = _find(samples, table.base, table, table.cut)
    gained = _minus(on_cut_text, own)
    possible = _minus(_find(samples, optimum, table, table.cut), best_possible)
    paired = {
        "behind": behind,
        "above": _estimates(_minus(own, best_possible)),
        "difference": _estimates(_minus(own, _find(samples, reference, table))),
        "share": list(map(_share, gained, possible)),
    }
    if table.measure.iloc[0] == "lengths":
        reference_on_cut_text = _find(samples, table.reference, table, table.reference_len)
        paired["gain"] = _estimates(gained)
        paired["lead"] = _estimates(_minus(reference_on_cut_text, own))
    for column, estimates in paired.items():
        table = _with(table, column, estimates)
    if "gain" in paired:
        table["verdict"] = list(map(verdict, table.gain_low, table.gain_high, table.tolerance))
    return table


def _find(
    samples: Samples, lines: Iterable[str], table: pd.DataFrame, longest: pd.Series | None = None
) -> list[BySeed]:
    """Return what `lines` measured at the part and length of each row; {} for nothing.

    Args:
        longest: tokens that longer texts are cut to.
    """
    lengths = table.length if longest is None else np.minimum(table.length, longest)
    return [samples.get(cell, {}) for cell in zip(lines, table.part, lengths, strict=True)]


def _minus(first: Sequence[BySeed], second: Sequence[BySeed]) -> list[Sample | None]:
    """Return differences paired by seed and text; None where no seed has both."""
    differences: list[Sample | None] = []
    for a, b in zip(first, second, strict=True):
        if EXACT in b:
            b = dict.fromkeys(a, b[EXACT])
        seeds = sorted(a.keys() & b.keys())
        if not seeds:
            differences.append(None)
            continue
        minuend, subtrahend = stacked([a[seed] for seed in seeds]), stacked([b[seed] for seed in seeds])
        # A damaged file may have other documents at each length.
        is_paired = minuend.units.size == subtrahend.units.size
        difference = Sample(minuend.values - subtrahend.values, minuend.units) if is_paired else None
        differences.append(difference)
    return differences


def _estimates(samples: Sequence[Sample | None]) -> list[Estimate | None]:
    return [sample and statistics.estimate(sample) for sample in samples]


def _share(gained: Sample | None, possible: Sample | None) -> Estimate | None:
    """Return a gain as a share of the possible one, which has no meaning if that is not surely above 0."""
    if gained is None or possible is None or not statistics.estimate(possible).low > 0:
        return None
    return statistics.share(gained, possible)


def _lines(rows: pd.DataFrame, runs: Runs, reference: str) -> pd.DataFrame:
    """Return OF_LINE by line: what it is, what it is compared with, and its costs, medians over its runs."""
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

    lines["reference_len"] = lines.reference.map(lines.train_len)

    # The best possible predictor is like the reference, but for what it is.
    train_len = lines.reference_len.iloc[0]
    optimum = dict.fromkeys(OF_LINE, "") | dict.fromkeys(["scale", "step", *COSTS], np.nan) | {"zero_shot": False}
    optimum |= {"base": BEST_POSSIBLE, "train_len": train_len, "cut": train_len, "reference_len": train_len}
    lines = lines[OF_LINE].astype(object)
    lines.loc[BEST_POSSIBLE] = optimum
    return lines
