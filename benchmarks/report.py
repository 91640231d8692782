"""What a benchmark says: tables to read, and everything measured as JSON."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conf.rundir import environment, write_atomically
from conf.schema import ConfigError


@dataclass
class Table:
    """Rows of equal keys, which are the heads of the columns."""

    title: str
    rows: list[dict[str, Any]]

    def markdown(self) -> str:
        heads = list(self.rows[0])
        lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *([cell(row[h]) for h in heads] for row in self.rows)]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Three significant digits; - for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "&#124;")


@dataclass
class Outcome:
    """Of one mode: its tables, and every measurement behind them."""

    tables: list[Table]
    measurements: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def where(device: str, threads: int) -> dict[str, Any]:
    """The circumstances of a measurement; to be taken before it, for the load of others."""
    on = torch.cuda.get_device_name() if device == "cuda" else f"{threads or torch.get_num_threads()} thread(s)"
    return environment() | {"device": device, "on": on, "load": round(os.getloadavg()[0], 1)}


def heading(place: dict[str, Any]) -> str:
    return (
        f"`python {place['command']}`\n\n{place['processor']}, {place['cores']} cores; {place['device']}, "
        f"{place['on']}; torch {place['packages']['torch']}, Python {place['python']}; "
        f"load before: {place['load']:g}"
    )


def publish(mode: str, outcome: Outcome, place: dict[str, Any], out: str | None) -> None:
    """Print the tables as Markdown, and write all of it to `out` as JSON."""
    print("\n\n".join([heading(place), *outcome.notes, *(table.markdown() for table in outcome.tables)]))
    if out:
        record = {
            "mode": mode,
            "environment": place,
            "notes": outcome.notes,
            "tables": {table.title: table.rows for table in outcome.tables},
            "measurements": outcome.measurements,
        }
        write_atomically(Path(out), json.dumps(record, indent=1) + "\n")


def check_out(out: str | None) -> None:
    """Raise ConfigError if `out` cannot be written: better now than after the measurement."""
    if out and not Path(out).resolve().parent.is_dir():
        raise ConfigError(f"out={out}: there is no such directory as {Path(out).parent}")


def progress(text: str) -> None:
    """What is measured now, for those who wait."""
    print(text, file=sys.stderr, flush=True)
