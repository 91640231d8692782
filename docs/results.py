"""Make README's table and picture, and most tables of docs/log, from docs/results/*.jsonl.gz.

python docs/results.py                       remake them; the same results make the same bytes
python docs/results.py markov runs/markov    first gather the runs in these folders into docs/results/markov.jsonl.gz
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import effects, ranks  # noqa: E402
from ropewalk.files import write_text  # noqa: E402
from ropewalk.report import frame, markdown, page  # noqa: E402
from ropewalk.report.answer import amount, percent  # noqa: E402
from ropewalk.report.comparison import BEST_POSSIBLE, Key, Table, tables  # noqa: E402

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
    for name, write_table in ARCHIVES.items():
        if not archive(name, root).is_file():
            continue  # its runs are not done
        runs = frame.load(archive(name, root))
        for path, reason in runs.left_out:
            print(f"left out: {path}: {reason}", file=sys.stderr)
        of_texts = [table for table in tables(runs) if table.is_text]
        table = max(of_texts, key=lambda table: len(table.lines))
        if name == "markov":
            insert(place(name, root), name, full(table, costs(root)))
            first = runs._replace(results=runs.results[runs.results.line.isin(FIRST)])
            write_text(root / PICTURE, page.picture(first) + "\n")
            (of_first,) = tables(first)
            insert(root / "README.md", name, short(of_first))
        else:
            insert(place(name, root), name, write_table(table))
    insert(place("ranks", root), "ranks", ranks.table(root))


def archive(name: str, root: Path) -> Path:
    """Return the file of one of ARCHIVES. Raises ValueError: there is no such one."""
    if name not in ARCHIVES:
        raise ValueError(f"{name} is none of the results: {', '.join(ARCHIVES)}")
    return root / f"docs/results/{name}.jsonl.gz"


def place(name: str, root: Path) -> Path:
    """Return the page with the table of that name."""
    return root / f"docs/log/{PAGES.get(name, name)}.md"


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


def costs(root: Path) -> dict[str, str]:
    """Return the time of a training step beside RoPE's, by line, as scripts/bench.py has printed it."""
    printed = (root / "docs/results/cost.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    return {row[0]: row[1].split(" ")[0] for row in rows[2:]}


def full(table: Table, costs: Mapping[str, str] | None = None) -> list[str]:
    """Return the table of docs/log/markov.md: each seed's bits above the best possible loss.

    Args:
        costs: time of a training step beside RoPE's, by line; without it the table has no such column.
    """
    longest = max(table.lengths)
    times = longest // table.train_len
    header = ["", "seeds", "above at 1x, by seed", f"above at {times}x, by seed", f"gain at {times}x"]
    rows = []
    for line in table.lines.index:
        far = Key(line, "text", longest)
        by_seed = [above(table, Key(line, "text", length)) for length in (table.train_len, longest)]
        gain = amount(table.gains.get(far), table.unit, "+")
        rows.append([line, table.lines.seeds[line], *by_seed, gain, percent(table.shares.get(far))])
    header.append("share of the possible, %")
    if costs is not None:
        header.append("time of a step")
        for row in rows:
            row.append(costs.get(row[0], ""))
    return markdown.table(header, rows)


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


def against_rope(table: Table) -> list[str]:
    """Return a table for texts whose optimum is not known: bits at the training length, and what longer text gains."""
    unit = table.unit
    header = ["", "seeds", f"{unit} at 1x", f"against {table.reference}", "gain at 2x", "gain at 8x"]
    rows = []
    for line in table.lines.index:
        near = Key(line, "text", table.train_len)
        gains = [table.gains.get(near._replace(length=times * table.train_len)) for times in (2, 8)]
        cells = [amount(table.means.get(near), unit), amount(table.differences.get(near), unit, "+")]
        cells += [amount(gain, unit, "+") for gain in gains]
        rows.append([line, table.lines.seeds[line], *cells])
    return markdown.table(header, rows)


def paired(table: Table) -> list[str]:
    """Return a table of the distance to the optimum at the training length, and of differences at all lengths."""
    multiples = [f"at {length / table.train_len:g}x" for length in table.lengths]
    header = ["", "seeds", "above at 1x", f"against {table.reference} {multiples[0]}", *multiples[1:]]
    rows = []
    for line in table.lines.index:
        near = Key(line, "text", table.train_len)
        differences = [table.differences.get(near._replace(length=length)) for length in table.lengths]
        cells = [amount(difference, table.unit, "+") for difference in differences]
        rows.append([line, table.lines.seeds[line], amount(table.excess.get(near), table.unit), *cells])
    return markdown.table(header, rows)


def norms(table: Table) -> list[str]:
    """Return the gains of docs/log/qk_norm.md, and the effects that decide."""
    return [*by_length(table), "", *effects.rows(table, effects.of_norm())]


def dropping(table: Table) -> list[str]:
    """Return the gains of docs/log/dropping.md, and the effects that decide."""
    return [*by_length(table), "", *effects.rows(table, effects.of_dropping())]


def features(table: Table) -> list[str]:
    """Return the bits of docs/log/olmpool.md after the extension, and the effects that decide."""
    return [*against_rope(table), "", *effects.rows(table, effects.of_features())]


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


# In docs/results, each with a table of its name in docs/log.
ARCHIVES: dict[str, Callable[[Table], list[str]]] = {
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
    "qk_norm": norms,
    "qk_norm_code": norms,
    "dropping": dropping,
    "olmpool": features,
}
PAGES = {"qk_norm_code": "qk_norm"}  # the pages whose name is not that of the table


if __name__ == "__main__":
    main(sys.argv[1:])
