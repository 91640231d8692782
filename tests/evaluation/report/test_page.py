"""What stands in the report: checked without a browser."""

import csv
import html.parser
import io
import itertools
import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest
from synthetic import write_run

from evaluation.report import frame, markdown, page

KINDS = ("lengths", "by_position", "far_copies", "ruler")
EVIL = "<script>alert(1)<!--script> \"'%{x} <b>|`*\0"


class Reader(html.parser.HTMLParser):
    """Tags, words and the JSON of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.figures, self.within = [], [], None, ("", {})
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.within = tag, dict(attributes)
        self.tags.append(self.within)

    def handle_data(self, text):
        tag, attributes = self.within
        if attributes.get("id") == "figures":
            self.figures = self.figures or json.loads(text)
        elif tag not in ("script", "style"):
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


def figure(reader, title):
    return next(f for f in reader.figures if f["title"] == title)


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
    (said, *_), (_, longest) = words["How sure"], words["Which"]
    assert re.search(r"on which \*\*rope\*\* is better \(-0\.\d+ ± 0\.\d+\)", longest)
    assert "over 1 seed and 24 texts" in said
    assert "covers the texts alone: another training run may differ by more" in said
    for seed in (0, 1, 2):
        for lr in (1.0, 2.0):
            write_run(tmp_path / "two", "rope", seed, name=f"{lr}-{seed}", config={"optim.lr": lr}, noise=0.02 * lr)
    (text, *_) = page.sections(frame.load(tmp_path / "two"))[0].words["Which"]
    assert "not separated from" in text


def test_every_table_has_the_truncated_text(section, reader):
    for grid in section.grids[:2]:
        cut, rope = grid.frame.iloc[0], grid.frame.loc["rope"]
        assert cut.name == "rope cut to 256"
        assert cut.filter(regex="2,048|8x").iloc[0] == rope.filter(regex="256|1x").iloc[0]
    columns = {"safe to", "useful to", "gain on far copies", "far needles found, %", "RULER, effective to"}
    assert columns | {"recall: safe to"} <= set(section.grids[0].frame)  # disturbed or used: one table
    assert "rope cut to 256" in {trace["name"] for trace in figure(reader, "Loss against text length")["data"]}


def test_figures_show_the_estimates(runs, reader):
    drawn = figure(reader, "Loss against text length")
    rope = next(t for t in drawn["data"] if (t["name"], t["yaxis"]) == ("rope", "y"))
    rows = runs.results[
        (runs.results.line == "rope") & (runs.results.kind == "lengths") & (runs.results.task == "text")
    ]
    assert rope["x"] == [128, 256, 512, 1024, 2048]
    assert rope["y"] == pytest.approx(list(rows.groupby("length").value.mean()), rel=1e-4)
    assert all(bar > 0 for bar in rope["error_y"]["array"])
    yarn = next(t for t in drawn["data"] if (t["name"], t["yaxis"]) == ("rope read as yarn at scale 8", "y2"))
    assert yarn["y"][1] == pytest.approx(-0.347, abs=0.01)  # the gain at train_len
    assert not [axis for axis in drawn["layout"].values() if "range" in axis]  # so nothing is cut off
    cut = [t["name"] for t in figure(reader, "Loss by position")["data"]]
    assert "rope" not in cut  # differences to it
    assert "fox" in cut


def test_all_figures_are_there_and_valid_without_another_file(reader):
    first, *others = [f["title"] for f in reader.figures]
    assert first == "Loss against text length"
    assert {"Loss by position", "Far copies", "RULER: answers found", "RULER: gain", "Error against length"} <= set(
        others
    )
    for f in reader.figures:
        go.Figure(data=f["data"], layout=f["layout"])
        assert sum(name.startswith("xaxis") for name in f["layout"]) == f["panels"]
    panels = [a["text"] for a in figure(reader, "Error against length")["layout"]["annotations"]]
    assert panels == ["<b>error in percent: dense</b>", "<b>error in percent: sparse</b>"]
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
    assert [tag for tag, _ in reader.tags].count("script") == 3
    shown = [t["name"] for f in reader.figures for t in f["data"]]
    shown += [a["text"][3:-4] for f in reader.figures for a in f["layout"]["annotations"]]
    assert not [name for name in shown if "<" in name or "%{" in name]
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


def test_each_encoding_has_a_look():
    """Colours are shared only when there are too few, pairs likewise; one more encoding changes few looks."""
    looks = page.looks(f"mine {i}" for i in range(56))
    assert len(set(looks.values())) == len(page.PALETTE) * len(page.SYMBOLS) == 56
    few = page.looks(["rope", "alibi", "cope", "fox", "nope", "kerple", "t5", "yarn"])
    assert len({colour for colour, _ in few.values()}) == 8
    assert len(page.looks(f"mine {i}" for i in range(100))) == 100
    assert page.looks(["rope"])["rope"] == page.looks(["rope", "rope"])["rope"]
