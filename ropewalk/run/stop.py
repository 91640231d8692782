"""The end of a program by a signal, or with the process that has started it. Imports nothing that takes long."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator

EXIT_STOPPED = 75  # exit code, os.EX_TEMPFAIL "try again later": a job script requeues on it and on no other
EXIT_INTERRUPTED = 130  # after Ctrl-C, as in shells
PARENT_ENV = "ROPEWALK_PARENT"  # environment variable: process id of rank zero, for the ranks that it starts


@contextlib.contextmanager
def noting_signals() -> Iterator[list[str]]:
    """Yield a list that gets the names of signals, which ask training to end after the current optimizer step.

    Inside the context SIGTERM and SIGUSR1, with which clusters announce the end of a job, and Ctrl-C do nothing else. A
    second Ctrl-C ends the process at once. SIGUSR2 counts where a launcher waits for it. A launcher that waits for one
    of these two, as submitit does to requeue a job, gets it when the context ends. Outside the main thread, which alone
    gets signals, none is noted.
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _: object) -> None:
        received.append(signal.Signals(number).name)
        # A step may take minutes: a second Ctrl-C kills the process.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if callable(signal.getsignal(signal.SIGUSR2)):
        numbers.append(signal.SIGUSR2)
    handlers = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if number.name in received and callable(handlers[number]):
                signal.raise_signal(number)


def reasons_to_stop(signals: list[str], deadline: float) -> list[str]:
    """Return the names of `signals`, and trainer.time_limit once `time.monotonic` is past the `deadline`."""
    return [*signals, "trainer.time_limit"] if time.monotonic() > deadline else [*signals]


def die_with_parent(parent: int) -> None:
    """Make this process end whenever the process `parent`, which started it, ends; at once if it has ended."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG, the signal when the parent ends
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
