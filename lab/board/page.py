"""The page of the board: a table, a figure, and how to enter."""

from collections.abc import Sequence
from pathlib import Path

from conf.files import write_bytes
from lab.benchmarks.measure import markdown as lines_of
from lab.board.counter import Counted
from lab.board.rules import IN_WORDS, LOWEST, READING, Row, holder_of, over_seeds, printed_p
from ropewalk.report import plot

HEAD = """\
# The board

<!-- written by `make board` from board/*/verdict.json -->

Each encoding is trained in the same small network on texts of 64 tokens, each with a Markov chain of its own (ten
symbols, order 1), and reads texts of 512. Its *score* is its gain there over the cut text, for chains that stay and
chains that change together, in percent of the possible; the lowest is -100. *Ahead*: the score less that of the
record's holder then, trained on the same seeds; its name stands where another holds the record now. *1x*: the loss at
64 tokens above RoPE's, in bits, over other seeds than RoPE's. *Step* time and *parameters* are multiples of RoPE's.
"""
ENTER = f"""\
## Enter

Write a folder [like this](../program.md), then `make board PE=board/DATE-NAME`: 20 trainings of about a minute, 60 more
if promising. A pull request is judged again, with seeds and texts drawn from its merge commit; that verdict counts.
Allowed: 1.02 times RoPE's parameters, twice its time of a step, {READING:g} times its time of reading, and a learning
rate of {IN_WORDS}.

A record is ahead of its holder with p < 0.01, paired by seed, after Holm's correction for all entries. At 1x it is
surely no more than 0.02 bits above RoPE, and has no help from the network, such as a convolution.

In simulated boards a gain of 5 points is a record in 98 % if scores vary as FoX's, in 6 % as KERPLE's; of 30 equal
entries one is in 1 % (`tests/lab/board/test_rules.py`).
"""


def cells(row: Row, holder: str | None = None) -> dict[str, str]:
    """What is said of an entry, by column; whom it is ahead of, unless that is `holder`."""
    v = row.verdict
    of_holder = "" if v.holder == holder else f" of {v.holder}"
    return {
        "entry": v.entry,
        "score": f"{row.score.value:.1f} ± {row.score.half:.1f}",
        "seeds": str(len(v.seeds)),
        "ahead": f"{row.ahead.value:+.1f}{of_holder}" if row.ahead else "",
        "p": printed_p(row.p) if row.ahead and row.ahead.value > 0 else "",
        "1x": f"{row.above:+.3f}",
        "step": f"{v.cost:.2f}",
        "parameters": f"{v.parameters:.2f}",
        "lr": f"{v.lr:g}",
        "": row.remark,
    }


def line(row: Row) -> str:
    """One entry in one line of a terminal."""
    said = [f"{name} {cell}" for name, cell in cells(row).items() if name and cell]
    return f"{', '.join(said)}: {row.remark or 'no record'}"


def markdown(rows: Sequence[Row], figure: str, counted: Counted | None = None) -> str:
    """The page of the lines of a board, which are in the order in which they were judged."""
    table = []
    holder = holder_of(rows)
    # Who broke a rule comes last, whatever it scored.
    for row in sorted(rows, key=lambda row: (bool(row.broken), -row.score.value)):
        entry = row.verdict.entry
        mark = "~~" if row.broken else "**" if entry == holder else ""
        table.append(cells(row, holder) | {"entry": f"{mark}[{entry}](../board/{entry}/README.md){mark}"})
    if rows and counted:
        score = over_seeds(counted.measured.scores())
        decays = " and ".join(f"{decay:g}" for decay in counted.decays)
        of_counter = {
            "entry": f"*an untrained counter of pairs that keeps {decays} of each count a token*",
            "score": f"{score.value:.1f} ± {score.half:.1f}",
            "seeds": str(score.seeds),
        }
        table.insert(0, dict.fromkeys(table[0], "") | of_counter)
    parts = ["No entry has been judged yet."]
    if rows:
        parts = ["\n".join(lines_of(table)), f"![Score of each entry]({figure})"]
    return "\n\n".join([HEAD.rstrip(), *parts, ENTER])


def draw(rows: Sequence[Row], path: Path, counted: Counted | None = None) -> None:
    """Draw the score of each entry, the best one at the top, beside its name and the time of a step."""
    ax = plot.dressed(plot.new())
    shown = sorted((row for row in rows if not row.broken), key=lambda row: row.score.value)
    for place, row in enumerate(shown):
        colour = plot.LINES[1] if row.is_record else plot.LIGHT.muted
        ax.errorbar(row.score.value, place, xerr=row.score.half, fmt="o", color=colour, markersize=4)
    ax.set_yticks(range(len(shown)), [f"{row.verdict.encoding}, {row.verdict.cost:.2f}" for row in shown])
    if counted:
        ax.axvline(float(counted.measured.scores().mean()), color=plot.LIGHT.muted, linestyle=":")
    ax.set_xlim(left=LOWEST - 5)
    note = "red: a record, dotted: the counter; beside the name the time of a training step, as a multiple of RoPE's"
    plot.titled(ax, "Score: gain at 8x, in percent of the possible", note)
    write_bytes(path, plot.written(ax, path.suffix.removeprefix(".")))
