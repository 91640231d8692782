"""Figures of the long table by matplotlib: functions of a table and an Axes.

    table = ropewalk.runs("runs")
    ax = ropewalk.plot.gain(table)                              # a figure of its own
    ropewalk.plot.gain(table, ax=axes[0], lines=["fox"])        # in yours; all other lines are grey
    ropewalk.plot.save(ax.figure, "gain.pdf")                   # or .svg, .png

Colours are for a light or a dark background, whichever the Axes has.
"""

import io
import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from ropewalk.files import write_out
from ropewalk.report.table import BEST_POSSIBLE, losses_of_text, over_seeds


class Palette(NamedTuple):
    """Colours for one background.

    Any two lines, the ink and the grey are at least 0.09 apart in Oklab, also as the colour-blind see them; the lines
    have a contrast of at least 3 to the paper.
    """

    ink: str
    muted: str
    grid: str
    paper: str
    grey: str
    lines: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        """The colours by the names that they have in a style sheet."""
        return self._asdict() | {"lines": None} | {f"line{i}": colour for i, colour in enumerate(self.lines)}


LIGHT = Palette(
    "#1b2026", "#5f6975", "#e3e6ea", "#ffffff", "#b4bac2",
    ("#2647b1", "#df2474", "#cf7c07", "#2288a3", "#8609f8", "#5d5a0b", "#a47ef5", "#782358"),
)  # fmt: skip
DARK = Palette(
    "#e4e7eb", "#9ca6b2", "#2b313a", "#14171c", "#59616c",
    ("#31d4fc", "#f67dab", "#c07000", "#0ea96f", "#bd31ff", "#d8b64c", "#9892eb", "#9dff5e"),
)  # fmt: skip
MARKERS = "os^DvPX*"
MOST = len(MARKERS)  # lines with a colour
WIDE, NARROW = (7.8, 4.4), (4.2, 4.0)  # inches: of a page, and of a phone or a column of a paper
SIZE = 9.5  # points of words
DODGE = 1.2  # points from line to line, so that equal values and their intervals can be seen
FLOOR = 0.01  # bits: an axis spans at least so much
GREY, BEST, COLOURED, REFERENCE = 2, 3, 4, 5  # how far above the others lines are drawn
VALIDATION = ("val/bits_per_byte", "val/error", "val/loss")  # the first that was recorded is drawn
BARS = "bars: 95 % intervals"
LONGEST = 21  # characters of a name at the end of a line
Name = tuple[str, float | None, float, str]  # y and x of the end of a line, and its colour
PLAIN = {"svg.fonttype": "none", "svg.hashsalt": "ropewalk", "pdf.fonttype": 42}


class Curve(NamedTuple):
    """A line as it is drawn."""

    line: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    seeds: list[tuple[float, float]]  # a point for each of its runs
    look: Mapping[str, Any]

    @property
    def is_named(self) -> bool:
        return self.look["zorder"] > GREY


def gain(table: pd.DataFrame, ax: Axes | None = None, *, lines: Sequence[str] | None = None) -> Axes:
    """Draw what each line gains over the text cut to its training length, against the length of the text.

    Args:
        table: as `ropewalk.runs` returns it.
        lines: those with colours and names, at most 8; none: the best of each encoding.

    Raises ValueError: no run has measured its loss at several lengths.
    """
    rows = _of_text(table).dropna(subset=["gain"])
    rows = rows[rows.length >= rows.cut]
    ax = dressed(ax)
    curves = _curves(rows, "gain", lines, ax)
    cuts = rows.cut.unique()
    cut = f"{cuts[0]:,.0f} tokens" if len(cuts) == 1 else "its training length"
    ax.axhline(0, color=palette_of(ax).muted, linewidth=1.2, zorder=1)
    titled(ax, f"Gain over the text cut to {cut}", f"{rows.unit.iloc[0]}; below 0 cut the text; {_marks(rows)}")
    _draw(ax, curves, *_limits_of_gain(curves), "{:+.2f}")
    return ax


def loss(table: pd.DataFrame, ax: Axes | None = None, *, lines: Sequence[str] | None = None) -> Axes:
    """Draw the loss of each line against the length of the text, and that of the reference on the cut text.

    Args and Raises: as of `gain`.
    """
    rows = _of_text(table)
    ax = dressed(ax)
    # The intervals of losses are those of the texts, which all lines share: they tell nothing of differences.
    curves = [curve._replace(low=[], high=[]) for curve in _curves(rows, "value", lines, ax)]
    note = _marks(rows).replace(BARS, "after more and more text")
    titled(ax, f"Loss in {rows.unit.iloc[0]} of the same tokens", note)
    muted = palette_of(ax).muted
    for row in rows[(rows.line == rows.reference) & rows.seed.isna() & (rows.length == rows.train_len)].itertuples():
        ax.axhline(row.value, color=muted, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        _words(ax, row.value, f"{short(row.line)}, text cut to {row.train_len:,}")
    for length in rows.train_len.unique():
        ax.axvline(length, color=muted, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    _draw(ax, curves, *_limits_of_loss(curves), "{:.2f}")
    return ax


def curves(
    table: pd.DataFrame, ax: Axes | None = None, *, lines: Sequence[str] | None = None, x: str = "tokens",
    y: str | None = None, reference: str = "rope",
) -> Axes:  # fmt: skip
    """Draw the validation loss in training, the mean over the seeds of each line.

    Args:
        table: as `ropewalk.curves` returns it.
        lines: as of `gain`; none: the first 8.
        x: also "step" or "seconds".
        y: a column; none: bits per byte, the error of a task or the loss, whichever the runs recorded.

    Raises ValueError: nothing was recorded.
    """
    recorded = [name for name in VALIDATION if name in table and table[name].notna().any()]
    if y is None and not recorded:
        raise ValueError("nothing to draw: no run has recorded a validation")
    y = y or recorded[0]
    ax = dressed(ax)
    rows = table.dropna(subset=[x, y])
    labels = rows.label.unique().tolist()
    named = lines if lines is not None else [label for label in labels if label != reference][:MOST]
    looks = _looks(labels, named, {reference}, set(), palette_of(ax))
    drawn = []
    for label, of_line in rows.groupby("label"):
        mean = of_line.groupby("step")[[x, y]].mean()
        drawn.append(Curve(str(label), mean[x].tolist(), mean[y].tolist(), [], [], [], looks[label] | {"marker": ""}))
    # The first validations are far above all that matters.
    best = min(_finite(drawn))
    late = max(curve.y[len(curve.y) // 4] for curve in drawn)
    pad = 0.05 * (late - best) + FLOOR
    titled(ax, f"Validation in training: {y.partition('/')[2].replace('_', ' ')}", "the mean over the seeds")
    _draw(ax, drawn, best - pad, late + pad, "{:.2f}", is_log=False, xlabel=f"{x} of training")
    return ax


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as its file's ending says: .svg, .png or .pdf. The same figure makes the same bytes.

    Raises ValueError: the ending is another.
    """
    path = Path(path)
    write_out(path, written(figure, path.suffix.removeprefix(".")))


def written(figure: Figure, kind: str) -> bytes:
    """Return a figure as "svg", "png" or "pdf"."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
    if kind not in metadata:
        raise ValueError(f"a figure is written as .svg, .png or .pdf, not as .{kind}")
    file = io.BytesIO()
    with matplotlib.rc_context(PLAIN):
        figure.savefig(file, format=kind, metadata=metadata[kind], dpi=200)
    return file.getvalue()


def svg(draw: Callable[[Axes], object], size: tuple[float, float] = WIDE) -> str:
    """Return a figure as SVG for a page: as wide as its place, in the colours of the page's variables."""
    ax = new(size)
    draw(ax)
    text = written(ax.figure, "svg").decode()
    text = text[text.index("<svg") :]
    for name, colour in LIGHT.variables.items():
        if colour:
            text = text.replace(colour, f"var(--{name})")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r' id="\w+_\d+"', "", text)
    text = re.sub(r"(?<!opacity: )\b(\d+\.\d)\d+", r"\1", text)
    # Words have the font of their page, which is narrower than matplotlib's, so that none leaves its place.
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r" transform=\"rotate\(-0 [^\"]*\"", "", text)
    text = re.sub(r"\n\s+", "\n", text)
    title = escape(" ".join(ax.get_title(loc="left").split()))
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{title}"', text, count=1)


def on_its_own(picture: str) -> str:
    """Return a figure from `svg` with the colours that it needs without a page, for light and dark."""
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in palette.variables.items() if colour)
        for palette in (LIGHT, DARK)
    )
    words = "text{font-family:system-ui,sans-serif}"
    style = f"<style>{words}:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    return re.sub(r"(<svg[^>]*>)", rf"\1{style}", picture, count=1)


def new(size: tuple[float, float] = WIDE, palette: Palette = LIGHT) -> Axes:
    """Return the Axes of a new figure, for pages and files: pyplot does not know it."""
    figure = Figure(figsize=size, layout="constrained", facecolor=palette.paper)
    return figure.subplots(subplot_kw={"facecolor": palette.paper})


def short(line: str, most: int = LONGEST) -> str:
    """Return the name of a line in at most so many characters."""
    name = line.replace(" read as ", " as ").replace(" at scale ", " x")
    if len(name) <= most:
        return name
    # Lines often begin alike and differ at their ends, as two values of an option do: the middle is left out.
    start = (most - 1) // 2
    return f"{name[:start]}…{name[-(most - 1 - start) :]}"


def chosen(table: pd.DataFrame) -> list[str]:
    """Return the lines that have colours: the best of each encoding at the longest text, and at most 8."""
    rows = losses_of_text(over_seeds(table))
    rows = rows[(rows.length == rows.length.max()) & (rows.line != BEST_POSSIBLE) & (rows.line != rows.reference)]
    rows = rows.sort_values("rank")
    best = rows.drop_duplicates("encoding").line.tolist()
    return (best + [line for line in rows.line if line not in best])[:MOST]


def variables(table: pd.DataFrame) -> dict[str, str]:
    """Return the name of each line's colour in a style sheet, as in the figures on a page."""
    names = {colour: name for name, colour in LIGHT.variables.items()}
    rows = _of_text(table)
    looks = _looks(rows.line.unique(), chosen(table), set(rows.reference), set(), LIGHT)
    return {line: names[look["color"]] for line, look in looks.items()}


def _of_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a text's loss. Raises ValueError: there are none."""
    rows = losses_of_text(table)
    if rows.empty:
        raise ValueError("nothing to draw: no run has measured the loss of a text")
    return rows


def dressed(ax: Axes | None) -> Axes:
    """Return the Axes, or a new one that pyplot shows, with a grid and without a frame."""
    if ax is None:
        _, ax = plt.subplots(figsize=WIDE, layout="constrained")
    palette = palette_of(ax)
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.spines["bottom"].set_color(palette.muted)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color=palette.grid, linewidth=0.8)
    ax.tick_params(colors=palette.muted, labelsize=SIZE)
    ax.tick_params(axis="y", length=0)
    return ax


def palette_of(ax: Axes) -> Palette:
    """Return the colours for the background of an Axes."""
    red, green, blue = to_rgb(ax.get_facecolor())
    return LIGHT if 0.2 * red + 0.7 * green + 0.1 * blue > 0.5 else DARK


def _looks(
    lines: Iterable[str], named: Sequence[str], references: set[str], dashed: set[str], palette: Palette
) -> dict[str, dict[str, Any]]:
    """Return how each line is drawn: the reference in ink, the named ones in colours, all others grey."""
    looks: dict[str, dict[str, Any]] = {}
    for line in lines:
        look: dict[str, Any] = {"color": palette.grey, "linewidth": 1.0, "zorder": GREY, "marker": "."}
        if line == BEST_POSSIBLE:
            look = {"color": palette.muted, "linewidth": 1.6, "zorder": BEST, "marker": "", "linestyle": (0, (1, 1.5))}
        elif line in references:
            look = {"color": palette.ink, "linewidth": 2.4, "zorder": REFERENCE, "marker": "o"}
        elif line in named[:MOST]:
            i = list(named).index(line)
            look = {"color": palette.lines[i], "linewidth": 1.8, "zorder": COLOURED, "marker": MARKERS[i]}
        if line in dashed:
            look["linestyle"] = (0, (4, 1.8))
        looks[line] = look | {"markersize": 4.5}
    return looks


def _curves(rows: pd.DataFrame, column: str, lines: Sequence[str] | None, ax: Axes) -> list[Curve]:
    """Return the curves of a column, those of most colour and the best last, so that they lie above the others."""
    named = chosen(rows) if lines is None else lines
    dashed = set(rows.line[rows.zero_shot.astype(bool)])
    looks = _looks(rows.line.unique(), named, set(rows.reference), dashed, palette_of(ax))
    ends = ["low", "high"] if column == "value" else [f"{column}_low", f"{column}_high"]
    result = []
    for line, of_line in rows.sort_values("length").groupby("line", sort=False):
        of_runs = of_line[of_line.seed.notna()]
        columns = [over_seeds(of_line)[name].tolist() for name in ("length", column, *ends)]
        seeds = list(zip(of_runs.length, of_runs[column], strict=True))
        result.append(Curve(str(line), *columns, seeds, looks[line]))
    return sorted(result, key=lambda curve: (curve.look["zorder"], curve.y[-1], curve.line))


def _marks(rows: pd.DataFrame) -> str:
    """Return the words that explain what is drawn besides lines."""
    dots = ", dots: seeds" if rows.seeds.max() > 1 else ""
    dashes = "; dashed: read otherwise than trained" if rows.zero_shot.any() else ""
    return f"{BARS}{dots}{dashes}"


def _finite(curves: Sequence[Curve]) -> list[float]:
    """Return the values of lines, but for those of the best possible predictor and of networks that diverged."""
    return [y for curve in curves if curve.line != BEST_POSSIBLE for y in curve.y if math.isfinite(y)]


def _limits_of_gain(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return an axis on which gains can be told apart: neither a failure nor the best possible may squeeze them."""
    highest = max([FLOOR, *_finite(curves)])
    lowest = max(min([-FLOOR, *_finite(curves)]), -max(1.2 * highest, 6 * FLOOR))
    possible = max([0.0, *[y for curve in curves if curve.line == BEST_POSSIBLE for y in curve.y]])
    if possible <= 1.6 * highest:
        highest = max(highest, possible)
    pad = 0.06 * (highest - lowest)
    return lowest - pad, highest + pad


def _limits_of_loss(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return an axis for the named lines up to where they begin: what fails later would flatten the rest."""
    shown = [curve for curve in curves if curve.is_named and curve.line != BEST_POSSIBLE]
    bottom = min(_finite(shown), default=0.0)
    starts = [curve.y[0] for curve in shown if math.isfinite(curve.y[0])] or [bottom]
    # So would a line that has learned little at all.
    top = min(max(starts), bottom + 2.5 * (statistics.median(starts) - bottom))
    pad = 0.08 * (top - bottom) + FLOOR / 3
    return bottom - pad, top + pad


def _draw(
    ax: Axes, curves: Sequence[Curve], low: float, high: float, number: str, *, is_log: bool = True,
    xlabel: str = "length of the text in tokens",
) -> None:  # fmt: skip
    """Draw curves within an axis, and name them at their ends; what leaves the axis is marked with its number."""
    ax.set_ylim(low, high)
    ax.ticklabel_format(axis="y", useOffset=False)
    ax.set_xlabel(xlabel, color=palette_of(ax).muted, fontsize=SIZE)
    lengths = sorted({x for curve in curves for x in curve.x})
    if is_log:
        ax.set_xscale("log")
        ax.set_xlim(lengths[0] / 1.06, lengths[-1] * 1.06)
        ax.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        # Matplotlib does not count lines that are drawn aside of their data.
        ax.update_datalim([(x, low) for x in lengths])
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    coloured = [curve.line for curve in curves if curve.look["zorder"] == COLOURED]
    names: list[Name] = []
    for curve in curves:
        points = DODGE * (coloured.index(curve.line) - (len(coloured) - 1) / 2) if curve.line in coloured else 0
        aside = ax.transData + ScaledTranslation(points / 72, 0, ax.figure.dpi_scale_trans)
        ax.plot(curve.x, curve.y, **curve.look, transform=aside)
        if curve.is_named:
            _draw_spread(ax, curve, low, high, aside)
            _mark_leaving(ax, curve, low, high, aside)
            names.append(_name(curve, low, high, number))
    others = sum(not curve.is_named for curve in curves)
    if others:
        names.append((f"{others} others", None, curves[0].x[-1], palette_of(ax).grey))
    name_ends(ax, names)
    if is_log:
        _thin(ax, lengths)


def _draw_spread(ax: Axes, curve: Curve, low: float, high: float, transform: Transform) -> None:
    """Draw the intervals of a curve, and a dot for each of its runs."""
    look = {"color": curve.look["color"], "zorder": curve.look["zorder"] - 0.1, "transform": transform}
    if curve.line != BEST_POSSIBLE:
        for x, y, start, stop in zip(curve.x, curve.y, curve.low, curve.high, strict=False):
            if low <= y <= high:
                ax.plot([x, x], [start, stop], linewidth=1.2, alpha=0.6, **look)
    if len(curve.seeds) > len(curve.x):
        ax.plot(*zip(*curve.seeds, strict=True), ".", markersize=2.5, alpha=0.45, **look)


def _mark_leaving(ax: Axes, curve: Curve, low: float, high: float, transform: Transform) -> None:
    """Draw an arrow head where a curve leaves the axis."""
    points = list(zip(curve.x, curve.y, strict=True))
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if low <= y0 <= high and (y1 < low or y1 > high) and math.isfinite(y1):
            edge = low if y1 < low else high
            x = x0 * (x1 / x0) ** ((edge - y0) / (y1 - y0))
            look = {"color": curve.look["color"], "markersize": 7, "clip_on": False, "zorder": 6}
            ax.plot(x, edge, "v" if edge == low else "^", **look, transform=transform)


def _name(curve: Curve, low: float, high: float, number: str) -> Name:
    """Return what stands at the end of a curve: its name, with its last value if that is off the axis."""
    end = curve.y[-1]
    words = ""
    if math.isnan(end):
        words = " diverged"
    elif not low <= end <= high:
        words = f" {'↓' if end < low else '↑'} {number.format(end)}"
    y = high if math.isnan(end) else min(max(end, low), high)
    return short(curve.line, LONGEST - len(words)) + words, y, curve.x[-1], curve.look["color"]


def _thin(ax: Axes, lengths: Sequence[float]) -> None:
    """Take the words of those ticks away that would touch the ones before: names have narrowed the axes."""
    ax.figure.draw_without_rendering()
    digit = 0.66 * SIZE * ax.figure.dpi / 72
    words = []
    end = -math.inf
    for length in lengths:
        word = f"{length:,.0f}"
        at = ax.transData.transform((length, 0))[0]
        half = digit * len(word) / 2
        words.append(word if at - half >= end else "")
        end = at + half + digit / 2 if words[-1] else end
    ax.set_xticks(lengths, words)


def name_ends(ax: Axes, names: Sequence[Name]) -> None:
    """Write names right of the axes, each beside the end of its line and none upon another.

    One without an end stands at the bottom.
    """
    ax.figure.draw_without_rendering()
    box = ax.get_window_extent()
    wanted = [0.0 if y is None else (ax.transData.transform((x, y))[1] - box.y0) / box.height for _, y, x, _ in names]
    places = spread(wanted, 1.25 * SIZE * ax.figure.dpi / 72 / box.height)
    for (name, y, x, color), place in zip(names, places, strict=True):
        look: dict[str, Any] = {"va": "center", "color": color, "fontsize": SIZE, "parse_math": False}
        if y is not None:
            line = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
            look["arrowprops"] = line
        ax.annotate(name, (x, y or 0), xytext=(1.05, place), textcoords="axes fraction", annotation_clip=False, **look)


def spread(wanted: Sequence[float], room: float) -> list[float]:
    """Return places at least `room` apart, as near to the wanted ones as can be, and in their order."""
    # Neighbours that are too near become a block around the mean of what they want; blocks that touch are merged.
    blocks: list[list[int]] = []
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        block = [i]
        while blocks and _start(block, wanted, room) < _start(blocks[-1], wanted, room) + room * len(blocks[-1]):
            block = blocks.pop() + block
        blocks.append(block)
    places = [0.0] * len(wanted)
    for block in blocks:
        for n, i in enumerate(block):
            places[i] = _start(block, wanted, room) + room * n
    return places


def _start(block: Sequence[int], wanted: Sequence[float], room: float) -> float:
    """Return the lowest place of a block, within the axes if it fits."""
    middle = sum(wanted[i] for i in block) / len(block)
    start = middle - room * (len(block) - 1) / 2
    return max(0.0, min(start, 1.0 - room * (len(block) - 1)))


def titled(ax: Axes, title: str, note: str) -> None:
    """Write a title and a note under it, in lines that fit into the figure."""
    palette = palette_of(ax)
    # Axes side by side have a part of the figure each; one alone begins with 0.775 of it.
    share = min(1.0, ax.get_position().width / 0.775)
    characters = share * ax.figure.get_figwidth() * 72 / SIZE / 0.62
    lines = textwrap.wrap(note, int(characters * 1.2))
    words = "\n".join(textwrap.wrap(title, int(characters * 0.8)))
    look = {"loc": "left", "fontsize": SIZE + 1, "fontweight": "bold", "color": palette.ink}
    ax.set_title(words, pad=10 + 1.2 * SIZE * len(lines), **look)
    ax.annotate(
        "\n".join(lines), (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points", va="bottom",
        color=palette.muted, fontsize=SIZE - 1, linespacing=1.25,
    )  # fmt: skip


def _words(ax: Axes, y: float, words: str) -> None:
    """Write small words at a line across, on the left, on paper so that no line strikes them through."""
    paper = {"facecolor": ax.get_facecolor(), "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
    ax.annotate(
        words, (0, y), xycoords=("axes fraction", "data"), xytext=(4, 4), textcoords="offset points", va="bottom",
        color=palette_of(ax).muted, fontsize=SIZE - 1.5, zorder=7, bbox=paper, parse_math=False,
    )  # fmt: skip
