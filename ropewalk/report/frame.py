"""Runs as DataFrames. Runs that differ in nothing but the seed are one group."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from conf.errors import ConfigError, flatten
from conf.files import printable, read_json
from conf.schema import Optim
from ropewalk.evaluation import archive
from ropewalk.evaluation.results import Evaluation, result_files
from ropewalk.run.directory import EARLIER_STEPS, FREE, MADE_OF, read_config, read_metrics, read_training
from ropewalk.training.optimizer import learning_rate

BEFORE, AFTER = "before training", "after training"  # readings of a run that starts from a model
START = "model before "  # begins the name of the line of that model, which ends with the label of the run
# Key prefixes in which the runs of a group may differ: they only observe the training, or depend on the machine. A
# tokenizer is part of the identity of the data, and seeds that start from runs of their own have it from there. Only
# older runs have `overwrite`.
IGNORED = (
    *FREE, "overwrite", "dry_run", "seed", "name", "init_from", MADE_OF, "data.tokenizer", "trainer.log_every",
    "trainer.val_", "trainer.accelerator", "trainer.compile", "trainer.kernels", "training.",
)  # fmt: skip
BROKEN = "broken: "  # begins the reason why something is left out that should be there
PROVENANCE = ["command", "commit", "dirty", "diff_sha256", "device", "precision", "torch", "processor"]
# What training.json records of a run; NaN where it has none.
COSTS = {
    "parameters": "training.parameters.total",
    "tokens_per_s": "training.tokens_per_s",
    "peak_memory_mb": "training.peak_memory_mb",
}
RUN_COLUMNS = [
    "name", "seed", "encoding", "data", "train_len", "section", "group", "label", "settings", "unlike", "done",
    "identity", "config", *COSTS,
]  # fmt: skip
RESULT_COLUMNS = [
    "path", "file", "seed", "train_len", "section", "group", "line", "kind", "task", "difficulty", "depth",
    "span_start", "span_end", "continuation", "part", "length", "quantity", "unit", "value", "optimum", "texts",
    "documents", "step", "reading", "variant", "encoding", "pe", "scale", "own_pe", "zero_shot", "skipped", "eval",
    *PROVENANCE, "sample", "optimum_sample",
]  # fmt: skip
LeftOut = list[tuple[str, str]]  # paths, and the reason of each


class Runs(NamedTuple):
    """The run directories in some folders.

    The cells of both tables are plain numbers and strings, but for configurations and samples.
    """

    # A row for each run, indexed by its path: RUN_COLUMNS. `section` is the title of the data and training lengths,
    # `label` that of the group, and `settings` the options in which it differs from others of its encoding, or but for
    # the encoding's own from any other; the latter are also in `unlike`, as JSON. `config` is its flat configuration,
    # with training.*.
    runs: pd.DataFrame
    # The long table, RESULT_COLUMNS: a row for each run, measure (kind and eval), variant, step, part, length and
    # quantity. `line` is the label of a group with the `reading` of its weights, `part` the label of task, difficulty,
    # depth and span, `value` the mean over `texts` texts from so many `documents`, `optimum` that of the best possible
    # predictor (NaN if it is not known). The last two columns have the sums for each text, a Sample, and those of that
    # predictor.
    results: pd.DataFrame
    # The path of each run that is broken, unfinished or there twice, and the reason.
    left_out: LeftOut


def load(folders: str | Path | Iterable[str | Path], only: Sequence[str] = (), exclude: Sequence[str] = ()) -> Runs:
    """Read all runs in or below `folders`. A run that is broken in any way is left out.

    Args:
        folders: also files that `archive.write` makes.
        only: patterns of names, as in "rope-*"; none: all runs.
        exclude: patterns of names that are passed over.

    Raises ConfigError: a folder does not exist.
    """
    is_chosen = partial(_is_chosen, only=only, exclude=exclude)
    places = list(dict.fromkeys(map(Path, [folders] if isinstance(folders, str | Path) else folders)))
    archives = [place for place in places if place.name.endswith(archive.SUFFIX) and place.is_file()]
    directories = _find([place for place in places if place not in archives])
    chosen = [path for path in directories if is_chosen(printable(path.name))]
    runs = [pd.DataFrame(columns=["path", *RUN_COLUMNS])]
    results = [pd.DataFrame(columns=RESULT_COLUMNS)]
    left_out: LeftOut = []
    for path in [*chosen, *archives]:
        with attempt(path, left_out):
            rows, measured = archive.read(path) if path in archives else _read(path, left_out)
            # All settings that decide what is computed: runs for which they are equal are seeds of one line.
            rows["key"] = [json.dumps(compared(config), sort_keys=True) for config in rows.config]
            rows = rows[rows["name"].map(is_chosen)]
            runs.append(rows)
            results.append(measured[measured.path.isin(rows.path)])
    # Labels name the differences between runs, so all runs must have been read.
    of_all = _on_equal_texts(_concatenated(results), left_out)
    grouped = _grouped(_concatenated(runs), of_all, left_out)
    return Runs(grouped, _with_lines(of_all, grouped), sorted(left_out))


def _is_chosen(name: str, only: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether a name fits the patterns of `load`."""
    is_wanted = not only or any(fnmatchcase(name, pattern) for pattern in only)
    return is_wanted and not any(fnmatchcase(name, pattern) for pattern in exclude)


def _concatenated(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all tables; if there are none, the columns of the first."""
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


@contextmanager
def attempt(what: object, left_out: LeftOut) -> Iterator[None]:
    """Note why `what` is left out if an error is raised: the rest of a report stands, whatever is wrong with it."""
    try:
        yield
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        left_out.append((printable(what), printable(BROKEN + reason)))


def curves(runs: Runs) -> pd.DataFrame:
    """Return the rows of metrics.jsonl of all runs, with the run, its section and label.

    A file that is damaged is added to `runs.left_out`: the results of its run stand for themselves.
    """
    about = runs.runs[["name", "seed", "encoding", "data", "train_len", "section", "label"]]
    rows: list[dict[str, Any]] = []
    for path, of_run in about.to_dict("index").items():
        file = Path(path) / "metrics.jsonl"
        with attempt(file, runs.left_out):
            of_file = list(read_metrics(Path(path))) if file.exists() else []  # runs in an archive have none
            rows += [{"path": path} | of_run | row for row in of_file]
    # A table has its columns, also if no run has a curve.
    return pd.DataFrame(rows, columns=None if rows else ["path", *about, "step", "tokens"])


def _find(folders: Iterable[Path]) -> list[Path]:
    """Return every run directory in or below `folders`, without hidden ones."""
    # Folders may contain each other, or link to each other: each run counts once.
    by_place: dict[Path, Path] = {}  # {the directory itself: how it was reached}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{printable(folder)} is not a directory")
        for file in folder.rglob("config.yaml"):
            parts = file.relative_to(folder).parts
            # Online wandb writes a config.yaml of its own, in a folder within the run's.
            if not any(name.startswith(".") for name in parts) and "wandb" not in parts[:-2]:
                by_place[file.parent.resolve()] = file.parent
    return sorted(by_place.values())


def _read(path: Path, left_out: LeftOut) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the row of a run directory, and those of its results; files that are damaged are left out."""
    trained = (path / "training.json").exists()
    values = read_config(path)
    if trained:
        values |= {"training": read_training(path)}
    config = flatten(values)
    identity = read_json(path / "data.json")
    other_rates = _other_rates(values, identity.pop(EARLIER_STEPS, []))
    if other_rates:
        config[EARLIER_STEPS] = other_rates
    if MADE_OF in identity:  # runs on the same data are compared, whatever they start from
        config[MADE_OF] = identity.pop(MADE_OF)
    # Everything below groups and sorts by these, too: one of another type would fail far from its file.
    wrong = [key for key in ("pe.name", "data.name") if not isinstance(config.get(key), str)]
    if wrong:
        raise ValueError(f"config.yaml has no valid {' or '.join(wrong)}")
    run = {
        "path": printable(path),
        "name": printable(path.name),
        "seed": config["seed"],
        "encoding": config["pe.name"],
        "data": config["data.name"],
        "train_len": config["train_len"],
        "done": trained or config["trainer.max_steps"] == 0,  # a model of transformers as it is has no steps
        "identity": json.dumps(identity, sort_keys=True),
        "config": config,
    }
    for cost, key in COSTS.items():
        value = config.get(key)
        run[cost] = float(value) if isinstance(value, int | float) else math.nan
    results: list[dict[str, Any]] = []
    for file in result_files(path):
        with attempt(file, left_out):
            results += _results(file, run, values["pe"])
    return pd.DataFrame([run]), pd.DataFrame(results, columns=None if results else RESULT_COLUMNS)


def _other_rates(values: Mapping[str, Any], earlier: Iterable[tuple[int, int]]) -> str:
    """Return those earlier max_steps with which a run was trained at other rates than its last number of steps gives.

    Args:
        values: its configuration.
        earlier: see EARLIER_STEPS.
    """

    def rate(max_steps: int, step: int) -> float:
        return learning_rate(step - 1, Optim(**values["optim"]), max_steps)

    # Rates that differ at all, differ at the last step.
    differ = [old for old, last in earlier if rate(old, last) != rate(values["trainer"]["max_steps"], last)]
    return ", ".join(map(str, differ))


def _results(file: Path, run: Mapping[str, Any], trained_pe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one results file of a run with this encoding. Raises ValueError: they do not go together."""
    e = Evaluation.load(file)
    # Before the first step the weights are those of another model, which has a training length of its own.
    if (e.step and e.train_len != run["train_len"]) or not isinstance(e.variant.pe["name"], str):
        raise ValueError("train_len is not that of config.yaml, or the encoding has no name")
    of_file = e.provenance | {
        "path": run["path"],
        "file": printable(file.name),
        "seed": run["seed"],
        "kind": e.kind,
        "eval": json.dumps(e.eval, sort_keys=True),
        "step": e.step,
        "train_len": e.train_len,
        "variant": e.variant.label,
        "encoding": e.variant.pe["name"],
        "pe": json.dumps(e.variant.pe, sort_keys=True),
        "own_pe": e.variant.pe == trained_pe,
        "scale": e.variant.scale,
        "zero_shot": e.variant.zero_shot,
        "skipped": bool(e.skipped),
    }
    return [of_file | row for row in e.numbers()]


def _on_equal_texts(results: pd.DataFrame, left_out: LeftOut) -> pd.DataFrame:
    """Return the rows without those of files with other texts than most have that were read with their settings.

    Runs are compared text by text, and equal settings promise equal texts. Of as many the first are right.
    """
    # Sums over other documents could have equal sizes by chance, so the documents are compared as well. Rows of files
    # of many runs do not name them.
    texts = {"quantity": results["sample"].map(lambda sample: hash(sample.units.tobytes()))}
    if "grouping" in results:
        texts["kind"] = results.grouping.dropna().map(hash).reindex(results.index)
    is_odd = pd.Series(False, results.index)
    for by, found in texts.items():
        keys = [results[name] for name in ("kind", "eval", "part", "length", by)]
        votes = found.groupby([*keys, found]).transform("size")
        most_first = found[votes.sort_values(ascending=False, kind="stable").index]
        expected = most_first.groupby(keys).transform("first").reindex(results.index)
        is_odd |= found.notna() & (found != expected)
    files = results.path + "/evals/" + results.file
    for row in results[is_odd].drop_duplicates(["path", "file"]).itertuples():
        reason = f"{BROKEN}{row.part} at {row.length} was measured on other texts or documents than its settings say"
        left_out.append((files[row.Index], reason))
    return results[~files.isin(files[is_odd])]


def _grouped(runs: pd.DataFrame, results: pd.DataFrame, left_out: LeftOut) -> pd.DataFrame:
    """Return the runs with section, group and label. Those that repeat another or are not finished are `left_out`."""
    if runs.empty:
        return runs.set_index("path")
    # A hash tells apart different data of the same name.
    hashes = runs.identity.map(lambda identity: f" ({sha256(identity.encode()).hexdigest()[:6]})")
    is_ambiguous = runs.groupby("data").identity.transform("nunique") > 1
    # Runs that stand together may have several training lengths.
    lengths = runs.groupby(_together(runs, results)).train_len.transform(
        lambda of_section: " and ".join(f"{length:,}" for length in sorted(of_section.unique()))
    )
    runs["section"] = runs.data + hashes.where(is_ambiguous, "") + ", trained at " + lengths + " tokens"
    runs["init"] = _starting_weights(runs)
    runs["group"] = runs.key + runs.init

    # Of runs with the same settings and seed the first is kept; complete runs come first, and those with most results.
    runs["results"] = runs.path.map(results.path.value_counts()).fillna(0)
    order = ["section", "seed", "done", "results", "path"]
    runs = runs.sort_values(order, ascending=[True, True, False, False, True])
    repeated = runs.duplicated(["section", "group", "seed"])
    left_out += [(path, "another run has the same settings and seed") for path in runs.path[repeated]]
    left_out += [(path, "not finished") for path in runs.path[~runs.done.astype(bool)]]
    runs = runs[~repeated].set_index("path")
    # Only runs in one section are shown together, so labels need not tell others apart.
    for _, of_section in runs.groupby("section"):
        groups = _labelled(of_section.drop_duplicates("group").set_index("group"))
        for column in ("label", "settings", "unlike"):
            runs.loc[of_section.index, column] = of_section.group.map(groups[column])
    return runs[RUN_COLUMNS]


def _starting_weights(runs: pd.DataFrame) -> pd.Series:
    """Return the names of the weights that runs start from, without the seed where each seed has its own.

    A hash tells apart different weights of one name.
    """
    init = runs.config.map(lambda config: str(config.get("init_from")))
    # Seeds may share the weights that they start from. Or each has its own, named as in "rope-s1": then the seed is
    # taken out of the name. A number in a name may mean something else. It is the seed only if runs of other seeds have
    # equal names without it, and no other seed has the same name with it.
    is_shared = runs.groupby(["key", init]).seed.transform("nunique") > 1
    weights = init
    for place in ("", "(?=[^/]*$)"):  # anywhere, or only in the last part of a path: a folder may be called exp-1
        pattern = rf"(-s)?(?<!\d){{}}(?!\d){place}"
        without_seed = pd.Series(
            [re.sub(pattern.format(seed), "", name) for seed, name in zip(runs.seed, init, strict=True)], runs.index
        )
        is_equal_without = runs.groupby(["key", without_seed]).seed.transform("nunique") > 1
        weights = weights.mask(is_equal_without & ~is_shared, without_seed)
    # A run that was trained on between two others has its name, and other weights. The hash of a model of transformers
    # is of the times of its files.
    made_of = runs.config.map(lambda config: config.get(MADE_OF))
    has_changed = (made_of.groupby(init).transform("nunique") > 1) & ~init.str.startswith("hf:")
    return weights.mask(has_changed, weights + " (" + made_of.astype(str).str[:6] + ")")


def _labelled(groups: pd.DataFrame) -> pd.DataFrame:
    """Return `groups`, the first run of each, with what its settings differ in, in words, and a label of its own."""
    settings = []
    for row in groups.itertuples():
        others = {"init_from": row.init, EARLIER_STEPS: row.config.get(EARLIER_STEPS)}
        settings.append(compared(row.config) | others)
    differences = differing(settings)
    words = pd.Series(list(map(in_words, groups.encoding, differences)), groups.index)
    # The name of the run labels what differs in several options, or in what two groups share.
    names = [run.name.removesuffix(f"-s{run.seed}") for run in groups.itertuples()]
    is_named = words.duplicated(keep=False) | np.array([len(differs) > 1 for differs in differences])
    labels = words.mask(is_named, names)
    # Directories in different folders may have one name.
    number = labels.groupby(labels).cumcount() + 1
    groups["label"] = labels.where(number == 1, labels + " [" + number.astype(str) + "]")
    # The rest of the training may also differ from that of other encodings. No label says so: it would be too long.
    unlike = not_alike(settings)
    groups["unlike"] = list(map(json.dumps, unlike))
    all_differences = [differs | others for differs, others in zip(differences, unlike, strict=True)]
    groups["settings"] = list(map(in_words, groups.encoding, all_differences))
    return groups


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide what is computed: those of the runs of a group are equal."""
    return {key: value for key, value in config.items() if not key.startswith(IGNORED)}


def _together(runs: pd.DataFrame, results: pd.DataFrame) -> pd.Series:
    """Return the shortest training length of the runs that each run stands with, and its data.

    They share training length or texts, directly or through others.
    """
    texts = results.loc[results.kind == "lengths", ["path", "eval"]].drop_duplicates()
    shared = runs[["path", "identity", "train_len"]].merge(texts, "left")
    shared["eval"] = shared["eval"].fillna("none " + shared.train_len.astype(str))  # of a run without results
    shortest = shared.train_len
    for _ in shared.train_len.unique():
        for by in ("eval", "train_len"):
            shortest = shortest.groupby([shared.identity, shared[by]]).transform("min")
    of_path = shortest.groupby(shared.path).min()
    return runs.identity + runs.path.map(of_path).astype(str)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options in which each of several settings differs from others of its encoding, sorted by name."""
    # As JSON: lists have no hash, and a missing key is not the same as null.
    words = pd.DataFrame(settings, dtype=object).map(json.dumps)
    differs = words.groupby("pe.name").transform("nunique", dropna=False) > 1
    # The name of the encoding begins every label.
    keys = [key for key in sorted(differs) if not key.endswith(("pe.name", "_target_"))]
    result = []
    for setting, is_named in zip(settings, differs[keys].to_numpy(), strict=True):
        result.append({key: setting.get(key) for key in itertools.compress(keys, is_named)})
    return result


def not_alike(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return of each of several settings the options in which some differ that are no part of the encoding.

    What some do not have, such as older ones, is no difference.
    """
    keys = []
    for key in sorted(set().union(*settings)):
        values = {json.dumps(setting[key]) for setting in settings if key in setting}
        if len(values) > 1 and not key.startswith(("pe.", "data.files", "data._target_")):  # the data are the same
            keys.append(key)
    return [{key: setting[key] for key in keys if key in setting} for setting in settings]


def in_words(name: str, options: Mapping[str, Any]) -> str:
    """Return a name with options, as in "yarn (ramp paper)"."""
    # What a run does not set is no difference to name.
    words = []
    for key, value in options.items():
        if value not in (None, "None"):
            words.append(f"{key.removeprefix('pe.').removeprefix('trainer.')} {value}")
    # The name of a reading may be empty.
    return f"{name} ({', '.join(words)})".strip() if words else name


def _with_lines(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the runs that are kept, with `section`, `group`, `reading` and `line`."""
    rows = rows[rows.path.isin(runs.index)]
    if rows.empty:
        return pd.DataFrame(columns=RESULT_COLUMNS)
    rows = rows.join(runs[["section", "group", "label", "done"]], on="path")
    rows[PROVENANCE] = rows.reindex(columns=PROVENANCE).fillna("").astype(str)  # older files lack some
    # Results of earlier steps, measured during training or before a run was extended, are lines of their own. So are
    # all of a run that is not finished: it is no seed of the runs that are.
    rows["last"] = rows.done.astype(bool) & (rows.step == rows.groupby("path").step.transform("max"))
    rows["group"] += rows.step.where(~rows["last"], "").astype(str)
    # Before the first step a run has the weights of another model, and its line is one of START. Where that model has
    # another encoding there may be two such lines: BEFORE is how the model reads its weights, and the other names the
    # run's own encoding, which reads them too.
    rows["is_start"] = (rows.step == 0) & ~rows["last"]
    read_otherwise = rows.path[rows.is_start & ~rows.own_pe]
    rows["is_own_start"] = rows.is_start & rows.own_pe & rows.path.isin(read_otherwise)
    rows["reading"] = list(map(_reading, rows.itertuples()))
    # Two ways to read the same weights may have the same name so far, and differ in options of the encoding: these are
    # added to the name.
    for (_, _, name), same_name in rows.groupby(["section", "label", "reading"]):
        readings = dict(tuple(same_name.groupby(["group", "pe", "scale"])))
        if len(readings) == 1:
            continue
        differences = differing([flatten({"pe": json.loads(pe)}) for _, pe, _ in readings])
        for reading, differs in zip(readings.values(), differences, strict=True):
            rows.loc[reading.index, "reading"] = in_words(name, differs)
    # A line is named by its label and reading. START says at the front what BEFORE says in the reading.
    of_label = rows.label + " " + rows.reading
    of_start = START + rows.label + rows.reading.str.removeprefix(BEFORE)
    rows["line"] = of_label.mask(rows.is_start, of_start).str.strip()
    return rows[RESULT_COLUMNS]


def _reading(row: Any) -> str:
    """Say how the weights of a row are read, and at which step; nothing for the last, read as trained."""
    # The variant's own label names the scale only where an encoding has several.
    has_scale = row.variant != row.encoding
    words = {
        BEFORE: row.is_start,
        f"read as {row.encoding}": row.is_own_start or (row.zero_shot and not row.own_pe and not row.is_start),
        f"at scale {row.scale:g}": has_scale and row.scale < math.inf,
        "extended": has_scale and row.scale == math.inf,  # by a training-free extension, to any length
        "(as trained)": has_scale and not row.zero_shot and not row.is_start,
        f"at step {row.step:,}": not row.last and not row.is_start,
    }
    return " ".join(word for word, is_said in words.items() if is_said)
