"""Make README's table and picture, and the Markov tables of docs/results.md, from docs/results/*.jsonl.gz.

python docs/results.py                       remake them; the same results make the same bytes
python docs/results.py markov runs/markov    first gather the runs in these folders into docs/results/markov.jsonl.gz
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.files import write_text  # noqa: E402
from evaluation.report import frame, markdown, page  # noqa: E402
from evaluation.report.answer import amount, percent  # noqa: E402
from evaluation.report.comparison import BEST_POSSIBLE, Key, Table, tables  # noqa: E402

# In docs/results, each with a table of its name in docs/results.md.
ARCHIVES = ("markov", "conv", "options", "long", "why")
PICTURE = "docs/gain.svg"
# What README shows: what most people ask for, and the best.
FIRST = ("fox", "kerple", "alibi", "cope", "nope", "rope", "rope read as rerope", "rope read as yarn at scale 8")


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Write all that is made from the results.

    Args:
        arguments: one of ARCHIVES, and folders of runs to gather into it first; none: the results are kept as they are.
        root: where README.md and docs/ lie.
    """
    if arguments:
        name, *folders = arguments
        frame.save(archive(name, root), folders)
    for name in ARCHIVES:
        runs = frame.load(archive(name, root))
        for path, reason in runs.left_out:
            print(f"left out: {path}: {reason}", file=sys.stderr)
        table = max(tables(runs), key=lambda table: len(table.lines))
        insert(root / "docs/results.md", name, by_length(table) if name == "why" else full(table))
        if name == "markov":
            first = runs._replace(results=runs.results[runs.results.line.isin(FIRST)])
            write_text(root / PICTURE, page.picture(first) + "\n")
            (of_first,) = tables(first)
            insert(root / "README.md", name, short(of_first))


def archive(name: str, root: Path) -> Path:
    """Return the file of one of ARCHIVES. Raises ValueError: there is no such one."""
    if name not in ARCHIVES:
        raise ValueError(f"{name} is none of the results: {', '.join(ARCHIVES)}")
    return root / f"docs/results/{name}.jsonl.gz"


def short(table: Table) -> list[str]:
    """Return the table of README.md: how far each line is from the best possible loss, and what it gains."""
    longest = max(table.lengths)
    possible = table.gains[Key(BEST_POSSIBLE, "text", longest)]
    header = [
        f"trained at {table.train_len} tokens",
        f"bits above the best possible at {table.train_len}",
        f"at {longest}",
        f"gained over cutting, of {amount(possible, table.unit)}",
    ]
    rows = []
    for line in table.lines.index:
        near = Key(line, "text", table.train_len)
        far = Key(line, "text", longest)
        above_near = amount(table.excess.get(near), table.unit)
        above_far = amount(table.excess.get(far), table.unit)
        gain = amount(table.gains.get(far), table.unit, "+")
        rows.append([line, above_near, above_far, gain])
    seeds = sorted(set(table.lines.seeds))
    over = f"{seeds[0]}"
    if len(seeds) > 1:
        over += f" to {seeds[-1]}"
    texts = int(table.lines.texts.iloc[0])
    return [*markdown.table(header, rows), "", f"{texts} texts, {over} seeds; ± is a 95 % interval over both."]


def full(table: Table) -> list[str]:
    """Return the table of docs/results.md: each seed's bits above the best possible loss."""
    longest = max(table.lengths)
    times = longest // table.train_len
    header = ["", "seeds", "above at 1x, by seed", f"above at {times}x, by seed", f"gain at {times}x"]
    rows = []
    for line in table.lines.index:
        far = Key(line, "text", longest)
        by_seed = [above(table, Key(line, "text", length)) for length in (table.train_len, longest)]
        gain = amount(table.gains.get(far), table.unit, "+")
        rows.append([line, table.lines.seeds[line], *by_seed, gain, percent(table.shares.get(far))])
    return markdown.table([*header, "share of the possible, %"], rows)


def by_length(table: Table) -> list[str]:
    """Return a table of the gains at all lengths beyond the training length."""
    longer = [length for length in table.lengths if length > table.train_len]
    header = ["", "seeds", "above at 1x", *[f"gain at {length / table.train_len:g}x" for length in longer]]
    rows = []
    for line in table.lines.index:
        near = table.excess.get(Key(line, "text", table.train_len))
        gains = [table.gains.get(Key(line, "text", length)) for length in longer]
        cells = [amount(near, table.unit), *[amount(gain, table.unit, "+") for gain in gains]]
        rows.append([line, table.lines.seeds[line], *cells])
    return markdown.table(header, rows)


def above(table: Table, key: Key) -> str:
    """Return the bits above the best possible loss of each seed, in the order of the seeds."""
    best = table.means[key._replace(line=BEST_POSSIBLE)].value
    above = []
    for _, sample in sorted(table.cells.get(key, {}).items()):
        mean = sample.values.sum() / sample.units.sum()
        above.append(f"{mean - best:.3f}")
    return ", ".join(above)


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


if __name__ == "__main__":
    main(sys.argv[1:])
