"""Jobs that share a limited time, each in a process of its own: what one of them breaks, the others do not see."""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from lab.kernels.check import outcome_of

Run = Callable[[Sequence[str], float], str]  # see `outcome_of`


class Job(NamedTuple):
    """A program, and its name in the table."""

    name: str
    command: list[str]


class Checklist:
    """Starts jobs within some minutes. One that has not ended by then is stopped.

    Args:
        minutes: for everything, from now on.
        at_once: jobs that run at the same time. Most of their time is that of compilers.
        run: runs a program, and returns the last line that it prints, or how it failed.
        clock: returns seconds.
    """

    def __init__(
        self, minutes: float, at_once: int, run: Run = outcome_of, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ends = clock() + 60 * minutes
        self.at_once = at_once
        self.run = run
        self.clock = clock
        self.left_out: list[str] = []

    def outcomes(self, jobs: Sequence[Job]) -> dict[str, str]:
        """The outcome of each job by its name, "" for those that time did not allow."""
        with ThreadPoolExecutor(self.at_once) as pool:
            return dict(zip([job.name for job in jobs], pool.map(self._outcome, jobs), strict=True))

    def _outcome(self, job: Job) -> str:
        seconds = self.ends - self.clock()
        if seconds <= 0:
            self.left_out.append(job.name)
            return ""
        print(job.name, file=sys.stderr, flush=True)
        return self.run(job.command, seconds)
