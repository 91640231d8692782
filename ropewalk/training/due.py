"""What follows an optimizer step: a row, a validation, an evaluation, a checkpoint, the end."""

import time
from dataclasses import dataclass

from conf.schema import Config
from ropewalk.training.distributed import any_rank
from ropewalk.training.stop import Stop


@dataclass
class Due:
    """The work that follows an optimizer step."""

    validating: bool
    logging: bool
    measuring: bool
    saving: bool
    stopping: bool
    interrupted: bool  # by Ctrl-C, which has an exit code of its own

    @property
    def anything(self) -> bool:
        return self.logging or self.measuring or self.saving


def due_after(step: int, cfg: Config, stop: Stop, saved: float) -> Due:
    """Return what is due after `step`, if the last checkpoint was saved at the time `saved`. All ranks agree."""
    t = cfg.trainer
    last = step == t.max_steps
    late = time.perf_counter() - saved > 60 * t.checkpoint_minutes
    stopping = bool(stop) and not last
    # Signals and clocks differ among ranks, but saving and stopping take all of them: if one rank must, all do.
    stopping, interrupted, late = any_rank(stopping, stop.reason == "SIGINT", late)
    validating = step % t.val_every == 0 or last
    return Due(
        validating=validating,
        logging=step % t.log_every == 0 or validating or step == 1,
        measuring=step in cfg.eval.at,
        saving=step % t.checkpoint_every == 0 or last or late or stopping,
        stopping=stopping,
        interrupted=interrupted,
    )
