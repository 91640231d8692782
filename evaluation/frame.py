"""Runs as DataFrames. Runs that differ in nothing but the seed are one group."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from conf.run_dir import FREE, read_config, read_metrics
from conf.schema import ConfigError, flatten
from evaluation import results
from evaluation.results import Evaluation
from model.files import read_json

# Key prefixes in which the runs of a group may differ: they only watch, or say on what machine.
IGNORED = (
    *FREE, "seed", "name", "init_from", "trainer.log_every", "trainer.val_", "trainer.accelerator", "trainer.compile",
)  # fmt: skip


class Runs(NamedTuple):
    """What the run directories in some folders hold."""

    runs: pd.DataFrame
    """A row for each run, by its path: name, seed, encoding, data, train_len, section (title of the data and
    train_len), group, label (of the group), done, config (flat), again every key of it, and training.*."""
    results: pd.DataFrame
    """A row for each run, measure (kind and eval), variant, step, name and length. `line` is the label of a group read
    in one way; `sample` and `gain` are sums for each text (`statistics.Sample`), `value` is the mean."""
    curves: pd.DataFrame
    """The rows of every metrics.jsonl, with the path of the run."""
    left_out: list[tuple[str, str]]
    """What is broken or not finished, and the reason."""


def load(folders: str | Path | Iterable[str | Path]) -> Runs:
    """All runs in or below `folders`. A broken one is left out, whatever is wrong with it.

    Raises:
        ConfigError: a folder does not exist.
    """
    rows, measured, curves, left_out = [], [], [], []
    sizes: dict[Any, np.ndarray] = {}  # of the texts of each measure, which all runs share

    def attempt(path: Path, read: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
        try:
            return list(read(path, *arguments))
        except Exception as error:  # a run of somebody else may be damaged in any way
            left_out.append((readable(path), f"broken: {error}".splitlines()[0]))
            return []

    for path in find([Path(f) for f in ([folders] if isinstance(folders, str | Path) else folders)]):
        for row in attempt(path, _run):
            rows.append(row)
            if not row["done"]:
                left_out.append((row["path"], "not finished"))
            for file in sorted(path.glob("evals/*.json")):
                measured += attempt(file, _measured, row, sizes)
            curves += [{"path": row["path"]} | x for x in attempt(path, read_metrics)]
    runs, twins = _grouped(pd.DataFrame(rows, columns=None if rows else ["path", "seed", "data", "done", "config"]))
    columns = ["path", "line", "encoding"]
    found, steps = (pd.DataFrame(x, columns=None if x else columns) for x in (measured, curves))
    found = found[found.path.isin(runs.index)].reset_index(drop=True)
    return Runs(runs, _with_lines(found, runs) if len(found) else found, steps, sorted(left_out + twins))


def find(folders: Iterable[Path]) -> list[Path]:
    """Every run directory in or below `folders`, once."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{readable(folder)} is not a directory")
        for path in folder.rglob("config.yaml"):
            if not any(part.startswith(".") for part in path.relative_to(folder).parts):
                found.setdefault(path.parent.resolve(), path.parent)
    return sorted(found.values())


def readable(path: str | Path) -> str:
    """A path as text that can be written: names of files need not be UTF-8."""
    return str(path).encode(errors="replace").decode()


def _run(path: Path) -> Iterator[dict[str, Any]]:
    config = flatten(read_config(path))
    for key, kind in {"train_len": int, "pe.name": str, "data.name": str, "seed": int}.items():
        if type(config.get(key)) is not kind or config["train_len"] < 1:
            raise ValueError(f"config.yaml has no valid {key}")
    done = (path / "training.json").exists()
    training = read_json(path / "training.json") if done else {}
    yield {
        "path": readable(path), "name": readable(path.name), "seed": config["seed"], "encoding": config["pe.name"],
        "data": config["data.name"], "train_len": config["train_len"], "done": done, "config": config,
        "identity": json.dumps(read_json(path / "data.json"), sort_keys=True), "more": flatten({"training": training}),
    }  # fmt: skip


def _measured(file: Path, run: Mapping[str, Any], sizes: dict[Any, np.ndarray]) -> Iterator[dict[str, Any]]:
    e = Evaluation.load(file)
    if e.train_len != run["train_len"] or not isinstance(e.variant.pe["name"], str):
        raise ValueError("train_len is not that of config.yaml, or the encoding has no name")
    settings, pe = (json.dumps(x, sort_keys=True) for x in (e.eval, e.variant.pe))
    trained = {k: v for k, v in run["config"].items() if k.startswith("pe.")} == flatten({"pe": e.variant.pe})
    common = {
        "path": run["path"], "file": readable(file.name), "seed": run["seed"], "kind": e.kind, "task": e.task or "",
        "eval": settings, "step": e.step, "variant": e.variant.label, "encoding": e.variant.pe["name"], "pe": pe,
        "own_pe": trained, "scale": e.variant.scale, "zero_shot": e.variant.zero_shot, "unit": results.unit(e),
        "skipped": tuple(e.skipped), "provenance": e.provenance.model_dump(),
    }  # fmt: skip
    for m in e.measured:
        sample = results.sample([e], m.name, m.length)
        if not np.array_equal(sizes.setdefault((e.kind, settings, m.name, m.length), sample.units), sample.units):
            raise ValueError(f"{m.name} at {m.length} was measured on other texts than its settings say")
        if sample.units.sum() > 0 and 0 < m.length < 2**31:
            gain = results.sample([e], m.name, m.length, gain=True)
            value = sample.values.sum() / sample.units.sum()
            yield common | {"name": m.name, "length": m.length, "value": value, "sample": sample, "gain": gain}


def _grouped(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """The runs with section, group and label; and those that repeat another run."""

    def training(config: Mapping[str, Any]) -> str:
        return json.dumps({k: v for k, v in config.items() if not k.startswith(IGNORED)}, sort_keys=True, default=str)

    if runs.empty:
        return runs.set_index("path").assign(name="", section="", label="", encoding=""), []
    several = runs.groupby("data").identity.transform("nunique") > 1
    digest = runs.identity.map(lambda x: f" ({sha256(x.encode()).hexdigest()[:6]})").where(several, "")
    runs["section"] = runs.data + digest + runs.train_len.map(", trained at {:,} tokens".format)
    runs["key"] = runs.config.map(training)
    # Seeds may share the weights that they start from, or each has its own, with the seed in the name.
    parent = runs.config.map(lambda config: str(config.get("init_from")))
    shared = runs.groupby(["key", parent]).seed.transform("nunique") > 1
    own = pd.Series([without_seed(p, seed) for p, seed in zip(parent, runs.seed, strict=True)], index=runs.index)
    runs["init"] = parent.where(shared, own)
    runs["group"] = runs.key + runs.init
    runs = runs.sort_values(["section", "seed", "done", "path"], ascending=[True, True, False, True])
    keys = ["section", "group", "seed"]
    twin, first = runs.duplicated(keys), runs.groupby(keys).path.transform("first")
    twins = list(zip(runs.path[twin], "the same, with the seed, as " + first[twin], strict=True))
    runs = runs[~twin].set_index("path")
    for _, part in runs.groupby("section"):
        groups = part.drop_duplicates("group")
        settings = [json.loads(key) | {"init_from": init} for key, init in zip(groups.key, groups.init, strict=True)]
        labels = dict(zip(groups.group, labelled(settings), strict=True))
        runs.loc[part.index, "label"] = part.group.map(labels)
    flat = pd.DataFrame([config | more for config, more in zip(runs.config, runs.more, strict=True)], index=runs.index)
    runs = runs.drop(columns=["more", "key", "init", "identity"])
    return runs.join(flat.drop(columns=[c for c in flat if c in runs])), twins


def without_seed(name: str, seed: int) -> str:
    """`name` without the seed, wherever it has it: "rope-s1", "s1/rope", "rope_seed=1_long" or "rope-1-long"."""
    marked = re.sub(rf"[-_.]?(?<![A-Za-z0-9])(s|seed[-_=]?){seed}(?![0-9])", "", name)
    return marked if marked != name else re.sub(rf"[-_.]?(?<![A-Za-z0-9]){seed}(?![A-Za-z0-9])", "", name)


def labelled(settings: list[dict[str, Any]]) -> list[str]:
    """A label for each of several settings: the encoding, and in what they differ; options of an encoding are compared
    with others of the same encoding only."""

    def differing(own: list[dict[str, Any]]) -> list[str]:
        keys = sorted({key for s in own for key in s if not key.endswith(("pe.name", "_target_"))})
        return [key for key in keys if len({json.dumps(s.get(key)) for s in own}) > 1]

    alike = defaultdict(list)
    for s in settings:
        alike[s["pe.name"]].append(s)
    options = {name: [k for k in differing(own) if k.startswith("pe.")] for name, own in alike.items()}
    general, labels = [k for k in differing(settings) if not k.startswith("pe.")], []
    for s in settings:
        keys = options[s["pe.name"]] + general
        words = [f"{k.removeprefix('pe.').removeprefix('trainer.')} {s.get(k)}" for k in keys]
        labels.append(s["pe.name"] + (f" ({', '.join(words)})" if words else ""))
    return labels


def _with_lines(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The results with `section`, `group`, `trained` (label of the group) and `line`."""
    rows = rows.join(runs[["section", "group", "label"]].rename(columns={"label": "trained"}), on="path")
    last = rows.step == rows.groupby("path").step.transform("max")

    def label(r: Any) -> str:
        scale = r.variant.removeprefix(r.encoding)
        as_trained = f"{scale} (as trained)" if scale else ""
        words = as_trained if not r.zero_shot else scale if r.own_pe else f" read as {r.variant}"
        return r.trained + words + ("" if last[r.Index] else f", step {r.step:,}")

    rows["line"] = [label(r) for r in rows.itertuples()]
    rows["group"] += rows.step.where(~last, "").astype(str)
    for (_, line), same in rows.groupby(["section", "line"]):
        ways = dict(tuple(same.groupby(["group", "pe", "scale"])))
        options = [flatten({"pe": json.loads(pe)}) for _, pe, _ in ways]
        for (_, way), words in zip(ways.items(), labelled(options) if len(ways) > 1 else (), strict=False):
            rows.loc[way.index, "line"] = f"{line} {words.removeprefix(way.encoding.iloc[0]).strip()}".strip()
    return rows
