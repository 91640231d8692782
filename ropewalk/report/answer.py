"""The answer of a long table: at most four sentences, each word by one rule.

About each line at the longest text, by its gain: how much lower its loss is than on the text cut to the training
length. The gain has a 95 % interval, and the run a tolerance t, `eval.tolerance`. The first rule that holds:

    level      the whole interval lies within -t and t
    better     the whole interval is above 0, at the three digits shown: only then a line "gains"
    worse      the whole interval is below 0, at the three digits shown
    undecided  none of these

1. Which line has the lowest loss at the longest text, and its word. It is "best" only if it is told apart from all
   others; otherwise the lines that it is not told apart from are named.
2. How many lines have each word, or that all have it; a word of at most three lines that not all have has their names.
   For one line: the length up to which it was level or better at every length.
3. What the best possible predictor gains, and the share of the first line. Only if both gain.
4. What the intervals cover, and which lines are not in the comparison.

Nothing else is said. Other tests of the same differences, such as a length that is "safe", could contradict the words.
"""

import math
from collections.abc import Sequence

import pandas as pd

from ropewalk.report.frame import AFTER, START
from ropewalk.report.table import BEST_POSSIBLE, FAR, LEARNED, losses_of_text, over_seeds

WORDS = {  # of several lines, and of one
    "better": ("gain", "gains"),
    "level": ("are level", "is level"),
    "worse": ("are worse", "is worse"),
    "undecided": ("are undecided", "is undecided"),
}
NAMED = 3  # lines at most that are named; more are counted
BEFORE = "the model before this training"


def answer(table: pd.DataFrame) -> list[str]:
    """Return the answer of one section of a table, as plain text."""
    rows = losses_of_text(over_seeds(table))
    if rows.empty:
        return of_task(table)
    measured = rows[(rows.line != BEST_POSSIBLE) & rows.value.map(math.isfinite)]
    if measured.empty:
        return ["No line has a finite loss."]
    # The longest text that a line of the final weights was measured at: where all lines end, or some fail.
    longest = rows[rows.length == measured.length.max()]
    last = measured[measured.length == measured.length.max()].sort_values("rank", kind="stable")
    first = last.iloc[0]
    sentences = [which(last)]
    if first.length > first.cut:
        if len(last) == 1:
            sentences.append(how_far(rows[rows.line == first.line]))
        else:
            sentences.append(how_many(last))
        sentences.append(possible(first, longest))
    sentences.append(how_sure(last) + how_complete(table, last))
    return [sentence for sentence in sentences if sentence]


def which(last: pd.DataFrame) -> str:
    """Say which line is best at the longest text, and what reading on is worth to it."""
    first = last.iloc[0]
    rivals = last[last.tied.eq(True) & (last.line != first.line)].line.tolist()
    loss = f"{amount(first.value, first.low, first.high)} {first.unit}"
    sentence = f"At {first.length:,} tokens{times(first)} {first.line} "
    if rivals:
        sentence += f"has the lowest loss, {loss}, but is not told apart from {listed(rivals)}"
    else:
        sentence += f"is best, {loss}" if len(last) > 1 else f"has {loss}"
    if not first.length > first.cut:
        return f"{sentence}; longer texts than in training were not measured."
    if pd.isna(first.gain):
        return f"{sentence}; on the cut text it was not measured."
    size = amount(first.gain, first.gain_low, first.gain_high, "+")
    cut = f"the text cut to {first.cut:,.0f} tokens"
    if first.reading == AFTER:
        cut = f"{BEFORE} on {cut}"
    words = {
        "better": f"it gains {size.removeprefix('+')} over {cut}",
        "level": f"it is level with {cut} ({size})",
        "worse": f"it is worse than {cut} ({size})",
        "undecided": f"whether it is better than {cut} is undecided ({size})",
    }
    sentence += f"; {words[first.verdict]}"
    # A line may gain over itself on the cut text, and yet be worse there than the reference.
    if first.line != first.reference and first.lead_high < 0 and first.verdict != "worse":
        sentence += f", on which {first.reference} is still better"
    return f"{sentence}."


def how_many(last: pd.DataFrame) -> str:
    """Say how many lines are better, level, worse and undecided when they read on."""
    everyone = "both" if len(last) == 2 else "all"
    parts = []
    for word, (of_several, of_one) in WORDS.items():
        lines = last[last.verdict == word].line.tolist()
        if len(lines) == len(last):
            parts.append(f"{everyone} {of_several}")
        elif lines:
            names = f" ({', '.join(lines)})" if len(lines) <= NAMED else ""
            words = of_one if len(lines) == 1 else of_several
            parts.append(f"{len(lines)} {words}{names}")
    is_start = last.base.str.startswith(START).eq(True)
    against = " or ".join(is_start.map({True: BEFORE, False: "itself"}).unique())
    return f"Of {len(last)} lines {', '.join(parts)}, each against {against} on the cut text." if parts else ""


def how_far(rows: pd.DataFrame) -> str:
    """Say up to which length one line was level or better at every length."""
    longer = rows[(rows.length > rows.cut) & rows.gain.notna()].sort_values("length")
    if longer.empty:
        return ""
    cut = longer.cut.iloc[0]
    held = longer[longer.verdict.isin(["better", "level"]).cummin()]
    if len(held) == len(longer):
        return f"It is level or better at each of {len(longer)} lengths beyond {cut:,.0f} tokens."
    first = longer.iloc[len(held)]
    found = f"{first.verdict} ({amount(first.gain, first.gain_low, first.gain_high, '+')})"
    if held.empty:
        return f"Already at {first.length:,} tokens, the first length beyond {cut:,.0f}, it is {found}."
    return f"It is level or better up to {held.length.max():,} tokens; at {first.length:,} it is {found}."


def possible(first: pd.Series, longest: pd.DataFrame) -> str:
    """Say what the longest text makes possible, and which share of it the first line has."""
    best = longest[(longest.line == BEST_POSSIBLE) & (longest.verdict == "better")]
    if best.empty or first.verdict != "better" or pd.isna(first.share):
        return ""
    return (
        f"The best possible predictor gains {best.gain.iloc[0]:.3f}: {first.line} has"
        f" {percent(first.share, first.share_low, first.share_high)} % of that."
    )


def how_sure(last: pd.DataFrame) -> str:
    """Say what the intervals cover."""
    first = last.iloc[0]
    texts = f"{first.texts:,} texts"
    if first.documents < first.texts:
        texts += f" of {first.documents:,} documents"
    if last.seeds.max() == 1:
        return f"± is the 95 % interval over {texts} of one training seed: another training may differ by more"
    seeds = " to ".join(dict.fromkeys(map(str, (last.seeds.min(), last.seeds.max()))))
    return f"± is the 95 % interval over {seeds} training seeds and {texts}"


def how_complete(table: pd.DataFrame, last: pd.DataFrame) -> str:
    """Say which lines with a loss are not among the last ones."""
    rows = table[(table.measure == "lengths") & (table.quantity == "loss") & (table.line != BEST_POSSIBLE)]
    others = sorted(set(rows.line) - set(last.line))
    if not others:
        return "."
    return f"; with other settings, shorter texts or no finite loss, and so not compared: {listed(others)}."


def of_task(table: pd.DataFrame) -> list[str]:
    """Answer for a task: the line with the fewest errors in the difficulty that is worst at the longest text."""
    rows = over_seeds(table)
    rows = rows[(rows.measure == "lengths") & (rows.quantity == "error") & rows.value.notna()]
    if rows.empty:
        return []
    rows = rows[rows.length == rows.length.max()]
    # By name where several are equally bad, so that the answer does not depend on the order of files.
    worst = rows.groupby("part").value.max().idxmax()
    first = rows[rows.part == worst].sort_values("rank").iloc[0]
    where = f"At {first.length:,} tokens{times(first)}, in {worst}, the difficulty that is worst there"
    fewest = "has the fewest errors" if rows.line.nunique() > 1 else "has errors"
    return [
        f"{where}, {first.line} {fewest}: {first.value:.1f} %;"
        f" {first.learned} of {first.seeds} seeds learned the task.",
        f"A seed has learned it with at most {LEARNED:g} % errors at the training length; only the median of those that"
        " did is told, or of all if none did, without an interval.",
    ]


def far_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows over all seeds of what text from beyond the training length is worth, all such parts as one."""
    rows = over_seeds(table)
    return rows[(rows.part == FAR) & rows.quantity.isin(["gain", "found"])]


def times(row: pd.Series) -> str:
    """Return a length as a multiple of the training length, as in " (8x)"; nothing for 1x."""
    return "" if row.times == 1 else f" ({row.times:g}x)"


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


def percent(share: float, low: float = math.nan, high: float = math.nan) -> str:
    """Return a share of 0.69 ± 0.03 as "69 ± 3"; "" for NaN."""
    return amount(100 * share, 100 * low, 100 * high, digits=0)


def listed(lines: Sequence[str]) -> str:
    """Return the names of at most three lines, and count the rest."""
    names = list(lines[:NAMED])
    if len(lines) > NAMED:
        names.append(f"{len(lines) - NAMED} more")
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
