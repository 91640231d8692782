"""What happens at the end of an optimizer step: log, validate, checkpoint, in this order."""

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.checkpoints import path_of, prune
from model.files import append, sync
from model.processes import any_of, gather
from model.stop import INTERRUPTED, STOPPED, Stop


class StepEnd(L.Callback):
    """Writes metrics.jsonl, validates and checkpoints, all on exact optimizer steps.

    Validation is called from here rather than by Lightning's loop: so a row of metrics is whole before its
    checkpoint is written, a resumed run neither repeats nor skips a validation, and the measure is the very
    function that evaluates after training. A checkpoint holds the losses that wait for the next row: so the rows are
    the same whenever the run was interrupted and checkpointed.

    Args:
        metrics: the JSON-lines file.
        checkpoints: folder of step=N.ckpt.
        validate: returns the metrics of a validation, such as {"val/loss": ...}; called on every process.
        mirror: called when there is a new row.
        tokens_per_step: of all processes.
        max_steps, log_every, val_every, checkpoint_every: in optimizer steps; the last step does all three.
        checkpoint_minutes: also after so long without a checkpoint. One is written as well at the lowest validation
            loss so far, and before stopping early.
        keep: newest checkpoints kept, beside that of the lowest validation loss.
        stop: tells when to end early; training then ends after the step, and `stopped` is the reason.
    """

    def __init__(
        self,
        *,
        metrics: Path,
        checkpoints: Path,
        validate: Callable[[], dict[str, float]],
        mirror: Callable[[], None],
        tokens_per_step: int,
        max_steps: int,
        log_every: int,
        val_every: int,
        checkpoint_every: int,
        checkpoint_minutes: float,
        keep: int,
        stop: Stop,
    ) -> None:
        self.metrics, self.checkpoints, self.validate, self.mirror = metrics, checkpoints, validate, mirror
        self.tokens_per_step, self.max_steps, self.keep = tokens_per_step, max_steps, keep
        self.log_every, self.val_every, self.checkpoint_every = log_every, val_every, checkpoint_every
        self.checkpoint_seconds, self.stop = 60 * checkpoint_minutes, stop
        self.stopped: str | None = None
        self.exit_code = STOPPED
        self.step = self.logged_step = 0
        self.seconds = 0.0  # of training since the last row
        self.best = (math.inf, 0)  # the lowest validation loss, and its step
        self.row: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        self._stop_if(trainer, self.stop.signal is not None)
        self.step = trainer.global_step
        if self.step:
            rows = [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]
            self.best = min([self.best, *((row["val/loss"], row["step"]) for row in rows if "val/loss" in row)])
        self.saved_at = time.perf_counter()
        self.logged_at = self.saved_at - self.seconds

    def on_before_optimizer_step(self, trainer: L.Trainer, lit: Any, optimizer: Any) -> None:
        self.lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            return  # in mid-accumulation
        self.step = step = trainer.global_step

        def due(every: int) -> bool:
            return step % every == 0 or step == self.max_steps

        self.row = {}
        if step == 1 or due(self.log_every) or due(self.val_every):
            self.row = self._measure(trainer, lit)
        paused = time.perf_counter()
        self.seconds = paused - self.logged_at
        if due(self.val_every):
            lit.assemble()
            self.row |= self.validate()
            lit.release()
        if self.row:
            self._write(trainer)
        best = self.row.get("val/loss", math.inf) < self.best[0]
        if best:
            self.best = self.row["val/loss"], step
        late = self._stop_if(
            trainer,
            step < self.max_steps and self.stop.reason is not None,
            time.perf_counter() - self.saved_at > self.checkpoint_seconds,
        )
        if due(self.checkpoint_every) or best or late or self.stopped:
            self._save(trainer, lit)
        self.logged_at += time.perf_counter() - paused  # tokens_per_s is of training alone

    def _stop_if(self, trainer: L.Trainer, stop: bool, late: bool = False) -> bool:
        """End the training if any process asks for it; returns whether any is `late`."""
        interrupted = self.stop.signal == signal.SIGINT
        stop, interrupted, late = any_of(stop, interrupted, late)
        if stop:
            self.stopped, trainer.should_stop = self.stop.reason or "another process was told to stop", True
            self.exit_code = INTERRUPTED if interrupted else STOPPED
        return late

    def _measure(self, trainer: L.Trainer, lit: Any) -> dict[str, Any]:
        lit.check_finite()
        loss_sum, share = trainer.strategy.reduce(torch.stack([lit.loss_sum, lit.loss_share]), reduce_op="sum")
        loss, norm = float(loss_sum / share), float(lit.grad_norm)
        lit.loss_sum, lit.loss_share = torch.zeros_like(lit.loss_sum), torch.zeros_like(lit.loss_share)
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
        append(self.metrics, json.dumps(self.row) + "\n")
        self.mirror()

    def _save(self, trainer: L.Trainer, lit: Any) -> None:
        lit.check_finite()
        lit.check_weights()
        if trainer.is_global_zero:
            sync(self.metrics)  # the rows must not reach the disk after a checkpoint that is beyond them
        trainer.save_checkpoint(path_of(self.checkpoints, self.step), weights_only=False)
        if trainer.is_global_zero:
            prune(self.checkpoints, newest=self.step, keep=self.keep, best=self.best[1])
        self.saved_at = time.perf_counter()

    def on_save_checkpoint(self, trainer: L.Trainer, lit: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["since_row"] = {
            "step": self.logged_step,
            "seconds": self.seconds,
            "loss_sums": torch.tensor(gather(float(lit.loss_sum))),  # [processes]
            "loss_count": torch.tensor(gather(float(lit.loss_share))),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, lit: Any, checkpoint: dict[str, Any]) -> None:
        since = checkpoint["since_row"]
        self.logged_step, self.seconds, sums = since["step"], since["seconds"], since["loss_sums"]
        shares = torch.as_tensor(since["loss_count"]).float().expand_as(sums)
        same = len(sums) == trainer.world_size  # with another number of processes each carries the mean on
        lit.loss_sum, lit.loss_share = (part[trainer.global_rank] if same else part.mean() for part in (sums, shares))


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
