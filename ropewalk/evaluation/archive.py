"""The results of many runs in one compressed file, small enough for a repository, that a report reads like the runs.

A row of JSON for each run, reading of its weights, part, length and quantity; `pandas.read_json(file, lines=True)` is a
long table. Each row has the sums of every text, so that intervals and paired differences can be computed from it.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, Json, create_model

from conf.errors import ConfigError
from conf.files import write_bytes
from ropewalk.evaluation.statistics import Sample

SUFFIX = ".jsonl.gz"
# Places on one machine say nothing about a result.
LOCAL = ("runs_dir", "data.cache_dir")
MADE = ["section", "group", "label", "settings", "line", "reading"]  # by comparing all runs that are read
SAMPLES = ("sample", "optimum_sample")
LARGEST = 2**28  # bytes of a file, uncompressed
Length = Annotated[int, Field(ge=1)]


def _schema(types: Mapping[Any, Sequence[str]]) -> type[BaseModel]:
    """Return a schema of the columns, {type: names}, that tables group, sort and compute by.

    With a value of another type a table would fail, far from its file.
    """
    fields: dict[str, Any] = {name: (kind, ...) for kind, names in types.items() for name in names}
    return create_model("Row", **fields)


RUN = _schema({str: ("name", "encoding", "data", "identity"), int: ("seed",), Length: ("train_len",), bool: ("done",)})
RESULT = _schema(
    {
        str: (
            "file", "kind", "variant", "encoding", "task", "difficulty", "continuation", "part", "quantity", "unit",
            "command",
        ),
        Json[dict[str, Any]]: ("eval", "pe"),
        int: ("seed", "step", "texts", "documents"),
        Length: ("train_len", "length"),
        float: ("depth", "span_start", "span_end", "value", "optimum", "scale"),
        bool: ("own_pe", "zero_shot", "skipped"),
    }
)  # fmt: skip


def write(path: Path, runs: pd.DataFrame, results: pd.DataFrame) -> None:
    """Write the rows of complete runs, sums rounded to four digits, without the loss by position, which is the bulk.

    Args:
        runs, results: as in `ropewalk.report.frame.Runs`.

    Raises ConfigError: the file would be larger than `read` reads.
    """
    complete = runs[runs.done.astype(bool)].drop(columns=MADE, errors="ignore")  # a table has only some of MADE
    # Runs of two folders may have the same name, and would be one: the first keeps it, the second becomes "2-NAME".
    number = complete.groupby("name").cumcount() + 1
    complete["name"] = complete.name.where(number == 1, number.astype(str) + "-" + complete.name)
    of_path = complete.to_dict("index")
    rows = results[results.path.isin(complete.index) & (results.kind != "by_position")]
    lines = []
    for row in rows.drop(columns=MADE, errors="ignore").to_dict("records"):
        run = dict(of_path[row.pop("path")])
        config = run.pop("config")
        config = {key: value for key, value in config.items() if key not in LOCAL}
        row["command"] = re.sub(r" '?(runs_dir|data\.cache_dir)=\S+", "", row["command"])
        for key in SAMPLES:
            sample = row[key]
            if sample is not None:
                row[key] = {"values": np.round(sample.values[0], 4).tolist(), "units": sample.units.tolist()}
        lines.append(json.dumps({"name": run["name"], **row, "run": run, "config": config}) + "\n")
    text = "".join(lines).encode()
    if len(text) > LARGEST:
        remedy = "leave runs out, by only= or exclude="
        raise ConfigError(
            f"{path} would have {len(text):,} bytes uncompressed, and at most {LARGEST:,} are read: {remedy}"
        )
    # Without the time, so that equal results are equal files.
    write_bytes(path, gzip.compress(text, mtime=0))


def read(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each row as a run and a result, as they were given to `write`.

    The path of a run is that of the file and the run's name.

    Raises ValueError: a line is damaged, or the file is larger than any that is written.
    """
    with gzip.open(path) as file:
        lines = file.readlines()
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
            run = result.pop("run") | {"config": result.pop("config")}
            result["path"] = run["path"] = f"{path}/{result.pop('name')}"
            result.setdefault("train_len", run["train_len"])  # in files that do not say it
            RUN.model_validate(run, strict=True)
            RESULT.model_validate(result, strict=True)
            for key in SAMPLES:
                if result[key] is not None:
                    result[key] = _sample(**result[key])
        except Exception as error:  # it may be from anybody
            raise ValueError(f"line {number} is damaged: {error}") from None
        yield run, result


def _sample(values: list[float], units: list[float]) -> Sample:
    """Return the sums of each text in a file as a sample of one seed. Raises ValueError: they make none."""
    sample = Sample(np.array([values], dtype=float), np.array(units, dtype=float))
    if sample.units.shape != (len(values),) or not sample.units.sum() > 0:
        raise ValueError("a sample needs a value and a unit for each text, and units above 0")
    return sample
