"""Trackers that show metrics.jsonl and evals/ elsewhere: CSV, TensorBoard, wandb. A tracker begins anew whenever the
process does, with all rows so far: each is shown once, however often the run was interrupted. Its failure is a warning.
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

from app.run_dir import RunDir, read_metrics
from conf.schema import WandbLogger
from evaluation.report import comparison, frame
from training.distributed import is_rank_zero
from training.stop import INTERRUPTED, STOPPED


class Wandb:
    """A wandb run with the methods of Fabric's loggers. It never asks for a key: without one it stays offline."""

    def __init__(self, run: RunDir, own: WandbLogger, config: dict[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or own.mode
        if mode in ("auto", "online") and not wandb.api.api_key:
            if mode == "online":
                warnings.warn("without `wandb login` or WANDB_API_KEY wandb stays offline", stacklevel=2)
            mode = "offline"
        for superseded in (run.path / "wandb").glob(f"offline-run-*-{run.run_id}"):  # wandb cannot join two
            shutil.rmtree(superseded)
        self.path, self.log_model = run.path, own.log_model
        self.run = wandb.init(
            id=run.run_id, name=run.cfg.name, config=config, dir=run.path, project=own.project, entity=own.entity,
            notes=own.notes, tags=[*own.tags, run.cfg.pe["name"], run.cfg.data["name"], f"seed {run.cfg.seed}"],
            group=own.group or os.environ.get("WANDB_RUN_GROUP"),  # which wandb reads only once in a process
            mode="online" if mode == "auto" else mode, resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )  # fmt: skip

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        if step >= self.run.starting_step:  # online, the server may know the steps before
            self.run.log(dict(values), step=step)

    def publish(self, found: frame.Runs) -> None:
        import wandb

        self.run.summary.update(dict(summary_metrics(found)))
        columns = ["kind", "variant", "zero_shot", "step", "name", "length", "unit", "value"]
        self.run.log({"eval/results": wandb.Table(dataframe=found.results[columns])})
        if self.log_model:
            model = wandb.Artifact(f"model-{self.run.id}", type="model")
            for name in ("model.safetensors", "model.json", "config.yaml"):
                model.add_file(str(self.path / name))
            self.run.log_artifact(model)

    def finalize(self, status: str) -> None:
        folder, url = Path(self.run.dir).parent, self.run.url
        self.run.finish(exit_code=int(status == "failed"))
        print(f"wandb: {url}" if url else f"wandb is offline; to upload: wandb sync {shlex.quote(str(folder))}")


def open_logger(run: RunDir, config: dict[str, Any]) -> Any:
    """A logger of Fabric, or one like it, without what an earlier process has written."""
    if isinstance(run.cfg.logger, WandbLogger):
        return Wandb(run, run.cfg.logger, config)
    kind = run.cfg.logger.kind
    from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

    shutil.rmtree(run.path / kind, ignore_errors=True)
    if kind == "csv":
        return CSVLogger(run.path, name="", version=kind, flush_logs_every_n_steps=1)
    logger = TensorBoardLogger(run.path, name="", version=kind)
    logger.log_hyperparams(config)
    return logger


def forgiving(method: Callable[..., None]) -> Callable[..., None]:
    """Decorates a method of Tracker: its failure is a warning, after which the tracker does nothing."""

    @functools.wraps(method)
    def wrapper(self: "Tracker", *arguments: Any) -> None:
        try:
            if self.on:
                method(self, *arguments)
        except Exception as error:
            self.on = False
            warnings.warn(f"logger={self.kind} failed, the run goes on without it: {error}", stacklevel=3)

    return wrapper


class Tracker:
    """Shows rows of metrics.jsonl (`log`) and the results in evals/ (`publish`) on rank zero. A context, entered when
    the run directory exists. `facts` are shown beside its configuration. ValueError: a package is not installed."""

    def __init__(self, run: RunDir, facts: Mapping[str, Any]) -> None:
        self.run, self.kind = run, run.cfg.logger.kind
        if self.kind in ("tensorboard", "wandb") and not find_spec(self.kind):
            raise ValueError(f"logger={self.kind} needs a package: pip install {self.kind}")
        self.config = run.cfg.model_dump() | dict(facts)
        self.on = self.kind != "none" and is_rank_zero()

    @forgiving
    def __enter__(self) -> None:
        self.logger = open_logger(self.run, self.config)
        for row in read_metrics(self.run.path) if self.run.metrics.exists() else ():
            self.log(row)

    @forgiving
    def log(self, row: Mapping[str, Any]) -> None:
        values = {name if "/" in name else f"train/{name}": x for name, x in row.items() if name != "step"}
        self.logger.log_metrics(values, row["step"])

    @forgiving
    def publish(self) -> None:
        found = frame.load(self.run.path)
        if isinstance(self.logger, Wandb):
            self.logger.publish(found)
        else:
            plain = {name: value for name, value in summary_metrics(found) if not isinstance(value, str)}
            self.logger.log_metrics(plain, step=int(found.results.step.max()))

    @forgiving
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        stopped = isinstance(error, SystemExit) and error.code in (STOPPED, INTERRUPTED)
        self.logger.finalize("success" if error is None or stopped else "failed")


def summary_metrics(found: frame.Runs) -> Iterator[tuple[str, float | str]]:
    """What one run measured at each length, by names that no encoding changes: "eval/bits_per_byte@512" of the network
    as trained, "zero_shot/..." of the variant that is best at the longest text."""
    for table in [t for t in comparison.tables(found) if t.kind == "lengths"][:1]:
        final = table.lines[table.lines.step == found.results.step.max()]
        for line, about in final.drop_duplicates("zero_shot").iterrows():  # the best of each
            prefix = "zero_shot" if about.zero_shot else "eval"
            yield f"{prefix}/variant", about.variant
            for (name, length), e in table.stats["mean"][line].items():
                where = "" if len(table.names) == 1 else f"{name}/"
                yield f"{prefix}/{where}{table.unit.replace(' ', '_')}@{length}", e.value
