"""The page of the board: a table, a figure, the history of the records, and how to enter."""

from collections.abc import Sequence
from pathlib import Path

from conf.files import write_bytes
from lab.benchmarks.measure import markdown as lines_of
from lab.board.counter import Counted
from lab.board.rules import IN_WORDS, LOWEST, READING, Row, holder_of, over_seeds
from ropewalk.report import plot

HEAD = """\
# The board: which position encoding gains most from long text

<!-- written by `make board` from board/*/verdict.json -->

Each encoding is trained in the same small network on texts of 64 tokens, with a Markov chain each, and then reads texts
of 512. Its *score* is what it gains there over the text cut to 64 tokens, in percent of what is possible, over chains
that stay the same and chains that change: the best possible predictor has 100, whoever cuts the text has 0, and whoever
loses as much as could be gained, or more, has -100. *Ahead* is the difference to the holder of the record, which was
trained beside it with the same seeds. *1x* is the loss at 64 tokens above RoPE's, in bits; *step* the time of a
training step, *reading* that of reading texts of 512, empty where it was not measured, and *parameters* their number
with buffers, as multiples of RoPE's. An entry that breaks a rule stays, struck through.
"""
ENTER = f"""\
## Enter

1. Copy `board/2026-11-25-rope` to `board/DATE-NAME`; write `encoding.py` and `pe.yaml` ([how](../program.md)).
2. Say in ten lines of README.md what the idea is, where it comes from, and what was tried and failed.
3. Commit, then `make board PE=board/DATE-NAME`: 20 trainings of about a minute, one on each core; 60 more if promising.
4. Open a pull request: it is judged again, with seeds and texts drawn from its merge commit, and that verdict counts.
5. Allowed are 2 % more parameters than RoPE's, twice its time of a step, {READING:g} times its time of reading, and a
   learning rate of {IN_WORDS}. Later tokens must not change what is said of earlier ones, at 64 tokens and at 512.

A record is ahead of its holder with p < 0.01, paired by seed, after Holm's correction for all entries so far. At 1x it
is surely no more than 0.02 bits above RoPE, and it has no `help` from the network, such as a convolution.

In 300 simulated boards a gain of 5 points after 28 equal entries is a record in 98 % where the difference of two scores
has a standard deviation of 3 from seed to seed, as between FoX and ALiBi. Where it is 8.6, as between KERPLE and these,
it is one in 6 %, and a gain of 12.5 points in 94 %. Of 30 equal entries one is a false record in 1 % of boards
(`tests/lab/board/test_rules.py`).
"""


def cells(row: Row) -> dict[str, str]:
    """What is said of an entry, by column."""
    v = row.verdict
    return {
        "entry": v.entry,
        "score": f"{row.score.value:.1f} ± {row.score.half:.1f}",
        "seeds": str(len(v.seeds)),
        "ahead": f"{row.ahead.value:+.1f} of {v.holder}" if row.ahead else "",
        "p": f"{row.p:.1g}" if row.ahead else "",
        "1x": f"{row.above:+.3f}",
        "step": f"{v.cost:.2f}",
        "reading": f"{v.reading:.2f}" if v.reading else "",
        "parameters": f"{v.parameters:.2f}",
        "lr": f"{v.lr:g}",
        "help": ", ".join(f"{key} {value}" for key, value in v.help.items()),
        "": row.remark,
    }


def line(row: Row) -> str:
    """One entry in one line of a terminal."""
    said = [f"{name} {cell}" for name, cell in cells(row).items() if name and cell]
    return f"{', '.join(said)}: {row.remark or 'no record'}"


def markdown(rows: Sequence[Row], figure: str, counted: Counted | None = None) -> str:
    """The page of the lines of a board, which are in the order in which they were judged."""
    table = []
    # Who broke a rule comes last, whatever it scored.
    for row in sorted(rows, key=lambda row: (bool(row.broken), -row.score.value)):
        entry = row.verdict.entry
        mark = "~~" if row.broken else "**" if entry == holder_of(rows) else ""
        table.append(cells(row) | {"entry": f"{mark}[{entry}](../board/{entry}/README.md){mark}"})
    if rows and counted:
        score = over_seeds(counted.measured.scores())
        decays = " and ".join(f"{decay:g}" for decay in counted.decays)
        of_counter = {
            "entry": f"*no training: a counter of pairs that keeps {decays} of each count a token*",
            "score": f"{score.value:.1f} ± {score.half:.1f}",
            "seeds": str(score.seeds),
        }
        table.insert(0, dict.fromkeys(table[0], "") | of_counter)
    parts = ["No entry has been judged yet."]
    if rows:
        records = [f"1. {line(row)}" for row in rows if row.is_record]
        picture = f"![Score of each entry]({figure})"
        parts = ["\n".join(lines_of(table)), picture, "## Records", "\n".join(records)]
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
