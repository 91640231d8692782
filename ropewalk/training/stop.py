"""The end of training by a signal."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 75  # exit code, os.EX_TEMPFAIL "try again later": a job script requeues on it and on no other
INTERRUPTED = 130  # after Ctrl-C, as in shells


@contextmanager
def noting_signals() -> Iterator[list[str]]:
    """Yield a list that gets the names of signals, which ask training to end after the current optimizer step.

    Inside the context SIGTERM and SIGUSR1, with which clusters announce the end of a job, and Ctrl-C do nothing else. A
    second Ctrl-C ends the process at once.
    """
    names: list[str] = []

    def note(number: int, _: object) -> None:
        names.append(signal.Signals(number).name)
        # A step may take minutes: a second Ctrl-C kills the process.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    handlers = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield names
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
