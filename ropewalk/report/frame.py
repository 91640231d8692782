"""Runs as DataFrames. Runs that differ in nothing but the seed are one group."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from conf.schema import ConfigError, flatten
from ropewalk.app.run_dir import FREE, read_config, read_metrics, read_training
from ropewalk.evaluation.results import Evaluation
from ropewalk.evaluation.statistics import Sample, grouping
from ropewalk.files import printable, read_json
from ropewalk.report import archive

BEFORE = "before"  # the training, of a run that starts from a model
# Key prefixes in which the runs of a group may differ: they only observe the training, or depend on the machine.
IGNORED = (
    *FREE, "seed", "name", "init_from", "trainer.log_every", "trainer.val_", "trainer.accelerator", "trainer.compile",
    "trainer.kernels", "training.",
)  # fmt: skip
PROVENANCE = ["command", "commit", "dirty", "diff_sha256", "device", "precision", "torch", "processor"]
RUN_COLUMNS = ["name", "seed", "encoding", "data", "train_len", "section", "group", "label", "settings", "done"]
RUN_COLUMNS += ["parameters", "tokens_per_s", "peak_memory_mb"]  # of training.json; NaN where that has none
RESULT_COLUMNS = [
    "path", "file", "seed", "train_len", "section", "group", "line", "kind", "task", "difficulty", "depth",
    "span_start", "span_end", "continuation", "part", "length", "quantity", "unit", "value", "optimum", "texts",
    "documents", "step", "variant", "encoding", "pe", "scale", "zero_shot", "skipped", "eval", *PROVENANCE,
]  # fmt: skip


class Runs(NamedTuple):
    """The run directories in some folders. The cells of both tables are plain numbers and strings."""

    # A row for each run, indexed by its path: RUN_COLUMNS. `section` is the title of the data and training lengths,
    # `label` that of the group, and `settings` the options in which it differs from others of its encoding.
    runs: pd.DataFrame
    # The long table, RESULT_COLUMNS: a row for each run, measure (kind and eval), variant, step, part, length and
    # quantity. `line` is the label of a group read in one way, `part` the label of task, difficulty, depth and span,
    # `value` the mean over `texts` texts from so many `documents`, `optimum` that of the best possible predictor (NaN
    # if it is not known).
    results: pd.DataFrame
    # The sums for each text, by the index of their row in `results`.
    samples: dict[int, Sample]
    # The same for the best possible predictor, for the rows that have one.
    optima: dict[int, Sample]
    # The flat configuration of each run, with training.*, by path.
    configs: dict[str, dict[str, Any]]
    # The path of each run that is broken, unfinished or there twice, and the reason.
    left_out: list[tuple[str, str]]


class _Read(NamedTuple):
    """What lies in some folders, before runs are grouped."""

    runs: list[dict[str, Any]]
    configs: dict[str, dict[str, Any]]
    # RESULT_COLUMNS but for section, group and line; with own_pe, and the samples as sample and optimum_sample.
    results: list[dict[str, Any]]
    left_out: list[tuple[str, str]]


def load(folders: str | Path | Iterable[str | Path], only: Sequence[str] = (), exclude: Sequence[str] = ()) -> Runs:
    """Read all runs in or below `folders`. A run that is broken in any way is left out.

    Args:
        folders: also files as from `save`.
        only: patterns of names, as in "rope-*"; none: all runs.
        exclude: patterns of names that are passed over.

    Raises ConfigError: a folder does not exist.
    """
    runs, configs, results, left_out = _read(folders, only, exclude)
    # The training length of what was measured: before the first step that of the model a run starts from.
    for row in results:
        row.setdefault("train_len", configs[row["path"]]["train_len"])
    empty = pd.DataFrame(columns=RESULT_COLUMNS)
    if not runs:
        return Runs(pd.DataFrame(columns=RUN_COLUMNS), empty, {}, {}, {}, sorted(left_out))
    # Labels name the differences between runs, so all runs must have been read.
    kept, repeated = _grouped(pd.DataFrame(runs), configs, results)
    left_out = sorted(left_out + repeated)
    samples = {number: row.pop("sample") for number, row in enumerate(results)}
    optima = {}
    for number, row in enumerate(results):
        optimum = row.pop("optimum_sample")
        if optimum is not None:
            optima[number] = optimum
    if not samples:
        return Runs(kept[RUN_COLUMNS], empty, {}, {}, configs, left_out)
    long = _with_lines(pd.DataFrame(results), kept)
    return Runs(kept[RUN_COLUMNS], long[RESULT_COLUMNS], samples, optima, configs, left_out)


def save(path: Path, folders: Iterable[str | Path], only: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
    """Write the complete runs in or below `folders` as one file that `load` reads; see `ropewalk.report.archive`."""
    read = _read(folders, only, exclude)
    archive.write(path, read.runs, read.configs, read.results)


def _read(folders: str | Path | Iterable[str | Path], only: Sequence[str], exclude: Sequence[str]) -> _Read:
    """Read all runs and results in or below `folders`; see `load`."""
    if isinstance(folders, str | Path):
        folders = [folders]
    places = [Path(folder) for folder in folders]
    read = _Read([], {}, [], [])
    sizes: dict[Any, np.ndarray] = {}

    def is_chosen(name: str) -> bool:
        return (not only or matches(name, only)) and not matches(name, exclude)

    # First the run directories, each with all files of its results; then the files of `save`, each of many runs.
    for path in _find([place for place in places if not _is_archive(place)]):
        if is_chosen(printable(path.name)):
            with _attempt(path, read.left_out):
                _read_run(path, read, sizes)
    for path in filter(_is_archive, places):
        with _attempt(path, read.left_out):
            _read_archive([row for row in archive.read(path) if is_chosen(row[0]["name"])], read, sizes)
    return read


@contextmanager
def _attempt(path: Path, left_out: list[tuple[str, str]]) -> Iterator[None]:
    """Note an error instead of raising it."""
    # One damaged run, whatever is wrong with it, must not prevent a report on the others.
    try:
        yield
    except Exception as error:
        reason = f"broken: {error}".splitlines()[0]
        left_out.append((printable(path), printable(reason)))


def _read_run(path: Path, read: _Read, sizes: dict[Any, np.ndarray]) -> None:
    """Add a run directory to what was read."""
    run, config = _run(path)
    read.runs.append(run)
    read.configs[run["path"]] = config
    if not run["done"]:
        read.left_out.append((run["path"], "not finished"))
    for file in sorted(path.glob("evals/*.json")):
        with _attempt(file, read.left_out):
            read.results.extend(_results(file, run, config, sizes))


def _read_archive(rows: Iterable[tuple[Any, Any, Any]], read: _Read, sizes: dict[Any, np.ndarray]) -> None:
    """Add the chosen rows of a file of many runs to what was read."""
    for run, config, row in rows:
        expected = sizes.setdefault(_texts_of(row), row["sample"].units)
        if not np.array_equal(expected, row["sample"].units):
            raise ValueError(f"{run['name']} was measured on other texts than its settings say")
        if run["path"] not in read.configs:
            read.runs.append(run)
        read.configs[run["path"]] = config
        read.results.append(row)


def _is_archive(place: Path) -> bool:
    return place.name.endswith(archive.SUFFIX) and place.is_file()


def _texts_of(row: Mapping[str, Any]) -> tuple:
    """Return what decides the texts of a result."""
    return row["kind"], row["eval"], row["part"], row["length"], row["quantity"]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name fits one of several patterns with * and ?."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def curves(runs: Runs) -> pd.DataFrame:
    """Return the rows of metrics.jsonl of all runs, with the run, its section and label."""
    rows = []
    columns = ["name", "seed", "encoding", "data", "train_len", "section", "label"]
    for run in runs.runs.itertuples():
        about = {"path": run.Index} | {column: getattr(run, column) for column in columns}
        # A run of another program, or a damaged one, has no curve; its results stand for themselves.
        with suppress(OSError, ValueError):
            rows += [about | row for row in read_metrics(Path(run.Index))]
    return pd.DataFrame(rows, columns=None if rows else ["path", *columns, "step", "tokens"])


def _find(folders: Iterable[str | Path]) -> list[Path]:
    """Return every run directory in or below `folders`, without hidden ones."""
    # Folders may contain each other, or link to each other: each run counts once.
    by_place: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ConfigError(f"{printable(folder)} is not a directory")
        for file in folder.rglob("config.yaml"):
            run = file.parent
            names = run.relative_to(folder).parts
            if not any(name.startswith(".") for name in names):
                by_place[run.resolve()] = run
    return sorted(by_place.values())


def _run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of a run, and its flat configuration."""
    trained = (path / "training.json").exists()
    values = read_config(path)
    if trained:
        values |= {"training": read_training(path).model_dump()}
    config = flatten(values)
    # Everything below groups and sorts by these: one of another type would fail far from its file.
    for key, kind in {"train_len": int, "pe.name": str, "data.name": str, "seed": int}.items():
        if type(config.get(key)) is not kind:
            raise ValueError(f"config.yaml has no valid {key}")
    if config["train_len"] < 1:
        raise ValueError("config.yaml has no valid train_len")
    row = {
        "path": printable(path),
        "name": printable(path.name),
        "seed": config["seed"],
        "encoding": config["pe.name"],
        "data": config["data.name"],
        "train_len": config["train_len"],
        "done": trained or config["trainer.max_steps"] == 0,  # a model of transformers as it is has no steps
        "parameters": _number(config.get("training.parameters.total")),
        "tokens_per_s": _number(config.get("training.tokens_per_s")),
        "peak_memory_mb": _number(config.get("training.peak_memory_mb")),
        "identity": json.dumps(read_json(path / "data.json"), sort_keys=True),
    }
    return row, config


def _number(value: Any) -> float:
    """Return a number as a float, and anything else as NaN."""
    return float(value) if isinstance(value, int | float) else np.nan


def _results(
    file: Path, run: Mapping[str, Any], config: Mapping[str, Any], sizes: dict[Any, np.ndarray]
) -> list[dict[str, Any]]:
    """Return the rows of one results file.

    Args:
        sizes: bytes or tokens of each text, and its document, by the settings that decide the texts; new ones are
            added.

    Raises ValueError: the file does not fit its run, or its texts or their documents are not those of other files with
    its settings.
    """
    e = Evaluation.load(file)
    if (e.step and e.train_len != run["train_len"]) or not isinstance(e.variant.pe["name"], str):
        raise ValueError("train_len is not that of config.yaml, or the encoding has no name")
    settings = json.dumps(e.eval, sort_keys=True)
    trained_pe = {key: value for key, value in config.items() if key.startswith("pe.")}
    of_file = {
        "path": run["path"],
        "file": printable(file.name),
        "seed": run["seed"],
        "kind": e.kind,
        "eval": settings,
        "step": e.step,
        "train_len": e.train_len,
        "variant": e.variant.label,
        "encoding": e.variant.pe["name"],
        "pe": json.dumps(e.variant.pe, sort_keys=True),
        "own_pe": trained_pe == flatten({"pe": e.variant.pe}),
        "scale": e.variant.scale,
        "zero_shot": e.variant.zero_shot,
        "skipped": bool(e.skipped),
    }
    for key in PROVENANCE:
        value = e.provenance.get(key)
        of_file[key] = "" if value is None else str(value)
    texts = len(e.measured[0].nats) if e.measured else 0
    rows = []
    # Runs are compared text by text. Equal settings promise equal texts, of equal documents: a file that breaks that is
    # left out. Sums over other documents could have equal sizes by chance, so the documents are compared as well.
    for m in e.measured:
        documents = grouping(m.documents, len(m.nats))
        expected = sizes.setdefault((e.kind, settings, m.part.name, m.length, "documents"), documents)
        if not np.array_equal(expected, documents):
            raise ValueError(f"{m.part.name} at {m.length} was measured on other documents than its settings say")
    for part, length, quantity, unit, sample, optimum in e.rows():
        expected = sizes.setdefault((e.kind, settings, part.name, length, quantity), sample.units)
        if not np.array_equal(expected, sample.units):
            raise ValueError(f"{part.name} at {length} was measured on other texts than its settings say")
        # A part without scored tokens has no mean.
        if sample.units.sum() > 0:
            of_part = {
                "task": part.task,
                "difficulty": part.difficulty,
                "depth": part.depth,
                "span_start": part.first,
                "span_end": part.last,
                "continuation": part.continuation,
                "part": part.name,
                "length": length,
                "quantity": quantity,
                "unit": unit,
                "value": sample.values.sum() / sample.units.sum(),
                "optimum": np.nan if optimum is None else optimum.values.sum() / optimum.units.sum(),
                "texts": texts,
                "documents": sample.units.size,
                "sample": sample,
                "optimum_sample": optimum,
            }
            rows.append(of_file | of_part)
    return rows


def _grouped(
    runs: pd.DataFrame, configs: Mapping[str, Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """Return the runs with section, group and label, and those that repeat another run with the reason."""
    # A hash tells apart different data of the same name.
    hashes = runs.identity.map(lambda identity: f" ({sha256(identity.encode()).hexdigest()[:6]})")
    is_ambiguous = runs.groupby("data").identity.transform("nunique") > 1
    together = _together(runs, results)
    trained_at = runs.groupby(["identity", together]).train_len.transform(_trained_at)
    runs["section"] = runs.data + hashes.where(is_ambiguous, "") + trained_at

    # Runs are seeds of one line if all settings are equal that decide what is computed.
    keys = []
    for path in runs.path:
        compared = {key: value for key, value in configs[path].items() if not key.startswith(IGNORED)}
        keys.append(json.dumps(compared, sort_keys=True))
    runs["key"] = keys
    runs["init"] = _starting_weights(runs, [str(configs[path].get("init_from")) for path in runs.path])
    runs["group"] = runs.key + runs.init

    # Of runs with the same settings and seed the first is kept; complete runs come first.
    runs = runs.sort_values(["section", "seed", "done", "path"], ascending=[True, True, False, True])
    repeated = runs.duplicated(["section", "group", "seed"])
    reasons = [(path, "another run has the same settings and seed") for path in runs.path[repeated]]
    runs = runs[~repeated].set_index("path")
    # Only runs in one section are shown together, so labels need not tell others apart.
    for _, of_section in runs.groupby("section"):
        groups = of_section.drop_duplicates("group")
        settings = []
        names = []
        for row in groups.itertuples():
            settings.append(json.loads(row.key) | {"init_from": row.init})
            names.append(row.name.removesuffix(f"-s{row.seed}"))
        told_apart = labelled(settings)
        labels = dict(zip(groups.group, named(told_apart, settings, names), strict=True))
        runs.loc[of_section.index, "label"] = of_section.group.map(labels)
        runs.loc[of_section.index, "settings"] = of_section.group.map(dict(zip(groups.group, told_apart, strict=True)))
    return runs, reasons


def _together(runs: pd.DataFrame, results: Iterable[Mapping[str, Any]]) -> pd.Series:
    """Return the shortest training length among the runs that share texts with each run, directly or through others.

    Runs of one length stand together in any case.
    """
    texts_of: dict[str, set[str]] = {}
    for row in results:
        if row["kind"] == "lengths":
            texts_of.setdefault(row["path"], set()).add(row["eval"])
    shared = runs[["identity", "train_len"]].assign(texts=runs.path.map(texts_of))
    shared = shared.explode("texts")
    shared["shortest"] = shared.train_len
    while True:
        before = shared.shortest
        for key in ("train_len", "texts"):
            shortest = shared.groupby(["identity", key]).shortest.transform("min")
            shared["shortest"] = shortest.fillna(shared.shortest)
        if shared.shortest.equals(before):
            return shared.groupby(level=0).shortest.min().astype(int)


def _trained_at(lengths: pd.Series) -> str:
    """Return training lengths in words, for the title of a section."""
    *shorter, longest = [f"{length:,}" for length in sorted(lengths.unique())]
    words = f"{', '.join(shorter)} and {longest}" if shorter else longest
    return f", trained at {words} tokens"


def _starting_weights(runs: pd.DataFrame, init_from: list[str]) -> pd.Series:
    """Return a name for the weights that each run starts from, the same for all seeds of a group.

    Seeds may share the weights. Or each has its own, named as in "rope-s1": then the seed is taken out of the name.

    Args:
        init_from: the option of each run, as text.
    """
    names = pd.DataFrame({"key": runs.key, "seed": runs.seed, "shared": init_from})
    without_seed = []
    for name, seed in zip(init_from, runs.seed, strict=True):
        without_seed.append(re.sub(rf"(-s)?(?<!\d){seed}(?!\d)", "", name))
    names["without_seed"] = without_seed
    # A number in a name may be a seed or mean something else. It is taken for the seed only if that makes runs with
    # other seeds equal, and no other seed starts from the very same weights.
    seeds_sharing = names.groupby(["key", "shared"]).seed.transform("nunique")
    seeds_without = names.groupby(["key", "without_seed"]).seed.transform("nunique")
    has_own_weights = (seeds_without > 1) & (seeds_sharing <= 1)
    return names.without_seed.where(has_own_weights, names.shared)


def named(labels: list[str], settings: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Return the labels of groups; the name of its first run for one that differs in several options, or repeats.

    Args:
        labels: as from `labelled`.
        names: of the first run of each group, without its seed.
    """
    result: list[str] = []
    for label, setting, name in zip(labels, settings, names, strict=True):
        of_same = [other for other in settings if other["pe.name"] == setting["pe.name"]]
        if len(differing(of_same)) > 1 or labels.count(label) > 1:
            label = name
        # Directories in different folders may have one name.
        n = sum(other == label or other.startswith(f"{label} [") for other in result)
        result.append(f"{label} [{n + 1}]" if n else label)
    return result


def labelled(settings: list[dict[str, Any]]) -> list[str]:
    """Return a label for each of several settings: the encoding, and in what it differs from others of the same."""
    labels = []
    for setting in settings:
        of_same = [other for other in settings if other["pe.name"] == setting["pe.name"]]
        words = []
        for key in differing(of_same):
            value = setting.get(key)
            # What a run does not set is no difference to name.
            if value not in (None, "None"):
                words.append(f"{key.removeprefix('pe.').removeprefix('trainer.')} {value}")
        label = setting["pe.name"]
        if words:
            label += f" ({', '.join(words)})"
        labels.append(label)
    return labels


def differing(settings: list[dict[str, Any]]) -> list[str]:
    """Return the keys in which the settings differ, sorted."""
    differing = []
    for key in sorted(set().union(*settings)):
        # The name of the encoding begins every label.
        if key.endswith(("pe.name", "_target_")):
            continue
        # As JSON: lists cannot be in a set, and a missing key is not the same as null.
        values = {json.dumps(setting[key]) for setting in settings if key in setting}
        is_missing = any(key not in setting for setting in settings)
        if len(values) + is_missing > 1:
            differing.append(key)
    return differing


def _with_lines(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the runs that are kept, with `section`, `group` and `line`."""
    rows = rows.join(runs[["section", "group", "label"]], on="path", how="inner")
    # Results of earlier steps, measured during training or before a run was extended, are lines of their own.
    rows["last"] = rows.step == rows.groupby("path").step.transform("max")
    rows["group"] += rows.step.where(~rows["last"], "").astype(str)
    # Before the first step a run has the weights of another model. As that model reads them, or as the only reading
    # there, they are "before", with no more words.
    rows["is_start"] = (rows.step == 0) & ~rows["last"]
    others = rows[rows.is_start & ~rows.own_pe].groupby("path").pe.nunique()
    n_others = rows.path.map(others).fillna(0)
    rows["is_alone"] = rows.is_start & ((n_others == 0) | (~rows.own_pe & (n_others == 1)))
    rows["line"] = [_line(row) for row in rows.itertuples()]
    # Two ways to read the same weights may have the same name so far, and differ in options of the encoding: these are
    # added to the name.
    for (_, name), same_name in rows.groupby(["section", "line"]):
        readings = dict(tuple(same_name.groupby(["group", "pe", "scale"])))
        settings = [flatten({"pe": json.loads(pe)}) for _, pe, _ in readings]
        for reading, label in zip(readings.values(), labelled(settings), strict=True):
            options = label.removeprefix(reading.encoding.iloc[0]).strip()
            rows.loc[reading.index, "line"] = f"{name} {options}".strip()
    return rows


def _line(row: Any) -> str:
    """Name a line: the label of the group, how it is read, and the step unless it is the last."""
    # The variant's own label names the scale only where an encoding has several.
    scale = "" if row.variant == row.encoding else f" at scale {row.scale:g}"
    line = row.label
    if row.is_start:
        line += f" {BEFORE}" if row.is_alone else f" {BEFORE} read as {row.encoding}"
        return line + scale
    if row.zero_shot and not row.own_pe:
        line += f" read as {row.encoding}{scale}"
    elif row.zero_shot:
        line += scale
    elif scale:
        line += f"{scale} (as trained)"
    if not row.last:
        line += f" at step {row.step:,}"
    return line
