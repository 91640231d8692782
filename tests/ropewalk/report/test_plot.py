"""Figures show the numbers of the table, words have room, and everyone can tell lines apart."""

import io
import math
import re
from itertools import combinations

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from synthetic import LENGTHS, TEXTS, TRAIN_LEN, edited, write_run, write_runs

import ropewalk
from ropewalk.report import plot
from ropewalk.report.table import over_seeds

# Linear RGB as the colour-blind see it: Machado, Oliveira and Fernandes, 2009.
SEEN_AS = {
    "normal": [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Oklab: Ottosson, 2020.
CONES = [
    [0.412221, 0.536333, 0.051446],
    [0.211903, 0.680700, 0.107397],
    [0.088302, 0.281719, 0.629979],
]
OKLAB = [
    [0.210454, 0.793618, -0.004072],
    [1.977998, -2.428592, 0.450594],
    [0.025904, 0.782772, -0.808676],
]


@pytest.mark.parametrize("kind", SEEN_AS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_any_two_colours_differ_for_everyone(kind, is_dark):
    """Also from the paper."""
    colours = [plot.LIGHT.ink, plot.LIGHT.grey, plot.LIGHT.paper, *plot.LINES]
    if is_dark:
        colours = [plot.DARK[colour] for colour in colours]
    rgb = np.array([to_rgb(colour) for colour in colours])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = linear @ np.transpose(SEEN_AS[kind])
    cones = seen.clip(0, 1) @ np.transpose(CONES)
    lab = np.cbrt(cones) @ np.transpose(OKLAB)
    distances = [np.linalg.norm(a - b) for a, b in combinations(lab, 2)]
    assert min(distances) > 0.09


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder, "rope", seeds=range(3), variants=["yarn", "rerope"], noise=0.002)
    write_runs(folder, "alibi", "cope", "fox", "nope", seeds=range(3), noise=0.002)
    return ropewalk.runs(folder)


def of_colour(ax, colour):
    """What is drawn in a colour as lines or dots: x and y [n, 2] of each, that of most points first."""
    drawn = [line.get_xydata() for line in ax.lines if line.get_color() == colour]
    return sorted(drawn, key=len, reverse=True)


@pytest.mark.parametrize(
    ("over", "column", "shortest"),
    [
        ("itself", "gain", TRAIN_LEN),
        ("reference", "lead", LENGTHS[0]),
    ],
)
def test_lines_are_the_means_of_the_table_and_dots_its_seeds(table, over, column, shortest):
    ax = plot.gain(table, plot.new(), lines=["fox", "alibi"], over=over)
    colours = {
        "fox": plot.LINES[0],
        "alibi": plot.LINES[1],
        "rope": plot.LIGHT.ink,
    }
    for line, colour in colours.items():
        rows = table[table.line == line].query("length >= @shortest")
        of_seeds = rows.dropna(subset="seed")
        means = over_seeds(rows)
        dots, mean, *_ = of_colour(ax, colour)
        np.testing.assert_array_equal(mean, means[["length", column]])
        np.testing.assert_array_equal(dots, of_seeds[["length", column]])


NAMED = [
    "fox",
    "alibi",
    "cope",
    "rope read as rerope at scale 8",
]


def test_of_few_lines_none_leaves_the_axis(table):
    ax = plot.gain(table, plot.new(), lines=NAMED)
    bottom, top = ax.get_ylim()
    gains = over_seeds(table).query("length >= @TRAIN_LEN").gain
    assert bottom < gains.min() < gains.max() < top
    assert "2 more" in names_of(ax)


def names_of(ax):
    return [text.get_text() for text in ax.texts]


def arrows_of(ax):
    """Where an arrow marks that something goes on beyond the axis: (length, end of the axis)."""
    return {tuple(line.get_xydata()[0]) for line in ax.lines if not line.get_clip_on()}


def test_of_many_lines_what_leaves_the_axis_has_its_number_and_an_arrow(table):
    others = [table[table.line == "nope"].assign(line=f"nope {number}") for number in range(9)]
    many = pd.concat([table, *others], ignore_index=True)
    ax = plot.gain(many, plot.new(), lines=NAMED)
    bottom, top = ax.get_ylim()
    means = over_seeds(table).query("length >= @TRAIN_LEN")
    ends = means.query("length == 2048").set_index("line")
    assert ends.gain.idxmax() == "fox"
    assert bottom < ends.gain_low["fox"] < ends.gain_high["fox"] < top
    assert f"rope ↓ {ends.gain['rope']:+.2f}" in names_of(ax)
    drawn = means[means.line.isin([*NAMED, "rope"])]
    leaving = drawn[drawn[["gain", "gain_low"]].min(axis=1) < bottom]
    assert arrows_of(ax) == {(length, bottom) for length in leaving.length}


@pytest.fixture(scope="module")
def of_task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    for pe, wrong in {"rope": 50, "cope": 2}.items():
        for seed in range(3):
            with edited(write_run(folder, pe, seed, task="recall")) as values:
                for part in values["measured"]:
                    part["tokens"] = [100] * TEXTS
                    part["errors"] = [wrong + seed] * TEXTS
    return ropewalk.runs(folder)


def test_errors_of_a_task_are_the_medians_of_the_table_with_their_range(of_task):
    ax = plot.errors(of_task, plot.new(), part="sparse")
    rows = over_seeds(of_task).query("part == 'sparse' and line == 'cope'")
    mean = next(xy for xy in of_colour(ax, plot.LINES[0]) if len(xy) == len(rows))
    np.testing.assert_array_equal(mean, rows[["length", "value"]])
    assert rows[["low", "value", "high"]].iloc[0].tolist() == [2, 3, 4]
    assert ax.get_ylim()[0] < 0 < 52 < ax.get_ylim()[1]
    assert "or of all if none did" in " ".join(ax.get_title(loc="left").split())  # as of rope
    assert plot.untitled(ax).get_title(loc="left") == ""
    with pytest.raises(ValueError, match=r"part=odd: there is .*sparse"):
        plot.errors(of_task, plot.new(), part="odd")


def numbers_of(picture):
    """What the paths of an SVG consist of."""
    return np.float64(re.findall(r"[-\d.]+", " ".join(re.findall(r'\bd="([^"]*)"', picture))))


def test_a_picture_is_matplotlibs_with_colours_for_dark_pages(table):
    ax = plot.gain(table, plot.new(), lines=NAMED)
    ax.figure.set_layout_engine("none")  # which places things anew each time
    drawn = io.StringIO()
    with matplotlib.rc_context(plot.PLAIN):
        ax.figure.savefig(drawn, format="svg")
    written = plot.written(ax, "svg").decode()
    np.testing.assert_allclose(numbers_of(written), numbers_of(drawn.getvalue()), rtol=0, atol=0.1)
    style, _, shapes = written.partition("</style>")
    for what, colour in re.findall(r"(fill|stroke): (#\w+)", shapes):
        assert f'{what}: {colour}"]{{{what}:{plot.DARK[colour]}!important}}' in style


def test_no_word_lies_outside_of_the_figure(table):
    ax = plot.gain(table, plot.new(), lines=NAMED)
    ax.figure.draw_without_rendering()
    whole = ax.figure.get_tightbbox()
    assert (whole.min >= 0).all()
    assert (whole.max <= plot.SIZE).all()


def test_curves_are_means_over_the_seeds_and_end_on_the_axis():
    steps = np.arange(1, 9)
    first = pd.DataFrame(
        {
            "label": "fox",
            "section": "code",
            "step": steps,
            "tokens": 4 * steps,
        }
    )
    seeds = [first.assign(**{"val/loss": steps + seed}) for seed in range(3)]
    ax = plot.curves(pd.concat(seeds), plot.new())
    mean, *_ = of_colour(ax, plot.LINES[0])
    np.testing.assert_array_equal(mean.T, [4 * steps, steps + 1])
    assert ax.get_ylim()[1] > 9


def test_curves_end_where_a_seed_ends_and_are_in_ink_in_every_section():
    steps = np.arange(1.0, 9.0)
    run = pd.DataFrame({"label": "rope", "section": "code", "step": steps, "tokens": 4 * steps, "val/loss": steps})
    stopped = run.assign(**{"val/loss": np.where(steps < 7, steps, math.inf)})  # it has diverged
    ax = plot.curves(pd.concat([run, stopped, run.assign(section="prose")]), plot.new())
    prose, code = of_colour(ax, plot.LIGHT.ink)
    assert code[:, 1].tolist() == [1, 2, 3, 4, 5, 6]
    assert len(prose) == 8


@pytest.mark.parametrize(
    ("message", "mistake"),
    [
        (
            r"lines=\['fax'\]: there is .*fox",
            lambda table: plot.gain(table, plot.new(), lines=["fax"]),
        ),
        (
            "nothing to draw",
            lambda table: plot.gain(table[table.measure == "none"]),
        ),
        (
            "2 sections.*code, trained at 256 tokens; another",
            lambda table: plot.gain(pd.concat([table, table.assign(section="another")])),
        ),
        ("NoneType has no columns .*; take rows of what ropewalk.runs returns", lambda _: plot.gain(None)),
        ("DataFrame has no columns gain, line;", lambda table: plot.errors(table.drop(columns=["line", "gain"]))),
        ("has no columns label, tokens; .*ropewalk.curves", lambda table: plot.curves(table)),
        ("over='x'", lambda table: plot.gain(table, over="x")),
        ("ax=5 is not an Axes", lambda table: plot.gain(table, ax=5)),
    ],
)
def test_mistakes_name_what_there_is(table, message, mistake):
    with pytest.raises(ValueError, match=message):
        mistake(table)
