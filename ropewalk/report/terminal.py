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
from ropewalk.report.page import grids
from ropewalk.report.table import results

WIDTH = 100  # columns at most; also those of a pipe, which has no width
READINGS = 4  # of the weights that fit beside each other


def show(run: Path, cfg: Config, only: Iterable[Evaluation] | None = None) -> None:
    """Print the results of a run: a table with a column for each reading of its weights, and the answer.

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
        # That by position has a row for each of many positions, and the answer is not made of it.
        others = table[table.measure != "by_position"]
        shown = grids(table if others.empty else others)
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width if sys.stdout.isatty() else WIDTH, WIDTH)
    for grid in shown:
        more = len(grid.cells) - READINGS
        upright = Table("", box=SIMPLE_HEAD, caption=f"{more} more columns are on the page" if more > 0 else None)
        cells = grid.cells[:READINGS].T
        for name in cells:
            upright.add_column(printable(name), justify="right")
        for row in cells.itertuples(name=None):
            upright.add_row(*map(printable, row))
        console.print(printable(f"{run.name}: {grid.title}"), upright, sep="\n")
    console.print(*map(printable, answer(table)), sep="\n")
