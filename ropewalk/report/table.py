"""One long table of results. Figures, answers, pages, trackers and docs are made of it and of nothing else.

A row for each line, part of a measure and length over all its seeds, where `seed` is missing and `low` and `high` are
the 95 % interval over seeds and texts; and one for each run alone, with its seed and the interval over texts.

    table = results(load("runs"))
    over_seeds(table).query("measure == 'lengths'").pivot(index="line", columns="length", values="gain")
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ropewalk.evaluation.results import LOWER_IS_BETTER
from ropewalk.evaluation.statistics import Estimate, Sample, estimate, share, stacked, tied
from ropewalk.report.frame import AFTER, COSTS, PROVENANCE, START, Runs, attempt, compared

BEST_POSSIBLE = "best possible"  # the line of the best possible predictor, where it is known
FAR = "far"  # the part that holds all parts which need text from beyond train_len
LEARNED = 10.0  # a seed has learned a task if at most so many percent of its answers are wrong where it was trained
OF_PART = ["task", "difficulty", "depth", "span_start", "span_end", "continuation"]
# The paired differences of a line. Each has its `interval_columns`.
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
    "unlike", "reference", "reference_len", "tolerance", *COSTS,
]  # fmt: skip


def interval_columns(column: str) -> list[str]:
    """Return the columns of a number and of the ends of its interval."""
    prefix = "" if column == "value" else f"{column}_"
    return [column, f"{prefix}low", f"{prefix}high"]


COLUMNS = [
    # Who was measured, and by what.
    "section", "data", "train_len", "cut", "line", "base", "encoding", "variant", "scale", "reading", "zero_shot",
    "step", "settings", "unlike", "run", "path", "seed", "seeds",
    "measure", "quantity", "unit", "eval", *OF_PART, "part", "length", "times", "texts", "documents", "learned",
    # The numbers, and what they mean.
    *(name for column in ("value", *PAIRED) for name in interval_columns(column)),
    "reference", "rank", "tied", "tolerance", "verdict", *COSTS, *PROVENANCE,
]  # fmt: skip


CELL = ["line", "part", "length"]
EXACT = -1  # the seed of the best possible predictor, which has none: it is compared with every seed


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
        with attempt(f"{kind} of {section}", runs.left_out):
            tables.append(_compared(rows, runs, reference).astype(object))
    table = pd.concat(tables, ignore_index=True).infer_objects()
    return table.astype({"seed": "Int64", "learned": "Int64", "rank": "Int64"})


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows over all seeds, without those of single runs."""
    return table[table.seed.isna()]


def by_length(table: pd.DataFrame, quantity: str = "loss") -> pd.DataFrame:
    """Return the rows of a text's loss, whose tokens are the same at every length, or of the "error" of a task.

    Measures with other settings have other texts: see `of_one_setting`.

    Raises ValueError: the table has several sections, which have nothing in common.
    """
    rows = table[(table.measure == "lengths") & (table.quantity == quantity)]
    sections = rows.section.unique()
    if len(sections) > 1:
        raise ValueError(
            f"the runs are of {len(sections)} sections, of which one can be shown: choose it with only=, or with"
            f" frame[frame.section == {sections[0]!r}]; there are: {'; '.join(sections)}"
        )
    return of_one_setting(rows)


def of_one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a measure with the settings that most lines were measured with, and of these most texts."""
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


def _compared(rows: pd.DataFrame, runs: Runs, reference: str) -> pd.DataFrame:
    """Return the part of the long table about one quantity of one measure, of all lines measured on the same texts."""
    rows = rows.join(runs.runs["name"].rename("run"), on="path").sort_values("line", kind="stable")
    first = rows.iloc[0]
    lines = _lines(rows, runs, reference)
    table = _cells(rows, lines).join(lines, on="line")
    table = table.assign(
        **first[["section", "quantity", "unit", "eval", "texts"]],
        data=runs.runs.config[first.path]["data.name"],
        measure=first.kind,
        times=table.length / table.train_len,
    )
    samples = _over_cells(table, table["sample"])
    table["seeds"] = samples.map(lambda sample: len(sample.values))
    table["documents"] = samples.map(lambda sample: sample.units.size)
    table = _with(table, "value", _estimates(samples))
    if first.quantity == "error":
        table = _over_learned(table)
    table = _against_others(_ranked(table))
    return table[table.seed != EXACT].reindex(columns=COLUMNS)


def _against_others(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with which cells are `tied` with the best one; but for errors also with PAIRED and the verdict."""
    differences = {name: _over_cells(table, of_seeds) for name, of_seeds in _differences(table).items()}
    estimates = {name: _estimates(samples) for name, samples in differences.items()}
    table["tied"] = _tied(table, estimates["behind"])
    if table.quantity.iloc[0] == "error":
        return table
    if "gain" in estimates:
        estimates["share"] = list(map(_share, differences["gain"], differences["possible"]))
    for name in PAIRED.keys() & estimates.keys():
        table = _with(table, name, estimates[name])
    if "gain" in estimates:
        verdicts = pd.Series(map(verdict, table.gain_low, table.gain_high, table.tolerance), table.index)
        table["verdict"] = verdicts.where(table.gain.notna())
    return table


def _cells(rows: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each cell, a line's part at a length, over all its seeds; then one for each seed, with `sample`.

    The best possible predictor is a line of its own, with the seed EXACT.
    """
    exact = rows[rows.optimum_sample.notna()].sort_values("length", kind="stable")
    exact = exact.drop_duplicates(["part", "length"], keep="last")
    exact = exact.assign(line=BEST_POSSIBLE, seed=EXACT, sample=exact.optimum_sample, run="", path="")
    exact[PROVENANCE] = np.nan
    seeds = pd.concat([exact, rows, *_far(rows, lines)], ignore_index=True)
    seeds = seeds[[*CELL, *OF_PART, "seed", "sample", "run", "path", *PROVENANCE]]
    seeds["cell"] = seeds.groupby(CELL, sort=False).ngroup()
    seeds = seeds.drop_duplicates(["cell", "seed"], keep="last").sort_values(["cell", "seed"])
    over_all = seeds.drop_duplicates("cell").assign(seed=None, path="", sample=None)
    over_all["run"] = over_all.cell.map(seeds.groupby("cell").run.agg(", ".join))
    both = pd.concat([over_all, seeds.astype({"seed": object})])
    return both.sort_values("cell", kind="stable", ignore_index=True)


def _over_cells(table: pd.DataFrame, samples: pd.Series) -> pd.Series:
    """Return the samples of single seeds, and in the rows over all seeds those of their cell as one."""
    of_cells = {}
    for cell, of_cell in samples.dropna().groupby(table.cell):
        of_cells[cell] = stacked(of_cell.tolist())
    result = samples.copy()
    is_over_all = table.seed.isna()
    result[is_over_all] = pd.Series([of_cells.get(cell) for cell in table.cell], table.index, dtype=object)
    return result


def _far(rows: pd.DataFrame, lines: pd.DataFrame) -> list[pd.DataFrame]:
    """Return rows of the part FAR: all parts which need text from beyond train_len, summed text by text.

    It is over the seeds that have all of them: a seed with fewer would answer another question.
    """
    if rows.kind.iloc[0] not in ("far_copies", "ruler"):
        return []
    # At least so many tokens back: words have a span, a needle its depth, and other parts are not far.
    distance = rows.span_start.fillna((1 - rows.depth) * rows.length)
    far = rows[distance >= rows.line.map(lines.train_len)]
    # A line that does not reach all lengths has fewer, too.
    parts = far.drop_duplicates(["train_len", "part", "length"]).train_len.value_counts()
    of_far = dict.fromkeys(["depth", "span_start", "span_end"], np.nan) | {"difficulty": "", "continuation": ""}
    of_far |= {"part": FAR, "task": FAR, "length": rows.length.max()}
    sums = []
    for _, of_seed in far.groupby(["line", "seed"]):
        if len(of_seed) == parts[of_seed.train_len.iloc[0]]:
            values, units = zip(*of_seed["sample"], strict=True)
            pooled = Sample(np.sum(values, axis=0), np.sum(units, axis=0))
            sums.append(of_seed.iloc[:1].assign(sample=[pooled], **of_far))
    return sums


def _estimates(samples: pd.Series) -> list[Estimate | None]:
    return samples.map(estimate, na_action="ignore").tolist()


def _with(table: pd.DataFrame, column: str, estimates: Sequence[Estimate | None]) -> pd.DataFrame:
    """Return a table with a number and its interval as columns."""
    numbers = [e[:3] if e else (np.nan, np.nan, np.nan) for e in estimates]
    return table.assign(**dict(zip(interval_columns(column), np.transpose(numbers), strict=True)))


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
    words = table.learned.eq(table.seeds).map({True: "learned", False: "partly"}).mask(table.learned == 0, "never")
    table["verdict"] = words.where(over_all)
    table[["low", "high"]] = np.nan
    for column in numbers:
        table.loc[over_all, column] = table.cell.map(numbers[column])
    return table


def _sign(table: pd.DataFrame) -> int:
    """Return 1 if less is better in the numbers of a table, -1 if more is."""
    return 1 if LOWER_IS_BETTER[table.quantity.iloc[0]] else -1


def _ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the `rank` of each cell at its part and length, best first, and the `best` line there."""
    # A network that diverged has NaN, which comes last; equal lines are by name.
    badness = (_sign(table) * table.value).fillna(np.inf)
    cells = table.assign(badness=badness)[table.seed.isna() & (table.line != BEST_POSSIBLE)]
    cells = cells.sort_values(["badness", "line"])
    places = cells.groupby(["part", "length"])
    table["rank"] = places.cumcount().add(1).reindex(table.index)
    best = places.line.first().rename("best")
    return table.join(best, on=["part", "length"])


def _tied(table: pd.DataFrame, behind: Sequence[Estimate | None]) -> pd.Series:
    """Return which cells are not told apart from the best of their part and length, with that one if there are any."""
    # What is better over the seeds that both have is not told apart from the best over all seeds.
    sign = _sign(table)
    behind = [e if e and sign * e.value >= 0 else None for e in behind]
    # A network that diverged is not the best, however little is known of it.
    is_tied = pd.Series(np.nan, table.index, dtype=object)
    cells = table[table["rank"].notna()]
    is_tied[cells.index] = False
    for _, at_place in cells[cells.value.notna()].groupby(["part", "length"]):
        others = at_place.index[at_place["rank"] > 1]
        are_tied = tied([behind[number] for number in others])
        is_tied[others] = are_tied
        is_tied[at_place.index[at_place["rank"] == 1]] = any(are_tied)
    return is_tied


def _differences(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the differences of each seed to others, text by text, by their names in `PAIRED`.

    "possible" is what the best possible predictor gains.
    """
    samples = dict(zip(table[[*CELL, "seed"]].itertuples(index=False, name=None), table["sample"], strict=True))

    def of(lines: pd.Series, longest: pd.Series = table.length) -> pd.Series:
        """Return what `lines` measured with the seed of each row at its part and length, which is cut to `longest`."""
        keys = table.assign(line=lines, length=np.minimum(table.length, longest))
        is_exact = table.seed.notna() & (keys.line == BEST_POSSIBLE)
        keys["seed"] = table.seed.mask(is_exact, EXACT)
        of_rows = list(map(samples.get, keys[[*CELL, "seed"]].itertuples(index=False, name=None)))
        return pd.Series(of_rows, table.index, dtype=object)

    measured = table["sample"]
    # A line is not compared with itself.
    reference = table.reference.mask(table.reference == table.line)
    optimum = pd.Series(BEST_POSSIBLE, table.index).mask(table.line == BEST_POSSIBLE)
    differences = {
        "difference": _minus(measured, of(reference)),
        "behind": _minus(measured, of(table.best)),
        "above": _minus(measured, of(optimum)),
    }
    if table.measure.iloc[0] == "lengths":
        gain = _minus(of(table.base, table.cut), measured)
        differences |= {
            "gain": gain,
            "possible": _minus(of(optimum, table.cut), of(optimum)).where(gain.notna(), None),
            "lead": _minus(of(table.reference, table.reference_len), measured),
        }
    return differences


def _minus(first: pd.Series, second: pd.Series) -> pd.Series:
    """Return differences text by text; None where one is missing, or has other documents, as in a damaged file."""
    differences = []
    for a, b in zip(first, second, strict=True):
        is_paired = a is not None and b is not None and a.units.size == b.units.size
        differences.append(Sample(a.values - b.values, a.units) if is_paired else None)
    return pd.Series(differences, first.index, dtype=object)


def _share(gained: Sample | None, possible: Sample | None) -> Estimate | None:
    """Return a gain as a share of the possible one, which has no meaning if that is not surely above 0."""
    if gained is None or possible is None or not estimate(possible).low > 0:
        return None
    return share(gained, possible)


def _lines(rows: pd.DataFrame, runs: Runs, reference: str) -> pd.DataFrame:
    """Return OF_LINE by line: what it is, what it is compared with, and its costs, medians over its runs."""
    lines = rows.drop_duplicates("line").set_index("line", drop=False)
    of_runs = runs.runs[["label", "settings", "unlike"]].join(runs.runs.groupby("group")[[*COSTS]].transform("median"))
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
    lines["tolerance"] = [float(config.get("eval.tolerance", 0)) for config in runs.runs.config[lines.path]]

    # The best possible predictor is like the reference, but for what it is.
    train_len = lines.reference_len.iloc[0]
    optimum = dict.fromkeys(OF_LINE, "") | dict.fromkeys(["scale", "step", *COSTS], np.nan) | {"zero_shot": False}
    optimum |= {"base": BEST_POSSIBLE, "train_len": train_len, "cut": train_len, "reference_len": train_len}
    optimum["tolerance"] = lines.tolerance[reference]
    lines = lines[OF_LINE].astype(object)
    lines.loc[BEST_POSSIBLE] = optimum
    return lines
