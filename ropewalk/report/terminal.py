"""The end of a run on a terminal: a table and the answer. All else is on the page."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from conf.schema import Config
from ropewalk.evaluation.results import Evaluation
from ropewalk.files import printable
from ropewalk.report.answer import answer
from ropewalk.report.frame import load
from ropewalk.report.page import Grid, grids
from ropewalk.report.table import results

WIDTH = 100  # columns at most; also those of a pipe, which has no width
READINGS = 4  # of the weights that fit beside each other


def show(run: Path, cfg: Config, only: Iterable[Evaluation] | None = None) -> None:
    """Print the results of a run.

    Args:
        cfg: its tolerance decides what is level, instead of that which the run was trained with.
        only: print only results with the same measure and settings as these.
    """
    runs = load(run)
    for config in runs.configs.values():
        config["eval.tolerance"] = cfg.eval.tolerance
    table = results(runs)
    shown = grids(table)[:1]
    if only is not None:
        asked = {(e.kind, json.dumps(e.eval, sort_keys=True)) for e in only}
        # Not table[...]: of an empty table an empty list would choose no columns.
        table = table.loc[[measured in asked for measured in zip(table.measure, table["eval"], strict=True)]]
        shown = grids(table)
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width if sys.stdout.isatty() else WIDTH, WIDTH)
    for grid in shown:
        console.print(printable(f"{run.name}: {grid.title}"), upright(grid), sep="\n")
    console.print(*map(printable, answer(table)), sep="\n")


def upright(grid: Grid) -> Table:
    """Return a table with a column for each way to read the weights of a run; those that do not fit are counted."""
    left_out = len(grid.cells) - READINGS
    table = Table(box=SIMPLE_HEAD, caption=f"{left_out} more columns are on the page" if left_out > 0 else None)
    shown = grid.cells[:READINGS].T.reset_index()
    for name in ["", *shown.columns[1:]]:
        table.add_column(printable(name), justify="right" if name else "left")
    for row in shown.itertuples(index=False, name=None):
        table.add_row(*map(printable, row))
    return table
