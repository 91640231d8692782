"""What a run shows: a summary at its start, then a bar on a terminal, or a line for each logged step elsewhere."""

import sys
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.base import Data
from data.sampler import micro_batch_size
from model.gpt import GPT
from training.distributed import is_rank_zero, world_size
from training.hardware import Hardware


class StepProgress(Progress):
    """The progress of `max_steps` optimizer steps, of which `done` are done. A context manager."""

    def __init__(self, max_steps: int, done: int) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        super().__init__("training", *columns, disable=not (is_rank_zero() and sys.stdout.isatty()))
        self.max_steps, self.task = max_steps, self.add_task("", total=max_steps, completed=done)

    def show(self, step: int, row: dict[str, Any]) -> None:
        """Step `step` is done; `row` is what was logged of it, if anything."""
        self.update(self.task, completed=step)
        if row:
            text = f"loss {row['train/loss']:.3f}  lr {row['lr']:.2e}  {row['tokens_per_s']:,.0f} tokens/s"
            text += f"  val loss {row['val/loss']:.3f}" if "val/loss" in row else ""
            self.update(self.task, description=text)
            if self.disable:
                print(f"step {step}/{self.max_steps}  {text}", flush=True)


def describe(cfg: Any, net: GPT, data: Data, hardware: Hardware, facts: dict[str, Any]) -> None:
    """Print what is about to run."""
    t, ranks = cfg.trainer, world_size()
    counts = "{total:,} parameters ({embedding:,} embedding, {position:,} position)".format_map(facts["parameters"])
    with hardware.autocast():
        encodings = dict.fromkeys(line for pe in net.distinct_encodings for line in pe.describe())
    size = micro_batch_size(t.batch_size, t.grad_accum_steps, ranks)
    print(
        f"run {cfg.name}: {t.max_steps} steps of {t.batch_size} x {cfg.train_len} tokens, "
        f"in micro-batches of {size} on {ranks} process{'es' * (ranks > 1)}",
        *data.describe(),
        f"model: {counts}, {facts['flops_per_token'] / 1e6:.1f} MFLOP a token",
        *(encodings or [f"position encoding: {cfg.pe['name']}"]),
        *hardware.describe(),
        sep="\n",
    )
