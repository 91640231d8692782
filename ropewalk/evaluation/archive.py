"""The results of many runs in one compressed file, small enough for a repository, that a report reads like the runs.

A row of JSON for each run, reading of its weights, part, length and quantity; `pandas.read_json(file, lines=True)` is a
long table. Each row has the sums of every text, so that intervals and paired differences can be computed from it.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import Config, defaults_of
from ropewalk.evaluation.statistics import Sample
from ropewalk.files import write_out

SUFFIX = ".jsonl.gz"
# Places on one machine say nothing about a result.
LOCAL = ("runs_dir", "data.cache_dir")
SAMPLES = ("sample", "optimum_sample")


def write(
    path: Path, runs: Sequence[Mapping[str, Any]], configs: Mapping[str, Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
) -> None:  # fmt: skip
    """Write the rows of complete runs, sums rounded to four digits, without the loss by position, which is the bulk.

    Args:
        runs, configs, results: as `ropewalk.report.frame` reads them.
    """
    complete = {run["path"]: run for run in runs if run["done"]}
    lines = []
    for result in results:
        if result["path"] not in complete or result["kind"] == "by_position":
            continue
        config = {key: value for key, value in configs[result["path"]].items() if key not in LOCAL}
        row = {"name": complete[result["path"]]["name"]} | dict(result) | {"run": complete[result["path"]]}
        row["command"] = re.sub(r" '?(runs_dir|data\.cache_dir)=\S+", "", result["command"])
        for key in SAMPLES:
            sample = result[key]
            if sample is not None:
                row[key] = {"values": np.round(sample.values[0], 4).tolist(), "units": sample.units.tolist()}
        row["run"] = {key: value for key, value in row["run"].items() if key != "path"}
        del row["path"]
        lines.append(json.dumps(row | {"config": config}) + "\n")
    # Without the time, so that equal results are equal files.
    write_out(path, gzip.compress("".join(lines).encode(), mtime=0))


def read(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield each row as a run, its configuration and a result, as they were given to `write`.

    The path of a run is that of the file and the run's name. Options that it is older than have their defaults.
    """
    defaults = defaults_of(Config)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            result = json.loads(line)
            run = result.pop("run")
            config = defaults | result.pop("config")
            result["path"] = run["path"] = f"{path}/{result.pop('name')}"
            result.setdefault("train_len", config["train_len"])  # that of the run, in files that do not say it
            for key in SAMPLES:
                if result[key] is not None:
                    sums = result[key]
                    result[key] = Sample(np.array([sums["values"]], dtype=float), np.array(sums["units"]))
            yield run, config, result
