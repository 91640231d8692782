"""What the figures of a report show: one for each measure, and the training curves. `figure.svg` draws them."""

import math
import statistics
from collections.abc import Mapping, Sequence

import pandas as pd

from ropewalk.report.answer import amount
from ropewalk.report.comparison import BEST_POSSIBLE, BySeed, Estimates, Key, Table
from ropewalk.report.figure import Figure, Panel, Point
from ropewalk.report.frame import Runs, curves

# These can be told apart with the kinds of colour blindness that the tests simulate, on white and on black.
PALETTE = ("#0563f2", "#fc115d", "#4aab8b", "#ac01a8", "#905b8a", "#1ba6f3", "#ac9f09", "#a04102")
ROOM = 0.15  # bits around what decides: a line that leaves it has its number beside its name
Styles = Mapping[str, str]  # classes of the style sheet, by line


def line_styles(section: Sequence[Table]) -> Styles:
    """Return the style of each line of a section: a colour for the first eight by rank, grey for the rest."""
    styles = {BEST_POSSIBLE: "best"}
    n_coloured = 0
    for table in section:
        for line in table.rows:
            if line in styles:
                continue
            if line not in table.lines.index:
                styles[line] = "cut"
                continue
            style = "grey"
            if line == table.reference:
                style = "reference"
            elif n_coloured < len(PALETTE):
                style = f"c{n_coloured}"
                n_coloured += 1
            styles[line] = f"{style} zero-shot" if table.lines.zero_shot[line] else style
    return styles


def points_of(table: Table, estimates: Estimates, part: str, sign: str = "") -> list[Point]:
    """Return a point for each estimate of a part, at its length, with the value of each seed."""
    points = []
    for line in table.rows:
        for length in table.lengths:
            key = Key(line, part, length)
            e = estimates.get(key)
            if e:
                seeds = _of_seeds(table, key, estimates is table.gains)
                points.append(Point(line, length, e.value, e.half, amount(e, table.unit, sign), seeds))
    return points


def _of_seeds(table: Table, key: Key, is_gain: bool) -> tuple[float, ...]:
    """Return the value of each seed, or its gain over the cut text; nothing for a single seed."""
    of_key = table.cells.get(key, {})
    if len(of_key) < 2:
        return ()
    cut: BySeed = {}
    if is_gain:
        length = min(key.length, table.train_len)
        cut = table.cells.get(key._replace(line=table.lines.base[key.line], length=length), {})
    values = []
    for seed, sample in of_key.items():
        total = sample.values.sum()
        if is_gain:
            if seed not in cut:
                continue
            total = cut[seed].values.sum() - total
        values.append(total / sample.units.sum())
    return tuple(values)


def by_length(table: Table) -> Figure:
    """Draw loss, errors or answers found against length; for text first the gain over the cut text."""
    xlabel = "text length in tokens"
    panels = []
    title = "Error against length"
    note = ""
    parts = list(table.parts)
    if table.is_text:
        title = "Gain over cutting the text, and loss, against text length"
        note = "The same tokens with more and more text before them. An arrow marks what leaves. "
        if table.gains:
            panels.append(_gains(table, xlabel))
    elif table.kind == "ruler":
        title = "RULER: gain" if table.quantity == "gain" else "RULER: answers found"
        note = "Mean over tasks. "
        if table.quantity == "gain":
            note += "Gain: how much more probable an answer is than after a text in which it is wrong. "
        parts = ["mean"]
    elif table.kind == "reach":
        title = "Reach: the share that comes from afar"
        xlabel = "from a distance of at least, in tokens"
        note = "Of the attention of the last token, mean over layers, and of its gradient by the embeddings. "
        parts = ["attention", "gradient"]
    panels += [_means(table, part, xlabel) for part in parts]
    note += "Medians over the seeds that learned the task." if table.task else "Bars: 95 % intervals; dots: seeds."
    return Figure(title, note, panels)


def _gains(table: Table, xlabel: str) -> Panel:
    """Draw the gain over the cut text, from a little below 0: how much a line loses beyond that decides nothing."""
    return Panel(
        title=f"{table.unit} gained over the text cut to {table.train_len:,} tokens",
        xlabel=xlabel,
        points=points_of(table, table.gains, "text", "+"),
        ticks=_ticks(table),
        log=True,
        low=-ROOM,
        mark=table.train_len,
        bars=True,
        below="below 0: cut the text instead",
    )


def _means(table: Table, part: str, xlabel: str) -> Panel:
    """Draw the means of one part; a loss up to a little above what most lines have at train_len or below."""
    points = points_of(table, table.means, part)
    high = math.inf
    if table.is_text:
        highest: dict[str, float] = {}
        for p in points:
            if p.x <= table.train_len and math.isfinite(p.y):
                highest[p.line] = max(highest.get(p.line, p.y), p.y)
        # One line that has learned little would flatten all others.
        if highest:
            high = statistics.median_low(highest.values()) + 2 * ROOM
    return Panel(
        title=table.unit if table.is_text else f"{table.unit}: {part}",
        xlabel=xlabel,
        points=points,
        ticks=_ticks(table),
        log=True,
        high=high,
        mark=table.train_len,
        percent=table.quantity in ("found", "share"),
    )


def _ticks(table: Table) -> dict[float, str]:
    """Return the lengths of a table with their names."""
    return {length: f"{length:,}" for length in table.lengths}


def far_copies(table: Table) -> Figure:
    """Draw the gain on far copies against their distance, in a panel for each continuation."""
    points: dict[str, list[Point]] = {}
    ticks = {}
    for name, part in table.parts.items():
        middle = (part.first + part.last) / 2
        # Nearer copies are few, and their wide intervals would hide the rest.
        if middle < table.train_len / 4:
            continue
        ticks[middle] = f"{part.first:.0f}-{part.last:.0f}"
        of_continuation = points.setdefault(part.continuation, [])
        for point in points_of(table, table.means, name, "+"):
            of_continuation.append(point._replace(x=middle, text=f"{name}: {point.text}", seeds=()))
    note = "Tokens after words that occurred before: how much better they are predicted with the whole text than when "
    note += f"cut to {table.train_len:,} tokens, which hides earlier occurrences. At 0 far text is not used; a network "
    note += "that copies blindly loses where the text goes on otherwise."
    # Results of earlier versions do not tell the continuations apart.
    titles = {"": "gain", "same": "gain where the text goes on as before", "other": "gain where it goes on otherwise"}
    panels = []
    for continuation, of_continuation in points.items():
        highest = max(ROOM, *(p.y for p in of_continuation if math.isfinite(p.y)))
        title = f"{titles[continuation]}, {table.unit}"
        xlabel = "tokens since the same words last occurred"
        panels.append(Panel(title, xlabel, of_continuation, ticks, log=True, low=-highest, mark=table.train_len))
    return Figure("Far copies", note, panels)


def by_position(table: Table) -> Figure:
    """Draw the loss against position, as the difference to each line's own loss around train_len."""
    (length,) = table.lengths
    rows = {}
    for name, part in table.parts.items():
        values = {}
        for line in table.lines.index:
            e = table.means.get(Key(line, name, length))
            values[line] = e.value if e else math.nan
        rows[part.first, part.last] = values
    losses = pd.DataFrame.from_dict(rows, "index").sort_index()
    firsts = losses.index.get_level_values(0)
    lasts = losses.index.get_level_values(1)
    is_around = (firsts >= table.train_len / 2) & (lasts < 1.5 * table.train_len)
    changes = losses - losses[is_around].mean()
    name = f"{table.unit}, change from the loss around {table.train_len:,}"
    note = "One pass over the longest texts, smoothed over three neighbours. "
    # What the texts add is common to all lines, and would hide them.
    if len(table.lines) > 2:
        changes = changes.sub(changes.median(axis=1), axis=0)
        note += "What texts add is common to all lines, so the median line is taken off: above it loss grows faster."
    changes = changes.rolling(3, center=True, min_periods=1).mean()
    points = []
    for line in changes:
        for (first, last), value in changes[line].dropna().items():
            text = f"positions {first:.0f}-{last:.0f}: {value:+.3f}"
            points.append(Point(line, (first + last) / 2, value, 0, text))
    xlabel = "position in the text, tokens"
    panel = Panel(name, xlabel, points, {}, high=3 * ROOM, low=-3 * ROOM, mark=table.train_len)
    return Figure("Loss by position", note, [panel])


def training(runs: Runs, section: str, table: Table | None) -> Figure:
    """Draw validation against tokens, and quality against speed."""
    panels = []
    rows = curves(runs)
    # A column that only runs of other sections have is empty here.
    rows = rows[rows.section == section].dropna(axis="columns", how="all")
    for measure in ("val/bits_per_byte", "val/error", "val/loss"):
        if measure in rows:
            panels.append(_validation(rows.dropna(subset=[measure]), measure))
            break
    if table is not None:
        of_section = runs.runs[runs.runs.section == section]
        points = _by_speed(table, of_section.groupby("label").tokens_per_s.median())
        # One point alone says nothing about speed against quality.
        if len(points) > 1:
            title = f"{table.unit} at {max(table.lengths):,} tokens, against speed"
            high = math.inf
            if table.is_text:
                high = min(p.y for p in points) + 4 * ROOM
            panels.append(Panel(title, "tokens/s in training", points, {}, high=high))
    note = "Validation at the training length, mean over seeds. Speeds compare only runs on the same machine."
    return Figure("Training", note, panels)


def _validation(rows: pd.DataFrame, measure: str) -> Panel:
    """Draw a validation measure against the tokens trained on, mean over seeds."""
    means = rows.groupby(["label", "tokens"])[measure].mean()
    points = []
    for (label, tokens), value in means.items():
        points.append(Point(label, tokens, value, 0, f"{tokens:,} tokens: {value:.3f}"))
    # The first quarter falls from far above and would flatten the rest.
    quarter = max(p.x for p in points) / 4
    late = [p.y for p in points if p.x >= quarter and math.isfinite(p.y)]
    name = measure.removeprefix("val/").replace("_", " ")
    highest = max(late, default=math.inf)
    return Panel(f"validation: {name}", "tokens trained on", points, {}, high=highest)


def _by_speed(table: Table, speeds: Mapping[str, float]) -> list[Point]:
    """Return the quality of each line as trained, at the longest length, against its speed in tokens/s."""
    longest = max(table.lengths)
    part, _ = table.best(longest)
    points = []
    for line in table.lines.index[~table.lines.zero_shot]:
        e = table.means.get(Key(line, part, longest))
        speed = float(speeds.get(line, math.nan))
        if e and speed > 0:
            text = f"{speed:,.0f} tokens/s: {amount(e, table.unit)}"
            points.append(Point(line, speed, e.value, e.half, text))
    return points


def figure(table: Table) -> Figure | None:
    """Draw a table; None if there is no figure for it."""
    if table.kind == "by_position":
        return by_position(table)
    if table.kind == "far_copies":
        return far_copies(table) if table.quantity == "gain" else None
    if table.kind == "key_tokens":
        return None  # two numbers for each line, which a table shows
    return by_length(table)
