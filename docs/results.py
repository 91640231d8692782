"""Make README's table and picture, and most tables of docs/log, from docs/results/*.parquet.

python docs/results.py                       remake them; the same results make the same bytes
python docs/results.py markov runs/markov    first gather the runs in these folders into docs/results/markov.parquet
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
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
from ropewalk.report.table import BEST_POSSIBLE, by_length, interval_columns, over_seeds, results  # noqa: E402

PICTURE = "docs/gain.svg"
TABLES = yaml.safe_load((ROOT / "docs/log/tables.yaml").read_text(encoding="utf-8"))
BY_SEED = "by seed"  # in the place of a column: bits above the best possible loss of each seed, in their order
# What README's picture shows: what most people ask for, and the best.
FIRST = ("fox", "kerple", "alibi", "cope", "rope", "rope read as rerope", "rope read as yarn at scale 8")
# Encodings of the board in README's table, and what it calls them.
SHOWN = dict.fromkeys(["fox", "alibi", "fox_rope", "kerple", "nope", "rope"]) | {
    "window": "rope with a window of 64 (the control)",
    "yarn": "rope read as yarn",
}
COUNTER = "a counter of pairs, two numbers, no training"
CHAINS = {"markov": "Gain over the cut text where chains stay", "switch": "Gain where chains change"}


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Write all that is made from the results.

    Args:
        arguments: the name of an archive, and folders of runs to gather into it first; none: the results are kept.
        root: where README.md and docs/ lie.
    """
    if arguments:
        name, *folders = arguments
        gathered = frame.load(folders)
        write(archive(name, root), gathered.runs, gathered.results)
    for name, described in TABLES["tables"].items():
        if not archive(name, root).is_file():
            continue  # its runs are not done
        sections = results(loaded(archive(name, root))).groupby("section", sort=False)
        table = pd.concat([by_length(section) for _, section in sections])
        rows = tabulated(table, described["columns"])
        if name == "markov":
            with_costs(rows, root)
            write_bytes(root / PICTURE, picture(root))
            insert(root / "README.md", "board", headline(ROOT / "board"))
        lines = markdown_table(rows)
        if "counted" in described:
            lines += ["", counted(described["counted"])]
        insert(page(described.get("page", name), root), name, lines)
    for name, described in TABLES["effects"].items():
        # By archive: words that tell it from the others. Each effect is taken in each of them.
        words_of = described.get("archives", {name: ""})
        if all(archive(of, root).is_file() for of in words_of):
            of_archives = {words: loaded(archive(of, root)) for of, words in words_of.items()}
            lines = effects.rows(effects.effects_of(described), of_archives)
            insert(page(described.get("page", name), root), f"effects of {name}", lines)


def loaded(file: Path) -> frame.Runs:
    """Return the runs of an archive without those that others started from, which are no row and nobody's control.

    In several sections one label may stand for several lines. These are called by the names of their runs instead.
    """
    runs = frame.load(file)
    for path, reason in runs.left_out:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    rows = runs.results[~runs.results.line.str.startswith(frame.START)]
    if rows.section.nunique() > 1:
        names = runs.runs["name"].str.replace(r"-s\d+$", "", regex=True)
        rows = rows.assign(line=(rows.path.map(names) + " " + rows.reading).str.strip())
        # Their sections, which are called by a hash, come in the order of these names.
        rows = rows.assign(section=rows.groupby("section").line.transform("min"))
    return runs._replace(results=rows)


def picture(root: Path) -> bytes:
    """Return the picture of README.md: what FIRST gain on both kinds of chains."""
    axes = Figure(figsize=(11, 4.4), layout="constrained").subplots(1, 2)
    for ax, (name, title) in zip(axes, CHAINS.items(), strict=True):
        runs = loaded(archive(name, root))
        # The best of these lines is not the best of all, so the table is made of them alone.
        table = results(runs._replace(results=runs.results[runs.results.line.isin(FIRST)]))
        plot.gain(table, ax, lines=[line for line in FIRST if line != "rope"])  # which is in ink
        plot.titled(ax, title, "bars: 95 % interval; dashed: read otherwise")
    return plot.written(axes[0], "svg")


def archive(name: str, root: Path) -> Path:
    """Return the file of an archive. Raises ValueError: tables.yaml has no table of it."""
    if name not in TABLES["tables"]:
        raise ValueError(f"{name} is none of the results: {', '.join(TABLES['tables'])}")
    return root / f"docs/results/{name}.parquet"


def page(name: str, root: Path) -> Path:
    """Return a page of the log."""
    return root / f"docs/log/{name}.md"


def lines_of(table: pd.DataFrame) -> list[str]:
    """Return the lines, of each section the best at the longest text first."""
    rows = over_seeds(table)
    order = {"section": True, "length": False, "rank": True, "line": True}  # ascending
    rows = rows[rows.line != BEST_POSSIBLE].sort_values([*order], ascending=[*order.values()])
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
    numbers = over_seeds(rows)[interval_columns(column)].iloc[0]
    if column == "share":
        return percent(*numbers)
    return amount(*numbers, sign="+" if column in ("gain", "difference") else "")


def tabulated(table: pd.DataFrame, columns: Mapping[str, tuple[str, float]]) -> list[list[str]]:
    """Return the header and the rows of a table of these columns of the long table.

    Args:
        columns: by name: the column, and the length as a multiple of the training length.
    """
    train_len = table.train_len.iloc[0]
    rows = [["", "seeds", *columns]]
    for line in lines_of(table):
        seeds = table.seeds[table.line == line].max()
        numbers = [cell(table, line, column, round(times * train_len)) for column, times in columns.values()]
        rows.append([line, str(seeds), *numbers])
    return rows


def headline(folder: Path) -> list[str]:
    """Return the table of README.md: what encodings of the board gain on both kinds of chains, best score first."""
    verdicts = {verdict.encoding: verdict.measured for verdict in board.verdicts(folder)}
    counted = counter.load(folder)
    assert counted is not None
    shown = {COUNTER: counted.measured} | {words or name: verdicts[name] for name, words in SHOWN.items()}
    rows = []
    for name, measured in sorted(shown.items(), key=lambda item: -item[1].scores().mean()):
        gains = [amount(*of_seeds(np.array(of_kind))[:3], sign="+") for of_kind in measured.gain]
        rows.append([name, *gains, f"{measured.scores().mean():.0f}"])
    kinds = []
    for kind, possible in zip(("chains stay", "chains change"), verdicts["rope"].possible, strict=True):
        kinds.append(f"where {kind}, of {of_seeds(np.array(possible)).value:.3f}")
    note = "Bits per token; 20 seeds of rope, fox and the counter, 5 of the others; ± is a 95 % interval over them."
    return [*markdown_table([["gained at 8x over the cut text", *kinds, "score"], *rows]), "", note]


def with_costs(rows: list[list[str]], root: Path) -> None:
    """Add the time of a training step beside RoPE's to the rows of a table, as scripts/bench.py has printed it."""
    printed = (root / "docs/results/cost.md").read_text(encoding="utf-8")
    timed = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    costs = {row[0]: row[1].split(" ")[0] for row in timed[2:]} | {"": "time of a step"}
    for row in rows:
        row.append(costs.get(row[0], ""))


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


def insert(file: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between two marks. Raises ValueError: the file has no such marks."""
    text, n = re.subn(
        rf"(<!-- made by docs/results.py of {name} -->\n).*?(<!-- end -->)",
        lambda marks: marks[1] + "\n".join(["", *lines, "", marks[2]]),
        file.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if n != 1:
        raise ValueError(f"{file} has no place for the table of {name}")
    write_text(file, text)


if __name__ == "__main__":
    main(sys.argv[1:])
