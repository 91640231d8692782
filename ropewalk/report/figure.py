"""Figures as SVG: a page of them is small, and follows light and dark by its style sheet.

Plotly has neither labels at the ends of lines nor axes with marks for what leaves them, and adds 4.8 MB to a page.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from conf.schema import ConfigError
from lab.pictures.svg import element, text

# Small, so that words can still be read where the page of a phone shrinks it.
WIDTH, HEIGHT = 500, 380
LEFT, RIGHT, TOP, BOTTOM = 46, 150, 30, 48  # margins; line names stand in the right one
LABEL = 14  # height of a line's name
# Of a figure that is a file: the page's style sheet in words that every viewer knows.
STYLE = """text{font:13px system-ui,sans-serif;fill:#1b2026}.paper{fill:#fff}.tick,.words{fill:#5f6975}
.title{font-weight:620}.grid{stroke:#dfe3e8}.zero{stroke:#5f6975;stroke-width:2}
.mark{stroke:#5f6975;stroke-dasharray:2 4}
.below{fill:#8884;opacity:.35}.line{color:#8a8f98}.curve{fill:none;stroke:currentColor;stroke-width:2.2}
.line text,.line circle{fill:currentColor}.bar,.leader{stroke:currentColor;opacity:.6}.seed{opacity:.5}
.zero-shot .curve{stroke-dasharray:6 4}.cut .curve,.best .curve{stroke-dasharray:2 3}.line.reference{color:#1b2026}
@media(prefers-color-scheme:dark){.paper{fill:#14171c}text{fill:#e4e7eb}.tick,.words{fill:#9ca6b2}
.grid{stroke:#323843}.line.reference{color:#e4e7eb}.line{filter:brightness(1.35)}}
"""


class Point(NamedTuple):
    """A point of a figure with its interval, from y - half to y + half."""

    line: str
    x: float
    y: float
    half: float
    text: str
    seeds: tuple[float, ...] = ()  # the value of each seed; empty for one


class Panel(NamedTuple):
    title: str
    xlabel: str
    points: list[Point]
    ticks: Mapping[float, str]  # of x; none: chosen here
    log: bool = False  # the x axis
    low: float = -math.inf  # what lies beyond is cut off, and its number is given beside the name
    high: float = math.inf
    mark: float | None = None  # x of a vertical line, such as the training length
    bars: bool = False  # draw intervals
    percent: bool = False  # the y axis goes from 0 to 100
    below: str = ""  # what is said of values below 0, in the shaded part


class Figure(NamedTuple):
    title: str
    note: str
    panels: list[Panel]


def nice_ticks(low: float, high: float, n: int = 6) -> list[float]:
    """Return about n round numbers from low to high."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / n))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= n:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


class Scale(NamedTuple):
    """Where a value lies on an axis, in units of the drawing."""

    first: float
    last: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        a, b = self.first, self.last
        if self.log:
            value, a, b = math.log(max(value, 1e-9)), math.log(a), math.log(b)
        share = (value - a) / (b - a) if b > a else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def svg(panel: Panel, styles: Mapping[str, str], name: str, sheet: str = "") -> str:
    """Return a panel as SVG; "" if it has no finite point.

    Args:
        styles: the classes of each line in the style sheet.
        name: of the panel, another for each on its page.
        sheet: the style sheet of a file of its own; "" on a page, which has one.
    """
    points = [point for point in panel.points if math.isfinite(point.y)]
    if not points:
        return ""
    x, y = _scales(panel, points)

    # The points of each line from left to right. Its name stands beside the last one.
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.line, []).append(point)
    for of_line in lines.values():
        of_line.sort(key=lambda point: point.x)

    ends = {line: of_line[-1] for line, of_line in lines.items()}
    places = label_places({line: y(end.y) for line, end in ends.items()})

    # What leaves the axes is cut off at their frame.
    inside = element("rect", x=LEFT, y=TOP, width=WIDTH - LEFT - RIGHT + 6, height=HEIGHT - TOP - BOTTOM)
    parts = [_axes(panel, x, y), element("clipPath", inside, id=f"p{name}")]
    # The best line is drawn last, so that it lies above the others.
    for line in reversed(list(lines)):
        curve = element("g", _shapes(lines[line], x, y, panel.bars), clip_path=f"url(#p{name})")
        label = _label(ends[line], places[line], x, y)
        style = styles.get(line, "grey")
        parts.append(element("g", curve, label, look=f"line {style}", data_line=line))

    attributes = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria_label": panel.title}
    if sheet:
        paper = element("rect", look="paper", width=WIDTH, height=HEIGHT)
        parts = [f"<style>{sheet}</style>", paper, *parts]
        attributes |= {"xmlns": "http://www.w3.org/2000/svg", "width": f"{1.6 * WIDTH:g}"}
    return element("svg", *parts, **attributes)


def _scales(panel: Panel, points: Sequence[Point]) -> tuple[Scale, Scale]:
    """Return the axes of x and y."""
    xs = [point.x for point in points] + list(panel.ticks)
    ys = [point.y for point in points]
    low = max(panel.low, min(ys))
    high = min(panel.high, max(ys))
    if panel.percent:
        low, high = 0.0, 100.0
    pad = 0.06 * (high - low) or 0.01
    is_log = panel.log and min(xs) > 0
    x = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, is_log)
    y = Scale(low - pad, high + pad, HEIGHT - BOTTOM, TOP)
    return x, y


def _label(end: Point, at: float, x: Scale, y: Scale) -> str:
    """Return the name of a line in the margin at the height `at`, and what leads to it from the line's end."""
    name = short(end.line, 19)
    if not y.first <= end.y <= y.last:
        arrow = "↓" if end.y < y.first else "↑"
        # A sign belongs to a difference, which may be negative. Losses have none.
        value = f"{end.y:.2f}" if y.first > 0 else f"{end.y:+.2f}"
        name = f"{short(end.line, 16 - len(value))} {value} {arrow}"
    margin = WIDTH - RIGHT + 12
    start = min(max(y(end.y), TOP), HEIGHT - BOTTOM)
    leader = element("path", look="leader", d=f"M{x(end.x) + 5},{start}L{margin},{at}")
    return leader + text(margin + 3, at + 4, name)


def rasteriser() -> Callable[[str], bytes]:
    """Return a function that makes a PNG of an SVG, by its colours for light.

    Raises ConfigError: the package for it is not installed.
    """
    try:
        import resvg_py
    except ImportError:
        raise ConfigError('png needs a package: pip install -e ".[draw]"') from None
    return lambda picture: bytes(resvg_py.svg_to_bytes(svg_string=picture, zoom=3))


def _axes(panel: Panel, x: Scale, y: Scale) -> str:
    """Return title, grid and ticks, and what is marked: values below 0, the training length."""
    right = WIDTH - RIGHT
    parts = [text(LEFT, 16, panel.title, "title")]
    if panel.below and y.first < 0 < y.last:
        parts.append(element("rect", look="below", x=LEFT, y=y(0), width=right - LEFT, height=y.start - y(0)))
        parts.append(text(LEFT + 5, y.start - 6, panel.below, "words"))

    # A line across for each tick of y, with its number on the left.
    for tick in nice_ticks(y.first, y.last):
        look = "zero" if tick == 0 else "grid"
        parts.append(element("path", look=look, d=f"M{LEFT},{y(tick)}H{right}"))
        parts.append(text(LEFT - 6, y(tick) + 4, f"{tick:g}", "tick", "end"))
    parts.append(_ticks_of_x(panel, x))

    if panel.mark is not None and x.first <= panel.mark <= x.last:
        at = x(panel.mark)
        parts.append(element("path", look="mark", d=f"M{at},{TOP}V{HEIGHT - BOTTOM}"))
        parts.append(text(at + 4, TOP + 10, "trained", "words"))

    middle = (LEFT + right) / 2
    parts.append(text(middle, HEIGHT - 8, panel.xlabel, "tick", "middle"))
    return "".join(parts)


def _ticks_of_x(panel: Panel, x: Scale) -> str:
    """Return the grid of x and its numbers, without those that are too near to the one before."""
    ticks = dict(panel.ticks)
    if not ticks:
        for tick in nice_ticks(x.first, x.last, 5):
            ticks[tick] = f"{tick:,.10g}"
    bottom = HEIGHT - BOTTOM
    parts = []
    end = -math.inf  # of the last number
    for tick in sorted(ticks):
        at = x(tick)
        parts.append(element("path", look="grid", d=f"M{at},{TOP}V{bottom}"))
        half_width = 3.6 * len(ticks[tick])
        if at - half_width > end:
            parts.append(text(at, bottom + 18, ticks[tick], "tick", "middle"))
            end = at + half_width
    return "".join(parts)


def _shapes(points: Sequence[Point], x: Scale, y: Scale, bars: bool) -> str:
    """Return a line, its points with what they say, their seeds and intervals."""
    path = "L".join(f"{x(p.x)},{y(p.y)}" for p in points)
    parts = [element("path", look="curve", d=f"M{path}")]
    for p in points:
        at = x(p.x)
        if bars and p.half > 0:
            parts.append(element("path", look="bar", d=f"M{at},{y(p.y - p.half)}V{y(p.y + p.half)}"))
        for value in p.seeds:
            parts.append(element("circle", look="seed", cx=at, cy=y(value), r=2))
        if len(points) < 40:
            words = element("title", escape(f"{p.line}\n{p.text}"))
            parts.append(element("circle", words, cx=at, cy=y(p.y), r=3.5))
    return "".join(parts)


def label_places(wanted: Mapping[str, float]) -> dict[str, float]:
    """Return a place for the name of each line, as near to the wanted one as there is room."""
    places: dict[str, float] = {}
    lowest = HEIGHT - BOTTOM
    room = min(LABEL, (lowest - TOP + LABEL) / max(len(wanted), 1))
    ordered = sorted(wanted, key=wanted.__getitem__)
    at = TOP - room
    for line in ordered:
        at = max(at + room, min(wanted[line], lowest))
        places[line] = at
    # Names that were pushed beyond the bottom push the others up.
    limit = float(lowest)
    for line in reversed(ordered):
        places[line] = round(min(places[line], limit), 1)
        limit = places[line] - room
    return places


def short(line: str, most: int) -> str:
    """Return the name of a line in at most so many characters, for the margin."""
    name = line.replace(" read as ", " as ").replace(" at scale ", " x")
    if len(name) <= most:
        return name
    # Lines often begin alike and differ at their ends, as two values of an option do: the middle is left out.
    start = (most - 1) // 3
    end = most - 1 - start
    return f"{name[:start]}…{name[-end:]}"
