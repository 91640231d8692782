"""The page needs nothing else, names are only text on it, and all formats hold the same numbers."""

import html.parser
import json

import pytest
from synthetic import edited, write_run

from ropewalk.report import frame, page
from ropewalk.report.answer import amount, answer
from ropewalk.report.table import over_seeds, results

KINDS = ("lengths", "by_position", "far_copies", "ruler", "reach")
EVIL = "<script>alert(1)<!--script> \"'%{x} <b>|`*\0 {{ 7 * 7 }}"


class Reader(html.parser.HTMLParser):
    """Tags and words of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.words = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.words.append(text.strip())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(folder, "rope", seed, kinds=KINDS, variants=("yarn",), noise=0.002)
        write_run(folder, "fox", seed, kinds=KINDS, noise=0.002)
        write_run(folder, "cope", seed, task="recall")
    write_run(folder, "alibi", 3, finished=False)
    return frame.load(folder)


@pytest.fixture(scope="module")
def reader(runs):
    return Reader(page.html(runs))


def test_the_page_says_what_the_answer_says_and_needs_nothing(runs, reader):
    for tag, attributes in reader.tags:
        assert tag not in ("script", "iframe", "object", "embed", "base", "img")
        assert not attributes.get("src")
        assert attributes.get("href", "#").startswith(("#", "data:,"))
    table = results(runs)
    for title in page.titles(runs):
        for sentence in answer(table[table.section == title]):
            assert sentence.replace(" ± ", "\u00a0±\u00a0").replace("(-", "(\N{MINUS SIGN}") in reader.words
    assert "alibi-code-s3" in " ".join(reader.words)  # left out, as it is not finished
    assert "python train.py" in reader.words


def test_every_measure_has_its_numbers(runs, reader):
    rows = over_seeds(results(runs))
    shown = set(reader.words)
    for row in rows[~rows.measure.isin(page.AS_GAINS) | (rows.quantity == "gain")].itertuples():
        sign = "+" if row.quantity == "gain" else ""
        digits = 3 if "bit" in row.unit else 1
        assert amount(row.value, row.low, row.high, sign, digits).replace("-", "\N{MINUS SIGN}", 1) in shown, (
            row.measure
        )


def test_names_are_only_text(tmp_path):
    for seed in (0, 1):
        is_finished = seed == 0  # unfinished runs are named, too
        path = write_run(tmp_path, "rope", seed, variants=("yarn",), finished=is_finished) / "config.yaml"
        evil_name = f"name: {json.dumps(EVIL)}"
        path.write_text(path.read_text().replace("name: rope\n", f"{evil_name}\n").replace("name: code", evil_name))
    runs = frame.load(tmp_path)
    text = page.html(runs)
    assert "<script" not in text
    assert "alert(1)" in text
    assert "7 * 7" in text
    for line in page.markdown(runs).splitlines():
        assert "<script" not in line.replace("\\<", "")


def test_other_training_lengths_stand_together_if_their_texts_are_the_same(tmp_path):
    write_run(tmp_path, "rope", name="short")
    long = write_run(tmp_path, "rope", name="long", config={"train_len": 512})
    write_run(tmp_path, "rope", name="other", config={"train_len": 1024}, finished=False)
    (file,) = long.glob("evals/*.json")
    with edited(file) as values:
        values["train_len"] = 512
    runs = frame.load(tmp_path)
    assert page.titles(runs) == ["code, trained at 256 and 512 tokens", "code, trained at 1,024 tokens"]
    table = over_seeds(results(runs))
    assert set(zip(table.line, table.train_len, table.cut, strict=True)) == {
        ("rope (train_len 256)", 256, 256),
        ("rope (train_len 512)", 512, 512),
    }
    assert table.difference.notna().sum() == 5
    overview = page.grids(table[table.section == page.titles(runs)[0]])[0]
    assert "train_len" in overview.cells
    page.html(runs)
