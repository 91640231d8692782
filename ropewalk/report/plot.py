"""Figures of the long table by matplotlib: functions of a table and an Axes.

table = ropewalk.runs("runs")
ax = ropewalk.plot.gain(table)                              # a figure of its own
ropewalk.plot.gain(table, ax=axes[0], lines=["fox"])        # in yours; all other lines are grey
ropewalk.plot.errors(table)                                 # of a task, by length
ropewalk.plot.untitled(ax)                                  # for a paper, whose caption says it
ax.figure.savefig("gain.pdf")                               # or .svg, .png

Colours are for a light page. What the project itself writes as SVG has others where a reader's pages are dark.
"""

import io
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
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
from ropewalk.report.table import BEST_POSSIBLE, COLUMNS, by_length, headline, interval_columns, over_seeds, worst_part

# Any two lines, the ink and the grey are at least 0.09 apart in Oklab, also as the colour-blind see them; the contrast
# of a line to the paper is 3 or more. Both hold on a dark page, too.
LIGHT = SimpleNamespace(ink="#1b2026", muted="#5f6975", grid="#e3e6ea", paper="#ffffff", grey="#b4bac2")
LINES = ["#2647b1", "#df2474", "#cf7c07", "#2288a3", "#8609f8", "#5d5a0b", "#a47ef5", "#782358"]
DARK = {  # what a dark page has instead
    LIGHT.ink: "#e4e7eb",
    LIGHT.muted: "#9ca6b2",
    LIGHT.grid: "#2b313a",
    LIGHT.paper: "#14171c",
    LIGHT.grey: "#59616c",
    "#000000": "#e4e7eb",  # matplotlib's own, as of the axis
    LINES[0]: "#31d4fc",
    LINES[1]: "#f67dab",
    LINES[2]: "#c07000",
    LINES[3]: "#0ea96f",
    LINES[4]: "#bd31ff",
    LINES[5]: "#d8b64c",
    LINES[6]: "#9892eb",
    LINES[7]: "#9dff5e",
}
MARKERS = "os^DvPX*"  # of the lines with a colour
SIZE, NARROW = (7.8, 4.4), (4.2, 4.6)  # inches: of a page, and of a phone
FONT_SIZE = 9.5  # points
DODGE = 1.2  # points from line to line, so that equal values and their intervals can be seen
FLOOR = 0.01  # bits: an axis spans at least so much
Z_GREY, Z_BEST, Z_COLOURED, Z_REFERENCE = 2, 3, 4, 5  # how far above the others lines are drawn
POINT = ["line", "seed", "x", "y", "low", "high"]  # columns of what is drawn; the interval may be NaN
EndLabel = tuple[str, float, float, str]  # the name of a line, x and y of its end, and its colour
TIMELESS: Any = {
    "svg": dict.fromkeys(["Date", "Creator", "Format", "Type"]),
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}
PLAIN: Any = {"svg.fonttype": "none", "svg.hashsalt": "ropewalk", "pdf.fonttype": 42}
# What an SVG is as good without, in half the space. Words have the font of their page, narrower than matplotlib's.
SHORTER = {
    r"^.*?(?=<svg)": "",
    r' id="(?!C[\da-f]+_)[\w.]+_\d+"| version="1.1"': "",  # what begins with C is used by its id
    r"(?<!opacity: )\b(\d+\.\d)\d+(?=[^<>]*>)": r"\1",  # within tags, not in words
    r"(?<=\d)\.0(?=[ \"),][^<>]*>)": "",
    r" font-family: [^;\"]*;": "",
    r' transform="rotate\(-0 [^"]*"': "",
    r"\s*\n\s*": " ",
    r"> <": "><",
    r"(?<=\d) L (?=[^CQ\"]*\")": " ",  # a line goes on: no letter is needed where there are no curves
    r"<g/>": "",
    r"; (?=[^<>]*>)": ";",
    r"\s*$": "\n",
}


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
    rows = by_length(table)
    rows = rows[rows[column].notna() & ((rows.length >= rows.cut) | (column == "lead"))]
    if rows.empty:
        raise NothingError("nothing to draw: no run has measured the loss of a text and of the cut text")
    # Most lines are compared with themselves, which needs no words.
    compared_with = rows.reference if column == "lead" else rows.base[rows.base.str.startswith(START)]
    cut = " or ".join(map("{:,.0f}".format, sorted(rows.cut.unique())))
    whose = "".join(f"{line} on " for line in compared_with.unique() if line)
    note = "below 0 cut the text; bars: 95 % interval, dots: seeds; dashed: not read as trained"
    ax = dressed(ax)
    titled(ax, f"Gain over {whose}the text cut to {cut} tokens", note)
    ax.set_ylabel(rows.unit.iloc[0])
    ax.axhline(0, color=LIGHT.muted, linewidth=1.2)
    # Of many lines neither those that failed nor the best possible predictor may squeeze the others.
    most = max(FLOOR, over_seeds(rows[rows.line != BEST_POSSIBLE])[column].max())
    points = _against_length(ax, rows, column)
    points.loc[points.line == BEST_POSSIBLE, ["low", "high"]] = math.nan  # it is known
    _draw(ax, points, _looks_in(rows, lines), _limits(points, (0, FLOOR), (-1.2 * most, 1.6 * most)), "{:+.2f}")
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
    rows = by_length(table, "error")
    rows = rows[rows.value.notna()]
    if rows.empty:
        raise NothingError("nothing to draw: no run has measured the errors of a task")
    part = part or worst_part(rows)
    if part not in set(rows.part):
        raise ValueError(f"part={part}: there is {', '.join(rows.part.unique())}")
    ax = dressed(ax)
    note = "medians of the seeds that learned it, or of all if none did; bars: their range, dots: seeds"
    titled(ax, f"Errors in {part}", note)
    ax.set_ylabel("percent wrong")
    rows = rows[rows.part == part]
    points = _against_length(ax, rows, "value")
    # Every seed is on the axis: one that did not learn the task is not in the median.
    limits = _limits(points.assign(seed=None), (0, 1))
    _draw(ax, points, _looks_in(rows, lines), limits, "{:.0f}")
    return ax


def _check(table: pd.DataFrame, columns: Sequence[str], function: str) -> None:
    """Raise ValueError unless a table has the columns of what `function` returns."""
    missing = set(columns) - {*getattr(table, "columns", ())}
    if missing:
        raise ValueError(
            f"table: {type(table).__name__} has no columns {', '.join(sorted(missing)[:3])}; "
            f"take rows of what {function} returns, with all columns"
        )


def _against_length(ax: Axes, rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Make the length of the text the axis of a figure, and return a column of the long table as POINT."""
    lengths = sorted(rows.length.unique())
    ax.set_xscale("log")
    ax.set_xlim(lengths[0] / 1.06, lengths[-1] * 1.06)
    # At most five have room; the longest is among them.
    ax.xaxis.set_major_locator(ticker.FixedLocator(lengths[:: -math.ceil(len(lengths) / 5)]))
    ax.minorticks_off()
    ax.set_xlabel("length of the text in tokens")
    points = rows[["line", "seed", "length", *interval_columns(column)]].set_axis(POINT, axis=1)
    return points.sort_values("x", kind="stable")


def curves(
    table: pd.DataFrame, ax: Axes | None = None, *, lines: Sequence[str] | None = None, reference: str = "rope"
) -> Axes:
    """Draw bits per byte, the error of a task or the loss in validation against the tokens of training.

    The first of these that the runs recorded is drawn, as the mean over the seeds of each line, as far as all go.

    Args:
        table: as `ropewalk.curves` returns it.
        lines: as of `gain`; none: the first 8.

    Raises ValueError: there is no such line; NothingError: no run was validated several times.
    """
    _check(table, ["label", "section", "step", "tokens"], "ropewalk.curves")
    is_recorded = table.reindex(columns=["val/bits_per_byte", "val/error", "val/loss"]).notna()
    quantity = is_recorded.any().idxmax()  # the first that has a number; if none has, nothing was validated
    if table.step[is_recorded[quantity]].nunique() < 2:
        raise NothingError("nothing to draw: no run was validated several times")
    # Lines of several sections have other texts or lengths.
    label = table.label if table.section.nunique() == 1 else table.label + ", " + table.section
    recorded = pd.DataFrame({"line": label, "step": table.step, "x": table.tokens, "y": table[quantity]})
    recorded = recorded.replace(math.inf, math.nan).dropna()  # a loss that has diverged is off the axis
    of_steps = recorded.groupby(["line", "step"])
    n_seeds = of_steps.size()
    is_of_all = n_seeds == n_seeds.groupby("line").transform("max")
    means = of_steps[["x", "y"]].mean()[is_of_all].reset_index()
    points = means.reindex(columns=POINT)  # over all seeds, without intervals
    references = [*label[table.label == reference].unique()]
    if lines is None:
        lines = [line for line in points.line.unique() if line not in references]
    looks = {line: look | {"marker": ""} for line, look in _looks(points.line.unique(), lines, references).items()}
    ax = dressed(ax)
    titled(ax, "In training: the mean over the seeds")
    ax.set_ylabel(quantity.replace("_", " "))
    ax.set_xlim(0, points.x.max())
    ax.xaxis.set_major_locator(ticker.MaxNLocator(4))
    ax.set_xlabel("training tokens")
    if quantity == "val/error":
        limits = _limits(points, (0, 1))
    else:
        # The first validations are far above all that matters, and of many lines so is what diverged.
        late = points[points.x >= points.x.max() / 4]
        bounds = (-math.inf, late.groupby("line").y.max().median())
        limits = _limits(late, (points.y.min(), points.y.min() + FLOOR), bounds)
    _draw(ax, points, looks, limits, "{:.2f}")
    return ax


def _limits(
    points: pd.DataFrame, shown: tuple[float, float], bounds: tuple[float, float] = (-math.inf, math.inf)
) -> tuple[float, float]:
    """Return the ends of an axis with all lines over their seeds, and intervals as far as these leave half of it.

    Args:
        points: POINT.
        shown: values that are on the axis in any case.
        bounds: of more lines than LINES has colours, and the best possible, what is beyond these is off the axis.
    """
    means = over_seeds(points)
    low, high = min(shown[0], means.y.min()), max(shown[1], means.y.max())
    if means.line[means.line != BEST_POSSIBLE].nunique() > len(LINES):
        low, high = max(low, bounds[0]), min(high, bounds[1])
    on_axis = means[means.y.between(low, high)]
    room = (high - low) / 2
    lowest = max(low - room, min(low, on_axis.low.min()))
    highest = min(high + room, max(high, on_axis.high.max()))
    pad = 0.06 * (highest - lowest)
    return lowest - pad, highest + pad


def written(ax: Axes, kind: str) -> bytes:
    """Return the whole figure of an Axes as "svg", "png" or "pdf"; the same figure makes the same bytes."""
    file = io.BytesIO()
    with matplotlib.rc_context(PLAIN):
        ax.figure.savefig(file, format=kind, metadata=TIMELESS[kind], dpi=200)  # type: ignore[union-attr]
    return _shortened(file.getvalue().decode()).encode() if kind == "svg" else file.getvalue()


def _shortened(picture: str) -> str:
    """Return an SVG of matplotlib's in less space, with a style for dark pages."""
    for pattern, replacement in SHORTER.items():
        picture = re.sub(pattern, replacement, picture, flags=re.DOTALL)
    dark = "".join(
        f'[style*="{what}: {color}"]{{{what}:{instead}!important}}'
        for color, instead in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {color}" in picture
    )
    words = "text{font-family:system-ui,sans-serif}"
    return picture.replace("</style>", f"{words}@media screen and (prefers-color-scheme:dark){{{dark}}}</style>", 1)


def svg(ax: Axes) -> str:
    """Return the whole figure of an Axes as an element of a page."""
    label = escape(" ".join(ax.get_title(loc="left").split()))
    return written(ax, "svg").decode().replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def new(size: tuple[float, float] = SIZE) -> Axes:
    """Return the Axes of a new figure, for pages and files: pyplot does not know it."""
    return Figure(figsize=size, layout="constrained").subplots()


def chosen(table: pd.DataFrame) -> list[str]:
    """Return the lines that have colours: the best of each encoding at the longest text, and at most 8."""
    rows = headline(over_seeds(table))
    rows = rows[rows.length == rows.length.max()]
    # These two have a look of their own.
    rows = rows[(rows.line != BEST_POSSIBLE) & (rows.line != rows.reference)].sort_values("rank")
    best = rows.drop_duplicates("encoding").line
    return pd.concat([best, rows.line]).unique().tolist()[: len(LINES)]


def dressed(ax: Axes | None) -> Axes:
    """Return the Axes, or a new one that pyplot shows, with a grid and without a frame."""
    if ax is None:
        _, ax = plt.subplots(figsize=SIZE, layout="constrained")
    if not isinstance(ax, Axes):
        raise ValueError(f"ax={ax!r} is not an Axes of matplotlib: leave it out to get a new figure")
    ax.spines[["left", "right", "top"]].set_visible(False)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set(color=LIGHT.muted, fontsize=FONT_SIZE)
    ax.grid(axis="y", color=LIGHT.grid)
    ax.tick_params(colors=LIGHT.muted, labelsize=FONT_SIZE, length=0)
    return ax


def _looks_in(rows: pd.DataFrame, named: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return the looks of all lines in rows of the long table, in which None names those of `chosen`."""
    looks = _looks(rows.line.unique(), chosen(rows) if named is None else named, rows.reference.unique())
    for line in rows.line[rows.zero_shot.astype(bool)].unique():
        looks[line]["linestyle"] = (0, (4, 1.8))
    if BEST_POSSIBLE in looks:
        looks[BEST_POSSIBLE] |= {
            "color": LIGHT.muted, "linewidth": 1.6, "linestyle": (0, (1, 1.5)), "marker": "", "zorder": Z_BEST,
        }  # fmt: skip
    return looks


def _looks(lines: Collection[str], named: Sequence[str], references: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return how each line is drawn: the references in ink, the first of the `named` in colours, all others grey."""
    unknown = set(named) - set(lines)
    if unknown:
        raise ValueError(f"lines={sorted(unknown)}: there is {', '.join(lines)}")
    looks: dict[str, dict[str, Any]] = {
        line: {"color": LIGHT.grey, "linewidth": 1.0, "zorder": Z_GREY, "marker": "."} for line in lines
    }
    for line, color, marker in zip(named, LINES, MARKERS, strict=False):
        looks[line] = {"color": color, "linewidth": 1.8, "zorder": Z_COLOURED, "marker": marker}
    for line in looks.keys() & set(references):
        looks[line] = {"color": LIGHT.ink, "linewidth": 2.4, "zorder": Z_REFERENCE, "marker": "o"}
    return looks


def _draw(
    ax: Axes, points: pd.DataFrame, looks: Mapping[str, dict[str, Any]], limits: tuple[float, float], value_format: str
) -> None:
    """Draw lines within an axis, and name them beside their ends.

    What goes on beyond the axis, a line or an interval, ends in an arrow; a line that ends there has its last value
    beside its name.

    Args:
        points: POINT by x; those with a seed are dots.
    """
    low, high = limits
    ax.set_ylim(limits)
    ax.ticklabel_format(axis="y", useOffset=False)
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ends = over_seeds(points).drop_duplicates("line", keep="last").sort_values("y", ascending=False, kind="stable")
    names: list[EndLabel] = []
    for line, end in zip(ends.line, ends.y, strict=True):
        look = looks[line] | {"markersize": 4.5}
        of_line = points[points.line == line]
        means = over_seeds(of_line)
        if look["zorder"] == Z_GREY:
            ax.plot(means.x, means.y, **look)
            continue
        aside = transforms.ScaledTranslation(DODGE / 72 * (len(names) % 5 - 2), 0, ax.figure.dpi_scale_trans)
        placed = look | {"transform": ax.transData + aside}
        ax.errorbar(means.x, means.y, [means.y - means.low, means.high - means.y], **placed, elinewidth=1.2)
        reached = means[["y", "low", "high"]]
        beyond = {"v": (low, reached.min(axis=1) < low), "^": (high, reached.max(axis=1) > high)}
        for marker, (border, leaves) in beyond.items():
            for place in means.x[leaves]:
                ax.plot(place, border, **placed | {"marker": marker, "clip_on": False})
        dots = of_line[of_line.seed.notna()]
        if len(dots) > len(means):
            ax.plot(dots.x, dots.y, **placed | {"marker": ".", "linestyle": "", "markersize": 4.5, "mew": 0})
        words = ""
        if math.isnan(end):
            words = " diverged"
        elif not low <= end <= high:
            words = f" {'↓' if end < low else '↑'} {value_format.format(end)}"
        # A line that diverged has no end: its name stands at the top.
        beside = high if math.isnan(end) else min(max(end, low), high)
        names.append((line + words, means.x.iloc[-1], beside, look["color"]))
    if len(ends) > len(names):
        names.append((f"{len(ends) - len(names)} more", points.x.max(), low, LIGHT.grey))
    name_ends(ax, names)


def name_ends(ax: Axes, names: Sequence[EndLabel]) -> None:
    """Write names right of the axes, each beside the end of its line and none upon another."""
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]
    box = ax.get_window_extent()
    wanted = [(ax.transData.transform((x, y))[1] - box.y0) / box.height for _, x, y, _ in names]
    characters = int(4 * ax.figure.bbox.width / ax.figure.dpi)  # in a row
    rows = [textwrap.fill(printable(name), characters) for name, *_ in names]
    line_height = 1.25 * FONT_SIZE * ax.figure.dpi / 72 / box.height
    heights = [line_height * (text.count("\n") + 1) for text in rows]
    for (_, x, y, color), text, place in zip(names, rows, _spread(wanted, heights), strict=True):
        ax.annotate(
            text, (x, y), xytext=(1.05, place), textcoords="axes fraction", annotation_clip=False, va="center",
            color=color, fontsize=FONT_SIZE, parse_math=False,
            arrowprops={
                "arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5),
            },
        )  # fmt: skip


def _spread(wanted: Sequence[float], heights: Sequence[float]) -> np.ndarray:
    """Return places for names of these heights, as near to the wanted ones as can be, in their order, from 0 to 1."""
    # Without the room that the names below one take, places must only not fall: the least squares of a regression.
    order = np.argsort(wanted, kind="stable")
    sizes = np.array(heights)[order]
    below = np.cumsum(sizes) - sizes[0] / 2 - sizes / 2
    rising = isotonic_regression(np.array(wanted)[order] - below).x
    places = np.empty(len(wanted))
    places[order] = np.clip(rising, 0.0, max(0.0, 1.0 - below[-1])) + below
    return places


def titled(ax: Axes, title: str, note: str = "") -> None:
    """Write a title and a note under it, in lines that fit into the figure."""
    # Axes side by side have a part of the figure each; one alone begins with 0.775 of it.
    inches = ax.figure.bbox.width / ax.figure.dpi * ax.get_position().width / 0.775
    characters = int(12 * inches)
    lines = [*textwrap.wrap(printable(title), characters), *textwrap.wrap(note, characters)]
    ax.set_title("\n".join(lines), loc="left", fontsize=FONT_SIZE, color=LIGHT.ink)


def untitled(ax: Axes) -> Axes:
    """Take the title and the note from a figure, for a place that has words of its own."""
    ax.set_title("", loc="left")
    return ax
