"""What stands in the report: checked without a browser."""

import csv
import dataclasses
import html.parser
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy.spatial.distance import pdist
from synthetic import write_run

from lab.pictures import pictures
from ropewalk.report import charts, comparison, frame, markdown, page
from ropewalk.report.figure import Panel, Point, label_places, nice_ticks, short, svg
from ropewalk.report.grids import Grid

KINDS = ("lengths", "by_position", "far_copies", "ruler", "reach")
EVIL = "<script>alert(1)<!--script> \"'%{x} <b>|`*\0"


class Reader(html.parser.HTMLParser):
    """Tags and words of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.words = []
        self.within = ("", {})
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.within = (tag, dict(attributes))
        self.tags.append(self.within)

    def handle_data(self, text):
        tag, _ = self.within
        if tag not in ("script", "style"):
            self.words.append(text.strip())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1, 2):
        write_run(folder, "rope", seed, kinds=KINDS, variants=("yarn", "rerope"), noise=0.002)
        for pe in ("alibi", "cope", "fox", "nope"):
            write_run(folder, pe, seed, kinds=KINDS, noise=0.002)
        for pe in ("rope", "cope"):
            write_run(folder, pe, seed, task="recall")
    write_run(folder, "alibi", 3, finished=False)
    return frame.load(folder)


@pytest.fixture(scope="module")
def section(runs):
    return page.sections(runs)[0]


@pytest.fixture(scope="module")
def reader(runs):
    return Reader(page.html(runs))


def titled(title, items):
    """The first of some figures or tables whose title begins like that."""
    return next(item for item in items if item.title.startswith(title))


def answers_of(folder):
    """Of the first section: heading -> sentences."""
    return page.sections(frame.load(folder))[0].words


def test_the_answer_says_which_how_far_and_how_sure(section):
    assert list(section.words) == ["Which", "How far", "Far text", "RULER", "How sure"]

    def plain(heading):
        return markdown.to_plain(" ".join(section.words[heading]))

    assert "At 256 tokens (1x) the best is rope: 2.099 ± 0.0" in plain("Which")
    best_at_8x = r"At 2,048 tokens \(8x\) the best is fox: .* better than itself on the same text cut to 256 tokens"
    assert re.search(best_at_8x, plain("Which"))

    safe = r"Safe \(.*\) to >= 8x: fox, alibi; .*to 1x: cope, nope, rope; at no length: rope read as yarn"
    useful = r"Useful \(longer text still helped\) to >= 8x: fox; to 1x: .*; to <= 0.5x: alibi"
    assert re.search(safe, plain("How far"))
    assert re.search(useful, plain("How far"))

    # Alibi is as safe, but does not use far text.
    both = r"Both safe to 8x and using text from beyond 256 tokens: fox \(gain on far copies: \+0\.\d+ ± 0\.\d+\)\."
    assert re.fullmatch(both, plain("Far text"))
    assert "over 3 seeds and 24 texts; differences are paired" in plain("How sure")


def test_one_seed_is_said_and_equal_encodings_are_not_separated(tmp_path):
    one_seed = tmp_path / "one"
    write_run(one_seed, "rope", variants=("yarn",))
    of_one_network = answers_of(one_seed)["Which"]
    assert "Beyond 256 tokens **cut the text**" in of_one_network[0]  # one network is no winner over itself

    write_run(one_seed, "nope")
    answers = answers_of(one_seed)
    _, at_longest = answers["Which"]
    assert re.search(r"on which \*\*rope\*\* is better \(-0\.\d+ ± 0\.\d+\)", at_longest)
    assert "over 1 seed and 24 texts" in answers["How sure"][0]
    assert "covers the texts alone: another training run may differ by more" in answers["How sure"][0]

    equal = tmp_path / "two"
    for seed in (0, 1, 2):
        for lr in (1.0, 2.0):
            write_run(equal, "rope", seed, name=f"{lr}-{seed}", config={"optim.lr": lr}, noise=0.02 * lr)
    assert "not separated from" in answers_of(equal)["Which"][0]


def test_training_is_drawn_by_what_each_section_recorded(tmp_path):
    for task, measure in ((None, "val/bits_per_byte"), ("recall", "val/error"), ("markov", "val/loss")):
        run = write_run(tmp_path, task=task)
        rows = [{"step": 10, "tokens": 40, measure: 2.0}, {"step": 20, "tokens": 80, measure: 1.0}]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    drawn = {}
    *of_data, _ = page.sections(frame.load(tmp_path))
    for section in of_data:
        panel, *_ = titled("Training", section.figures).panels
        drawn[section.title.partition(",")[0]] = panel.title
    validation = {"code": "bits per byte", "recall": "error", "markov": "loss"}
    assert drawn == {data: f"validation: {name}" for data, name in validation.items()}


def test_every_table_has_the_truncated_text(runs, section):
    overview = section.grids[0]
    means = titled("Bits per byte", section.grids)
    for grid in (overview, means):
        cut = grid.frame.iloc[0]
        rope = grid.frame.loc["rope"]
        assert cut.name == "rope cut to 256"
        assert cut.filter(regex="2,048|8x").iloc[0] == rope.filter(regex="256|1x").iloc[0]
    columns = {"safe to", "useful to", "gain at 8x", "gain on far copies", "RULER, effective to", "parameters"}
    assert columns <= set(overview.frame)

    # Each section has its own columns.
    of_task = page.sections(runs)[1].grids[0]
    assert {"safe to", "parameters"} <= set(of_task.frame)
    assert not any("bits" in column for column in of_task.frame)

    loss = titled("Gain", section.figures).panels[1]
    assert "rope cut to 256" in {point.line for point in loss.points}


def test_the_overview_is_in_order_and_only_what_is_separated_is_bold(section):
    grid = section.grids[0]
    losses = [float(cell.split()[0]) for cell in grid.frame["bits per byte at 8x"][1:]]
    assert losses == sorted(losses)
    assert grid.best >= {("fox", "bits per byte at 8x")}
    for row, column in grid.best:
        assert grid.frame.loc[row, column]


def test_sections_begin_with_most_lines_and_lengths_are_numbers(tmp_path):
    for pe, train_len, identity in (
        ("rope", 1024, "a"),
        ("rope", 256, "a"),
        ("rope", 512, "b"),
        ("alibi", 1024, "a"),
    ):
        name = f"{pe}-{train_len}"
        write_run(tmp_path, pe, name=name, identity=identity, finished=False, config={"train_len": train_len})
    sections = page.sections(frame.load(tmp_path))[:-1]  # the last one says what was run
    lengths = [re.search(r"at ([\d,]+)", section.title)[1] for section in sections]
    assert lengths == ["1,024", "256", "512"]


def test_other_settings_are_collapsed_and_most_texts_lead(tmp_path):
    run = write_run(tmp_path, "rope", variants=("yarn",))
    config = frame.load(tmp_path).configs[str(run)]
    pe = {key.removeprefix("pe."): value for key, value in config.items() if key.startswith("pe.")}
    fewer_texts = {"sequences": 12, "lengths": [128, 256]}
    synthetic.evaluate(run, {"pe": pe, "seed": 0}, settings=fewer_texts, worse=1.0)

    (section, _) = page.sections(frame.load(tmp_path))
    titles = [figure.title for figure in section.figures]
    assert titles.count("Gain over cutting the text, and loss, against text length") == 1
    (other,) = section.others
    assert other.title == "lengths, loss: lengths 128 256, sequences 12"
    text = page.html(frame.load(tmp_path))
    assert text.index("Overview") < text.index("<summary>Other settings: lengths, loss")


def test_figures_show_the_estimates(runs, section):
    gain, loss = titled("Gain", section.figures).panels
    results = runs.results
    of_rope = results[(results.line == "rope") & (results.kind == "lengths") & (results.task == "text")]
    points = [point for point in loss.points if point.line == "rope"]
    assert [point.x for point in points] == sorted(set(of_rope.length))
    for point in points:
        of_seeds = of_rope[of_rope.length == point.x].value
        assert point.y == pytest.approx(of_seeds.mean(), rel=1e-9)
        assert sorted(point.seeds) == pytest.approx(sorted(of_seeds))

    yarn = next(point for point in gain.points if (point.line, point.x) == ("rope read as yarn at scale 8", 256))
    assert yarn.y == pytest.approx(-0.347, abs=0.01)  # the gain at train_len
    assert sum(yarn.seeds) / 3 == pytest.approx(yarn.y)
    assert gain.low == -0.15  # what is worse leaves the axis


def numbers_in(path):
    """The points [n, 2] of an SVG path."""
    points = re.findall(r"([\d.]+),(-?[\d.]+)", path)
    return np.array(points, dtype=float)


def test_a_line_is_drawn_where_it_is_and_what_leaves_has_its_number(section):
    panel = titled("Gain", section.figures).panels[0]
    text = svg(panel, section.styles, "x")
    paths = dict(re.findall(r'data-line="([^"]+)"><g [^>]+><path class="curve" d="([^"]+)"', text))
    fox = numbers_in(paths["fox"])
    alibi = numbers_in(paths["alibi"])
    cope = numbers_in(paths["cope"])
    steps = np.diff(fox[:, 0])
    assert np.ptp(steps) <= 0.2  # a doubling is a step

    # Distances at the right end are in proportion to the differences of the values.
    value = {point.line: point.y for point in panel.points if point.x == 2048}
    expected = (value["fox"] - value["alibi"]) / (value["alibi"] - value["cope"])
    drawn = (alibi[-1, 1] - fox[-1, 1]) / (cope[-1, 1] - alibi[-1, 1])
    assert drawn == pytest.approx(expected, rel=0.02)

    assert re.search(r">rope -2\.1\d ↓<", text)
    assert ">fox<" in text


def test_a_line_that_learned_little_leaves_the_loss_panel(runs):
    table = next(table for table in comparison.tables(runs) if table.is_text and table.kind == "lengths")
    means = dict(table.means)
    for key, estimate in table.means.items():
        if key.line == "nope":
            means[key] = estimate._replace(value=estimate.value + 3)
    moved = dataclasses.replace(table, means=means)
    panel = charts.by_length(moved).panels[-1]
    text = svg(panel, {}, "x")
    assert panel.high < min(point.y for point in panel.points if point.line == "nope")
    assert panel.high > max(point.y for point in panel.points if point.line == "fox")
    assert re.search(r">nope \d\.\d\d ↑<", text)
    assert ">fox<" in text


def test_names_at_the_ends_do_not_overlap():
    ends = [100.0, 100, 101, 102, 390, 391, 392, 900]
    places = label_places({f"line {i}": y for i, y in enumerate(ends)})
    ordered = sorted(places.values())
    assert np.diff(ordered).min() >= 14
    assert ordered[-1] <= 392
    assert places["line 0"] == 100

    many = sorted(label_places({str(i): 300.0 for i in range(60)}).values())
    assert np.diff(many).min() > 5
    assert many[0] >= 0


def test_names_that_differ_at_their_ends_still_do_in_the_margin():
    """As far as there is room, of the options and readings that lines are named by."""
    lines = ["t5 (optim.pe_lr_scale 1.0)", "t5 (optim.pe_lr_scale 10.0)", "rope (values False) read as lampe",
             "rope (values False) read as yarn at scale 8", "rope (values False)"]  # fmt: skip
    names = [short(line, 19) for line in lines]
    assert max(map(len, names)) <= 19
    assert len(set(names)) == len(lines)
    assert names[2].endswith("as lampe")
    assert short("rope read as rerope", 19) == "rope as rerope"


def test_only_differences_have_a_sign_where_a_line_leaves_the_figure():
    points = [Point("low", 1.0, 2.0, 0, ""), Point("a line with a long name", 1.0, 9.0, 0, "")]
    loss = svg(Panel("loss", "x", points, {}, high=3), {}, "x")
    assert re.search(r">[^<]* 9.00 ↑<", loss)
    gain = svg(Panel("gain", "x", [Point("low", 1.0, -1.0, 0, ""), *points], {}, high=3), {}, "x")
    (name,) = re.findall(r">([^<]* \+9.00 ↑)<", gain)
    assert len(name) <= 19  # as many characters as there is room for


def test_ticks_are_round():
    assert nice_ticks(-0.16, 0.11) == pytest.approx([-0.15, -0.1, -0.05, 0, 0.05, 0.1])
    assert nice_ticks(0, 100) == [0, 20, 40, 60, 80, 100]


def test_ruler_by_depth_and_length(runs, section):
    grid = titled("fox: answers found", section.heat)
    assert list(grid.frame.index) == ["0.00", "0.50", "1.00"]
    rows = runs.results[(runs.results.line == "fox") & (runs.results.quantity == "found")]
    expected = rows[(rows.depth == 0.5) & (rows.length == 1024)].value.mean()
    assert grid.frame.loc["0.50", "1,024"] == pytest.approx(expected)


def test_colours_of_heat_maps_can_be_compared_and_noise_has_none():
    """All lines have one scale of bits, which is at least a bit long."""

    def shares(**values):
        grids = [Grid(f"{line}: bits per answer", pd.DataFrame({"512": bits})) for line, bits in values.items()]
        return [int(share) for share in re.findall(r"--share:(\d+)%", page._heat_maps(grids))]

    assert shares(a=[4.0, 1.0], b=[2.0, -1.0]) == [100, 25, 50, 0]
    assert shares(a=[0.002, -0.003]) == [0, 0]
    assert "-0" not in page._heat_maps([Grid("a: bits", pd.DataFrame({"512": [-0.001]}))])


def test_the_page_needs_no_other_file_and_is_small(runs, reader, section):
    titles = [figure.title for figure in section.figures]
    assert len(set(titles)) == len(titles) == 7
    assert len(page.html(runs)) < 400_000
    for tag, attributes in reader.tags:
        assert tag not in ("iframe", "object", "embed", "base", "img")
        assert not attributes.get("src")
        assert attributes.get("href", "#").startswith(("#", "data:,"))


def test_names_are_only_text(tmp_path):
    for seed in (0, 1):
        is_finished = seed == 0  # unfinished runs are named, too
        path = write_run(tmp_path, "rope", seed, variants=("yarn",), finished=is_finished) / "config.yaml"
        evil_name = f"name: {json.dumps(EVIL)}"
        config = path.read_text().replace("name: rope\n", f"{evil_name}\n").replace("name: code", evil_name)
        path.write_text(config)
    runs = frame.load(tmp_path)
    text = page.html(runs)
    assert "<script>alert" not in text
    reader = Reader(text)
    tags = [tag for tag, _ in reader.tags]
    lines = [attributes.get("data-line", "") for _, attributes in reader.tags]
    assert tags.count("script") == 1
    assert any("<script>alert" in line for line in lines)
    for line in page.markdown(runs).splitlines():
        assert "<script" not in line.replace("\\<", "")


def test_markdown_and_csv_hold_the_same_numbers(runs):
    wanted = {"kind": "lengths", "line": "rope", "length": "2048", "task": "text", "estimate": "mean"}
    rows = csv.DictReader(io.StringIO(page.csv(runs)))
    (rope,) = [row for row in rows if wanted.items() <= row.items()]
    value = float(rope["value"])
    half = (float(rope["high"]) - float(rope["low"])) / 2
    results = runs.results
    of_rope = results[(results.line == "rope") & (results.length == 2048) & (results.kind == "lengths")]
    assert value == pytest.approx(of_rope.value[of_rope.task == "text"].mean())
    assert rope["unit"] == "bits per byte"
    assert rope["seeds"] == "3"
    assert f"{value:.3f} ± {half:.3f}" in page.markdown(runs)


# Colours as people with three kinds of vision see them (Machado, Oliveira, Fernandes 2009), in CIELAB.
VISION = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])


def linear(colour):
    """The light of red, green and blue, each from 0 to 1, of a colour such as "#ff8000"."""
    levels = np.array(list(bytes.fromhex(colour[1:])))
    return (levels / 255) ** 2.2


def lines_of_pictures():
    """The colours of lines in pictures of encodings, on a light and on a dark page."""
    light, dark = pictures.STYLE.split("@media")
    return [re.findall(r"\.pe \.(?:c\d|base)\{stroke:(#\w+)", style) for style in (light, dark)]


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart(vision):
    for colours in (page.PALETTE, *lines_of_pictures()):
        assert len(colours) >= 5
        rgb = np.array([linear(colour) for colour in colours])  # [colours, 3]
        seen = np.clip(VISION[vision] @ rgb.T, 0, 1)
        white = XYZ.sum(1, keepdims=True)
        x, y, z = np.cbrt(XYZ @ seen / white)
        lab = np.array([116 * y, 500 * (x - y), 200 * (y - z)]).T
        assert pdist(lab).min() > 20  # where 2.3 is just noticeable

    # The contrast of WCAG, on a light and on a dark page.
    luminances = np.array([linear(colour) for colour in page.PALETTE]) @ XYZ[1] + 0.05
    for background in ("#ffffff", "#14171c"):
        ratios = luminances / (linear(background) @ XYZ[1] + 0.05)
        assert np.maximum(ratios, 1 / ratios).min() > 2.5


def test_the_first_eight_lines_have_colours_of_their_own(section):
    styles = [style.split()[0] for style in section.styles.values()]
    coloured = [style for style in styles if style.startswith("c") and style != "cut"]
    assert len(coloured) == len(set(coloured)) == 6
    assert styles.count("reference") == 1
    assert "zero-shot" in section.styles["rope read as yarn at scale 8"]
