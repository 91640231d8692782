"""The end of training by a signal."""

import signal
import threading
from typing import Any, Self

STOPPED = 75  # exit code, os.EX_TEMPFAIL "try again later": a job script requeues on it and on no other
INTERRUPTED = 130  # after Ctrl-C, as in shells


class Stop:
    """The request to end training after the current optimizer step, by a signal.

    Inside the context SIGTERM and SIGUSR1, with which clusters announce the end of a job, and Ctrl-C only set a flag. A
    second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.signal = ""  # name of the last one that has come
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
        self.signal = signal.Signals(number).name
        # A step may take minutes: a second Ctrl-C kills the process.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
