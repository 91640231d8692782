"""Trackers that show metrics.jsonl and evals/ elsewhere: in CSV, TensorBoard or wandb.

On every start the tracker is recreated and all rows are replayed, so each appears once, however often the run was
interrupted. Failures of a tracker only warn.
"""

import functools
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from conf.schema import WandbLogger
from ropewalk.app.run_dir import RunDir, read_metrics
from ropewalk.report import frame, page
from ropewalk.report.answer import far_text
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results
from ropewalk.training.distributed import is_rank_zero
from ropewalk.training.stop import INTERRUPTED, STOPPED

WANDB_COLUMNS = [
    "measure", "variant", "zero_shot", "step", "task", "difficulty", "depth", "span_start", "span_end", "continuation",
    "length", "quantity", "unit", "value", "low", "high", "gain",
]  # fmt: skip
BY_LENGTH = "by_length"  # section of the charts against length
LENGTH = f"{BY_LENGTH}/tokens"


class Wandb:
    """A wandb run with the methods of Fabric's loggers.

    It takes the place of Lightning's, which prompts for a key and counts steps itself: replayed rows would appear
    twice.
    """

    def __init__(self, run: RunDir, options: WandbLogger, config: dict[str, Any]) -> None:
        import wandb

        # wandb cannot append to the files of an earlier process. Their rows are replayed, so the files can go.
        for superseded in (run.path / "wandb").glob(f"offline-run-*-{run.run_id}"):
            shutil.rmtree(superseded)
        self.path = run.path
        self.log_model = options.log_model
        self.run = wandb.init(
            id=run.run_id,
            name=run.cfg.name,
            config=config,
            dir=run.path,
            project=options.project,
            entity=options.entity,
            notes=options.notes,
            tags=[*options.tags, run.cfg.pe["name"], run.cfg.data["name"], f"seed {run.cfg.seed}"],
            # A group of wandb's is a folder here, as a sweep fills one. Within it runs of one type, the seeds of an
            # encoding, are averaged. wandb reads the variable only once in a process, and a sweep has many runs in one.
            group=options.group or os.environ.get("WANDB_RUN_GROUP") or run.path.absolute().parent.name,
            job_type=run.cfg.pe["name"],
            mode=_wandb_mode(os.environ.get("WANDB_MODE") or options.mode),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        # Charts of these have the length as their axis. They need no summary: that has a number for each length.
        self.run.define_metric(f"{BY_LENGTH}/*", step_metric=LENGTH, summary="none")

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        # When a run is resumed online, the server may already have the earlier steps.
        if step >= self.run.starting_step:
            self.run.log(dict(values), step=step)

    def publish(self, table: pd.DataFrame, metrics: Mapping[str, float | str]) -> None:
        """Show the results as a summary, curves over length and a table, and with `log_model` the weights."""
        import wandb

        self.run.summary.update(dict(metrics))
        of_run = table[table.seed.notna()]
        self.run.log({"eval/results": wandb.Table(dataframe=of_run[WANDB_COLUMNS].astype(object))})
        for length, values in length_curves(table).items():
            self.run.log({LENGTH: length, **values})
        if self.log_model:
            model = wandb.Artifact(f"model-{self.run.id}", type="model")
            for name in ("model.safetensors", "model.json", "config.yaml"):
                model.add_file(str(self.path / name))
            self.run.log_artifact(model)

    def attach_page(self, runs: frame.Runs) -> None:
        """Show the page of the run as an artifact."""
        import wandb

        artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
        with artifact.new_file("report.html", encoding="utf-8") as file:
            file.write(page.html(runs))
        self.run.log_artifact(artifact)

    def finalize(self, status: str) -> None:
        folder = Path(self.run.dir).parent
        url = self.run.url
        self.run.finish(exit_code=int(status == "failed"))
        print(f"wandb: {url}" if url else f"wandb is offline; to upload: wandb sync {shlex.quote(str(folder))}")


def _wandb_mode(mode: str) -> Any:
    """Return the mode for wandb.init, which would stop and ask for a key if there were none."""
    if mode not in ("auto", "online"):
        return mode
    import wandb

    if wandb.login(prompt=False, verify=False):
        return "online"
    if mode == "online":
        warnings.warn("without `wandb login` or WANDB_API_KEY wandb stays offline", stacklevel=2)
    return "offline"


def open_logger(run: RunDir, config: dict[str, Any]) -> Any:
    """Return a logger of Fabric, or one like it, after removing what an earlier process has written."""
    if isinstance(run.cfg.logger, WandbLogger):
        return Wandb(run, run.cfg.logger, config)
    from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

    kind = run.cfg.logger.kind
    shutil.rmtree(run.path / kind, ignore_errors=True)
    if kind == "csv":
        return CSVLogger(run.path, name="", version=kind, flush_logs_every_n_steps=1)
    # `Tracker.publish` writes the table of hyperparameters: TensorBoard takes its columns from the first that it meets,
    # so the results must be there.
    logger = TensorBoardLogger(run.path, name="", version=kind, default_hp_metric=False)
    logger.experiment.add_text("config", f"```yaml\n{yaml.safe_dump(config)}```")
    return logger


def forgiving(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a method of Tracker: if it fails, that is a warning, and the tracker is off from then on."""

    @functools.wraps(method)
    def wrapper(self: "Tracker", *arguments: Any) -> None:
        # A full disk or a server that is down must not end a training.
        try:
            if self.on:
                method(self, *arguments)
        except Exception as error:
            self.on = False
            warnings.warn(f"logger={self.kind} failed, the run goes on without it: {error}", stacklevel=3)

    return wrapper


class Tracker:
    """Shows rows of metrics.jsonl (`log`) and the results in evals/ (`publish`) on rank zero.

    It is a context manager, to be entered once the run directory exists.

    Args:
        facts: shown beside the configuration of the run.

    Raises ValueError: a package is not installed.
    """

    def __init__(self, run: RunDir, facts: Mapping[str, Any]) -> None:
        self.run = run
        self.kind = run.cfg.logger.kind
        if self.kind in ("tensorboard", "wandb") and not find_spec(self.kind):
            raise ValueError(f"logger={self.kind} needs a package: pip install {self.kind}")
        self.config = run.cfg.model_dump()
        self.config.update(facts)
        self.on = self.kind != "none" and is_rank_zero()

    @forgiving
    def __enter__(self) -> None:
        self.logger = open_logger(self.run, self.config)
        # Rows of a run that is resumed: the new logger has not seen them.
        if self.run.metrics.exists():
            for row in read_metrics(self.run.path):
                self.log(row)

    @forgiving
    def log(self, row: Mapping[str, Any]) -> None:
        values = {}
        for name, value in row.items():
            if name == "step":
                continue
            # Trackers group metrics by what stands before the slash.
            if "/" not in name:
                name = f"train/{name}"
            values[name] = value
        self.logger.log_metrics(values, row["step"])

    @forgiving
    def publish(self) -> None:
        table = results(frame.load(self.run.path))
        metrics = summary_metrics(table)
        for name, count in self.config["parameters"].items():
            metrics[f"parameters/{name}"] = count
        if isinstance(self.logger, Wandb):
            self.logger.publish(table, metrics)
            return
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        step = int(table.step.max())
        if self.kind == "tensorboard":
            self.logger.log_hyperparams(self.config, numbers, step)
            # TensorBoard has no axis but the step, which is here a length.
            for length, values in length_curves(table).items():
                self.logger.log_metrics(values, length)
        else:
            self.logger.log_metrics(numbers, step)

    @forgiving
    def attach_page(self) -> None:
        """Show the page of a run that is complete, if the tracker keeps files."""
        if isinstance(self.logger, Wandb):
            self.logger.attach_page(frame.load(self.run.path))

    @forgiving
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        stopped = isinstance(error, SystemExit) and error.code in (STOPPED, INTERRUPTED)
        self.logger.finalize("success" if error is None or stopped else "failed")


def summary_metrics(table: pd.DataFrame) -> dict[str, float | str]:
    """Return the results of one run at each length, by names that are the same for all encodings.

    "eval/bits_per_byte@512" is the network as trained, "zero_shot/..." the variant that is best at the longest text.
    Names like "eval/gain@8x", "eval/verdict" and "eval/far_copies" are also the same for all training lengths.
    """
    metrics: dict[str, float | str] = {}
    far = far_text(table).query("measure == 'far_copies' and part == 'far'").set_index("line").value
    for prefix, rows in _best_lines(table):
        last = rows.iloc[-1]
        metrics[f"{prefix}/variant"] = last.variant
        for row in rows.itertuples():
            metrics[f"{prefix}/{_name(row, rows)}@{row.length}"] = row.value
            if row.length > row.train_len and not pd.isna(row.gain):
                metrics[f"{prefix}/gain@{row.times:g}x"] = row.gain
        if isinstance(last.verdict, str):
            metrics[f"{prefix}/verdict"] = last.verdict
        if last.line in far.index:
            metrics[f"{prefix}/far_copies"] = far[last.line]
    return metrics


def length_curves(table: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Return the loss of one run, and its gain over cutting the text, by length in tokens and by name.

    Names like "by_length/eval/bits_per_byte" and "by_length/zero_shot/gain" are the same for all encodings.
    """
    curves: dict[int, dict[str, float]] = {}
    for prefix, rows in _best_lines(table):
        for row in rows.itertuples():
            values = curves.setdefault(row.length, {})
            values[f"{BY_LENGTH}/{prefix}/{_name(row, rows)}"] = row.value
            if row.length > row.train_len and not pd.isna(row.gain):
                values[f"{BY_LENGTH}/{prefix}/gain"] = row.gain
    return dict(sorted(curves.items()))


def _best_lines(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield "eval" and the rows of the final weights as trained, "zero_shot" and those of the best other reading."""
    rows = over_seeds(table)
    rows = rows[(rows.measure == "lengths") & (rows.line != BEST_POSSIBLE)]
    rows = rows[(rows.step == rows.step.max())].sort_values(["length", "part"])
    for is_zero_shot, of_kind in rows.groupby("zero_shot"):
        # Best at the longest text: of a task in the difficulty that is worst there.
        longest = of_kind[of_kind.length == of_kind.length.max()]
        best = longest.groupby("line")["rank"].max().idxmin()
        yield "zero_shot" if is_zero_shot else "eval", of_kind[of_kind.line == best]


def _name(row: Any, rows: pd.DataFrame) -> str:
    """Return the name of a number: its unit, after its part if there are several."""
    unit = row.unit.replace(" ", "_")
    return f"{row.part}/{unit}" if rows.part.nunique() > 1 else unit
