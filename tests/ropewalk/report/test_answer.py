"""No answer says two things that exclude each other, in tables of simulated and of scrambled numbers."""

import math
import re

import numpy as np
import pytest
from synthetic import TEXTS, edited, write_run, write_runs

import ropewalk
from ropewalk.report.answer import answer
from ropewalk.report.table import over_seeds, verdict

SAID = {
    "better": "it gains",
    "level": "it is level with",
    "worse": "it is worse than",
    "undecided": "whether it is better than",
}
COUNTED = {
    "better": r"(\d+) gains?\b",
    "level": r"(\d+) (?:is|are) level\b",
    "worse": r"(\d+) (?:is|are) worse\b",
    "undecided": r"(\d+) (?:is|are) undecided\b",
}
# Encodings, and by what their weights are read too.
RUNS = [
    (["fox"], []),
    (["alibi", "rope"], ["rerope"]),
    (["rope", "fox", "cope", "alibi", "nope"], ["yarn"]),  # which gain, stay level and fail
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    measured = []
    for n_seeds, (encodings, variants) in enumerate(RUNS, start=1):
        folder = tmp_path_factory.mktemp("runs")
        write_runs(
            folder,
            *encodings,
            seeds=range(n_seeds),
            variants=variants,
            noise=0.01,
            falls=0.06,
        )
        measured.append(ropewalk.runs(folder))
    return measured


def scrambled(table, rng):
    """The table with numbers that have nothing to do with each other, as no measurement would have."""
    n = len(table)
    table = table.assign(tied=rng.random(n) < 0.5)
    for name in ("gain", "lead", "share"):
        three = rng.normal(0, 0.05, (n, 3))
        table[[f"{name}_low", name, f"{name}_high"]] = np.sort(three, axis=1)
    intervals = zip(table.gain_low, table.gain_high, strict=True)
    table["verdict"] = [verdict(low, high, 0.02) for low, high in intervals]
    table["value"] = table.value.mask(rng.random(n) < 0.1)  # it diverged
    return table


@pytest.mark.parametrize("number", range(60))
def test_no_answer_contradicts_itself_or_the_table(tables, number):
    table = tables[number % 3]
    if number >= 3:
        table = scrambled(table, np.random.default_rng(number))
    sentences = answer(table)
    text = " ".join(sentences)
    assert 1 <= len(sentences) <= 4
    assert not re.search(r"\b(nan|inf)\b|-0\.000(?! ±)", text)
    assert sentences == answer(table.sample(frac=1, random_state=number)), "the order of rows decides"

    # The first sentence has one of the words, that of the table.
    rows = over_seeds(table)
    lines = rows.query("line != 'best possible'")
    finite = lines.dropna(subset="value")
    last = finite.query("length == length.max()").sort_values("rank")
    first, *others = last.itertuples()
    shown = [f"{row.value:.3f}" for row in last.itertuples()]
    has_rivals = any(other.tied for other in others) or shown.count(shown[0]) > 1
    said = [word for word, words in SAID.items() if words in sentences[0]]
    assert said == [first.verdict]
    assert ("not significant" in text) == has_rivals
    assert ("is best" in text) == (others != [] and not has_rivals)
    is_behind = first.line != first.reference and first.lead_high < 0
    assert (f"{first.reference} is still better" in text) == (is_behind and first.verdict != "worse")

    # Every line has one word, and none is left out without a word.
    if others:
        sentence = sentences[1].replace(" all ", f" {len(last)} ")
        for word, pattern in COUNTED.items():
            counts = map(int, re.findall(pattern, sentence))
            assert sum(counts) == (last.verdict == word).sum(), word
    assert ("not compared" in text) == (set(lines.line) > set(last.line))
    assert ("another training may differ" in text) == (last.seeds.max() == 1)

    # A share is said of a gain alone, where there is something to gain.
    (possible,) = rows.query("line == 'best possible' and length == @first.length").verdict
    assert ("% of that" in text) == (possible == first.verdict == "better")


@pytest.mark.parametrize("number", range(25))
def test_no_answer_of_a_task_contradicts_its_table(tmp_path, number):
    """With few values, so that many are equal."""
    rng = np.random.default_rng(number)
    values = rng.choice([0, 3, 40, 100], size=rng.integers(1, 4), replace=False)
    for pe in ["rope", "fox", "cope"][: rng.integers(1, 4)]:
        for seed in range(rng.integers(1, 4)):
            settings = {"texts": "others"} if pe == "cope" and rng.random() < 0.3 else {}
            with edited(write_run(tmp_path, pe, seed, task="recall", settings=settings)) as run:
                for part in run["measured"]:
                    part["tokens"] = [100] * TEXTS
                    part["errors"] = rng.choice(values, size=TEXTS).tolist()
    table = ropewalk.runs(tmp_path)
    first, *others = answer(table)
    text = " ".join([first, *others])
    (part,) = re.findall("in (dense|sparse), the difficulty", first)
    everyone = over_seeds(table).query("part == @part and length == length.max()")
    last = everyone[everyone["eval"] == everyone.groupby("eval").line.nunique().idxmax()].sort_values("rank")
    shown = last.value.round(1)
    assert ("none is best" in first) == (len(last) > 1 and shown.nunique() == 1)
    if "is best" in first and "none" not in first:
        (name,) = re.findall(r", (\S+) is best", first)
        assert shown.iloc[0] < shown.iloc[1:].min()
        assert (last.line.iloc[0], last.tied.any()) == (name, False)
    if "not significant" in first:
        assert set(re.findall("rope|fox|cope", first)) > {last.line.iloc[0]}
    assert f"{shown.iloc[0]:.1f}" in first
    assert ("not compared" in text) == (everyone.line.nunique() > len(last))


def test_a_line_alone_has_a_verdict_at_each_longer_length(tables):
    rows = over_seeds(tables[0]).query("line == 'fox' and length > 256")
    _, by_length, *_ = answer(rows.assign(verdict=["level", "undecided", "level"]))
    assert by_length == "It is level at 512, 2,048; undecided at 1,024 tokens."


def test_lines_that_were_not_measured_on_the_cut_text_have_no_verdict(tmp_path):
    for pe in ("rope", "alibi"):
        with edited(write_run(tmp_path, pe)) as run:
            run["measured"] = run["measured"][-1:]
    text = " ".join(answer(ropewalk.runs(tmp_path)))
    assert "on the cut text it was not measured" in text
    assert "undecided" not in text


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.03, 0.05, "better"),
        (0.001, 0.019, "level"),
        (-0.05, -0.03, "worse"),
        (-0.01, 0.03, "undecided"),
        (0.0004, 0.03, "undecided"),
        (-0.03, -0.0004, "undecided"),
        (math.nan, math.nan, "undecided"),
        (-0.019, 0.019, "level"),
        (0.001, 0.021, "better"),
        (-0.021, -0.001, "worse"),
    ],
)
def test_the_word_follows_from_the_interval_of_the_gain(low, high, word):
    assert verdict(low, high, 0.02) == word
