"""Figures show the numbers of the table, are the same bytes each time, and everyone can tell their lines apart."""

import json
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.markers import CARETDOWN, CARETUP
from matplotlib.text import Text
from synthetic import write_run

import ropewalk
from ropewalk.report import plot

# Linear RGB as the colour-blind see it: Machado, Oliveira and Fernandes, 2009.
SEEN_AS = {
    "normal": "1 0 0  0 1 0  0 0 1",
    "protan": "0.152286 1.052583 -0.204868  0.114503 0.786281 0.099216  -0.003882 -0.048116 1.051998",
    "deutan": "0.367322 0.860646 -0.227968  0.280085 0.672501 0.047413  -0.011820 0.042940 0.968881",
    "tritan": "1.255528 -0.076749 -0.178779  -0.078411 0.930809 0.147602  0.004733 0.691367 0.303900",
}
# Oklab: Ottosson, 2020.
CONES = "0.412221 0.536333 0.051446  0.21190350 0.68069955 0.10739696  0.08830246 0.28171884 0.6299787"
OKLAB = "0.210454 0.793618 -0.004072  1.97799850 -2.42859221 0.45059371  0.02590404 0.78277177 -0.80867577"
LUMINANCE = [0.2126, 0.7152, 0.0722]


def times(matrix, vectors):
    """The products of a matrix, given as text, and each vector."""
    return vectors @ np.array(matrix.split(), float).reshape(3, 3).T


def linear(colours):
    values = np.array([to_rgb(colour) for colour in colours])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("kind", SEEN_AS)
@pytest.mark.parametrize("palette", [plot.LIGHT, plot.DARK])
def test_any_two_colours_differ_for_everyone(palette, kind):
    colours = linear([*palette.lines, palette.ink, palette.grey])
    seen = times(SEEN_AS[kind], colours).clip(0, 1)
    lab = times(OKLAB, np.cbrt(times(CONES, seen)))
    assert min(np.linalg.norm(a - b) for a, b in combinations(lab, 2)) > 0.09


@pytest.mark.parametrize("palette", [plot.LIGHT, plot.DARK])
def test_lines_have_a_contrast_of_3_to_the_paper(palette):
    light = linear(palette.lines) @ LUMINANCE + 0.05
    paper = linear([palette.paper]) @ LUMINANCE + 0.05
    assert min(np.maximum(light, paper) / np.minimum(light, paper)) >= 3


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1, 2):
        write_run(folder, "rope", seed, variants=["yarn", "rerope"], noise=0.002)
        for pe in ("alibi", "cope", "fox", "nope"):
            write_run(folder, pe, seed, noise=0.002)
    return ropewalk.runs(folder)


def of_colour(ax, colour):
    """What is drawn in a colour as lines or dots: x and y of each, the longest first."""
    lines = [line.get_data() for line in ax.lines if line.get_color() == colour]
    return sorted(lines, key=lambda xy: -len(xy[0]))


@pytest.mark.parametrize("size", [plot.WIDE, plot.NARROW])
def test_a_figure_shows_the_table_and_its_words_have_room(table, size):
    ax = plot.gain(table, plot.new(size), lines=["fox", "alibi", "cope", "rope read as rerope at scale 8"])
    colours = {
        "rope": plot.LIGHT.ink,
        "fox": plot.LIGHT.lines[0],
        "alibi": plot.LIGHT.lines[1],
    }
    for line, colour in colours.items():
        rows = table[(table.line == line) & (table.length >= 256)]
        dots, means, *_ = of_colour(ax, colour)
        over_seeds = rows[rows.seed.isna()]
        np.testing.assert_array_equal(means, [over_seeds.length, over_seeds.gain])
        assert sorted(dots[1]) == sorted(rows.gain[rows.seed.notna()])

    # The best line is on the axis with its interval. What leaves the axis has its number.
    bottom, top = ax.get_ylim()
    ends = table[table.seed.isna() & (table.length == 2048)].set_index("line")
    assert ends.gain.idxmax() == "fox"
    assert bottom < ends.gain_low["fox"] < ends.gain_high["fox"] < top
    words = [text.get_text() for text in ax.texts]
    assert f"rope ↓ {ends.gain['rope']:+.2f}" in words
    assert "2 more" in words

    # No word lies upon another, or outside of the figure.
    ax.figure.draw_without_rendering()
    drawn = [label for label in ax.get_yticklabels() if bottom <= label.get_position()[1] <= top]  # not those beyond
    labels = [label for label in [*ax.get_xticklabels(), *drawn] if label.get_text()]
    boxes = [Text.get_window_extent(text) for text in [*ax.texts, *labels]]  # without the line to the end of the curve
    assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
    width, height = ax.figure.bbox.size
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height


@pytest.mark.parametrize(("column", "value", "arrow"), [("gain_low", -9.0, CARETDOWN), ("gain_high", 9.0, CARETUP)])
def test_an_interval_that_leaves_the_axis_ends_in_an_arrow(table, column, value, arrow):
    rows = table[table.line.isin(["fox", "rope"]) & table.seed.isna()]
    is_wide = (rows.line == "rope") & (rows.length == 256)
    ax = plot.gain(rows.assign(**{column: rows[column].mask(is_wide, value)}), plot.new())
    arrows = [line.get_data() for line in ax.lines if line.get_marker() == arrow]
    ((x, y),) = np.concatenate(arrows, axis=1).T
    assert x == 256
    assert y in ax.get_ylim()


def test_the_lead_is_over_the_reference(table):
    ax = plot.gain(table, plot.new(), lines=["fox"], over="reference")
    rows = table[(table.line == "fox") & table.seed.isna()]
    _, lead, *_ = of_colour(ax, plot.LIGHT.lines[0])
    np.testing.assert_array_equal(lead, [rows.length, rows.lead])


def test_curves_are_means_over_the_seeds_and_end_on_the_axis(tmp_path):
    for seed in (0, 1, 2):
        run = write_run(tmp_path, "fox", seed, finished=False)
        rows = [{"step": n, "tokens": 4 * n, "val/loss": n + seed} for n in range(1, 9)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ax = plot.curves(ropewalk.curves(tmp_path), plot.new())
    steps = np.arange(1, 9)
    mean, *_ = of_colour(ax, plot.LIGHT.lines[0])
    np.testing.assert_array_equal(mean, [4 * steps, steps + 1])
    assert ax.get_ylim()[1] > 9


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_a_figure_is_the_same_bytes_each_time(table, kind):
    first, second = (plot.written(plot.gain(table, plot.new()).figure, kind) for _ in range(2))
    assert first == second


def test_mistakes_name_what_there_is(table):
    two_sections = pd.concat([table, table.assign(section="another")])
    mistakes = {
        r"lines=\['fax'\]: there is .*fox": lambda: plot.gain(table, plot.new(), lines=["fax"]),
        "there is 'itself' and 'reference'": lambda: plot.gain(table, plot.new(), over="rope"),
        "nothing to draw": lambda: plot.gain(table[table.measure == "none"]),
        "2 sections.*code, trained at 256 tokens; another": lambda: plot.gain(two_sections),
        r"not as \.gif": lambda: plot.save(plot.new().figure, "a.gif"),
    }
    for message, mistake in mistakes.items():
        with pytest.raises(ValueError, match=message):
            mistake()


def test_a_figure_of_a_user_has_their_axes_and_background_or_is_one_of_pyplot(table):
    dark = plot.new(palette=plot.DARK)
    assert plot.gain(table, dark, lines=["fox"]) is dark
    assert of_colour(dark, plot.DARK.lines[0])
    assert ropewalk.plot.gain(table).figure is plt.gcf()
    plt.close()
