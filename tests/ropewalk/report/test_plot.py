"""Figures show the numbers of the table, are the same bytes each time, and everyone can tell their lines apart."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from synthetic import write_run

import ropewalk
from ropewalk.report import plot

SEEN_AS = {  # linear RGB as the colour-blind see it: Machado, Oliveira and Fernandes, 2009
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Oklab: Ottosson, 2020.
CONES = [[0.412221, 0.536333, 0.051446], [0.21190350, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
OKLAB = [[0.210454, 0.793618, -0.004072], [1.97799850, -2.42859221, 0.45059371], [0.02590404, 0.78277177, -0.80867577]]


def linear(colours):
    values = np.array([to_rgb(colour) for colour in colours])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("kind", SEEN_AS)
@pytest.mark.parametrize("palette", [plot.LIGHT, plot.DARK])
def test_any_two_colours_differ_for_everyone(palette, kind):
    seen = np.clip(linear([*palette.lines, palette.ink, palette.grey]) @ np.array(SEEN_AS[kind]).T, 0, 1)
    lab = np.cbrt(seen @ np.array(CONES).T) @ np.array(OKLAB).T
    distances = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
    assert distances[np.triu_indices(len(lab), 1)].min() > 0.09

    luminance = np.array([0.2126, 0.7152, 0.0722])
    light = linear(palette.lines) @ luminance + 0.05
    paper = linear([palette.paper]) @ luminance + 0.05
    assert (np.maximum(light, paper) / np.minimum(light, paper)).min() >= 3


@pytest.mark.parametrize("seed", range(20))
def test_places_of_names_are_apart_in_order_and_inside(seed):
    rng = np.random.default_rng(seed)
    wanted = rng.beta(0.3, 0.3, rng.integers(1, 12)).tolist()
    places = np.array(plot.spread(wanted, 0.07))
    assert (np.diff(places[np.argsort(wanted, kind="stable")]) > 0.07 - 1e-9).all()
    assert places.min() > -1e-9
    assert places.max() < 1 + 1e-9


def test_names_that_differ_at_their_ends_still_do():
    lines = ["t5 (optim.pe_lr_scale 1.0)", "t5 (optim.pe_lr_scale 10.0)", "rope (values False) read as lampe"]
    names = [plot.short(line) for line in lines]
    assert max(map(len, names)) <= plot.LONGEST
    assert len(set(names)) == 3
    assert plot.short("rope read as rerope") == "rope as rerope"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1, 2):
        write_run(folder, "rope", seed, variants=("yarn", "rerope"), noise=0.002)
        for pe in ("alibi", "cope", "fox", "nope"):
            run = write_run(folder, pe, seed, noise=0.002)
            rows = [f'{{"step": {n}, "tokens": {4 * n}, "val/bits_per_byte": {4 / n + seed}}}\n' for n in range(1, 9)]
            (run / "metrics.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def table(folder):
    return ropewalk.runs(folder)


def points(ax, colour):
    """The points of the curve in a colour: the longest line."""
    lines = [line for line in ax.lines if line.get_color() == colour and len(line.get_xdata()) > 2]
    return {x: y for x, y in zip(*lines[0].get_data(), strict=True)}


def words_of(ax):
    return {text.get_text(): text for text in ax.texts}


@pytest.mark.parametrize("size", [plot.WIDE, plot.NARROW])
def test_a_figure_shows_the_table_and_its_words_have_room(table, size):
    ax = plot.gain(table, plot.new(size), lines=["fox", "alibi", "cope", "rope read as rerope at scale 8"])
    for line, colour in {"rope": plot.LIGHT.ink, "fox": plot.LIGHT.lines[0], "alibi": plot.LIGHT.lines[1]}.items():
        rows = table[(table.line == line) & table.seed.isna() & (table.length >= 256)]
        assert points(ax, colour) == dict(zip(rows.length, rows.gain, strict=True))
    dots = [
        line.get_data() for line in ax.lines if line.get_alpha() == 0.45 and line.get_color() == plot.LIGHT.lines[0]
    ]
    of_runs = table[(table.line == "fox") & table.seed.notna() & (table.length >= 256)]
    assert sorted(dots[0][1]) == sorted(of_runs.gain)

    # What leaves the axis has its number.
    words = words_of(ax)
    (last,) = table.gain[(table.line == "rope") & table.seed.isna() & (table.length == 2048)]
    assert f"rope ↓ {last:+.2f}" in words
    low, _ = ax.get_ylim()
    assert low > last
    assert "2 others" in words

    # No word lies upon another, or outside of the figure.
    ax.figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without the line to the end of the curve
    bottom, top = ax.get_ylim()
    drawn = [label for label in ax.get_yticklabels() if bottom <= label.get_position()[1] <= top]  # not those beyond
    boxes += [label.get_window_extent() for label in [*ax.get_xticklabels(), *drawn] if label.get_text()]
    width, height = ax.figure.bbox.size
    for number, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_the_second_figure_has_one_baseline(table):
    ax = plot.gain(table, plot.new(), lines=["fox"], over="reference")
    rows = table[(table.line == "fox") & table.seed.isna()]
    assert points(ax, plot.LIGHT.lines[0]) == dict(zip(rows.length, rows.lead, strict=True))


def test_training_is_the_mean_over_seeds(folder):
    ax = plot.curves(ropewalk.curves(folder), plot.new(), lines=["fox"])
    assert points(ax, plot.LIGHT.lines[0]) == pytest.approx({4 * n: 4 / n + 1 for n in range(1, 9)})
    left, right = ax.get_xlim()
    assert 0 < left < 4
    assert 32 < right < 40


def test_a_figure_is_the_same_bytes_each_time(table, tmp_path):
    for kind, start in {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}.items():
        files = [tmp_path / f"{name}.{kind}" for name in "ab"]
        for file in files:
            plot.save(plot.gain(table, plot.new()).figure, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"not as \.gif"):
        plot.save(plot.new().figure, tmp_path / "a.gif")


def test_a_figure_of_a_user(table):
    """In their own axes, on a dark background; without any, in one of pyplot's."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", facecolor="black")
    axes[1].set_facecolor("black")
    assert ropewalk.plot.gain(table, axes[1], lines=["fox"]) is axes[1]
    assert points(axes[1], plot.DARK.lines[0])
    assert math.isfinite(sum(axes[1].get_ylim()))
    ropewalk.plot.gain(table)
    assert len(plt.get_fignums()) == 2
    plt.close("all")
    with pytest.raises(ValueError, match="nothing to draw"):
        ropewalk.plot.gain(table[table.measure == "none"])
