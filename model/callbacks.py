"""What happens at the end of an optimizer step: log, validate, checkpoint, in this order."""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class StepEnd(L.Callback):
    """Writes metrics.jsonl, validates and checkpoints, all on exact optimizer steps.

    Validation is called from here rather than by Lightning's loop: so a row of metrics is whole before its
    checkpoint is written, a resumed run neither repeats nor skips a validation, and the measure is the very
    function that evaluates after training.

    Args:
        metrics: the JSON-lines file.
        checkpoints: folder of step=N.ckpt.
        validate: returns the metrics of a validation, such as {"val/loss": ...}; called on every process.
        tokens_per_step: of all processes.
        max_steps, log_every, val_every, checkpoint_every: in optimizer steps; the last step does all three.
        keep: newest checkpoints kept.
    """

    def __init__(
        self,
        *,
        metrics: Path,
        checkpoints: Path,
        validate: Callable[[], dict[str, float]],
        tokens_per_step: int,
        max_steps: int,
        log_every: int,
        val_every: int,
        checkpoint_every: int,
        keep: int,
    ) -> None:
        self.metrics, self.checkpoints, self.validate = metrics, checkpoints, validate
        self.tokens_per_step, self.max_steps, self.keep = tokens_per_step, max_steps, keep
        self.log_every, self.val_every, self.checkpoint_every = log_every, val_every, checkpoint_every
        self.step = 0
        self.row: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        self.step = self.logged_step = trainer.global_step
        if self.step and trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):  # it begins its file anew
                    for line in self.metrics.read_text(encoding="utf-8").splitlines():
                        _mirror(logger, json.loads(line))
        self.logged_at = time.perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, lit: Any, optimizer: Any) -> None:
        self.lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            return  # in mid-accumulation
        self.step = step = trainer.global_step

        def due(every: int) -> bool:
            return step % every == 0 or step == self.max_steps

        self.row = {}
        # A checkpoint always comes with a row, so that no loss is pending in it.
        if step == 1 or due(self.log_every) or due(self.val_every) or due(self.checkpoint_every):
            self.row = self._measure(trainer, lit)
        paused = time.perf_counter()
        if due(self.val_every):
            self.row |= self.validate()
        if self.row:
            self._write(trainer)
        if due(self.checkpoint_every):
            self._save(trainer)
        self.logged_at += time.perf_counter() - paused  # tokens_per_s is of training alone

    def _measure(self, trainer: L.Trainer, lit: Any) -> dict[str, Any]:
        lit.check_finite()
        loss = trainer.strategy.reduce(lit.loss_sum / lit.loss_count, reduce_op="mean")
        loss, norm = float(loss), float(lit.grad_norm)
        lit.loss_sum, lit.loss_count = torch.zeros_like(lit.loss_sum), 0
        now = time.perf_counter()
        speed = (self.step - self.logged_step) * self.tokens_per_step / (now - self.logged_at)
        self.logged_step, self.logged_at = self.step, now
        return {
            "step": self.step,
            "tokens": self.step * self.tokens_per_step,
            "train/loss": loss,
            "lr": self.lr,
            "grad_norm": norm,
            "tokens_per_s": round(speed, 1),
        }

    def _write(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.row) + "\n")
        for logger in trainer.loggers:
            try:
                _mirror(logger, self.row)
            except Exception as error:
                warnings.warn(f"{type(logger).__name__} failed, training goes on: {error}", stacklevel=2)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.checkpoints / f"step={self.step}.ckpt", weights_only=False)
        if trainer.is_global_zero:
            for old in checkpoints_in(self.checkpoints)[: -self.keep]:
                old.unlink()


def _mirror(logger: Any, row: dict[str, Any]) -> None:
    logger.log_metrics({key: value for key, value in row.items() if key != "step"}, step=row["step"])


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))


def newest_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """(the newest checkpoint that can be read, its optimizer step), or (None, 0). Damaged ones are reported."""
    for path in reversed(checkpoints_in(folder)):
        try:
            return path, torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        except Exception as error:  # a cut or garbled file fails in many ways
            print(f"{path} is damaged ({str(error).splitlines()[0]}): trying the one before", file=sys.stderr)
    return None, 0


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it there, so that no reader ever sees half of one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


class ProgressLine(L.Callback):
    """A progress bar on a terminal; elsewhere a line for each logged step."""

    def __init__(self, step_end: StepEnd) -> None:
        self.source = step_end
        self.bar: Progress | None = None
        self.text = ""

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        if trainer.is_global_zero and sys.stdout.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
            self.bar = Progress(TextColumn("training"), *columns, console=Console())
            self.bar.start()
            self.task = self.bar.add_task("", total=self.source.max_steps, completed=trainer.global_step, text="")

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = self.source.row
        fresh = bool(row) and row["step"] == trainer.global_step
        if self.bar:
            if fresh:
                self.text = describe_row(row)
            self.bar.update(self.task, completed=trainer.global_step, text=self.text)
        elif fresh and trainer.is_global_zero and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            print(f"step {row['step']}/{self.source.max_steps}  {describe_row(row)}", flush=True)

    def on_train_end(self, trainer: L.Trainer, lit: Any) -> None:
        if self.bar:
            self.bar.stop()

    def on_exception(self, trainer: L.Trainer, lit: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, lit)


def describe_row(row: dict[str, Any]) -> str:
    text = f"loss {row['train/loss']:.3f}  lr {row['lr']:.2e}  {row['tokens_per_s']:,.0f} tokens/s"
    return text + (f"  val loss {row['val/loss']:.3f}" if "val/loss" in row else "")
