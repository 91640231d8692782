"""Ending a training early, in an orderly way."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Exit codes. os.EX_TEMPFAIL, "try again later": a job script requeues on it, and on no other; 143, which shells report
# of a process that SIGTERM killed, would not tell that all is saved.
STOPPED = 75
INTERRUPTED = 130  # after Ctrl-C, as shells have it


class Stop:
    """Tells whether training is to end after the current optimizer step: a signal came, or its time is over.

    SIGTERM and SIGUSR1, with which clusters announce that they take a machine away, and Ctrl-C only set a flag. A
    second Ctrl-C ends the process at once; so does any of them before and after the training, where nothing is lost.
    Of several processes any one may get it: all end after the same step.

    Args:
        minutes: from now on, or None.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.signal: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the signals set the flag."""
        before = {}
        if threading.current_thread() is threading.main_thread():  # others may not
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                before[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    @property
    def reason(self) -> str | None:
        """Why to end, or None."""
        if self.signal:
            return self.signal.name
        if self.deadline is not None and time.monotonic() > self.deadline:
            return f"trainer.time_limit={self.minutes:g} minutes"
        return None
