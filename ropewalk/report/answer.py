"""The answer of a long table: at most five sentences, each word by one rule, the same for texts and for tasks.

It is about each line at the longest text, of a task in the difficulty that is worst there.

1. Which line has the lowest loss, or the fewest errors. It is "best" only if all others are told apart from it and
   have another number in the tables; otherwise those that are not are named. If all have the same number, nobody has
   the lowest.
2. How many lines have each verdict; of at most three with their names. A line alone has one for each length.
3. What the best possible predictor gains, and the share of the first line. Only if both gain.
4. What the intervals cover, and which lines are not in the comparison.
5. In which settings the lines were not trained alike, but for the encoding. Only if there are any.

The verdict of a text is that of its gain: how much lower the loss is than on the text cut to the training length. The
gain has a 95 % interval, and the run a tolerance t, `eval.tolerance`. The first rule that holds:

    level      the whole interval lies within -t and t
    better     the whole interval is above 0, at the three digits shown: only then a line "gains"
    worse      the whole interval is below 0, at the three digits shown
    undecided  none of these

The verdict of a task is how many of a line's seeds learned it. Nothing else is said: other tests of the same
differences, such as a length that is "safe", could contradict it.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ropewalk.report.frame import AFTER, START, not_alike
from ropewalk.report.table import BEST_POSSIBLE, FAR, LEARNED, headline, interval_columns, over_seeds, worst_part

VERDICTS = {  # of one line, and of several
    "better": ("gains", "gain"),
    "level": ("is level", "are level"),
    "worse": ("is worse", "are worse"),
    "undecided": ("is undecided", "are undecided"),
    "learned": ("learned the task with every seed", "learned the task with every seed"),
    "partly": ("learned it with some seeds", "learned it with some seeds"),
    "never": ("learned it with no seed", "learned it with no seed"),
}
NAMED = 3  # lines at most that are named; more are counted
BASE_MODEL = "the model before this training"


def answer(table: pd.DataFrame) -> list[str]:
    """Return the answer of one section of a table, as plain text."""
    table = over_seeds(table)
    rows = headline(table)
    if rows.empty:
        return []
    measured = rows[(rows.line != BEST_POSSIBLE) & np.isfinite(rows.value)]
    if measured.empty:
        return ["No line has a finite loss."]
    # The longest text that a line of the final weights was measured at: where all lines end, or some fail.
    last = measured[measured.length == measured.length.max()]
    last = last[last.part == worst_part(last)].sort_values("rank", kind="stable")
    first = last.iloc[0]
    best = rows[(rows.line == BEST_POSSIBLE) & (rows.length == first.length)]
    alike = table[(table.measure == "lengths") & (table.quantity == first.quantity) & (table.line != BEST_POSSIBLE)]
    others = sorted(set(alike.line) - set(last.line))
    verdicts = at_each_length(measured[measured.line == first.line]) if len(last) == 1 else how_many(last)
    sentences = [
        f"{which(last)}{reading_on(first)}.",
        verdicts,
        possible(first, best),
        how_sure(last, others),
        trained_alike(last),
    ]
    return [sentence for sentence in sentences if sentence]


def which(last: pd.DataFrame) -> str:
    """Say which line is best at the longest text, or which ones are not told apart."""
    first = last.iloc[0]
    where = f"At {first.length:,} tokens" + ("" if first.times == 1 else f" ({first.times:g}x)")
    unit, what = first.unit, "the lowest loss"
    if first.quantity == "error":
        where += f", in {first.part}, the difficulty that is worst there,"
        unit, what = "% errors", "the fewest errors"
    shown = last.value.map(lambda value: amount(value, digits=digits(first)))
    is_equal = shown == shown.iloc[0]
    rivals = last.line[(last.tied.eq(True) | is_equal) & (last.line != first.line)].tolist()
    if len(last) == 1:
        return f"{where} {first.line} has {number(first)} {unit}"
    if is_equal.all():
        return f"{where} all {len(last)} lines have {shown.iloc[0]} {unit}: none is best"
    if not rivals:
        return f"{where} {first.line} is best, {number(first)} {unit}"
    return (
        f"{where} {first.line} has {what}, {number(first)} {unit}, "
        f"but the difference to {listed(rivals)} is not significant"
    )


def reading_on(first: pd.Series) -> str:
    """Say what the longest text is worth to a line."""
    if first.quantity == "error":
        return ""
    if not first.length > first.cut:
        return "; longer texts than in training were not measured"
    if pd.isna(first.gain):
        return "; on the cut text it was not measured"
    size = number(first, "gain")
    cut = f"the text cut to {first.cut:,.0f} tokens"
    if first.reading == AFTER:
        cut = f"{BASE_MODEL} on {cut}"
    words = {
        "better": f"it gains {size.removeprefix('+')} over {cut}",
        "level": f"it is level with {cut} ({size})",
        "worse": f"it is worse than {cut} ({size})",
        "undecided": f"whether it is better than {cut} is undecided ({size})",
    }
    sentence = f"; {words[first.verdict]}"
    # A line may gain over itself on the cut text, and yet be worse there than the reference.
    if first.line != first.reference and first.lead_high < 0 and first.verdict != "worse":
        sentence += f", on which {first.reference} is still better"
    return sentence


def how_many(last: pd.DataFrame) -> str:
    """Say how many lines have each verdict."""
    if (last.length <= last.cut).all() and last.quantity.iloc[0] != "error":
        return ""
    parts = []
    for word, (of_one, of_several) in VERDICTS.items():
        lines = last.line[last.verdict == word]
        if len(lines):
            names = f" ({', '.join(lines)})" if len(lines) <= NAMED else ""
            count = "all" if len(lines) == len(last) else len(lines)
            parts.append(f"{count} {of_one if len(lines) == 1 else of_several}{names}")
    if not parts:
        return ""
    against = last.base[last.gain.notna()].str.startswith(START).map({True: BASE_MODEL, False: "itself"}).unique()
    control = f", each against {' or '.join(against)} on the cut text" if len(against) else ""
    return f"Of {len(last)} lines {', '.join(parts)}{control}."


def at_each_length(rows: pd.DataFrame) -> str:
    """Say which verdict a line alone has at each length."""
    if rows.quantity.iloc[0] == "error":
        return f"{rows.learned.iloc[0]} of {rows.seeds.iloc[0]} seeds learned the task."
    longer = rows[(rows.length > rows.cut) & rows.gain.notna()].sort_values("length")
    words = [
        f"{verdict} at {', '.join(map('{:,}'.format, of_verdict.length))}"
        for verdict, of_verdict in longer.groupby("verdict", sort=False)
    ]
    return f"It is {'; '.join(words)} tokens." if words else ""


def possible(first: pd.Series, best: pd.DataFrame) -> str:
    """Say what the longest text makes possible, and which share of it the first line has."""
    if not best.verdict.eq("better").any() or first.verdict != "better" or pd.isna(first.share):
        return ""
    return (
        f"The best possible predictor gains {best.gain.iloc[0]:.3f}: {first.line} has"
        f" {percent(first.share, first.share_low, first.share_high)} % of that."
    )


def how_sure(last: pd.DataFrame, others: Sequence[str]) -> str:
    """Say what the intervals cover, and which lines are not among the last ones."""
    first = last.iloc[0]
    texts = counted(first.texts, "text")
    if first.documents < first.texts:
        texts += f" of {counted(first.documents, 'document')}"
    seeds = " to ".join(dict.fromkeys(map(str, (last.seeds.min(), last.seeds.max()))))
    sentence = f"± is the 95 % interval over {seeds} training seeds and {texts}"
    if first.quantity == "error":
        sentence = (
            f"A seed learned the task with at most {LEARNED:g} % errors at the training length; numbers are medians of"
            f" those that did, or of all if none did, with the range of several, over {texts}"
        )
    elif last.seeds.max() == 1:
        sentence = f"± is the 95 % interval over {texts} of one training seed: another training may differ by more"
    if others:
        sentence += f"; not compared (other settings, shorter texts or no finite loss): {listed(others)}"
    return f"{sentence}."


def trained_alike(last: pd.DataFrame) -> str:
    """Say in what the trainings of the lines differ, but for their encodings."""
    trained = [json.loads(options) for options in last.unlike[~last.line.str.startswith(START)]]
    keys = sorted(set().union(*not_alike(trained)))
    return f"The lines were not trained alike: they also differ in {', '.join(keys)}." if keys else ""


def far_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows over all seeds of what text from beyond the training length is worth, all such parts as one."""
    rows = over_seeds(table)
    return rows[(rows.part == FAR) & rows.quantity.isin(["gain", "found"])]


def digits(row: Any) -> int:
    """Return how many digits after the decimal point the numbers of a row of the long table are shown with."""
    return 3 if "bit" in row.unit else 1


def number(row: Any, column: str = "value") -> str:
    """Return a number of a row of the long table with its interval in words; of an error the range over the seeds."""
    value, low, high = (getattr(row, name) for name in interval_columns(column))
    if row.quantity == "error" and column == "value":
        text, lowest, highest = (amount(part, digits=1) for part in (value, low, high))
        return text if lowest == highest else f"{text} ({lowest} to {highest})"
    is_difference = column != "value" or row.quantity == "gain"
    return amount(value, low, high, "+" if is_difference else "", digits(row))


def amount(value: float, low: float = math.nan, high: float = math.nan, sign: str = "", digits: int = 3) -> str:
    """Return a number with its interval, as in "2.051 ± 0.069"; "" for NaN.

    Args:
        low, high: the ends of its interval, which is left out unless both are finite.
        sign: "+" to show the sign of positive numbers.
        digits: after the decimal point.
    """
    if math.isnan(value):
        return ""
    # Adding zero turns -0.0 into 0.0: a difference must not read as -0.000.
    text = f"{round(value, digits) + 0.0:{sign}.{digits}f}"
    if math.isfinite(low) and math.isfinite(high):
        text += f" ± {(high - low) / 2:.{digits}f}"
    return text


def percent(share: float, low: float, high: float) -> str:
    """Return a share of 0.69 ± 0.03 as "69 ± 3"; "" for NaN."""
    return amount(100 * share, 100 * low, 100 * high, digits=0)


def counted(n: int, noun: str) -> str:
    """Return a number of things, as in "1 text" and "2 texts"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listed(lines: Sequence[str]) -> str:
    """Return the names of at most three lines, and count the rest."""
    names = list(lines[:NAMED])
    if len(lines) > NAMED:
        names.append(f"{len(lines) - NAMED} more")
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
