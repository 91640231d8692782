"""The answer in words: which encoding, how far, how sure. The words are Markdown."""

import math
from collections.abc import Mapping, Sequence

from ropewalk.evaluation.statistics import Estimate, Learned
from ropewalk.report import retrieval
from ropewalk.report.comparison import BEST_POSSIBLE, LEARNED, Key, Table
from ropewalk.report.markdown import bold, escaped

Column = dict[str, str]  # cells by line


def amount(e: Estimate | None, unit: str, sign: str = "") -> str:
    """Format an estimate with its interval, as in "2.051 ± 0.069"; "" for none.

    Args:
        sign: "+" to show the sign of positive numbers.
    """
    if e is None or math.isnan(e.value):
        return ""
    digits = 3 if "bit" in unit else 1
    # Adding zero turns -0.0 into 0.0: a difference must not read as -0.000.
    value = round(e.value, digits) + 0.0
    text = f"{value:{sign}.{digits}f}"
    if not math.isnan(e.half):
        text += f" ± {e.half:.{digits}f}"
    return text


def signed(gain: Estimate, table: Table) -> str:
    """Format a gain with its sign, interval and unit, as in "+0.012 ± 0.003 bits"."""
    return f"{amount(gain, table.unit, '+')} {table.unit}"


def percent(share: Estimate | None) -> str:
    """Format a share of 0.69 ± 0.03 as "69 ± 3"; "" for none."""
    if share is None or math.isnan(share.value):
        return ""
    # Rounded before zero is added, which turns -0.0 into 0.0.
    value = round(100 * share.value) + 0.0
    text = f"{value:.0f}"
    if not math.isnan(share.half):
        text += f" ± {100 * share.half:.0f}"
    return text


def listed(items: Sequence[str], most: int = 6) -> str:
    """Join at most so many items, and count the rest."""
    text = ", ".join(items[:most])
    if len(items) > most:
        text += f" and {len(items) - most} more"
    return text


def times(length: int, table: Table) -> str:
    """Return a length as a multiple of the training length, as in "8x"."""
    return f"{length / table.train_len:g}x"


def find(tables: Sequence[Table], kind: str, quantity: str | None = None) -> Table | None:
    """Return the first table of a measure and, if given, a quantity."""
    for table in tables:
        if table.kind == kind and quantity in (None, table.quantity):
            return table
    return None


def which(table: Table, length: int) -> str:
    """Say which line is best at a length. It is called the best only if it is separated from all others."""
    part, (first, *others) = table.best(length)
    key = Key(first, part, length)
    value = amount(table.means[key], table.unit)
    sentence = f"At {length:,} tokens ({times(length, table)})"
    if table.task:
        # Medians have no intervals, so nothing is said about what separates the lines.
        comparison = "the lowest error" if others else "an error"
        seeds = _seeds_that_learned(table.learned[key])
        sentence += f", in the difficulty that is worst there ({escaped(part)})"
        return f"{sentence} {bold(first)} has {comparison}: {value} %, {seeds}."
    loss = f"{value} {table.unit}"
    tied = table.tied(key)
    if not others:
        sentence += f" {bold(first)} has {loss}"
    elif tied:
        names = listed([escaped(line) for line in tied], 4)
        sentence += f" the lowest is {bold(first)}: {loss}, not separated from {names}"
    else:
        second = others[0]
        behind = amount(table.behind[key._replace(line=second)], table.unit, "+")
        sentence += f" the best is {bold(first)}: {loss}, then {escaped(second)} ({behind})"
    if length > table.train_len:
        sentence += _against_truncation(table, key)
    return f"{sentence}."


def _seeds_that_learned(of_seeds: Learned) -> str:
    """Say over which seeds a median is."""
    if not of_seeds.learned:
        return f"the median over {of_seeds.seeds} seeds, none of which learned the task"
    return f"the median over the {of_seeds.learned} of {of_seeds.seeds} seeds that learned the task"


def _against_truncation(table: Table, best: Key) -> str:
    """Say how much better or worse the best line is than on the text cut to train_len."""
    gain = table.gains.get(best)
    if gain is None:
        return ""
    size = amount(gain._replace(value=abs(gain.value)), table.unit)
    if not gain.separated:
        comparison = "not separated from"
    elif gain.value > 0:
        comparison = f"{size} better than"
    else:
        comparison = f"{size} worse than"
    sentence = f"; {escaped(best.line)} is {comparison} itself on the same text cut to {table.train_len:,} tokens"
    # The best line may be better than itself on the cut text, and yet worse than the reference on it.
    # The first row of a table of text is the reference on the cut text.
    cut = table.behind.get(best._replace(line=table.rows[0]))
    if best.line != table.reference and cut and cut.high < 0:
        sentence += f", on which {bold(str(table.reference))} is better ({amount(cut, table.unit, '+')})"
    return sentence


def in_words(table: Table, lengths: Mapping[str, int]) -> Column:
    """Return the lengths that lines reach, the longest first: "8x", or "none" for 0."""
    lines = [line for line in table.lines.index if line in lengths]
    words = {}
    for line in sorted(lines, key=lambda line: -lengths[line]):
        length = lengths[line]
        words[line] = times(length, table) if length else "none"
    return words


def reached(table: Table, lengths: Mapping[str, int]) -> Column:
    """Return the lengths that lines reach `in_words`, and ">= 8x" where nothing longer was measured."""
    words = in_words(table, lengths)
    longest = max(table.lengths)
    for line in words:
        # A line whose encoding ends at some length was measured as far as it goes: there is no more to find.
        if lengths[line] == longest and not table.lines.skipped[line]:
            words[line] = f">= {words[line]}"
    return words


def useful(table: Table) -> Column:
    """Return the useful lengths in words. If longer text never helped, only an upper limit is known."""
    words = reached(table, table.useful)
    shortest = min(table.lengths)
    for line, length in table.useful.items():
        if length == shortest < max(table.lengths):
            words[line] = f"<= {times(length, table)}"
    return words


def how_far(what: str, reach: Mapping[str, str]) -> list[str]:
    """Return a sentence on the lines that are `what` up to each length; none for no lines."""
    if not reach:
        return []
    lines_of: dict[str, list[str]] = {}
    for line, length in reach.items():
        lines_of.setdefault(length, []).append(escaped(line))
    most = 6 if len(reach) < 20 else 3
    texts = []
    for length, lines in lines_of.items():
        extent = "**at no length**" if length == "none" else f"to {bold(length)}"
        texts.append(f"{extent}: {listed(lines, most)}")
    return [f"{what} {'; '.join(texts)}."]


def mastered(table: Table) -> list[str]:
    """Say up to which length at least 99 % of a task's answers are right, in its hardest difficulty.

    A model that only guesses never gets worse with length: it is safe at every length, which is no merit.
    """
    reach = {}
    for line in table.lines.index:
        reach[line] = 0
        for length in table.lengths:
            errors = [e.value for key, e in table.means.items() if (key.line, key.length) == (line, length)]
            # Written so that NaN ends it.
            if not errors or not max(errors) <= 1:
                break
            reach[line] = length
    return how_far("At least 99 % right", in_words(table, reach))


def used(table: Table, others: Sequence[Table]) -> str:
    """Say which lines are safe to the longest length and also gain from text beyond train_len, and how much."""
    gains: dict[str, str] = {}
    for other in others:
        measure = other.kind.replace("_", " ")
        for line, e in retrieval.pooled(other).items():
            # Only gains whose interval stays above 0 at the three digits shown. The first such measure is named.
            if round(e.low, 3) > 0:
                gains.setdefault(line, f"gain on {measure}: {amount(e, 'bits', '+')}")
    longest = max(table.lengths)
    both = []
    for line in table.lines.index:
        if table.safe.get(line) == longest and line in gains:
            both.append(f"{bold(line)} ({gains[line]})")
    end = f"safe to {times(longest, table)} and using text from beyond {table.train_len:,} tokens"
    if not both:
        return f"No line is both {end}."
    return f"Both {end}: {listed(both)}."


def possible(table: Table) -> list[str]:
    """Say how much each line gains of what the longest text makes possible; nothing if the optimum is not known."""
    length = max(table.lengths)
    best = table.gains.get(Key(BEST_POSSIBLE, "text", length))
    if best is None or length <= table.train_len:
        return []

    longer = f"{length:,} tokens make possible over {table.train_len:,}"
    shares = {key.line: e.value for key, e in table.shares.items() if key.length == length}
    if not shares:
        return [f"The gain that {longer} is not separated from 0: {signed(best, table)}."]
    # A network that diverged has NaN, which has no place in an order.
    finite = [line for line, share in shares.items() if not math.isnan(share)]
    if not finite:
        return []
    first, *others = sorted(finite, key=lambda line: -shares[line])

    # Of each line the gain, and which share that is of the possible one.
    gains = {line: amount(table.gains[Key(line, "text", length)], table.unit) for line in finite}
    percents = {line: f"({round(100 * shares[line])} %)" for line in finite}
    sentence = f"{bold(first)} gains {gains[first]} of the {best.value:.3f} {table.unit} that {longer}"
    sentence += f" {percents[first]}"

    if others:
        words = [f"{escaped(line)} {gains[line]} {percents[line]}" for line in others]
        # Up to 14 lines are all named; of more only the best.
        most = 13 if len(others) <= 13 else 6
        sentence += f"; {listed(words, most)}"
    return [f"{sentence}."]


def verdict(gain: Estimate, tolerance: float) -> str:
    """Say in a word what reading on is worth: "better", "worse", "level", or "undecided".

    Level is a difference that is smaller than the tolerance with all of its interval.
    """
    if gain.low > -tolerance and gain.high < tolerance:
        return "level"
    # As it is shown: a gain of "+0.000" is none.
    if round(gain.low, 3) > 0:
        return "better"
    if round(gain.high, 3) < 0:
        return "worse"
    return "undecided"


def how_far_it_goes(table: Table, tolerance: float) -> list[str]:
    """Say of one trained network how far it can be read, and whether reading it otherwise helps."""
    sentences = []
    trained = list(table.lines.index[~table.lines.zero_shot])
    longest = max(table.lengths)
    if longest <= table.train_len:
        return []
    # The others are the same network at earlier steps, which are no answer.
    if trained:
        sentences.append(_reading_on(table, trained[0], tolerance))
    gains = {}
    for line in table.lines.index[table.lines.zero_shot]:
        gain = table.gains.get(Key(line, "text", longest))
        if gain is not None and not math.isnan(gain.value):
            gains[line] = gain
    if gains:
        best = max(gains, key=lambda line: gains[line].value)
        size = signed(gains[best], table)
        multiple = times(longest, table)
        words = {
            "better": f"it gains from longer text, {size} at {multiple}",
            "worse": f"it is worse than cutting too, {size} at {multiple}",
            "level": f"it is level with cutting at {multiple} ({size})",
            "undecided": f"whether it is worth it at {multiple} is undecided ({size})",
        }
        # The label of a line is that of the line as trained and how it is read, such as "rope read as yarn".
        reading = best.removeprefix(str(table.lines.base[best])).strip().capitalize()
        worth = words[verdict(gains[best], tolerance)]
        sentences.append(f"**{escaped(reading)}** {worth}.")
    return sentences


def _reading_on(table: Table, line: str, tolerance: float) -> str:
    """Say up to which length a network as trained may read on, and what happens then."""
    level = table.train_len  # the longest text so far on which it is not worse
    worth = ""
    for length in table.lengths:
        if length <= table.train_len:
            continue
        gain = table.gains.get(Key(line, "text", length))
        if gain is None:
            break
        word = verdict(gain, tolerance)
        size = signed(gain, table)
        evidence = f"{size} at {times(length, table)}"
        if word == "undecided":
            return f"**Undecided** beyond {level:,} tokens: {evidence} against the cut text; measure more texts."
        if word == "worse":
            return f"Beyond {level:,} tokens **cut the text**: {escaped(line)} is worse when it reads on, {evidence}."
        level = length
        what = "gains from longer text" if word == "better" else "is level with cutting the text"
        worth = f"({times(level, table)}) and {what}: {size}."
    if not worth:
        return f"{bold(line)} was not measured beyond {table.train_len:,} tokens."
    return f"{bold(line)} reads on to **{level:,} tokens** {worth}"


def how_sure(table: Table) -> str:
    """Say what the intervals cover."""
    fewest = table.lines.seeds.min()
    most = table.lines.seeds.max()
    seeds = f"{most} seeds" if most > 1 else "1 seed"
    if fewest < most:
        seeds = f"{fewest} to {seeds}"
    first = table.lines.iloc[0]
    noun = "sequences" if table.task else "texts"
    sample = f"{first.texts:,} {noun}"
    # Texts of one document are not independent, so that both numbers matter.
    if first.documents < first.texts:
        sample += f" of {first.documents:,} documents"
    if table.task:
        limit = f"at most {LEARNED:g} % errors at the training length"
        return f"Medians are over the seeds that learned the task ({limit}); there are {seeds} and {sample}."
    sentence = f"± is the 95 % interval over {seeds} and {sample}; differences are paired by seed and text."
    if fewest == 1:
        sentence += " Over one seed it covers the texts alone: another training run may differ by more."
    comparisons = len(table.differences)
    if comparisons:
        separated = sum(e.separated for e in table.differences.values())
        sentence += f" Of {comparisons} differences to {escaped(table.reference)} {separated} are separated from 0"
        sentence += f"; of equal lines about {0.05 * comparisons:.2g} would be, by chance alone."
    return sentence


def retrieved(tables: Sequence[Table]) -> list[str]:
    """Return the sentences about RULER."""
    sentences = []
    found = find(tables, "ruler", "found")
    if found:
        reach = reached(found, retrieval.effective(found))
        sentences += how_far(f"Effective (at least {retrieval.EFFECTIVE} % found)", reach)
    gain = find(tables, "ruler", "gain")
    if gain:
        reach = reached(gain, retrieval.above_chance(gain))
        sentences += how_far("Above chance (gain above 0)", reach)
    return sentences


def answer(tables: Sequence[Table], tolerance: float = 0.02) -> dict[str, list[str]]:
    """Return sentences about the tables of one section, by heading; headings without any are left out.

    Args:
        tolerance: bits by which lines may differ and still be level.
    """
    words: dict[str, list[str]] = {}
    table = find(tables, "lengths")
    if table:
        # Only what was measured: eval.lengths need not include the training length.
        lengths = dict.fromkeys((table.train_len, max(table.lengths)))
        words["Which"] = [which(table, length) for length in lengths if length in table.lengths]
        # One network read in several ways: a winner among them would only be itself.
        if table.is_text and table.lines.base.nunique() == 1:
            words["Which"] = how_far_it_goes(table, tolerance)
        safe = reached(table, table.safe)
        if table.task:
            words["How far"] = how_far("Safe (hardly more errors than at the training length)", safe)
            words["How far"] += mastered(table)
        else:
            words["How far"] = how_far("Safe (shown to be not worse than cutting the text)", safe)
            words["How far"] += how_far("Useful (longer text still helped)", useful(table))
        words["Possible"] = possible(table)
        gains = [other for other in tables if other.quantity == "gain"]
        if gains:
            words["Far text"] = [used(table, gains)]
    words["RULER"] = retrieved(tables)
    if table:
        words["How sure"] = [how_sure(table)]
    return {heading: sentences for heading, sentences in words.items() if sentences}
