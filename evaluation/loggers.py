"""Trackers that show metrics.jsonl and evals/ elsewhere: in CSV, TensorBoard or wandb.

On every start the tracker is recreated and all rows are replayed, so each appears once, however often the run was
interrupted. Failures of a tracker only warn.
"""

import functools
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from app.run_dir import RunDir, read_metrics
from conf.schema import WandbLogger
from evaluation.report import comparison, frame, retrieval
from evaluation.report.answer import find, times
from training.distributed import is_rank_zero
from training.stop import INTERRUPTED, STOPPED

WANDB_COLUMNS = [
    "kind", "variant", "zero_shot", "step", "task", "difficulty", "depth", "span_start", "span_end", "continuation",
    "length", "quantity", "unit", "value",
]  # fmt: skip


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
            # wandb reads this variable only once in a process, and a sweep has many runs in one.
            group=options.group or os.environ.get("WANDB_RUN_GROUP"),
            mode=_wandb_mode(os.environ.get("WANDB_MODE") or options.mode, wandb.api.api_key),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        # When a run is resumed online, the server may already have the earlier steps.
        if step >= self.run.starting_step:
            self.run.log(dict(values), step=step)

    def publish(self, runs: frame.Runs) -> None:
        """Show the results as a summary and a table, and with `log_model` the weights."""
        import wandb

        self.run.summary.update(summary_metrics(runs))
        self.run.log({"eval/results": wandb.Table(dataframe=runs.results[WANDB_COLUMNS])})
        if self.log_model:
            model = wandb.Artifact(f"model-{self.run.id}", type="model")
            for name in ("model.safetensors", "model.json", "config.yaml"):
                model.add_file(str(self.path / name))
            self.run.log_artifact(model)

    def finalize(self, status: str) -> None:
        folder = Path(self.run.dir).parent
        url = self.run.url
        self.run.finish(exit_code=int(status == "failed"))
        print(f"wandb: {url}" if url else f"wandb is offline; to upload: wandb sync {shlex.quote(str(folder))}")


def _wandb_mode(mode: str, key: str | None) -> Any:
    """Return the mode for wandb.init, which would stop and ask for a key if there were none."""
    if mode == "online" and not key:
        warnings.warn("without `wandb login` or WANDB_API_KEY wandb stays offline", stacklevel=2)
    if mode in ("auto", "online"):
        return "online" if key else "offline"
    return mode


def open_logger(run: RunDir, config: dict[str, Any]) -> Any:
    """Return a logger of Fabric, or one like it, after removing what an earlier process has written."""
    if isinstance(run.cfg.logger, WandbLogger):
        return Wandb(run, run.cfg.logger, config)
    from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

    kind = run.cfg.logger.kind
    shutil.rmtree(run.path / kind, ignore_errors=True)
    if kind == "csv":
        return CSVLogger(run.path, name="", version=kind, flush_logs_every_n_steps=1)
    logger = TensorBoardLogger(run.path, name="", version=kind)
    logger.log_hyperparams(config)
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
        if isinstance(self.logger, Wandb):
            self.logger.publish(runs)
            return
        metrics = summary_metrics(runs)
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        self.logger.log_metrics(numbers, step=int(runs.results.step.max()))

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
    final = table.lines[table.lines.step == runs.results.step.max()]
    # Lines are ordered, best first: the first of each kind is the best.
    for line, about in final.drop_duplicates("zero_shot").iterrows():
        prefix = "zero_shot" if about.zero_shot else "eval"
        metrics[f"{prefix}/variant"] = about.variant
        unit = table.unit.replace(" ", "_")
        for key, e in table.means.items():
            if key.line == line:
                part = f"{key.part}/" if len(table.parts) > 1 else ""
                metrics[f"{prefix}/{part}{unit}@{key.length}"] = e.value
                if key in table.gains and key.length > table.train_len:
                    metrics[f"{prefix}/gain@{times(key.length, table)}"] = table.gains[key].value
        if line in table.safe:
            metrics[f"{prefix}/safe_length"] = table.safe[line]
        if line in far_copies:
            metrics[f"{prefix}/far_copies"] = far_copies[line].value
    return metrics
