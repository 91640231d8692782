"""Jobs that share a limited time: each row is printed as it comes, and a job that fails ends alone."""

import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from lab.benchmarks.measure import reason_of, table_line

Row = dict[str, str]  # {heading of a column: cell}; the first column, which names the row, has no heading
Result = TypeVar("Result")


class Checklist:
    """Runs jobs within some minutes and prints what they return, as Markdown.

    No job begins after its time. One that has begun is finished, so the last one may end later.

    Args:
        minutes: for everything, from now on.
        clock: returns seconds.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.minutes = minutes
        self.clock = clock
        self.begun = clock()
        self.left_out: dict[str, list[str]] = {}  # names of jobs by the title of their table
        self.failed: list[str] = []  # titles and names of jobs

    def minutes_spent(self) -> float:
        """Minutes since the list was made."""
        return (self.clock() - self.begun) / 60

    def table(
        self, title: str, columns: Sequence[str], jobs: Mapping[str, Callable[[], Row]], *, share: float
    ) -> list[Row]:
        """Print a table, and return the rows of those jobs that ran and did not fail.

        Args:
            title: of the table.
            columns: their headings, without the first, which is empty.
            jobs: {name: a call that returns the cells of its row}; "" among the cells replaces the name.
            share: of all minutes, after which no job begins.
        """
        print(f"\n## {title}\n", flush=True)
        rows: list[Row] = []
        headed = False
        for name, job in jobs.items():
            if not self._in_time(share):
                self.left_out.setdefault(title, []).append(name)
                continue
            if not headed:
                print(table_line(["", *columns]), table_line(["---"] * (1 + len(columns))), sep="\n", flush=True)
                headed = True
            cells, reason = self._attempt(title, name, job)
            row = {"": name}
            if cells is None:
                row[columns[0]] = f"fails: {reason}".replace("|", "\\|")
            else:
                row |= cells
                rows.append(row)
            print(table_line([row.get(column, "") for column in ("", *columns)]), flush=True)
        if not headed:
            print("Left out: no time.", flush=True)
        return rows

    def part(self, title: str, job: Callable[[], str], *, share: float) -> None:
        """Print what one job returns, below a title."""
        print(f"\n## {title}\n", flush=True)
        if not self._in_time(share):
            self.left_out[title] = []
            print("Left out: no time.", flush=True)
            return
        text, reason = self._attempt(title, "", job)
        print(f"Fails: {reason}" if text is None else text, flush=True)

    def _in_time(self, share: float) -> bool:
        return self.minutes_spent() < share * self.minutes

    def _attempt(self, title: str, name: str, job: Callable[[], Result]) -> tuple[Result | None, str]:
        """Return what the job returns and ""; or None and the reason why it failed."""
        print(f"{title}: {name}", file=sys.stderr, flush=True)
        try:
            return job(), ""
        except Exception as failure:  # whatever a compiler or a driver may raise, and where memory does not suffice
            traceback.print_exc()
            reason = reason_of(failure)
        self.failed.append(f"{title}: {name}".removesuffix(": "))
        # The frames of the failure held its tensors. After an illegal access even this may raise.
        gc.collect()
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()
        return None, reason
