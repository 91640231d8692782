"""What follows an optimizer step: a row, a validation, an evaluation, a checkpoint, or an end by a signal or time."""

import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

from conf.schema import Config
from ropewalk.training.distributed import any_rank

STOPPED = 75  # exit code, os.EX_TEMPFAIL "try again later": a job script requeues on it and on no other
INTERRUPTED = 130  # after Ctrl-C, as in shells


class Stop:
    """The request to end training after the current optimizer step: by a signal, or by the time limit.

    Inside the context SIGTERM and SIGUSR1, with which clusters announce the end of a job, and Ctrl-C only set a flag. A
    second Ctrl-C ends the process at once.

    Args:
        minutes: the time limit, counted from now; None: no limit.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self.started = time.monotonic()
        self.reason: str | None = None  # name of the signal, or the option that set the limit
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows no other thread to set handlers
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self._old_handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.reason = signal.Signals(number).name
        # A step may take minutes: a second Ctrl-C kills the process.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    @property
    def signalled(self) -> bool:
        """True after a signal, which is more pressing than the time limit."""
        return (self.reason or "").startswith("SIG")

    def __bool__(self) -> bool:
        """True once training should end."""
        if self.reason is None and self.minutes is not None and time.monotonic() - self.started > 60 * self.minutes:
            self.reason = f"trainer.time_limit={self.minutes:g} minutes"
        return self.reason is not None


@dataclass
class Due:
    """The work that follows an optimizer step."""

    validating: bool
    logging: bool
    measuring: bool
    saving: bool
    stopping: bool
    interrupted: bool  # by Ctrl-C, which has an exit code of its own


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
