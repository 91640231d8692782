"""Figures of the long table by matplotlib: functions of a table and an Axes.

    table = ropewalk.runs("runs")
    ax = ropewalk.plot.gain(table)                              # a figure of its own
    ropewalk.plot.gain(table, ax=axes[0], lines=["fox"])        # in yours; all other lines are grey
    ropewalk.plot.errors(table)                                 # of a task, by length
    ropewalk.plot.untitled(ax)                                  # for a paper, whose caption says it
    ax.figure.savefig("gain.pdf")                               # or .svg, .png

Colours are for a light background; on a page also for a dark one.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from types import SimpleNamespace
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import ticker, transforms
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

from conf.files import printable
from ropewalk.report.frame import START
from ropewalk.report.table import BEST_POSSIBLE, COLUMNS, by_length, headline, interval, over_seeds, worst_part

# Colours for a light and for a dark background, by their names in a style sheet. Any two lines, the ink and the grey
# are at least 0.09 apart in Oklab, also as the colour-blind see them; the contrast of a line to the paper is 3 or more.
LIGHT = SimpleNamespace(
    ink="#1b2026",
    muted="#5f6975",
    grid="#e3e6ea",
    paper="#ffffff",
    grey="#b4bac2",
    line0="#2647b1",
    line1="#df2474",
    line2="#cf7c07",
    line3="#2288a3",
    line4="#8609f8",
    line5="#5d5a0b",
    line6="#a47ef5",
    line7="#782358",
)
DARK = SimpleNamespace(
    ink="#e4e7eb",
    muted="#9ca6b2",
    grid="#2b313a",
    paper="#14171c",
    grey="#59616c",
    line0="#31d4fc",
    line1="#f67dab",
    line2="#c07000",
    line3="#0ea96f",
    line4="#bd31ff",
    line5="#d8b64c",
    line6="#9892eb",
    line7="#9dff5e",
)
LINES = [colour for name, colour in vars(LIGHT).items() if name.startswith("line")]
MARKERS = "os^DvPX*"
MOST = len(MARKERS)  # lines with a colour
WIDE, NARROW = (7.8, 4.4), (4.2, 4.0)  # inches: of a page, and of a phone or a column of a paper
SIZE = 9.5  # points of words
DODGE = 1.2  # points from line to line, so that equal values and their intervals can be seen
FLOOR = 0.01  # bits: an axis spans at least so much
GREY, BEST, COLOURED, REFERENCE = 2, 3, 4, 5  # how far above the others lines are drawn
POINT = ["line", "seed", "x", "y", "low", "high"]  # columns of what is drawn; the interval may be NaN
NOTE = "note"  # marks the note of a figure
LONGEST = 24  # characters of a name at the end of a line
Name = tuple[str, float, float, str]  # the name of a line, y and x of its end, and its colour
# What a figure on a page does without. Words have the font of their page, which is narrower than matplotlib's, so that
# none leaves its place.
SHORTER = {
    r"^.*?(?=<svg)": "",
    r"<metadata>.*?</metadata>\s*": "",
    r' id="\w+_\d+"': "",
    r"(?<!opacity: )\b(\d+\.\d)\d+(?=[^<>]*>)": r"\1",  # within tags, not in words
    r" font-family: [^;\"]*;": "",
    r" transform=\"rotate\(-0 [^\"]*\"": "",
    r"\n\s+": "\n",
}
TIMELESS = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
PLAIN: Any = {"svg.fonttype": "none", "svg.hashsalt": "ropewalk", "pdf.fonttype": 42}


class NothingError(ValueError):
    """There is nothing to draw."""


def gain(
    table: pd.DataFrame, ax: Axes | None = None, *, lines: Sequence[str] | None = None, over: str = "itself"
) -> Axes:
    """Draw what each line gains over the text cut to its training length, against the length of the text.

    Args:
        table: as `ropewalk.runs` returns it.
        lines: those with colours and names, at most 8; none: the best of each encoding.
        over: "reference": over the reference on the cut text instead, which is one baseline for all lines: their losses
            with another sign.

    Raises ValueError: the table has several sections, or no such line; NothingError: no run has measured that.
    """
    _check(table, COLUMNS, "ropewalk.runs")
    column = {"itself": "gain", "reference": "lead"}.get(over)
    if column is None:
        raise ValueError(f"over={over!r}: it should be 'itself' or 'reference'")
    rows = by_length(table).sort_values("length", kind="stable")
    rows = rows[rows[column].notna() & ((rows.length >= rows.cut) | (column == "lead"))]
    if rows.empty:
        raise NothingError("nothing to draw: no run has measured the loss of a text and of the cut text")
    ax = dressed(ax)
    # Most lines are compared with themselves, which needs no words.
    compared_with = rows.reference if column == "lead" else rows.base[rows.base.str.startswith(START)]
    note = "below 0 cut the text; bars: 95 % interval, dots: seeds; dashed: read otherwise than trained"
    titled(ax, f"Gain over {_on_cut_text(rows, compared_with)}", f"{rows.unit.iloc[0]}; {note}")
    ax.axhline(0, color=LIGHT.muted, linewidth=1.2, zorder=1)

    points = _against_length(ax, rows, column)
    _draw(ax, points, _looks(rows, lines), _limits_of_gains(points), "{:+.2f}")
    return ax


def errors(
    table: pd.DataFrame, ax: Axes | None = None, *, lines: Sequence[str] | None = None, part: str | None = None
) -> Axes:
    """Draw the errors of each line in a task, in percent, against the length of the text.

    Args:
        table, lines: as of `gain`.
        part: the difficulty; none: that with most errors at the longest text.

    Raises ValueError, NothingError: as `gain`.
    """
    _check(table, COLUMNS, "ropewalk.runs")
    rows = by_length(table, "error").sort_values("length", kind="stable")
    rows = rows[rows.value.notna()]
    if rows.empty:
        raise NothingError("nothing to draw: no run has measured the errors of a task")
    part = part or worst_part(rows)
    rows = rows[rows.part == part]
    if rows.empty:
        raise ValueError(f"part={part}: there is {', '.join(table.part[table.quantity == 'error'].unique())}")
    ax = dressed(ax)
    note = "percent; medians over the seeds that learned it; bars: their range, dots: seeds"
    titled(ax, f"Errors in {part}", note)
    points = _against_length(ax, rows, "value")
    _draw(ax, points, _looks(rows, lines), _limits_of_errors(points), "{:.0f}")
    return ax


def _check(table: pd.DataFrame, columns: Sequence[str], function: str) -> None:
    """Raise ValueError unless a table has the columns of what `function` returns."""
    missing = set(columns) - {*getattr(table, "columns", ())}
    if missing:
        has_none = f"{type(table).__name__} has no columns {', '.join(sorted(missing)[:3])}"
        raise ValueError(f"table: {has_none}; take rows of what {function} returns, with all columns")


def _against_length(ax: Axes, rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Make the length of the text the axis of a figure, and return a column of the long table as POINT."""
    lengths = sorted(rows.length.unique())
    ax.set_xscale("log")
    ax.set_xlim(lengths[0] / 1.06, lengths[-1] * 1.06)
    ax.xaxis.set_major_locator(ticker.FixedLocator(lengths, nbins=5))  # for so many words even a phone has room
    ax.minorticks_off()
    ax.set_xlabel("length of the text in tokens")
    return rows[["line", "seed", "length", *interval(column)]].set_axis(POINT, axis=1)


def _limits_of_errors(points: pd.DataFrame) -> tuple[float, float]:
    """Return the ends of an axis with all errors, in percent."""
    highest = max(1.0, points.y.max())
    return -0.03 * highest, 1.06 * highest


def _on_cut_text(rows: pd.DataFrame, compared_with: pd.Series) -> str:
    """Name the baseline of gains: the text cut to so many tokens, and the line that reads it if it is another one."""
    cut = " or ".join(map("{:,.0f}".format, sorted(rows.cut.unique())))
    names = [line for line in compared_with.unique() if line]
    whose = "what each is compared with, on " if len(names) > 1 else "".join(f"{name} on " for name in names)
    return f"{whose}the text cut to {cut} tokens"


def _limits_of_gains(points: pd.DataFrame) -> tuple[float, float]:
    """Return the ends of an axis on which gains can be told apart, of POINT by length.

    Of few lines all are on it, and their intervals as far as these leave half of it to the lines. Of more lines neither
    a failure nor the best possible may squeeze the others; the best line of the longest text is on the axis with its
    intervals.
    """
    means = over_seeds(points)
    gains = means[means.line != BEST_POSSIBLE]
    last = gains[gains.x == gains.x.max()]
    best = gains[gains.line.isin(last.line[last.y == last.y.max()])]
    if gains.line.nunique() <= MOST:
        lowest, highest = means.y.min(), max(FLOOR, means.y.max())
        room = (highest - lowest) / 2
        lowest = max(lowest - room, min(lowest, gains.low.min()))
        highest = min(highest + room, max(highest, gains.high.max()))
    else:
        most = max(FLOOR, gains.y.max())
        # What is possible is shown as far as it leaves gains more than half of the axis.
        highest = max(most, means.y[means.y <= 1.6 * most].max(), best.high.max())
        # A loss takes little more room than the gains.
        lowest = max(gains.low.min(), min(-1.2 * highest, best.low.min()))
    pad = 0.06 * (highest - lowest)
    return lowest - pad, highest + pad


def curves(
    table: pd.DataFrame, ax: Axes | None = None, *, lines: Sequence[str] | None = None, reference: str = "rope"
) -> Axes:
    """Draw bits per byte, the error of a task or the loss in validation against the tokens of training.

    The first of these that the runs recorded is drawn, as the mean over the seeds of each line.

    Args:
        table: as `ropewalk.curves` returns it.
        lines: as of `gain`; none: the first 8.

    Raises ValueError: there is no such line; NothingError: no run was validated several times.
    """
    _check(table, ["label", "section", "step", "tokens"], "ropewalk.curves")
    validation = table.reindex(columns=["val/bits_per_byte", "val/error", "val/loss"])
    is_recorded = validation.notna()
    y = is_recorded.any().idxmax()  # the first that has a number; if none has, nothing was validated
    if table.step[is_recorded[y]].nunique() < 2:
        raise NothingError("nothing to draw: no run was validated several times")
    ax = dressed(ax)
    titled(ax, f"In training: {y.replace('_', ' ')}", "the mean over the seeds")
    # As rows of a long table over all seeds. Lines of several sections have other texts or lengths.
    label = table.label if table.section.nunique() == 1 else table.label + ", " + table.section
    recorded = pd.DataFrame({"line": label, "step": table.step, "x": table.tokens, "y": table[y]}).dropna()
    rows = recorded.groupby(["line", "step"])[["x", "y"]].mean().reset_index()
    rows = rows.assign(seed=None, low=math.nan, high=math.nan, reference=reference, zero_shot=False)
    if lines is None:
        lines = [line for line in rows.line.unique() if line != reference]
    looks = {line: look | {"marker": ""} for line, look in _looks(rows, lines).items()}
    # The first validations are far above all that matters, and of many lines so is what diverged.
    late = rows[rows.x >= rows.x.max() / 4].groupby("line").y.max()
    best = rows.y.min()
    highest = late.max() if len(late) <= MOST else late.median()
    pad = 0.05 * (highest - best) + FLOOR
    limits = _limits_of_errors(rows) if y == "val/error" else (best - pad, highest + pad)
    ax.set_xlim(0, rows.x.max())
    ax.xaxis.set_major_locator(ticker.MaxNLocator(4))
    ax.set_xlabel("tokens of training")
    _draw(ax, rows[POINT], looks, limits, "{:.2f}")
    return ax


def written(ax: Axes, kind: str) -> bytes:
    """Return the whole figure of an Axes as "svg", "png" or "pdf"; the same figure makes the same bytes."""
    file = io.BytesIO()
    with matplotlib.rc_context(PLAIN):
        ax.figure.savefig(file, format=kind, metadata=TIMELESS[kind], dpi=200)  # type: ignore[union-attr]
    return file.getvalue()


def svg(draw: Callable[[Axes], object], size: tuple[float, float] = WIDE) -> str:
    """Return a figure as SVG for a page: as wide as its place, in the colours of the page's variables."""
    ax = new(size)
    draw(ax)
    text = written(ax, "svg").decode()
    replacements = {colour: f"var(--{name})" for name, colour in vars(LIGHT).items()}
    for pattern, replacement in (SHORTER | replacements).items():
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    label = f'role="img" aria-label="{escape(" ".join(ax.get_title(loc="left").split()))}"'
    # By a function, as a name may have a backslash.
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', lambda _: label, text, count=1)


def on_its_own(picture: str) -> str:
    """Return a figure from `svg` with the colours that it needs without a page, for light and dark."""
    light = "text{font-family:system-ui,sans-serif}:root{" + style(LIGHT) + "}"
    dark = "@media(prefers-color-scheme:dark){:root{" + style(DARK) + "}}"
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{light}{dark}</style>", picture, count=1)


def style(palette: SimpleNamespace) -> str:
    """Return the colours as variables of a style sheet."""
    return "".join(f"--{name}:{colour};" for name, colour in vars(palette).items())


def new(size: tuple[float, float] = WIDE) -> Axes:
    """Return the Axes of a new figure, for pages and files: pyplot does not know it."""
    figure = Figure(figsize=size, layout="constrained", facecolor=LIGHT.paper)
    return figure.subplots(subplot_kw={"facecolor": LIGHT.paper})


def short(line: str, most: int = LONGEST) -> str:
    """Return the name of a line in at most so many characters."""
    name = printable(line).replace(" read as ", " as ").replace(" at scale ", " x").replace(START, "before ")
    # Lines often begin alike and differ at their ends, as two values of an option do: the middle is left out.
    start = (most - 1) // 2
    end = most - 1 - start
    return name if len(name) <= most else f"{name[:start]}…{name[-end:]}"


def chosen(table: pd.DataFrame) -> list[str]:
    """Return the lines that have colours: the best of each encoding at the longest text, and at most 8."""
    rows = headline(over_seeds(table))
    rows = rows[rows.length == rows.length.max()]
    # These two have a look of their own.
    rows = rows[(rows.line != BEST_POSSIBLE) & (rows.line != rows.reference)].sort_values("rank")
    best = rows.drop_duplicates("encoding").line
    return pd.concat([best, rows.line]).unique().tolist()[:MOST]


def dressed(ax: Axes | None) -> Axes:
    """Return the Axes, or a new one that pyplot shows, with a grid and without a frame."""
    if ax is None:
        _, ax = plt.subplots(figsize=WIDE, layout="constrained")
    if not isinstance(ax, Axes):
        raise ValueError(f"ax={ax!r} is no Axes of matplotlib: leave it out for a figure of its own")
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.spines["bottom"].set_color(LIGHT.muted)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color=LIGHT.grid, linewidth=0.8)
    ax.tick_params(colors=LIGHT.muted, labelsize=SIZE)
    ax.tick_params(axis="y", length=0)
    return ax


def _looks(rows: pd.DataFrame, named: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return how each line is drawn: the reference in ink, the named ones in colours, all others grey."""
    named = list(chosen(rows) if named is None else named)[:MOST]
    unknown = set(named) - set(rows.line)
    if unknown:
        raise ValueError(f"lines={sorted(unknown)}: there is {', '.join(rows.line.unique())}")
    looks: dict[str, dict[str, Any]] = {
        line: {"color": LIGHT.grey, "linewidth": 1.0, "zorder": GREY, "marker": "."} for line in rows.line.unique()
    }
    for line, color, marker in zip(named, LINES, MARKERS, strict=False):
        looks[line] = {"color": color, "linewidth": 1.8, "zorder": COLOURED, "marker": marker}
    for line in looks.keys() & set(rows.reference):
        looks[line] = {"color": LIGHT.ink, "linewidth": 2.4, "zorder": REFERENCE, "marker": "o"}
    for line in rows.line[rows.zero_shot.astype(bool)].unique():
        looks[line]["linestyle"] = (0, (4, 1.8))
    if BEST_POSSIBLE in looks:
        looks[BEST_POSSIBLE] |= {
            "color": LIGHT.muted, "linewidth": 1.6, "linestyle": (0, (1, 1.5)), "marker": "", "zorder": BEST,
        }  # fmt: skip
    return looks


def _draw(
    ax: Axes, points: pd.DataFrame, looks: Mapping[str, dict[str, Any]], limits: tuple[float, float], number: str
) -> None:
    """Draw lines within an axis, and name them at their ends; what has left the axis there has its number.

    Args:
        points: POINT by x; those with a seed are dots.
    """
    ax.set_ylim(limits)
    ax.ticklabel_format(axis="y", useOffset=False)
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ax.xaxis.label.set(color=LIGHT.muted, fontsize=SIZE)
    ends = over_seeds(points).drop_duplicates("line", keep="last").set_index("line").sort_values("y", kind="stable")
    low, high = limits
    names: list[Name] = []
    for line, x, end in zip(ends.index, ends.x, ends.y, strict=True):
        of_line = points[points.line == line]
        means = over_seeds(of_line)
        look = looks[line]
        if look["zorder"] == GREY:
            ax.plot(means.x, means.y, **look, markersize=4.5)
            continue
        aside = transforms.ScaledTranslation(DODGE / 72 * (len(names) % 5 - 2), 0, ax.figure.dpi_scale_trans)
        look = look | {"transform": ax.transData + aside}
        bars = None if line == BEST_POSSIBLE else [means.y - means.low, means.high - means.y]
        ax.errorbar(means.x, means.y, bars, **look, markersize=4.5, elinewidth=1.2)
        # What goes on beyond the axis, a line or an interval, ends in an arrow.
        reached = means[["y", "low", "high"]]
        beyond = {"v": (low, reached.min(axis=1) < low), "^": (high, reached.max(axis=1) > high)}
        for marker, (border, leaves) in beyond.items():
            for place in means.x[leaves]:
                ax.plot(place, border, **look | {"marker": marker, "clip_on": False}, markersize=4.5)
        dots = of_line[of_line.seed.notna()]
        if len(dots) > len(means):
            ax.plot(dots.x, dots.y, **look | {"marker": ".", "linestyle": ""}, markersize=2.5, alpha=0.45)
        # A line that ends off the axis has its last value beside its name.
        words = ""
        if math.isnan(end):
            words = " diverged"
        elif not low <= end <= high:
            words = f" {'↓' if end < low else '↑'} {number.format(end)}"
        place = float(np.nan_to_num(end, nan=high).clip(low, high))
        names.append((short(line, LONGEST - len(words)) + words, place, x, look["color"]))
    if len(ends) > len(names):
        names.append((f"{len(ends) - len(names)} more", low, points.x.max(), LIGHT.grey))
    name_ends(ax, names)


def name_ends(ax: Axes, names: Sequence[Name]) -> None:
    """Write names right of the axes, each beside the end of its line and none upon another."""
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]
    box = ax.get_window_extent()
    wanted = []
    for _, y, x, _ in names:
        _, pixels = ax.transData.transform((x, y))
        wanted.append((pixels - box.y0) / box.height)
    line_height = 1.25 * SIZE * ax.figure.dpi / 72 / box.height
    for (name, y, x, color), place in zip(names, _spread(wanted, line_height), strict=True):
        ax.annotate(
            name, (x, y), xytext=(1.05, place), textcoords="axes fraction", annotation_clip=False, va="center",
            color=color, fontsize=SIZE, parse_math=False,
            arrowprops={
                "arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5),
            },
        )  # fmt: skip


def _spread(wanted: Sequence[float], room: float) -> np.ndarray:
    """Return places at least `room` apart, as near to the wanted ones as can be, and in their order, within 0 and 1."""
    # Without the room that the names below one take, places must only not fall: the least squares of a regression.
    order = np.argsort(wanted, kind="stable")
    below = room * np.arange(len(wanted))
    rising = isotonic_regression(np.array(wanted)[order] - below).x
    highest = max(0.0, 1.0 - below[-1])
    places = np.empty(len(wanted))
    places[order] = np.clip(rising, 0.0, highest) + below
    return places


def titled(ax: Axes, title: str, note: str) -> None:
    """Write a title and a note under it, in lines that fit into the figure."""
    # Axes side by side have a part of the figure each; one alone begins with 0.775 of it.
    share = min(1.0, ax.get_position().width / 0.775)
    characters = share * ax.figure.bbox.width / ax.figure.dpi * 72 / SIZE / 0.62
    lines = textwrap.wrap(note, int(characters * 1.2))
    words = "\n".join(textwrap.wrap(printable(title), int(characters * 0.8)))
    ax.set_title(
        words, loc="left", pad=10 + 1.2 * SIZE * len(lines), fontsize=SIZE + 1, fontweight="bold", color=LIGHT.ink
    )
    ax.annotate(
        "\n".join(lines), (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points", va="bottom",
        color=LIGHT.muted, fontsize=SIZE - 1, linespacing=1.25, gid=NOTE,
    )  # fmt: skip


def untitled(ax: Axes) -> Axes:
    """Take the title and the note from a figure, for a place that has words of its own."""
    ax.set_title("", loc="left")
    for text in ax.texts:
        if text.get_gid() == NOTE:
            text.remove()
    return ax
