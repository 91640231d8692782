"""Make README's table and picture, and most tables of docs/log, from docs/results/*.jsonl.gz.

python docs/results.py                       remake them; the same results make the same bytes
python docs/results.py markov runs/markov    first gather the runs in these folders into docs/results/markov.jsonl.gz
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import effects, ranks  # noqa: E402
from ropewalk.files import write_text  # noqa: E402
from ropewalk.report import frame, plot  # noqa: E402
from ropewalk.report.answer import amount, percent  # noqa: E402
from ropewalk.report.page import markdown_table  # noqa: E402
from ropewalk.report.table import BEST_POSSIBLE, losses_of_text, over_seeds, results  # noqa: E402

PICTURE = "docs/gain.svg"
# What README shows: what most people ask for, and the best.
FIRST = ("fox", "kerple", "alibi", "cope", "nope", "rope", "rope read as rerope", "rope read as yarn at scale 8")
COLOURED = [line for line in FIRST if line != "rope"]  # which is in ink


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Write all that is made from the results.

    Args:
        arguments: one of ARCHIVES, and folders of runs to gather into it first; none: the results are kept as they are.
        root: where README.md and docs/ lie.
    """
    if arguments:
        name, *folders = arguments
        frame.save(archive(name, root), folders)
    for name, write_table in ARCHIVES.items():
        if not archive(name, root).is_file():
            continue  # its runs are not done
        runs = frame.load(archive(name, root))
        for path, reason in runs.left_out:
            print(f"left out: {path}: {reason}", file=sys.stderr)
        if name == "markov":
            insert(place(name, root), name, full(losses_of_text(results(runs)), costs(root)))
            # The best of these lines is not the best of all, so the table is made of them alone.
            first = results(runs._replace(results=runs.results[runs.results.line.isin(FIRST)]))
            drawn = plot.svg(partial(plot.gain, first, lines=COLOURED), (8, 5))
            write_text(root / PICTURE, plot.on_its_own(drawn))
            insert(root / "README.md", name, short(losses_of_text(first)))
        else:
            lines = write_table(losses_of_text(results(runs)))
            if name in EFFECTS:
                lines += ["", *effects.rows(runs, EFFECTS[name]())]
            insert(place(name, root), name, lines)
    insert(place("ranks", root), "ranks", ranks.table(root))


def archive(name: str, root: Path) -> Path:
    """Return the file of one of ARCHIVES. Raises ValueError: there is no such one."""
    if name not in ARCHIVES:
        raise ValueError(f"{name} is none of the results: {', '.join(ARCHIVES)}")
    return root / f"docs/results/{name}.jsonl.gz"


def place(name: str, root: Path) -> Path:
    """Return the page with the table of that name."""
    return root / f"docs/log/{PAGES.get(name, name)}.md"


def lines_of(table: pd.DataFrame) -> list[str]:
    """Return the lines, best at the longest text first."""
    rows = over_seeds(table)
    rows = rows[rows.line != BEST_POSSIBLE].sort_values(["length", "rank", "line"], ascending=[False, True, True])
    return rows.line.unique().tolist()


def cell(table: pd.DataFrame, line: str, length: int, column: str = "value", sign: str = "") -> str:
    """Return a number over all seeds with its interval; "" where it was not measured."""
    rows = over_seeds(table)
    rows = rows[(rows.line == line) & (rows.length == length)]
    prefix = "" if column == "value" else f"{column}_"
    numbers = rows[[column, f"{prefix}low", f"{prefix}high"]]
    if rows.empty:
        return ""
    return percent(*numbers.iloc[0]) if column == "share" else amount(*numbers.iloc[0], sign=sign)


def seeds_of(table: pd.DataFrame, line: str) -> int:
    """Return the number of seeds of a line."""
    return int(table.seeds[table.line == line].max())


def short(table: pd.DataFrame) -> list[str]:
    """Return the table of README.md: how far each line is from the best possible loss, and what it gains."""
    train_len, longest = table.train_len.iloc[0], table.length.max()
    header = [
        f"trained at {train_len} tokens",
        f"bits above the best possible at {train_len}",
        f"at {longest}",
        f"gained over cutting, of {cell(table, BEST_POSSIBLE, longest, 'gain')}",
    ]
    rows = []
    for line in lines_of(table):
        above = [cell(table, line, length, "above") for length in (train_len, longest)]
        rows.append([line, *above, cell(table, line, longest, "gain", "+")])
    seeds = sorted({seeds_of(table, line) for line in lines_of(table)})
    over = f"{seeds[0]}"
    if len(seeds) > 1:
        over += f" to {seeds[-1]}"
    return [
        *markdown_table(header, rows),
        "",
        f"{table.texts.iloc[0]} texts, {over} seeds; ± is a 95 % interval over both.",
    ]


def costs(root: Path) -> dict[str, str]:
    """Return the time of a training step beside RoPE's, by line, as scripts/bench.py has printed it."""
    printed = (root / "docs/results/cost.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    return {row[0]: row[1].split(" ")[0] for row in rows[2:]}


def full(table: pd.DataFrame, costs: Mapping[str, str] | None = None) -> list[str]:
    """Return the table of docs/log/markov.md: each seed's bits above the best possible loss.

    Args:
        costs: time of a training step beside RoPE's, by line; without it the table has no such column.
    """
    train_len, longest = table.train_len.iloc[0], table.length.max()
    times = longest // train_len
    header = ["", "seeds", "above at 1x, by seed", f"above at {times}x, by seed", f"gain at {times}x"]
    header.append("share of the possible, %")
    rows: list[list[Any]] = []
    for line in lines_of(table):
        by_seed = [above(table, line, length) for length in (train_len, longest)]
        gain = cell(table, line, longest, "gain", "+")
        rows.append([line, seeds_of(table, line), *by_seed, gain, cell(table, line, longest, "share")])
    if costs is not None:
        header.append("time of a step")
        for row in rows:
            row.append(costs.get(row[0], ""))
    return markdown_table(header, rows)


def by_length(table: pd.DataFrame) -> list[str]:
    """Return a table of the gains at all lengths beyond the training length."""
    train_len = table.train_len.iloc[0]
    longer = sorted(table.length[table.length > train_len].unique())
    header = ["", "seeds", "above at 1x", *[f"gain at {length / train_len:g}x" for length in longer]]
    rows = []
    for line in lines_of(table):
        gains = [cell(table, line, length, "gain", "+") for length in longer]
        rows.append([line, seeds_of(table, line), cell(table, line, train_len, "above"), *gains])
    return markdown_table(header, rows)


def against_rope(table: pd.DataFrame) -> list[str]:
    """Return a table for texts whose optimum is not known: bits at the training length, and what longer text gains."""
    train_len, unit = table.train_len.iloc[0], table.unit.iloc[0]
    header = ["", "seeds", f"{unit} at 1x", f"against {table.reference.max()}", "gain at 2x", "gain at 8x"]
    rows = []
    for line in lines_of(table):
        near = [cell(table, line, train_len), cell(table, line, train_len, "difference", "+")]
        gains = [cell(table, line, times * train_len, "gain", "+") for times in (2, 8)]
        rows.append([line, seeds_of(table, line), *near, *gains])
    return markdown_table(header, rows)


def paired(table: pd.DataFrame) -> list[str]:
    """Return a table of the distance to the optimum at the training length, and of differences at all lengths."""
    train_len, lengths = table.train_len.iloc[0], sorted(table.length.unique())
    multiples = [f"at {length / train_len:g}x" for length in lengths]
    header = ["", "seeds", "above at 1x", f"against {table.reference.max()} {multiples[0]}", *multiples[1:]]
    rows = []
    for line in lines_of(table):
        differences = [cell(table, line, length, "difference", "+") for length in lengths]
        rows.append([line, seeds_of(table, line), cell(table, line, train_len, "above"), *differences])
    return markdown_table(header, rows)


def above(table: pd.DataFrame, line: str, length: int) -> str:
    """Return the bits above the best possible loss of each seed, in the order of the seeds."""
    rows = table[table.length == length]
    (best,) = rows.value[rows.line == BEST_POSSIBLE]
    of_seeds = rows[(rows.line == line) & rows.seed.notna()].sort_values("seed")
    return ", ".join(f"{value - best:.3f}" for value in of_seeds.value)


def insert(file: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between the two marks of one of ARCHIVES. Raises ValueError: the file has no such marks."""
    text, n = re.subn(
        rf"(<!-- made by docs/results.py of {name} -->\n).*?(<!-- end -->)",
        lambda marks: marks[1] + "\n".join(["", *lines, "", marks[2]]),
        file.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if n != 1:
        raise ValueError(f"{file} has no place for the table of {name}")
    write_text(file, text)


# In docs/results, each with a table of its name in docs/log.
ARCHIVES: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "markov": full,
    "conv": full,
    "options": full,
    "long": full,
    "why": by_length,
    "switch": full,
    "larger": full,
    "extend": paired,
    "code": against_rope,
    "prose": against_rope,
    "qk_norm": by_length,
    "qk_norm_code": by_length,
    "dropping": by_length,
    "olmpool": against_rope,
}
EFFECTS = {
    "qk_norm": effects.of_norm,
    "qk_norm_code": effects.of_norm,
    "dropping": effects.of_dropping,
    "olmpool": effects.of_features,
}
PAGES = {"qk_norm_code": "qk_norm"}  # the pages whose name is not that of the table


if __name__ == "__main__":
    main(sys.argv[1:])
