"""What stands in the report: checked without a browser."""

import csv
import html.parser
import io
import itertools
import json
import re

import numpy as np
import pytest
import synthetic
from synthetic import write_run

from evaluation.report import frame, markdown, page
from evaluation.report.figure import label_places, nice_ticks, svg

KINDS = ("lengths", "by_position", "far_copies", "ruler", "reach")
EVIL = "<script>alert(1)<!--script> \"'%{x} <b>|`*\0"


class Reader(html.parser.HTMLParser):
    """Tags and words of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.within = [], [], ("", {})
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.within = tag, dict(attributes)
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


def figure(section, title):
    return next(f for f in section.figures if f.title.startswith(title))


def test_the_answer_says_which_how_far_and_how_sure(section):
    assert list(section.words) == ["Which", "How far", "Far text", "RULER", "How sure"]
    plain = {heading: markdown.to_plain(" ".join(sentences)) for heading, sentences in section.words.items()}
    assert "At 256 tokens (1x) the best is rope: 2.099 ± 0.0" in plain["Which"]
    for heading, pattern in (
        ("Which", r"At 2,048 tokens \(8x\) the best is fox: .* better than itself on the same text cut to 256 tokens"),
        ("How far", r"Safe \(.*\) to >= 8x: fox, alibi; .*to 1x: cope, nope, rope; at no length: rope read as yarn"),
        ("How far", r"Useful \(longer text still helped\) to >= 8x: fox; to 1x: .*; to <= 0.5x: alibi"),
    ):
        assert re.search(pattern, plain[heading])
    pattern = r"Both safe to 8x and using text from beyond 256 tokens: fox \(gain on far copies: \+0\.\d+ ± 0\.\d+\)\."
    assert re.fullmatch(pattern, plain["Far text"])  # alibi does not use it
    assert "over 3 seeds and 24 texts; differences are paired" in plain["How sure"]


def test_one_seed_is_said_and_equal_encodings_are_not_separated(tmp_path):
    write_run(tmp_path / "one", "rope", variants=("yarn",))
    words = page.sections(frame.load(tmp_path / "one"))[0].words
    assert "Beyond 256 tokens **cut the text**" in words["Which"][0]  # one network is no winner over itself
    write_run(tmp_path / "one", "nope")
    words = page.sections(frame.load(tmp_path / "one"))[0].words
    (said, *_), (_, longest) = words["How sure"], words["Which"]
    assert re.search(r"on which \*\*rope\*\* is better \(-0\.\d+ ± 0\.\d+\)", longest)
    assert "over 1 seed and 24 texts" in said
    assert "covers the texts alone: another training run may differ by more" in said
    for seed in (0, 1, 2):
        for lr in (1.0, 2.0):
            write_run(tmp_path / "two", "rope", seed, name=f"{lr}-{seed}", config={"optim.lr": lr}, noise=0.02 * lr)
    (text, *_) = page.sections(frame.load(tmp_path / "two"))[0].words["Which"]
    assert "not separated from" in text


def test_every_table_has_the_truncated_text(runs, section):
    means = next(grid for grid in section.grids if grid.title.startswith("Bits per byte"))
    for grid in (section.grids[0], means):
        cut, rope = grid.frame.iloc[0], grid.frame.loc["rope"]
        assert cut.name == "rope cut to 256"
        assert cut.filter(regex="2,048|8x").iloc[0] == rope.filter(regex="256|1x").iloc[0]
    columns = {"safe to", "useful to", "gain at 8x", "gain on far copies", "RULER, effective to", "parameters"}
    assert columns <= set(section.grids[0].frame)
    task = page.sections(runs)[1].grids[0]
    assert {"safe to", "parameters"} <= set(task.frame)  # each section has its own
    assert not [column for column in task.frame if "bits" in column]
    assert "rope cut to 256" in {p.line for p in figure(section, "Gain").panels[1].points}


def test_the_overview_is_in_order_and_only_what_is_separated_is_bold(section):
    grid = section.grids[0]
    losses = [float(cell.split()[0]) for cell in grid.frame["bits per byte at 8x"][1:]]
    assert losses == sorted(losses)
    assert grid.best >= {("fox", "bits per byte at 8x")}
    for row, column in grid.best:
        assert grid.frame.loc[row, column]


def test_sections_begin_with_most_lines_and_lengths_are_numbers(tmp_path):
    for train_len in (1024, 256, 512):
        identity = "b" if train_len == 512 else "a"
        write_run(tmp_path, "rope", name=f"rope-{train_len}", identity=identity, finished=False,
                  config={"train_len": train_len})  # fmt: skip
    write_run(tmp_path, "alibi", name="second", identity="a", finished=False, config={"train_len": 1024})
    titles = [section.title for section in page.sections(frame.load(tmp_path))]
    assert [re.search(r"at ([\d,]+)", title)[1] for title in titles[:-1]] == ["1,024", "256", "512"]


def test_other_settings_are_collapsed_and_most_texts_lead(tmp_path):
    run = write_run(tmp_path, "rope", variants=("yarn",))
    config = frame.load(tmp_path).configs[str(run)]
    values = {"pe": {key[3:]: value for key, value in config.items() if key.startswith("pe.")}, "seed": 0}
    synthetic.evaluate(run, values, settings={"sequences": 12, "lengths": [128, 256]}, worse=1.0)
    (section, _) = page.sections(frame.load(tmp_path))
    assert [f.title for f in section.figures].count("Gain over cutting the text, and loss, against text length") == 1
    (other,) = section.others
    assert other.title == "lengths, loss: lengths 128 256, sequences 12"
    text = page.html(frame.load(tmp_path))
    assert text.index("Overview") < text.index("<summary>Other settings: lengths, loss")


def test_figures_show_the_estimates(runs, section):
    gain, loss = figure(section, "Gain").panels
    rows = runs.results[(runs.results.line == "rope") & (runs.results.kind == "lengths")]
    means = rows[rows.task == "text"].groupby("length").value.mean()
    rope = {point.x: point for point in loss.points if point.line == "rope"}
    assert {length: point.y for length, point in rope.items()} == pytest.approx(means.to_dict(), rel=1e-9)
    for length, point in rope.items():
        of_seeds = rows[(rows.task == "text") & (rows.length == length)].value
        assert sorted(point.seeds) == pytest.approx(sorted(of_seeds))
    yarn = next(p for p in gain.points if (p.line, p.x) == ("rope read as yarn at scale 8", 256))
    assert yarn.y == pytest.approx(-0.347, abs=0.01)  # the gain at train_len
    assert sum(yarn.seeds) / 3 == pytest.approx(yarn.y)
    assert gain.low == -0.15  # what is worse leaves the axis


def numbers_in(path):
    return [tuple(map(float, point.split(","))) for point in re.findall(r"[\d.]+,-?[\d.]+", path)]


def test_a_line_is_drawn_where_it_is_and_what_leaves_has_its_number(section):
    panel = figure(section, "Gain").panels[0]
    text = svg(panel, section.styles, "x")
    curves = dict(re.findall(r'data-line="([^"]+)"><g [^>]+><path class="curve" d="([^"]+)"', text))
    fox = numbers_in(curves["fox"])
    across = [b[0] - a[0] for a, b in itertools.pairwise(fox)]
    assert max(across) - min(across) <= 0.2  # a doubling is a step
    alibi = numbers_in(curves["alibi"])[-1][1]
    points = {(p.line, p.x): p.y for p in panel.points}
    rising = points["fox", 2048] - points["alibi", 2048]
    falling = points["alibi", 2048] - points["cope", 2048]
    cope = numbers_in(curves["cope"])[-1][1]
    assert (alibi - fox[-1][1]) / (cope - alibi) == pytest.approx(rising / falling, rel=0.02)
    assert re.search(r">rope -2\.1\d ↓<", text)
    assert ">fox<" in text


def test_names_at_the_ends_do_not_overlap():
    places = label_places({f"line {i}": y for i, y in enumerate([100.0, 100, 101, 102, 390, 391, 392, 900])})
    ordered = sorted(places.values())
    assert min(b - a for a, b in itertools.pairwise(ordered)) >= 14
    assert ordered[-1] <= 392
    assert places["line 0"] == 100
    many = sorted(label_places({str(i): 300.0 for i in range(60)}).values())
    assert min(b - a for a, b in itertools.pairwise(many)) > 5
    assert many[0] >= 0


def test_ticks_are_round():
    assert nice_ticks(-0.16, 0.11) == pytest.approx([-0.15, -0.1, -0.05, 0, 0.05, 0.1])
    assert nice_ticks(0, 100) == [0, 20, 40, 60, 80, 100]


def test_ruler_by_depth_and_length(runs, section):
    grid = next(grid for grid in section.heat if grid.title.startswith("fox: answers found"))
    assert list(grid.frame.index) == ["0.00", "0.50", "1.00"]
    rows = runs.results[(runs.results.line == "fox") & (runs.results.quantity == "found")]
    value = rows[(rows.depth == 0.5) & (rows.length == 1024)].value.mean()
    assert grid.frame.loc["0.50", "1,024"] == pytest.approx(value)


def test_the_page_needs_no_other_file_and_is_small(runs, reader, section):
    titles = [f.title for f in section.figures]
    assert len(set(titles)) == len(titles) == 7
    assert len(page.html(runs)) < 400_000
    for tag, attributes in reader.tags:
        assert tag not in ("iframe", "object", "embed", "base", "img")
        assert not attributes.get("src")
        assert attributes.get("href", "#").startswith(("#", "data:,"))


def test_names_are_only_text(tmp_path):
    for seed in (0, 1):
        path = write_run(tmp_path, "rope", seed, variants=("yarn",), finished=not seed) / "config.yaml"
        text = path.read_text().replace("name: rope\n", f"name: {json.dumps(EVIL)}\n")
        path.write_text(text.replace("name: code", f"name: {json.dumps(EVIL)}"))
    runs = frame.load(tmp_path)
    text = page.html(runs)
    reader = Reader(text)
    assert "<script>alert" not in text
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert any("<script>alert" in attributes.get("data-line", "") for _, attributes in reader.tags)
    for line in page.markdown(runs).splitlines():
        assert "<script" not in line.replace("\\<", "")


def test_markdown_and_csv_hold_the_same_numbers(runs):
    rows = [row for row in csv.DictReader(io.StringIO(page.csv(runs))) if row["kind"] == "lengths"]
    (rope,) = [
        r for r in rows if (r["line"], r["length"], r["task"], r["estimate"]) == ("rope", "2048", "text", "mean")
    ]
    own = runs.results[(runs.results.line == "rope") & (runs.results.length == 2048) & (runs.results.kind == "lengths")]
    assert float(rope["value"]) == pytest.approx(own.value[own.task == "text"].mean())
    assert (rope["unit"], rope["seeds"]) == ("bits per byte", "3")
    value, half = float(rope["value"]), (float(rope["high"]) - float(rope["low"])) / 2
    assert f"{value:.3f} ± {half:.3f}" in page.markdown(runs)


# Colours as people with three kinds of vision see them (Machado, Oliveira, Fernandes 2009), in CIELAB.
VISION = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])


def linear(colour):
    return (np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255) ** 2.2


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart(vision):
    rgb = np.array([linear(colour) for colour in page.PALETTE])
    x, y, z = np.cbrt(XYZ @ np.clip(VISION[vision] @ rgb.T, 0, 1) / XYZ.sum(1, keepdims=True))
    lab = np.array([116 * y, 500 * (x - y), 200 * (y - z)]).T
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(lab, 2)) > 20  # where 2.3 is just noticeable
    for background in ("#ffffff", "#14171c"):
        for luminance in rgb @ XYZ[1]:
            dark, light = sorted((luminance + 0.05, linear(background) @ XYZ[1] + 0.05))
            assert light / dark > 2.5


def test_the_first_eight_lines_have_colours_of_their_own(section):
    styles = [style.split()[0] for style in section.styles.values()]
    coloured = [style for style in styles if style.startswith("c") and style != "cut"]
    assert len(coloured) == len(set(coloured)) == 6
    assert styles.count("reference") == 1
    assert "zero-shot" in section.styles["rope read as yarn at scale 8"]
