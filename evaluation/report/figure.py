"""Figures as SVG: a page of them is small, and follows light and dark by its style sheet.

Plotly has neither labels at the ends of lines nor axes with marks for what leaves them, and adds 4.8 MB to a page.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from conf.schema import ConfigError

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
    xs = [point.x for point in points] + [x for x in panel.ticks]
    low = max(panel.low, min(point.y for point in points))
    high = min(panel.high, max(point.y for point in points))
    if panel.percent:
        low, high = 0.0, 100.0
    pad = 0.06 * (high - low) or 0.01
    x = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, panel.log and min(xs) > 0)
    y = Scale(low - pad, high + pad, HEIGHT - BOTTOM, TOP)
    parts = [_axes(panel, x, y)]
    by_line: dict[str, list[Point]] = {}
    for point in points:
        by_line.setdefault(point.line, []).append(point)
    lines = {line: sorted(of_line, key=lambda point: point.x) for line, of_line in by_line.items()}
    places = label_places({line: y(of_line[-1].y) for line, of_line in lines.items()})
    parts.append(f'<clipPath id="p{name}"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT + 6}" ')
    parts.append(f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>')
    # The best line is drawn last, so that it lies above the others.
    for line in reversed(list(lines)):
        shapes = _shapes(lines[line], x, y, panel.bars)
        last = lines[line][-1]
        label = short(line, 19)
        if not y.first <= last.y <= y.last:
            label = f"{short(line, 13)} {last.y:+.2f} {'↓' if last.y < y.first else '↑'}"
        at = places[line]
        end = min(max(y(last.y), TOP), HEIGHT - BOTTOM)
        leader = f'<path class="leader" d="M{x(last.x) + 5},{end}L{WIDTH - RIGHT + 12},{at}"/>'
        words = f'<text x="{WIDTH - RIGHT + 15}" y="{at + 4}">{escape(label)}</text>'
        style = styles.get(line, "grey")
        parts.append(f'<g class="line {style}" data-line="{escape(line)}">')
        parts.append(f'<g clip-path="url(#p{name})">{shapes}</g>{leader}{words}</g>')
    title = escape(panel.title)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"'
    if sheet:
        head += f' xmlns="http://www.w3.org/2000/svg" width="{1.6 * WIDTH:g}"'
        parts.insert(0, f'<style>{sheet}</style><rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>')
    return f"{head}>{''.join(parts)}</svg>"


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
    """Return title, grid and ticks."""
    parts = [f'<text class="title" x="{LEFT}" y="16">{escape(panel.title)}</text>']
    right = WIDTH - RIGHT
    if panel.below and y.first < 0 < y.last:
        parts.append(
            f'<rect class="below" x="{LEFT}" y="{y(0)}" width="{right - LEFT}" height="{y.start - y(0):.1f}"/>'
        )
        parts.append(f'<text class="words" x="{LEFT + 5}" y="{y.start - 6}">{escape(panel.below)}</text>')
    for tick in nice_ticks(y.first, y.last):
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{LEFT},{y(tick)}H{right}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y(tick) + 4}">{tick:g}</text>')
    ticks = panel.ticks or {tick: f"{tick:,.10g}" for tick in nice_ticks(x.first, x.last, 5)}
    last = -math.inf
    for tick in sorted(ticks):
        at = x(tick)
        parts.append(f'<path class="grid" d="M{at},{TOP}V{HEIGHT - BOTTOM}"/>')
        # A tick too near to the one before it has no number.
        wide = 3.6 * len(ticks[tick])
        if at - wide > last:
            middle = HEIGHT - BOTTOM + 18
            parts.append(f'<text class="tick" text-anchor="middle" x="{at}" y="{middle}">{escape(ticks[tick])}</text>')
            last = at + wide
    if panel.mark is not None and x.first <= panel.mark <= x.last:
        parts.append(f'<path class="mark" d="M{x(panel.mark)},{TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="words" x="{x(panel.mark) + 4}" y="{TOP + 10}">trained</text>')
    parts.append(f'<text class="tick" text-anchor="middle" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}">')
    parts.append(f"{escape(panel.xlabel)}</text>")
    return "".join(parts)


def _shapes(points: Sequence[Point], x: Scale, y: Scale, bars: bool) -> str:
    """Return a line, its points with what they say, their seeds and intervals."""
    parts = ['<path class="curve" d="M' + "L".join(f"{x(p.x)},{y(p.y)}" for p in points) + '"/>']
    for p in points:
        if bars and p.half > 0:
            parts.append(f'<path class="bar" d="M{x(p.x)},{y(p.y - p.half)}V{y(p.y + p.half)}"/>')
        for value in p.seeds:
            parts.append(f'<circle class="seed" cx="{x(p.x)}" cy="{y(value)}" r="2"/>')
        if len(points) < 40:
            text = escape(f"{p.line}\n{p.text}")
            parts.append(f'<circle cx="{x(p.x)}" cy="{y(p.y)}" r="3.5"><title>{text}</title></circle>')
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
    return name if len(name) <= most else name[: most - 1] + "…"
