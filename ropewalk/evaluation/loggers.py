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

import yaml

from conf.schema import WandbLogger
from ropewalk.app.run_dir import RunDir, read_metrics
from ropewalk.report import comparison, frame, page, retrieval
from ropewalk.report.answer import find, times
from ropewalk.report.comparison import Key, Table
from ropewalk.training.distributed import is_rank_zero
from ropewalk.training.stop import INTERRUPTED, STOPPED

WANDB_COLUMNS = [
    "kind", "variant", "zero_shot", "step", "task", "difficulty", "depth", "span_start", "span_end", "continuation",
    "length", "quantity", "unit", "value",
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

    def publish(self, runs: frame.Runs, metrics: Mapping[str, float | str]) -> None:
        """Show the results as a summary, curves over length and a table, and with `log_model` the weights."""
        import wandb

        self.run.summary.update(dict(metrics))
        self.run.log({"eval/results": wandb.Table(dataframe=runs.results[WANDB_COLUMNS])})
        for length, values in length_curves(runs).items():
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
        runs = frame.load(self.run.path)
        metrics = summary_metrics(runs)
        for name, count in self.config["parameters"].items():
            metrics[f"parameters/{name}"] = count
        if isinstance(self.logger, Wandb):
            self.logger.publish(runs, metrics)
            return
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        step = int(runs.results.step.max())
        if self.kind == "tensorboard":
            self.logger.log_hyperparams(self.config, numbers, step)
            # TensorBoard has no axis but the step, which is here a length.
            for length, values in length_curves(runs).items():
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


def summary_metrics(runs: frame.Runs) -> dict[str, float | str]:
    """Return the results of one run at each length, by names that are the same for all encodings.

    "eval/bits_per_byte@512" is the network as trained, "zero_shot/..." the variant that is best at the longest text.
    Names like "eval/gain@8x", "eval/safe_length" and "eval/far_copies" are also the same for all training lengths.
    """
    tables = comparison.tables(runs)
    table = find(tables, "lengths")
    if table is None:
        return {}
    copies = find(tables, "far_copies", "gain")
    far_copies = retrieval.pooled(copies) if copies else {}
    metrics: dict[str, float | str] = {}
    unit = table.unit.replace(" ", "_")
    for prefix, line in _best_lines(runs, table):
        metrics[f"{prefix}/variant"] = table.lines.variant[line]
        for key, part in _cells(table, line):
            metrics[f"{prefix}/{part}{unit}@{key.length}"] = table.means[key].value
            if key in table.gains and key.length > table.train_len:
                metrics[f"{prefix}/gain@{times(key.length, table)}"] = table.gains[key].value
        if line in table.safe:
            metrics[f"{prefix}/safe_length"] = table.safe[line]
        if line in far_copies:
            metrics[f"{prefix}/far_copies"] = far_copies[line].value
    return metrics


def length_curves(runs: frame.Runs) -> dict[int, dict[str, float]]:
    """Return the loss of one run, and its gain over cutting the text, by length in tokens and by name.

    Names like "by_length/eval/bits_per_byte" and "by_length/zero_shot/gain" are the same for all encodings.
    """
    table = find(comparison.tables(runs), "lengths")
    if table is None:
        return {}
    curves: dict[int, dict[str, float]] = {length: {} for length in table.lengths}
    unit = table.unit.replace(" ", "_")
    for prefix, line in _best_lines(runs, table):
        for key, part in _cells(table, line):
            values = curves[key.length]
            values[f"{BY_LENGTH}/{prefix}/{part}{unit}"] = table.means[key].value
            if key in table.gains and key.length > table.train_len:
                values[f"{BY_LENGTH}/{prefix}/gain"] = table.gains[key].value
    return curves


def _best_lines(runs: frame.Runs, table: Table) -> Iterator[tuple[str, str]]:
    """Yield "eval" and the line of the final weights as trained, "zero_shot" and the best of the other readings."""
    final = table.lines[table.lines.step == runs.results.step.max()]
    # Lines are ordered, best first: the first of each kind is the best.
    for line, about in final.drop_duplicates("zero_shot").iterrows():
        yield "zero_shot" if about.zero_shot else "eval", str(line)


def _cells(table: Table, line: str) -> Iterator[tuple[Key, str]]:
    """Yield the cells of a line, each with its part as names have it: empty if there is only one."""
    for key in table.means:
        if key.line == line:
            yield key, f"{key.part}/" if len(table.parts) > 1 else ""
