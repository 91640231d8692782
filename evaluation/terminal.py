"""What the results of one run look like on a terminal: tables, and safe and useful lengths in words."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import table as rich
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from conf.schema import Config
from evaluation.answer import amount
from evaluation.comparison import Table, tables
from evaluation.frame import load
from evaluation.results import Evaluation
from evaluation.statistics import Reach


def show(run: Path, cfg: Config, only: Iterable[Evaluation] | None = None) -> None:
    """Print the results of a run, or of it those that measured the same as `only`; tolerances are those of `cfg`.

    Where the lines of a table do not fit beside each other, they come one below the other; a terminal that is narrower
    still wraps, but no number is cut.
    """
    asked = None if only is None else [(e.kind, e.eval) for e in only]
    found = load(run)
    for config in found.runs.config:
        config |= {f"eval.{key}": getattr(cfg.eval, key) for key in ("tolerance", "task_tolerance")}
    for t in tables(found):
        if t.kind == "by_position" or (asked is not None and (t.kind, t.eval) not in asked):
            continue
        lines, width = [str(line) for line in t.lines.index], Console().width
        parts = [drawn(t, lines)]
        if sys.stdout.isatty() and _width(parts[0]) > width:
            parts = [drawn(t, [line]) for line in lines]
        print(f"{run.name}, {t.kind.replace('_', ' ')}: {t.unit}, mean ± half of the 95 % interval over texts")
        for part in parts:
            Console(width=max(width, _width(part))).print(part)
        for line, reach in t.lines.reach.items():
            if reach:
                print(in_words(str(line), reach, t.train_len, t.lengths[0]))


def drawn(t: Table, lines: Sequence[str]) -> rich.Table:
    """A row for each text length and name; for each line the mean and how much better it is than the baseline. For text
    the first row is the baseline: the text cut to train_len, and read as trained."""
    found, several, has_gain = rich.Table(), t.names != ["text"], bool(t.stats.gain.notna().any())
    for heading in ["", "tokens read"] if several else ["tokens read"]:
        found.add_column(heading, no_wrap=True, justify="right" if heading else "left")
    for line in lines:
        for heading in [line, "gain over cut" if t.is_text else "gain, bits"] if has_gain else [line]:
            found.add_column(Text(heading), no_wrap=True, justify="right")
    if t.is_text:
        trained = {t.lines.group[line]: line for line, zero_shot in t.lines.zero_shot.items() if not zero_shot}
        cuts = [amount(t.get(trained.get(t.lines.group[line]), t.train_len), t.unit) for line in lines]
        found.add_row(f"cut to {t.train_len:,}", *[x for cut in cuts for x in (cut, "")], end_section=True)
    for name in t.names:
        for length in t.lengths:
            row = [Text(name)] * several + [f"{length:,} ({length / t.train_len:g}x)"]
            for line in lines:
                row.append(amount(t.get(line, length, name=name), t.unit) or "-")
                row += [amount(t.get(line, length, "gain", name), "bits", "+")] * has_gain
            found.add_row(*row)
    return found


def in_words(label: str, found: Reach, train_len: int, shortest: int) -> str:
    """A sentence such as "rope: safe to 1x (256 tokens), useful to at most 0.5x (128 tokens)"."""

    def to(length: int, more: str) -> str:
        return f"to {more}{length / train_len:g}x ({length:,} tokens)"

    safe = "safe at no measured length" if found.safe == 0 else "safe length unknown: nothing was measured at 1x"
    if found.safe:
        safe = f"safe {to(found.safe, '>= ' if found.safe_open else '')}"
    if found.useful is None:
        return f"{label}: {safe}"
    more = ">= " if found.useful_open else "at most " if found.useful == shortest else ""
    return f"{label}: {safe}, useful {to(found.useful, more)}"


def _width(part: rich.Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, part).maximum
