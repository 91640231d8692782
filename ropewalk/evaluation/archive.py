"""The results of many runs in one Parquet file, small enough for a repository, that a report reads like the runs.

A row for each run, reading of its weights, part, length and quantity: `pandas.read_parquet(file)` is a long table. Each
row has the sums of every text, as whole numbers of 1/64, so that intervals and paired differences can be computed
from it. What describes the run begins with "run_". Each page of the file has a checksum, which is compared when it is
read.
"""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from conf.files import refuse_link, write_bytes
from ropewalk.evaluation.statistics import Sample

SUFFIX = ".parquet"
STEPS = 64  # of a unit: what sums are rounded to
LOCAL = ("runs_dir", "data.cache_dir")  # keys of places on one machine, which say nothing about a result
SUMS = ["values", "units", "optimum_values"]  # of a sample, and of that of the best possible predictor: null if unknown
OF_RUN = {
    **dict.fromkeys(["run_name", "run_encoding", "run_data", "run_identity", "run_config"], pa.string()),
    **dict.fromkeys(["seed", "run_train_len"], pa.int64()),
    **dict.fromkeys(["run_parameters", "run_tokens_per_s", "run_peak_memory_mb"], pa.float64()),
}
OF_RESULT = {
    **dict.fromkeys(
        [
            "file", "kind", "variant", "encoding", "pe", "eval", "task", "difficulty", "continuation", "part",
            "quantity", "unit", "command", "commit", "dirty", "diff_sha256", "device", "precision", "torch",
            "processor",
        ],
        pa.string(),
    ),
    **dict.fromkeys(["step", "train_len", "length", "texts", "documents"], pa.int64()),
    **dict.fromkeys(["scale", "depth", "span_start", "span_end", "value", "optimum"], pa.float64()),
    **dict.fromkeys(["own_pe", "zero_shot", "skipped"], pa.bool_()),
}  # fmt: skip
OF_TEXTS = dict.fromkeys(SUMS, pa.list_(pa.int64()))
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name == "optimum_values") for name, kind in (OF_RUN | OF_RESULT | OF_TEXTS).items()]
)


def write(path: Path, runs: pd.DataFrame, results: pd.DataFrame) -> None:
    """Write the rows of complete runs, without the loss by position, which is the bulk.

    Args:
        runs, results: as in `ropewalk.report.frame.Runs`.

    Raises ValueError: there are none.
    """
    complete = runs[runs.done.astype(bool)].copy()
    # Runs of two folders may have the same name, and would be one: the first keeps it, the second becomes "2-NAME".
    number = complete.groupby("name").cumcount() + 1
    complete["name"] = complete.name.where(number == 1, number.astype(str) + "-" + complete.name)
    configs = []
    for config in complete.config:
        configs.append(json.dumps({key: value for key, value in config.items() if key not in LOCAL}))
    complete["config"] = configs
    rows = results[results.path.isin(complete.index) & (results.kind != "by_position")]
    if rows.empty:
        raise ValueError(f"{path}: no run is complete and measured, so there is nothing to write")
    rows = rows.join(complete.add_prefix("run_"), on="path")
    # Rows of the same texts beside each other compress best.
    rows = rows.sort_values(["kind", "eval", "part", "length", "quantity", "line", "seed"], kind="stable")
    rows["command"] = rows.command.str.replace(r" '?(runs_dir|data\.cache_dir)=\S+", "", regex=True)
    rows["values"] = rows["sample"].map(_rounded)
    rows["units"] = [sample.units.astype(int) for sample in rows["sample"]]
    rows["optimum_values"] = rows.optimum_sample.map(_rounded, na_action="ignore")
    # From arrays, as of a table of pandas NaN would be null.
    columns = [pa.array(rows[field.name].to_numpy(), field.type) for field in SCHEMA]
    file = BytesIO()
    parquet.write_table(
        pa.Table.from_arrays(columns, schema=SCHEMA),
        file,
        compression="zstd",
        compression_level=19,
        use_dictionary=[*OF_RUN, *OF_RESULT],
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in SUMS},
        write_statistics=False,
        write_page_checksum=True,
    )
    write_bytes(path, file.getvalue())


def read(path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of the runs and of their results, as they were given to `write`.

    The path of a run is that of the file and the run's name.

    Raises ValueError: the file is damaged, or another one.
    """
    try:
        file = parquet.ParquetFile(refuse_link(path), page_checksum_verification=True)
        if not file.schema_arrow.equals(SCHEMA):
            raise ValueError("its columns are not those of results")
        rows = file.read().to_pandas()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if (rows[["length", "train_len", "run_train_len"]] < 1).any(axis=None):
        raise ValueError("a length is not a number of tokens")
    rows["path"] = f"{path}/" + rows.run_name
    rows["sample"] = list(map(_sample, rows["values"], rows.units))
    rows["optimum_sample"] = [
        None if values is None else _sample(values, units)
        for values, units in zip(rows.optimum_values, rows.units, strict=True)
    ]
    runs = rows.drop_duplicates("path")[["path", *OF_RUN]].rename(columns=lambda name: name.removeprefix("run_"))
    runs = runs.assign(done=True, config=runs.config.map(json.loads))
    return runs, rows[["path", "seed", *OF_RESULT, "sample", "optimum_sample"]]


def _rounded(sample: Sample) -> list[int | None]:
    """Return the sums of one seed as whole numbers of steps, with the same total; None for what is not finite."""
    sums = sample.values[0]
    # Rounding what all texts up to each one have rounds their total only once.
    until = np.round(STEPS * np.nancumsum(np.where(np.isfinite(sums), sums, np.nan)))
    rounded = np.diff(until, prepend=0.0)
    return [int(number) if np.isfinite(exact) else None for number, exact in zip(rounded, sums, strict=True)]


def _sample(values: np.ndarray, units: np.ndarray) -> Sample:
    """Return the sums of each text in a file as a sample of one seed. Raises ValueError: they make none."""
    sample = Sample(values[None].astype(float) / STEPS, units.astype(float))
    if sample.units.shape != (len(values),) or not sample.units.sum() > 0:
        raise ValueError("a sample needs a value and a unit for each text, and units above 0")
    return sample
