"""Make README's table and picture, and most tables of docs/log, from docs/results/*.parquet.

python docs/results.py                       remake them; the same results make the same bytes
python docs/results.py markov runs/markov    first gather the runs in these folders into docs/results/markov.parquet
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from conf.files import write_bytes, write_text  # noqa: E402
from data.tasks.markov import Markov  # noqa: E402
from docs import effects  # noqa: E402
from lab.board import board, counter  # noqa: E402
from lab.board.rules import over_seeds as of_seeds  # noqa: E402
from ropewalk.evaluation.archive import write  # noqa: E402
from ropewalk.report import frame, plot  # noqa: E402
from ropewalk.report.answer import amount, percent  # noqa: E402
from ropewalk.report.page import markdown_table  # noqa: E402
from ropewalk.report.table import BEST_POSSIBLE, by_length, interval, over_seeds, results  # noqa: E402

PICTURE = "docs/gain.svg"
BY_SEED = "by seed"  # in the place of a column: bits above the best possible loss of each seed, in their order
# What README's picture shows: what most people ask for, and the best.
FIRST = ("fox", "kerple", "alibi", "cope", "nope", "rope", "rope read as rerope", "rope read as yarn at scale 8")
# Encodings of the board in README's table, and what it calls them.
SHOWN = dict.fromkeys(["fox", "alibi", "fox_rope", "kerple", "nope", "rope"]) | {
    "window": "rope that sees 64 tokens (the control)",
    "yarn": "rope read as yarn",
}
COUNTER = "a counter of pairs, two numbers, no training"
CHAINS = {"markov": "Gain over the cut text where chains stay", "switch": "Gain where chains change"}
COLOURED = [line for line in FIRST if line != "rope"]  # which is in ink


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Write all that is made from the results.

    Args:
        arguments: one of ARCHIVES, and folders of runs to gather into it first; none: the results are kept as they are.
        root: where README.md and docs/ lie.
    """
    if arguments:
        name, *folders = arguments
        gathered = frame.load(folders)
        write(archive(name, root), gathered.runs, gathered.results)
    for name, write_table in ARCHIVES.items():
        if not archive(name, root).is_file():
            continue  # its runs are not done
        runs = frame.load(archive(name, root))
        # What a run started from is no row, and nobody's control.
        runs = runs._replace(results=runs.results[~runs.results.line.str.startswith(frame.START)])
        for path, reason in runs.left_out:
            print(f"left out: {path}: {reason}", file=sys.stderr)
        if name == "markov":
            insert(place(name, root), name, full(by_length(results(runs)), costs(root)))
            write_bytes(root / PICTURE, picture(root))
            insert(root / "README.md", "board", headline(ROOT / "board"))
        else:
            lines = write_table(by_length(results(runs)))
            if name in COUNTED:
                lines += ["", counted(COUNTED[name])]
            if name in EFFECTS:
                lines += ["", *effects.rows(runs, EFFECTS[name]())]
            insert(place(name, root), name, lines)


def picture(root: Path) -> bytes:
    """Return the picture of README.md: what FIRST gain on both kinds of chains."""
    axes = Figure(figsize=(11, 4.4), layout="constrained").subplots(1, 2)
    for ax, (name, title) in zip(axes, CHAINS.items(), strict=True):
        runs = frame.load(archive(name, root))
        # The best of these lines is not the best of all, so the table is made of them alone.
        table = results(runs._replace(results=runs.results[runs.results.line.isin(FIRST)]))
        plot.gain(table, ax, lines=COLOURED)
        plot.titled(ax, title, "bars: 95 % interval; dashed: read otherwise")
    return plot.written(axes[0], "svg")


def archive(name: str, root: Path) -> Path:
    """Return the file of one of ARCHIVES. Raises ValueError: there is no such one."""
    if name not in ARCHIVES:
        raise ValueError(f"{name} is none of the results: {', '.join(ARCHIVES)}")
    return root / f"docs/results/{name}.parquet"


def place(name: str, root: Path) -> Path:
    """Return the page with the table of that name."""
    return root / f"docs/log/{PAGES.get(name, name)}.md"


def lines_of(table: pd.DataFrame) -> list[str]:
    """Return the lines, best at the longest text first."""
    rows = over_seeds(table)
    rows = rows[rows.line != BEST_POSSIBLE].sort_values(["length", "rank", "line"], ascending=[False, True, True])
    return rows.line.unique().tolist()


def cell(table: pd.DataFrame, line: str, column: str, length: int) -> str:
    """Return a number over all seeds with its interval, or with BY_SEED those of each; "" where it was not measured."""
    rows = table[(table.line == line) & (table.length == length)]
    if column == BY_SEED:
        (best,) = table.value[(table.line == BEST_POSSIBLE) & (table.length == length)]
        of_seeds = rows[rows.seed.notna()].sort_values("seed")
        return ", ".join(f"{value - best:.3f}" for value in of_seeds.value)
    if rows.empty:
        return ""
    numbers = over_seeds(rows)[interval(column)].iloc[0]
    if column == "share":
        return percent(*numbers)
    return amount(*numbers, sign="+" if column in ("gain", "difference") else "")


def tabulated(table: pd.DataFrame, columns: Mapping[str, tuple[str, int]]) -> list[list[str]]:
    """Return the header and the rows of a table of these columns of the long table, each at a length."""
    rows = [["", "seeds", *columns]]
    for line in lines_of(table):
        seeds = table.seeds[table.line == line].max()
        rows.append([line, str(seeds), *[cell(table, line, *column) for column in columns.values()]])
    return rows


def headline(folder: Path) -> list[str]:
    """Return the table of README.md: what encodings of the board gain on both kinds of chains, best score first."""
    verdicts = {verdict.encoding: verdict.measured for verdict in board.verdicts(folder)}
    counted = counter.load(folder)
    assert counted is not None
    shown = {COUNTER: counted.measured} | {words or name: verdicts[name] for name, words in SHOWN.items()}
    possible = [f"{of_seeds(np.array(of_kind)).value:.3f}" for of_kind in verdicts["rope"].possible]
    rows = []
    for name, measured in sorted(shown.items(), key=lambda item: -item[1].scores().mean()):
        gains = [amount(*of_seeds(np.array(of_kind))[:3], sign="+") for of_kind in measured.gain]
        rows.append([name, *gains, f"{measured.scores().mean():.0f}"])
    kinds = [f"where {kind}, of {most}" for kind, most in zip(("chains stay", "chains change"), possible, strict=True)]
    note = "Bits per token; 20 seeds of rope, fox and the counter, 5 of the others; ± is a 95 % interval over them."
    return [*markdown_table([["gained at 8x over the cut text", *kinds, "score"], *rows]), "", note]


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
    columns = {
        "above at 1x, by seed": (BY_SEED, train_len),
        f"above at {times}x, by seed": (BY_SEED, longest),
        f"gain at {times}x": ("gain", longest),
        "share of the possible, %": ("share", longest),
    }
    rows = tabulated(table, columns)
    if costs is not None:
        for row in rows:
            row.append(({"": "time of a step"} | costs).get(row[0], ""))
    return markdown_table(rows)


def counted(switch: float) -> str:
    """Return a sentence on the counter of pairs, on the texts that conf/experiment/markov.yaml evaluates."""
    chains = Markov(switch=switch)
    decay = counter.best_decay(chains, 512)
    gain, possible, above = counter.gains(chains, decay, (64, 512), target_tokens=4, texts=512)
    at_8x = above + possible - gain
    return (
        f"Without training a counter of pairs that keeps {decay:g} of each count a token is {above:.3f} above at 1x "
        f"and {at_8x:.3f} at 8x; it gains {gain:.3f}, {100 * gain / possible:.0f} % of the possible."
    )


def gains(table: pd.DataFrame) -> list[str]:
    """Return a table of the gains at all lengths beyond the training length."""
    train_len = table.train_len.iloc[0]
    longer = sorted(table.length[table.length > train_len].unique())
    columns = {f"gain at {length / train_len:g}x": ("gain", length) for length in longer}
    return markdown_table(tabulated(table, {"above at 1x": ("above", train_len)} | columns))


def against_rope(table: pd.DataFrame) -> list[str]:
    """Return a table for texts whose optimum is not known: bits at the training length, and what longer text gains."""
    train_len = table.train_len.iloc[0]
    columns = {
        f"{table.unit.iloc[0]} at 1x": ("value", train_len),
        f"against {table.reference.max()}": ("difference", train_len),
        "gain at 2x": ("gain", 2 * train_len),
        "gain at 8x": ("gain", 8 * train_len),
    }
    return markdown_table(tabulated(table, columns))


def paired(table: pd.DataFrame) -> list[str]:
    """Return a table of the distance to the optimum at the training length, and of differences at all lengths."""
    train_len, lengths = table.train_len.iloc[0], sorted(table.length.unique())
    columns = {"above at 1x": ("above", train_len)}
    for length in lengths:
        words = f"against {table.reference.max()} " if length == lengths[0] else ""
        columns[f"{words}at {length / train_len:g}x"] = ("difference", length)
    return markdown_table(tabulated(table, columns))


def at_lengths(table: pd.DataFrame) -> list[str]:
    """Return a table of the losses at all lengths."""
    lengths = sorted(table.length.unique())
    return markdown_table(tabulated(table, {f"{table.unit.iloc[0]} at {n}": ("value", n) for n in lengths}))


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
    "why": gains,
    "switch": full,
    "larger": full,
    "extend": paired,
    "code": against_rope,
    "prose": against_rope,
    "qk_norm": gains,
    "qk_norm_code": gains,
    "dropping": gains,
    "newer": gains,
    "olmpool": at_lengths,
    "nope": full,
    "gates": full,
    "gates_switch": full,
}
EFFECTS = {
    "qk_norm": effects.of_norm,
    "qk_norm_code": effects.of_norm,
    "dropping": effects.of_dropping,
    "newer": effects.of_newer,
    "olmpool": effects.of_features,
}
# The hazard of tables beside which the counter of pairs stands. At 0 it is the best possible predictor.
COUNTED = {"switch": 0.01, "gates_switch": 0.01}
# The pages whose name is not that of the table.
PAGES = {"qk_norm_code": "qk_norm", "gates_switch": "gates", "nope": "learning_rates"}


if __name__ == "__main__":
    main(sys.argv[1:])
