"""The answer in words and in tables of text: which encoding, how far, how sure. The words are Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from evaluation.report import retrieval
from evaluation.report.comparison import BEST_POSSIBLE, LEARNED, Estimates, Key, Table
from evaluation.report.markdown import bold, escaped
from evaluation.statistics import Estimate, Learned


class Grid(NamedTuple):
    """A table of text, with its labels as index."""

    title: str
    frame: pd.DataFrame


def amount(e: Estimate | None, unit: str, sign: str = "") -> str:
    """2.051 ± 0.069"""
    if e is None or math.isnan(e.value):
        return ""
    digits = 3 if "bit" in unit else 1
    value = round(e.value, digits) + 0.0  # no -0.000
    text = f"{value:{sign}.{digits}f}"
    if not math.isnan(e.half):
        text += f" ± {e.half:.{digits}f}"
    return text


def percent(share: Estimate | None) -> str:
    """69 ± 3, of a share of 0.69 ± 0.03"""
    if share is None or math.isnan(share.value):
        return ""
    text = f"{100 * share.value + 0.0:.0f}"
    return text if math.isnan(share.half) else f"{text} ± {100 * share.half:.0f}"


def listed(items: Sequence[str], most: int = 6) -> str:
    text = ", ".join(items[:most])
    if len(items) > most:
        text += f" and {len(items) - most} more"
    return text


def times(length: int, table: Table) -> str:
    return f"{length / table.train_len:g}x"


def find(tables: Sequence[Table], kind: str, quantity: str | None = None) -> Table | None:
    """The first table of a measure and a quantity."""
    for table in tables:
        if table.kind == kind and quantity in (None, table.quantity):
            return table
    return None


def which(table: Table, length: int) -> str:
    """The line that is best at a length. It is called the best only if it is separated from all others."""
    part, (first, *others) = table.best(length)
    key = Key(first, part, length)
    sentence = f"At {length:,} tokens ({times(length, table)})"
    if table.task:
        sentence += f", in the difficulty that is worst there ({escaped(part)})"
    value = amount(table.means[key], table.unit)
    if table.task:
        of_seeds = table.learned[key]
        name = f"{bold(first)} has the lowest error" if others else f"{bold(first)} has an error"
        return f"{sentence} {name}: {value} %, {_seeds_that_learned(of_seeds)}."
    tied = table.tied(key)
    if not others:
        sentence += f" {bold(first)} has {value} {table.unit}"
    elif tied:
        sentence += f" the lowest is {bold(first)}: {value} {table.unit}, not separated from "
        sentence += listed([escaped(line) for line in tied], 4)
    else:
        second = amount(table.behind[key._replace(line=others[0])], table.unit, "+")
        sentence += f" the best is {bold(first)}: {value} {table.unit}, then {escaped(others[0])} ({second})"
    if length > table.train_len:
        sentence += _against_truncation(table, key)
    return f"{sentence}."


def _seeds_that_learned(of_seeds: Learned) -> str:
    if not of_seeds.learned:
        return f"the median over {of_seeds.seeds} seeds, none of which learned the task"
    return f"the median over the {of_seeds.learned} of {of_seeds.seeds} seeds that learned the task"


def _against_truncation(table: Table, best: Key) -> str:
    """How much better or worse the best line is than on the text cut to train_len."""
    gain = table.gains.get(best)
    if gain is None:
        return ""
    than = "not separated from"
    if gain.separated:
        size = amount(gain._replace(value=abs(gain.value)), table.unit)
        than = f"{size} {'better' if gain.value > 0 else 'worse'} than"
    sentence = f"; {escaped(best.line)} is {than} itself on the same text cut to {table.train_len:,} tokens"
    # The first row of text is the reference on the cut text.
    cut = table.behind.get(best._replace(line=table.rows[0]))
    if best.line != table.reference and cut and cut.high < 0:
        sentence += f", on which {bold(str(table.reference))} is better ({amount(cut, table.unit, '+')})"
    return sentence


def reached(table: Table, lengths: Mapping[str, int]) -> dict[str, str]:
    """The lengths that lines reach in words, the longest first.

    8x; ">= 8x" if nothing longer was measured; "none".
    """
    words = {}
    longest = max(table.lengths)
    for line in sorted((line for line in table.lines.index if line in lengths), key=lambda line: -lengths[line]):
        length = lengths[line]
        words[line] = times(length, table) if length else "none"
        if length == longest and not table.lines.skipped[line]:
            words[line] = f">= {words[line]}"
    return words


def useful(table: Table) -> dict[str, str]:
    """The useful lengths in words. Where text beyond the shortest was never useful, that is all that is known."""
    words = reached(table, table.useful)
    shortest = min(table.lengths)
    for line, length in table.useful.items():
        if length == shortest < max(table.lengths):
            words[line] = f"<= {times(length, table)}"
    return words


def how_far(what: str, reach: Mapping[str, str]) -> list[str]:
    """The lines that are `what` to each length, in a sentence; none for no lines."""
    lines_of: dict[str, list[str]] = {}
    for line, length in reach.items():
        lines_of.setdefault(length, []).append(escaped(line))
    most = 6 if len(reach) < 20 else 3
    texts = []
    for length, lines in lines_of.items():
        where = "**at no length**" if length == "none" else f"to {bold(length)}"
        texts.append(f"{where}: {listed(lines, most)}")
    return [f"{what} {'; '.join(texts)}."] if texts else []


def mastered(table: Table) -> list[str]:
    """How far at least 99 % are right of a task, in its hardest difficulty: without that a safe length is no merit."""
    reach = {}
    for line in table.lines.index:
        reach[line] = 0
        for length in table.lengths:
            errors = [e.value for key, e in table.means.items() if (key.line, key.length) == (line, length)]
            if not errors or not max(errors) <= 1:
                break
            reach[line] = length
    words = {line: times(length, table) if length else "none" for line, length in reach.items()}
    ordered = sorted(words, key=lambda line: -reach[line])
    return how_far("At least 99 % right", {line: words[line] for line in ordered})


def used(table: Table, others: Sequence[Table]) -> str:
    """The lines that are safe to the longest length and gain from text beyond train_len, too: by how much."""
    using: dict[str, str] = {}
    for other in others:
        for line, e in retrieval.pooled(other).items():
            if round(e.low, 3) > 0 and line not in using:  # as it is shown
                using[line] = f"gain on {other.kind.replace('_', ' ')}: {amount(e, 'bits', '+')}"
    longest = max(table.lengths)
    both = []
    for line in table.lines.index:
        if table.safe.get(line) == longest and line in using:
            both.append(f"{bold(line)} ({using[line]})")
    end = f"safe to {times(longest, table)} and using text from beyond {table.train_len:,} tokens"
    return f"Both {end}: {listed(both)}." if both else f"No line is both {end}."


def possible(table: Table) -> list[str]:
    """How much of what the longest text makes possible each line gains: none where the optimum is not known."""
    length = max(table.lengths)
    best = table.gains.get(Key(BEST_POSSIBLE, table.first_part, length))
    if best is None or length <= table.train_len:
        return []
    longer = f"{length:,} tokens make possible over {table.train_len:,}"
    shares = {key.line: e for key, e in table.shares.items() if key.length == length}
    if not shares:
        return [f"The gain that {longer} is not separated from 0: {amount(best, table.unit, '+')} {table.unit}."]
    first, *others = sorted(shares, key=lambda line: -shares[line].value)

    def gain(line: str) -> str:
        return amount(table.gains[Key(line, table.first_part, length)], table.unit)

    sentence = f"{bold(first)} gains {gain(first)} of the {best.value:.3f} {table.unit} that {longer}"
    sentence += f" ({100 * shares[first].value:.0f} %)"
    if others:
        most = 13 if len(others) <= 13 else 6
        words = [f"{escaped(line)} {gain(line)} ({100 * shares[line].value:.0f} %)" for line in others]
        sentence += f"; {listed(words, most)}"
    return [f"{sentence}."]


def how_sure(table: Table) -> str:
    """The sentence about the intervals."""
    seeds = table.lines.seeds
    number = f"{seeds.max()} seeds" if seeds.max() > 1 else "1 seed"
    if seeds.min() < seeds.max():
        number = f"{seeds.min()} to {number}"
    texts, documents = table.lines[["texts", "documents"]].iloc[0]
    sample = f"{texts:,} {'sequences' if table.task else 'texts'}"
    if documents < texts:
        sample += f" of {documents:,} documents"
    if table.task:
        limit = f"at most {LEARNED:g} % errors at the training length"
        return f"Medians are over the seeds that learned the task ({limit}); there are {number} and {sample}."
    sentence = f"± is the 95 % interval over {number} and {sample}; differences are paired by seed and text."
    if seeds.min() == 1:
        sentence += " Over one seed it covers the texts alone: another training run may differ by more."
    comparisons = len(table.differences)
    if comparisons:
        sentence += f" Of {comparisons} differences to {escaped(table.reference)} about {0.05 * comparisons:.2g} are "
        sentence += "separated by chance; the best is named after Holm's correction."
    return sentence


def retrieved(tables: Sequence[Table]) -> list[str]:
    """The sentences about RULER."""
    sentences = []
    found = find(tables, "ruler", "found")
    if found:
        reach = reached(found, retrieval.effective(found))
        sentences += how_far(f"Effective (at least {retrieval.EFFECTIVE} % found)", reach)
    gain = find(tables, "ruler", "gain")
    if gain:
        sentences += how_far("Above chance (gain above 0)", reached(gain, retrieval.above_chance(gain)))
    return sentences


def answer(tables: Sequence[Table]) -> dict[str, list[str]]:
    """Sentences about the tables of one section, by heading."""
    table = find(tables, "lengths")
    of_ruler = retrieved(tables)
    if table is None:
        return {"RULER": of_ruler} if of_ruler else {}
    lengths = dict.fromkeys((table.train_len, max(table.lengths)))
    safe = "hardly more errors than at the training length"
    if not table.task:
        safe = "shown to be not worse than cutting the text"
    reach = how_far(f"Safe ({safe})", reached(table, table.safe))
    if table.task:
        reach += mastered(table)
    else:
        reach += how_far("Useful (longer text still helped)", useful(table))
    gains = [other for other in tables if other.quantity == "gain"]
    words = {
        "Which": [which(table, length) for length in lengths if length in table.lengths],
        "How far": reach,
        "Possible": possible(table),
        "Far text": [used(table, gains)] if gains else [],
        "RULER": of_ruler,
        "How sure": [how_sure(table)],
    }
    return {heading: sentences for heading, sentences in words.items() if sentences}


MEASURES = {"far_copies": "far copies", "ruler": "RULER"}  # in the titles of their tables


def numbers(table: Table) -> list[Grid]:
    """Tables of the means of each line, its gain over the cut text, and its paired difference to the reference."""
    words = []
    for key, value in table.eval.items():
        if isinstance(value, list):
            words.append(f"{key} {' '.join(map(str, value))}")
        elif not isinstance(value, str):  # that is a hash
            words.append(f"{key} {value}")
    title = table.unit.capitalize()
    if table.quantity == "gain":
        title = f"Gain in {table.unit}"
    if table.kind in MEASURES:
        title = f"{MEASURES[table.kind]}: {title}"
    what = "seeds that learned and their median" if table.task else "mean ± 95 % interval"
    title = f"{title} ({', '.join(words)}), {what}"
    if table.is_text and "target_tokens" in table.eval:
        title += f"; in a row each target has its length less {table.eval['target_tokens']} to 1 tokens before it"
    grids = [_grid(table, title, table.means, table.rows)]
    if table.gains:
        title = f"Gain over the same text cut to {table.train_len:,} tokens, in {table.unit}"
        rows = [row for row in table.rows if row == BEST_POSSIBLE or row in table.lines.index]
        grids.append(_grid(table, title, table.gains, rows, "+"))
    if table.excess:
        title = f"{table.unit.capitalize()} above the optimum, paired by text"
        grids.append(_grid(table, title, table.excess, list(table.lines.index), "+"))
    if table.shares:
        title = f"Share in percent of the gain over {table.train_len:,} tokens that longer text makes possible"
        grids.append(_shares(table, title))
    if table.kind == "lengths" and table.differences:
        title = f"Difference to {table.reference} in {table.unit}, paired by seed and text"
        grids.append(_grid(table, title, table.differences, list(table.lines.index), "+"))
    return grids


def _shares(table: Table, title: str) -> Grid:
    """Shares of the possible gain; beside its length stands what is possible."""
    rows: dict[str, dict[str, str]] = {}
    for line in table.lines.index:
        rows[line] = {}
        for length in sorted({key.length for key in table.shares}):
            best = table.gains[Key(BEST_POSSIBLE, table.first_part, length)]
            e = table.shares.get(Key(line, table.first_part, length))
            rows[line][f"{length:,} ({times(length, table)}), of {best.value:.3f}"] = percent(e)
    return Grid(title, pd.DataFrame.from_dict(rows, "index").fillna(""))


def _grid(table: Table, title: str, estimates: Estimates, lines: Sequence[str], sign: str = "") -> Grid:
    """Estimates in words. The columns are lengths; where there is only one, the parts."""
    if table.quantity == "gain":
        sign = "+"
    several = len(table.parts) > 1
    rows: dict[str, dict[str, str]] = {}
    if several and len(table.lengths) == 1:
        for line in lines:
            cells = {part: estimates.get(Key(line, part, table.lengths[0])) for part in table.parts}
            rows[line] = {part: amount(e, table.unit, sign) for part, e in cells.items()}
    else:
        for part in table.parts:
            for line in lines:
                label = f"{part}: {line}" if several else line
                rows[label] = {}
                for length in table.lengths:
                    e = estimates.get(Key(line, part, length))
                    cell = amount(e, table.unit, sign)
                    of_seeds = table.learned.get(Key(line, part, length))
                    if of_seeds:
                        cell = f"{of_seeds.learned} of {of_seeds.seeds}: {cell}"
                    rows[label][f"{length:,} ({times(length, table)})"] = cell
    return Grid(title, pd.DataFrame.from_dict(rows, "index").fillna(""))


def overview(tables: Sequence[Table]) -> list[Grid]:
    """One table of all sections, disturbed or used: how far a line is safe and useful, and what it finds far back."""
    columns: dict[str, dict[str, str]] = {}
    for table in sorted(tables, key=lambda table: (table.task, table.section, table.kind != "lengths")):
        prefix = f"{table.task}: " if table.task else ""
        if len({other.section for other in tables if other.task == table.task}) > 1:
            prefix = f"{table.section}: "
        for heading, cells in _summary(table).items():
            columns[prefix + heading] = cells
    if not columns:
        return []
    rows = dict.fromkeys(row for table in tables for row in table.rows)
    trained = {line for table in tables for line in table.lines.index}
    lines = sorted(rows, key=lambda row: row in trained)  # the cut text comes first
    return [Grid("Disturbed or used", pd.DataFrame(columns, index=lines).fillna(""))]


def _summary(table: Table) -> dict[str, dict[str, str]]:
    """The columns of one table in the overview: {heading: {line: cell}}."""
    if table.kind == "lengths":
        return _summary_of_lengths(table)
    far = {line: amount(e, table.unit, "+") for line, e in retrieval.pooled(table).items()}
    if (table.kind, table.quantity) == ("far_copies", "gain"):
        other = {line: amount(e, table.unit, "+") for line, e in retrieval.pooled(table, "other").items()}
        columns = {"gain on far copies": far}
        if other:
            columns["of it where the text goes on otherwise"] = other
        return columns
    if (table.kind, table.quantity) == ("ruler", "found"):
        reach = reached(table, retrieval.effective(table))
        return {"RULER, effective to": reach, "far needles found, %": {x: text.lstrip("+") for x, text in far.items()}}
    if (table.kind, table.quantity) == ("ruler", "gain"):
        return {"RULER, above chance to": reached(table, retrieval.above_chance(table))}
    return {}


def _summary_of_lengths(table: Table) -> dict[str, dict[str, str]]:
    columns = {"safe to": reached(table, table.safe)}
    if table.is_text:
        columns["useful to"] = useful(table)
    longest = max(table.lengths)
    shares = {key.line: percent(e) for key, e in table.shares.items() if key.length == longest}
    if shares:
        columns[f"share of the possible gain at {times(longest, table)}, %"] = shares
    for length in sorted({table.train_len, max(table.lengths)} & set(table.lengths)):
        part, _ = table.best(length)
        measure = f"{part}, %" if table.task else table.unit
        cells = {line: amount(table.mean(line, length, part), table.unit) for line in table.rows}
        columns[f"{measure} at {times(length, table)}"] = cells
    return columns
