"""Runs as DataFrames. Runs that differ in nothing but the seed are one group."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from app.run_dir import FREE, read_config, read_training
from common.files import read_json
from conf.schema import ConfigError, flatten
from evaluation.results import Evaluation
from evaluation.statistics import Sample

# Key prefixes in which the runs of a group may differ: they only watch, or say on what machine.
IGNORED = (
    *FREE, "seed", "name", "init_from", "trainer.log_every", "trainer.val_", "trainer.accelerator", "trainer.compile",
    "training.",
)  # fmt: skip


class Runs(NamedTuple):
    """What the run directories in some folders hold."""

    runs: pd.DataFrame
    """A row for each run, by its path: name, seed, encoding, data, train_len, section (title of the data and
    train_len), group, label (of the group), done, and config (flat, with training.*)."""
    results: pd.DataFrame
    """A row for each run, measure (kind and eval), variant, step, name and length. `line` is the label of a group read
    in one way; `sample` and `gain` are sums for each text (`statistics.Sample`), `value` is the mean. Of RULER there is
    one name more, first: the mean of all tasks."""
    left_out: list[tuple[str, str]]  # what is broken, not finished or there twice, and the reason


def load(folders: str | Path | Iterable[str | Path]) -> Runs:
    """All runs in or below `folders`; ConfigError if one does not exist. One that is broken in any way is left out."""
    rows: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    left_out: list[tuple[str, str]] = []
    sizes: dict[Any, np.ndarray] = {}  # of the texts of each measure, which all runs share

    @contextmanager
    def attempt(path: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a run of somebody else may be damaged in any way
            left_out.append((readable(path), readable(f"broken: {error}".splitlines()[0])))

    for path in _find([folders] if isinstance(folders, str | Path) else folders):
        with attempt(path):
            run = _run(path)
            rows.append(run)
            left_out += [] if run["done"] else [(run["path"], "not finished")]
            for file in sorted(path.glob("evals/*.json")):
                with attempt(file):
                    measured += list(_measured(file, run, sizes))
    empty = pd.DataFrame(columns=["path", "name", "encoding", "section", "label", "line", "config"])
    if not rows:
        return Runs(empty, empty, sorted(left_out))
    runs, twins = _grouped(pd.DataFrame(rows))
    results = _with_lines(pd.DataFrame(measured), runs) if measured else empty
    return Runs(runs, results, sorted(left_out + twins))


def _find(folders: Iterable[str | Path]) -> list[Path]:
    """Every run directory in or below `folders`, once; none that is hidden."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ConfigError(f"{readable(folder)} is not a directory")
        paths = (path.parent for path in folder.rglob("config.yaml"))
        found |= {p.resolve(): p for p in paths if not any(x.startswith(".") for x in p.relative_to(folder).parts)}
    return sorted(found.values())


def readable(path: str | Path) -> str:
    """A path, or what names one, as text that can be written: names of files need not be UTF-8."""
    return str(path).encode(errors="replace").decode()


def _run(path: Path) -> dict[str, Any]:
    trained = (path / "training.json").exists()
    config = flatten(read_config(path) | ({"training": read_training(path).model_dump()} if trained else {}))
    done = trained or config["trainer.max_steps"] == 0  # a model of transformers as it is
    for key, kind in {"train_len": int, "pe.name": str, "data.name": str, "seed": int}.items():
        if type(config.get(key)) is not kind or config["train_len"] < 1:
            raise ValueError(f"config.yaml has no valid {key}")
    return {
        "path": readable(path), "name": readable(path.name), "seed": config["seed"], "encoding": config["pe.name"],
        "data": config["data.name"], "train_len": config["train_len"], "done": done, "config": config,
        "identity": json.dumps(read_json(path / "data.json"), sort_keys=True),
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
        "own_pe": trained, "scale": e.variant.scale, "zero_shot": e.variant.zero_shot, "unit": e.unit,
        "skipped": bool(e.skipped), "provenance": e.provenance,
    }  # fmt: skip
    samples = [(m.name, m.length, e.sample(m), e.sample(m, gain=True)) for m in e.measured]
    for name, length, sample, gain in [*_over_tasks(samples), *samples] if e.kind == "ruler" else samples:
        if not np.array_equal(sizes.setdefault((e.kind, settings, name, length), sample.units), sample.units):
            raise ValueError(f"{name} at {length} was measured on other texts than its settings say")
        if sample.units.sum() > 0:
            found = {"value": sample.values.sum() / sample.units.sum(), "sample": sample, "gain": gain}
            yield common | {"name": name, "length": length} | found


def _over_tasks(samples: list[tuple[str, int, Sample, Sample]]) -> Iterator[tuple[str, int, Sample, Sample]]:
    """Of RULER, at each length: the mean over the tasks, of each over its depths, text by text."""
    by_length: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for name, length, sample, gain in samples:
        by_length[length][name.split()[0]].append([sample.values, gain.values])
    for length, tasks in by_length.items():
        values, gains = np.mean([np.mean(depths, axis=0) for depths in tasks.values()], axis=0)  # [1, T] each
        yield "mean", length, Sample(values, np.ones(values.size)), Sample(gains, np.ones(values.size))


def _grouped(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """The runs with section, group and label; and those that repeat another run."""
    several = runs.groupby("data").identity.transform("nunique") > 1
    digest = runs.identity.map(lambda x: f" ({sha256(x.encode()).hexdigest()[:6]})").where(several, "")
    runs["section"] = runs.data + digest + runs.train_len.map(", trained at {:,} tokens".format)
    kept = [{k: v for k, v in config.items() if not k.startswith(IGNORED)} for config in runs.config]
    runs["key"] = [json.dumps(config, sort_keys=True) for config in kept]
    runs["init"] = [str(config.get("init_from")) for config in runs.config]
    # Seeds may share the weights that they start from. Or each has its own, named as "rope-s1": the seed is taken out.
    runs["own"] = [re.sub(rf"(-s)?(?<!\d){r.seed}(?!\d)", "", r.init) for r in runs.itertuples()]
    shared, own = (runs.groupby(["key", name]).seed.transform("nunique") > 1 for name in ("init", "own"))
    runs["init"] = runs.own.where(own & ~shared, runs.init)
    runs["group"] = runs.key + runs.init
    runs = runs.sort_values(["section", "seed", "done", "path"], ascending=[True, True, False, True])
    keys = ["section", "group", "seed"]
    twins = [(path, "another run has the same settings and seed") for path in runs.path[runs.duplicated(keys)]]
    runs = runs.drop_duplicates(keys).set_index("path")
    for _, part in runs.groupby("section"):
        groups = part.drop_duplicates("group")
        labels = labelled([json.loads(r.key) | {"init_from": r.init} for r in groups.itertuples()])
        runs.loc[part.index, "label"] = part.group.map(dict(zip(groups.group, labels, strict=True)))
    return runs, twins


def labelled(settings: list[dict[str, Any]]) -> list[str]:
    """A label for each of several settings: the encoding, and in what they differ; options of an encoding only from
    others of the same encoding."""

    def differing(own: list[dict[str, Any]]) -> list[str]:
        keys = sorted({key for s in own for key in s if not key.endswith(("pe.name", "_target_"))})
        return [key for key in keys if len({json.dumps(s[key]) if key in s else None for s in own}) > 1]

    general = [key for key in differing(settings) if not key.startswith("pe.")]
    labels = []
    for s in settings:
        of_same = differing([other for other in settings if other["pe.name"] == s["pe.name"]])
        keys = [key for key in of_same if key.startswith("pe.")] + general
        words = [f"{key.removeprefix('pe.').removeprefix('trainer.')} {s.get(key)}" for key in keys]
        labels.append(s["pe.name"] + (f" ({', '.join(words)})" if words else ""))
    return labels


def _with_lines(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The results with `section`, `group`, and `line`."""
    rows = rows.join(runs[["section", "group", "label"]], on="path", how="inner")
    last = rows.step == rows.groupby("path").step.transform("max")
    rows["group"] += rows.step.where(~last, "").astype(str)

    def line(r: Any) -> str:
        scale = "" if r.variant == r.encoding else f" at scale {r.scale:g}"
        if not r.zero_shot:
            words = f"{scale} (as trained)" if scale else ""
        else:
            words = scale if r.own_pe else f" read as {r.encoding}{scale}"
        return r.label + words + ("" if last[r.Index] else f" at step {r.step:,}")

    rows["line"] = [line(r) for r in rows.itertuples()]
    for (_, name), same in rows.groupby(["section", "line"]):  # other ways to read, by options that no label has named
        ways = dict(tuple(same.groupby(["group", "pe", "scale"])))
        labels = labelled([flatten({"pe": json.loads(pe)}) for _, pe, _ in ways])
        for way, label in zip(ways.values(), labels, strict=True):
            rows.loc[way.index, "line"] = f"{name} {label.removeprefix(way.encoding.iloc[0]).strip()}".strip()
    return rows
