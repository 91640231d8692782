"""Runs side by side: those that differ in nothing but the seed are one line, those measured alike one table."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from conf.rundir import FREE
from evaluation.results import PositionBin, Row
from evaluation.runs import LeftOut, Run, find, load, never_began

# What the runs of a line may differ in: the seed, and what only watches. What `eval` asked for is told by the results.
_NOT_TRAINING = (
    *FREE, "seed", "name", "init_from", "eval.", "trainer.log_every", "trainer.val_every", "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
)  # fmt: skip

QUANTITIES = {  # of a row: how it is called, and how many decimals it deserves
    "bits_per_byte": ("bits per byte", 3),
    "loss": ("loss in nats per token", 3),
    "error": ("wrong tokens in percent", 2),
    "sequence_error": ("sequences with a wrong token in percent", 2),
}


class Spread(NamedTuple):
    """One quantity over seeds."""

    values: dict[int, float]  # seed -> value; never empty

    @property
    def mean(self) -> float:
        return fmean(self.values.values())

    @property
    def half_range(self) -> float | None:
        """Half of the distance between the largest and the smallest; None for a single seed."""
        values = self.values.values()
        return (max(values) - min(values)) / 2 if len(values) > 1 else None

    def format(self, decimals: int) -> str:
        """The mean, ± half of the range where there are several seeds; a count that is always the same needs none."""
        some = self.half_range is not None and (decimals > 0 or self.half_range > 0)
        return f"{self.mean:,.{decimals}f}" + (f" ± {self.half_range:,.{decimals}f}" if some else "")


def _spread(values: dict[int, float | None]) -> Spread | None:
    known = {seed: value for seed, value in values.items() if value is not None}
    return Spread(known) if known else None


@dataclass
class Group:
    """Runs that differ in nothing but the seed."""

    runs: dict[int, Run]  # seed -> run, ascending
    label: str = ""  # the encoding, and what distinguishes the group from others of its section

    @property
    def first(self) -> Run:
        return next(iter(self.runs.values()))

    @property
    def encoding(self) -> str:
        return self.first.encoding

    def read(self, reading: str, swap: bool) -> str:
        """The label of one way to read this group; a swap reads with another encoding."""
        if swap:
            return f"{self.label} read as {reading}"
        return self.label + ("" if reading == "as trained" else f", {reading}")

    def training(self, name: str, seeds: Iterable[int]) -> Spread | None:
        """A number of `results.Training` over some of the seeds; or "parameters": their total."""
        values: dict[int, float | None] = {}
        for seed in seeds:
            if t := self.runs[seed].training:
                values[seed] = t.parameters.get("total") if name == "parameters" else getattr(t, name)
        return _spread(values)


@dataclass
class Line:
    """A group, read in one way."""

    group: Group
    reading: str
    swap: bool  # the weights are read by another encoding, which the reading begins with
    rows: dict[int, dict[tuple[str, int], Row]]  # seed -> (slice, length) -> row
    bins: dict[int, list[PositionBin]]  # seed -> loss by position

    @property
    def encoding(self) -> str:
        """That reads."""
        return self.reading.partition(",")[0] if self.swap else self.group.encoding

    @property
    def label(self) -> str:
        return self.group.read(self.reading, self.swap)

    @property
    def seeds(self) -> list[int]:
        return sorted(self.rows)

    def spread(self, slice_name: str, length: int, quantity: str, only: int | None = None) -> Spread | None:
        """Over the seeds, or of one `only`; None where the encoding is not defined or the quantity not known."""
        chosen = self.rows if only is None else {only: self.rows[only]}
        found = {seed: rows.get((slice_name, length)) for seed, rows in chosen.items()}
        return _spread({seed: getattr(row, quantity) for seed, row in found.items() if row})


class Verdict(NamedTuple):
    """Which line is best at one length, by the mean over all slices. Single seeds are never found equal."""

    length: int
    best: tuple[Line, Spread]
    equal: list[tuple[Line, Spread]]  # a seed of which is as good as the worst of the best line
    others: list[tuple[Line, Spread]]  # in their order


class Measure(NamedTuple):
    """What was measured: rows are compared only within one. The data and train_len are the section's."""

    task: str | None
    lengths: tuple[int, ...]
    amounts: tuple[tuple[str, int, int], ...]  # (slice, tokens, sequences) at the shortest length


@dataclass
class Table:
    measure: Measure
    lines: list[Line] = field(default_factory=list)

    @property
    def slices(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self.measure.amounts))

    @cached_property
    def quantity(self) -> str:
        """What the lines are ranked by."""
        rows = [row for line in self.lines for of_seed in line.rows.values() for row in of_seed.values()]
        names = ("error",) if self.measure.task else ("bits_per_byte", "loss")
        return next((name for name in names if all(getattr(row, name) is not None for row in rows)), "loss")

    @property
    def quantities(self) -> list[str]:
        """What there is to show: of these, `quantity` comes first."""
        beside = {"error": "sequence_error", "bits_per_byte": "loss"}.get(self.quantity)
        return [self.quantity] + ([beside] if beside else [])

    def overall(self, line: Line, length: int) -> Spread | None:
        """The mean of all slices, over the seeds; None where the line has no value."""
        found = [s.values for name in self.slices if (s := line.spread(name, length, self.quantity))]
        return _spread({seed: fmean(of[seed] for of in found if seed in of) for of in found for seed in of})

    def rank(self, line: Line) -> tuple[int, float, str]:
        """Sorts first what reads the longest texts, then what does so best."""
        for length in reversed(self.measure.lengths):
            if spread := self.overall(line, length):
                return -length, math.inf if math.isnan(spread.mean) else spread.mean, line.label
        return 0, 0.0, line.label

    def verdict(self, length: int) -> Verdict | None:
        """None where no line has a finite value."""
        found = [(line, spread) for line in self.lines if (spread := self.overall(line, length))]
        ordered = sorted((f for f in found if math.isfinite(f[1].mean)), key=lambda f: f[1].mean)
        if not ordered:
            return None
        best, *rest = ordered
        worst = max(best[1].values.values())
        equal = [
            f for f in rest if min(len(f[1].values), len(best[1].values)) > 1 and min(f[1].values.values()) <= worst
        ]
        return Verdict(length, best, equal, [f for f in rest if f not in equal])


@dataclass
class Section:
    """Everything on one training set at one training length."""

    data: str
    train_len: int
    groups: list[Group] = field(default_factory=list)  # also those of which nothing is measured yet
    tables: list[Table] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.data}, trained at {self.train_len:,} tokens"

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs.values()]


class Comparison(NamedTuple):
    sections: list[Section]
    left_out: list[LeftOut]

    @property
    def runs(self) -> list[Run]:
        return [run for section in self.sections for run in section.runs]


def compare(folders: Sequence[Path]) -> Comparison:
    """All runs in or below `folders`.

    Raises:
        ConfigError: a folder does not exist.
    """
    found = [load(path) for path in find(folders)]
    left_out = [reason for _, reasons in found for reason in reasons] + list(never_began(folders))
    return arrange([run for run, _ in found if run], left_out)


def arrange(runs: Sequence[Run], left_out: Sequence[LeftOut] = ()) -> Comparison:
    """The runs in sections, groups and tables; of two runs that are one group and seed, one is left out."""
    left_out = list(left_out)
    sections: dict[tuple[str, int], dict[str, Group]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: (run.seed, run.results is None)):
        group = sections[run.identity, run.config["train_len"]].setdefault(_training(run), Group({}))
        if twin := group.runs.get(run.seed):
            left_out.append(LeftOut(run.path, f"the same as {twin.path}, the seed too"))
        else:
            group.runs[run.seed] = run
    identities = defaultdict(set)
    for run in runs:
        identities[run.config["data.name"]].add(run.identity)
    found = []
    for (identity, train_len), groups in sections.items():
        label_groups(list(groups.values()))
        data = next(iter(groups.values())).first.config["data.name"]
        if len(identities[data]) > 1:
            data += f" ({digest(identity)})"
        ordered = sorted(groups.values(), key=lambda group: group.label)
        found.append(Section(data, train_len, ordered, _tables(ordered)))
    return Comparison(sorted(found, key=lambda section: (section.data, section.train_len)), sorted(left_out))


def digest(identity: str) -> str:
    """A short name of some data."""
    return hashlib.sha256(identity.encode()).hexdigest()[:6]


def _training(run: Run) -> str:
    """Equal for two runs that differ in nothing but the seed."""
    config = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value  # 500 is 500.0
        for key, value in run.config.items()
        if not key.startswith(_NOT_TRAINING)
    }
    parent = str(run.config.get("init_from"))  # each seed may continue from its own: runs/rope-code-s1
    config["init_from"] = parent.removesuffix(f"-s{run.seed}")
    return json.dumps(config, sort_keys=True, default=str)


def label_groups(groups: Sequence[Group]) -> None:
    """Call each group by its encoding, and by those settings that tell it from others: of its encoding for the
    encoding's own, of all for the rest."""
    settings = [json.loads(_training(group.first)) for group in groups]
    for group, own in zip(groups, settings, strict=True):
        alike = [other for other in settings if other.get("pe.name") == group.encoding]
        differing = [
            key
            for key in sorted({key for other in settings for key in other})
            if key != "pe.name"
            and len({json.dumps(other.get(key)) for other in (alike if key.startswith("pe.") else settings)}) > 1
        ]
        words = [f"{key.removeprefix('pe.').removeprefix('trainer.')} {own.get(key)}" for key in differing]
        group.label = group.encoding + (f" ({', '.join(words)})" if words else "")


def _tables(groups: Sequence[Group]) -> list[Table]:
    tables: dict[Measure, Table] = {}
    for group in groups:
        lines: dict[tuple[Measure, str], Line] = {}
        for seed, run in group.runs.items():
            for measure, reading, swap, rows, bins in _measured(run):
                if (measure, reading) not in lines:
                    lines[measure, reading] = Line(group, reading, swap, {}, {})
                    tables.setdefault(measure, Table(measure)).lines.append(lines[measure, reading])
                lines[measure, reading].rows.setdefault(seed, rows)  # results.json comes before swap.json
                lines[measure, reading].bins.setdefault(seed, bins)
    for table in tables.values():
        table.lines.sort(key=table.rank)
    return sorted(tables.values(), key=lambda table: (-len(table.lines), str(table.measure)))


def _measured(run: Run) -> Iterator[tuple[Measure, str, bool, dict[tuple[str, int], Row], list[PositionBin]]]:
    """Of each file, task and reading: what was measured, the reading, whether it is a swap, rows, loss by position."""
    own = next((row.reading for row in run.results.lengths), "") if run.results else "as trained"
    for results in filter(None, (run.results, run.swap)):
        every = sorted(
            {n for skipped in results.skipped.values() for n in skipped} | {r.length for r in results.lengths}
        )
        for task in dict.fromkeys(row.task for row in results.lengths):
            rows = [row for row in results.lengths if row.task == task]
            shortest = min(row.length for row in rows)
            amounts = dict.fromkeys((row.slice, row.tokens, row.sequences) for row in rows if row.length == shortest)
            measure = Measure(task, tuple(every), tuple(amounts))
            for label in dict.fromkeys(row.reading for row in rows):
                # A swap begins with the run's own rows, under another label.
                swap = results is run.swap and label != f"{run.encoding}, as trained"
                reading = label if swap or results is run.results else own
                yield (
                    measure, reading, swap, {(row.slice, row.length): row for row in rows if row.reading == label},
                    [found for found in results.by_position if found.reading == label],
                )  # fmt: skip
