"""Mirrors of a run for those who watch it elsewhere: CSV, TensorBoard, wandb.

metrics.jsonl and results.json are the truth. A mirror begins anew whenever the process does, with all rows so far: it
shows each of them once, however often the run was interrupted. Its failure is a warning, and changes nothing.
"""

import json
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import yaml

from conf.rundir import RunDir
from conf.schema import WandbLogger, flatten
from evaluation.results import Results

Row = dict[str, Any]


class Logger:
    """Shows the run nowhere.

    Args:
        run: its directory, which need not exist before `begin`.
        parameters: counts of the network's.
    """

    def __init__(self, run: RunDir, parameters: dict[str, int]) -> None:
        self.run, self.parameters = run, parameters

    def begin(self) -> None:
        """Forget what a process before this one has shown."""

    def log(self, row: Row) -> None:
        """Show a row of metrics.jsonl."""

    def publish(self, results: Results, figures: list[Path]) -> None:
        """Show the evaluation, and pictures of it."""

    def end(self, failed: bool) -> None:
        """Nothing follows."""


class Csv(Logger):
    """csv/metrics.csv in the run directory: a column for each key of metrics.jsonl."""

    def begin(self) -> None:
        from lightning.fabric.loggers import CSVLogger

        shutil.rmtree(self.run.path / "csv", ignore_errors=True)
        self.file = CSVLogger(self.run.path, name="", version="csv", flush_logs_every_n_steps=1)

    def log(self, row: Row) -> None:
        self.file.log_metrics({name: value for name, value in row.items() if name != "step"}, step=row["step"])


class TensorBoard(Logger):
    """Events in tensorboard/ of the run directory. What depends on a length or a position has it in place of the step.

    Raises:
        ValueError: tensorboard is not installed.
    """

    def __init__(self, run: RunDir, parameters: dict[str, int]) -> None:
        super().__init__(run, parameters)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise ValueError('logger=tensorboard needs a package: pip install "ropewalk[tensorboard]"') from None
        self.open = SummaryWriter

    def begin(self) -> None:
        folder = self.run.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self.writer = self.open(str(folder))
        text = yaml.safe_dump(self.run.cfg.model_dump(), sort_keys=False)
        self.writer.add_text("config", f"```yaml\n{text}```")

    def log(self, row: Row) -> None:
        for name, value in grouped(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def publish(self, results: Results, figures: list[Path]) -> None:
        from matplotlib.image import imread

        for name, at, value in numbers(results):
            self.writer.add_scalar(name, value, at)
        for path in figures:
            self.writer.add_image(f"figures/{path.stem}", imread(path), dataformats="HWC")
        options = flatten(self.run.cfg.model_dump())
        plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in options.items()}
        plain |= {f"parameters.{name}": count for name, count in self.parameters.items()}
        measures = {f"hparams/{row.reading}/{row.slice}/{row.length}": results.measure(row) for row in results.lengths}
        self.writer.add_hparams(plain, measures, run_name=".")

    def end(self, failed: bool) -> None:
        self.writer.close()


class Wandb(Logger):
    """A run of wandb, under the id in environment.json. Offline it lies in wandb/ of the run directory, whole in one
    folder also after an interruption: wandb cannot join two."""

    def begin(self) -> None:
        import wandb

        cfg = self.run.cfg
        assert isinstance(cfg.logger, WandbLogger)
        mode: Any = os.environ.get("WANDB_MODE") or cfg.logger.mode
        if mode == "auto":
            mode = "online" if wandb.api.api_key else "offline"
        for superseded in (self.run.path / "wandb").glob(f"offline-run-*-{self.run.run_id}"):
            shutil.rmtree(superseded)
        self.wandb = wandb.init(
            id=self.run.run_id, name=cfg.name, project=cfg.logger.project, tags=[cfg.pe["name"], cfg.data["name"]],
            config=cfg.model_dump() | {"parameters": self.parameters}, dir=self.run.path, mode=mode, resume="allow",
            group=os.environ.get("WANDB_RUN_GROUP"),  # wandb reads it once for the whole process
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )  # fmt: skip

    def log(self, row: Row) -> None:
        if row["step"] >= self.wandb.starting_step:  # online, the server may know the steps before
            self.wandb.log(grouped(row), step=row["step"])

    def publish(self, results: Results, figures: list[Path]) -> None:
        import wandb

        shown: dict[str, Any] = {f"figures/{path.stem}": wandb.Image(str(path)) for path in figures}
        by_length, by_position = defaultdict(list), defaultdict(list)
        for row in results.lengths:
            by_length[f"{row.reading}, {row.slice}"].append((row.length, results.measure(row)))
        for part in results.by_position:
            by_position[part.reading].append((part.start, part.loss))
        for name, rows, lines, at in (
            ("lengths", results.lengths, by_length, "length in tokens"),
            ("by_position", results.by_position, by_position, "position"),
        ):
            if rows:
                cells = [list(row.model_dump().values()) for row in rows]
                shown[f"eval/{name}"] = wandb.Table(list(type(rows[0]).model_fields), cells)
                xs, ys = zip(*(zip(*line, strict=True) for line in lines.values()), strict=True)
                shown[f"eval/{name}_curves"] = wandb.plot.line_series(xs, ys, list(lines), self.run.path.name, at)
        self.wandb.log(shown)
        measured = [(name, at, value) for name, at, value in numbers(results) if not name.startswith("by_position/")]
        self.wandb.summary.update({f"{name}@{at}" if at else name: value for name, at, value in measured})

    def end(self, failed: bool) -> None:
        self.wandb.finish(exit_code=int(failed))


class Mirror:
    """A logger that follows metrics.jsonl, and without which the run goes on if it fails. A context: in the end, or
    when an exception ends the run, the logger ends, too."""

    def __init__(self, logger: Logger, metrics: Path) -> None:
        self.logger: Logger | None = logger
        self.metrics = metrics
        self.at: int | None = None  # up to where metrics.jsonl has been shown

    def update(self) -> None:
        """Show the rows that are new in metrics.jsonl."""
        if self.at is None:
            self.at = 0
            self._do("begin")
        if self.logger and self.metrics.is_file():
            with self.metrics.open("rb") as file:
                file.seek(self.at)
                rows = [json.loads(line) for line in file.readlines()]
                self.at = file.tell()
            for row in rows:
                if "task" not in row:  # these are in the results, too
                    self._do("log", row)

    def publish(self, results: Results, figures: list[Path]) -> None:
        self.update()
        self._do("publish", results, figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.at is not None:
            self._do("end", kind is not None)

    def _do(self, step: str, *arguments: Any) -> None:
        if self.logger is None:
            return
        try:
            getattr(self.logger, step)(*arguments)
        except Exception as error:
            warnings.warn(f"{type(self.logger).__name__} failed, the run goes on without it: {error}", stacklevel=3)
            self.logger = None


def build(run: RunDir, parameters: dict[str, int]) -> Mirror:
    """The mirror that the `logger` section of the run's configuration asks for. It writes nothing yet.

    Raises:
        ValueError: the logger needs a package that is not installed.
    """
    kinds = {"none": Logger, "csv": Csv, "tensorboard": TensorBoard, "wandb": Wandb}
    return Mirror(kinds[run.cfg.logger.kind](run, parameters), run.metrics)


def grouped(row: Row) -> dict[str, float]:
    """What a row says of its step, each name with a group before it: lr -> train/lr."""
    return {name if "/" in name else f"train/{name}": value for name, value in row.items() if name != "step"}


def numbers(results: Results) -> Iterator[tuple[str, int | None, float]]:
    """(name, at which length or position if at any, value) of all that was measured."""
    parts: list[tuple[str, str, Any]] = [("eval/validation", "length", results.validation)]
    parts += [(f"eval/{row.reading}/{row.slice}", "length", row) for row in results.lengths]
    parts += [(f"by_position/{part.reading}", "start", part) for part in results.by_position]
    parts += [("training", "", results.training)] if results.training else []
    for group, coordinate, part in parts:
        values = flatten(part.model_dump())
        at = values.pop(coordinate, None)
        for name, value in values.items():
            if isinstance(value, int | float):
                yield f"{group}/{name}", at, value
