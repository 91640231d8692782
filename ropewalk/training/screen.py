"""What a run shows while it trains: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from rich.progress import BarColumn, Progress, TextColumn

from conf.schema import Config

EVERY = 10  # seconds between two lines
READING = 1 / 3  # time of reading a token, in parts of that of training with it: there is no backward pass


class Screen:
    """Shows the rows of a run, and how long it will take.

    Args:
        evaluation: tokens that are read at the end, about.
    """

    def __init__(self, cfg: Config, evaluation: int) -> None:
        self.cfg = cfg
        self.evaluation = evaluation
        self.shown = time.monotonic()
        self.bar = Progress(BarColumn(), TextColumn("{task.description}"), disable=not sys.stdout.isatty())
        self.task = self.bar.add_task("", total=cfg.trainer.max_steps)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def is_due(self) -> bool:
        """Whether it is time to show something, whatever the step."""
        return time.monotonic() - self.shown > EVERY

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl: in the bar, and as a line of its own if it is due, validated or the first."""
        text = self._text(row)
        step = row["step"]
        self.bar.update(self.task, completed=step, description=text)
        validated = "val/loss" in row
        is_due = step == 1 or validated or self.is_due()
        if is_due:
            self.shown = time.monotonic()
        if validated or (is_due and self.bar.disable):
            print(text, flush=True)

    def _text(self, row: Mapping[str, Any]) -> str:
        t = self.cfg.trainer
        text = f"step {row['step']}/{t.max_steps}  loss {row['train/loss']:.3f}  {row['tokens_per_s']:,.0f} tokens/s"
        if "val/error" in row:
            text += f"  val error {row['val/error']:.1f} %"
        elif "val/loss" in row:
            text += f"  val loss {row['val/loss']:.3f}"
        if row["step"] > 1:  # the first step alone says little of the time of the others
            steps = t.max_steps - row["step"]
            validations = -(-steps // t.val_every)
            read = validations * t.val_tokens + self.evaluation
            seconds = (steps * self.cfg.step_tokens + READING * read) * row["seconds"] / row["tokens"]
            text += f"  {seconds / 60:.1f} minutes left"
        return text
