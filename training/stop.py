"""Stopping a training run early, with a checkpoint: signals and the time limit."""

import signal
import threading
import time
from typing import Any, Self

# Exit codes. 75 is os.EX_TEMPFAIL, "try again later": a job script requeues on it and on no other code. 143, which
# shells report of a process killed by SIGTERM, would not tell that everything is saved.
STOPPED = 75
INTERRUPTED = 130  # after Ctrl-C, as in shells


class Stop:
    """Tells whether training shall end after the current optimizer step, because of a signal or the time limit.

    Inside the context SIGTERM and SIGUSR1, with which clusters announce the end of a job, and Ctrl-C only set a flag. A
    second Ctrl-C ends the process at once, as all signals do before and after, when there is nothing to lose. The limit
    is in minutes from now on.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes, self.began = minutes, time.monotonic()
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows no other
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.signal = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self.signal:
            return self.signal.name
        if self.minutes is not None and time.monotonic() > self.began + 60 * self.minutes:
            return f"trainer.time_limit={self.minutes:g} minutes"
        return None
