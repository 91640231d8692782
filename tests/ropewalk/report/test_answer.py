"""No answer says two things that exclude each other, in tables of simulated and of scrambled numbers."""

import math
import re

import numpy as np
import pytest
from synthetic import LENGTHS, write_run

from ropewalk.report.answer import answer
from ropewalk.report.frame import load
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results, verdict

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
LINES = [
    ["fox"],
    ["alibi", "rope"],
    ["rope", "fox", "cope", "alibi", "nope"],  # which gain, stay level and fail
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    measured = []
    for number, lines in enumerate(LINES):
        folder = tmp_path_factory.mktemp("runs")
        for seed in range(number + 1):
            for pe in lines:
                variants = ["yarn", "rerope"] if pe == "rope" else []
                write_run(folder, pe, seed, noise=0.01, variants=variants, falls=0.06)
        measured.append(results(load(folder)))
    return measured


def scrambled(table, rng):
    """The table with numbers that have nothing to do with each other, as no measurement would have."""
    n = len(table)
    table = table.assign(tied=rng.random(n) < 0.5)
    for name in ("gain", "lead", "share"):
        table[name] = rng.normal(0, 0.05, n)
        half = rng.exponential(0.05, n)
        table[f"{name}_low"] = table[name] - half
        table[f"{name}_high"] = table[name] + half
    intervals = zip(table.gain_low, table.gain_high, strict=True)
    table["verdict"] = [verdict(low, high, 0.02) for low, high in intervals]
    table.loc[rng.random(n) < 0.1, ["value", "low", "high"]] = math.nan
    return table


@pytest.mark.parametrize("number", range(60))
def test_no_answer_contradicts_itself_or_the_table(tables, number):
    rng = np.random.default_rng(number)
    table = tables[number % 3]
    if number >= 3:
        table = scrambled(table, rng)
    sentences = answer(table)
    text = " ".join(sentences)
    assert 1 <= len(sentences) <= 4
    assert not re.search(r"\b(nan|inf)\b|-0\.000(?! ±)", text)
    assert sentences == answer(table.sample(frac=1, random_state=number)), "the order of rows decides"

    rows = over_seeds(table)
    lines = rows[rows.line != BEST_POSSIBLE]
    last = lines[lines.value.notna() & (lines.length == max(LENGTHS))].sort_values("rank")
    if last.empty:
        return
    # The first sentence has one of the words, that of the table.
    first = last.iloc[0]
    said = [word for word, words in SAID.items() if words in sentences[0]]
    assert said == [first.verdict]
    rivals = last[last.tied.eq(True) & (last.line != first.line)]
    assert ("told apart" in text) == (len(rivals) > 0)
    assert ("is best" in text) == (len(last) > 1 and rivals.empty)
    worse_there = first.line != first.reference and first.lead_high < 0
    assert (f"{first.reference} is still better" in text) == (worse_there and first.verdict != "worse")

    # Every line has one word, and none is left out without a word.
    if len(last) > 1:
        sentence = re.sub("both|all", str(len(last)), sentences[1])
        counts = {word: sum(map(int, re.findall(pattern, sentence))) for word, pattern in COUNTED.items()}
        assert counts == {word: (last.verdict == word).sum() for word in COUNTED}
    assert ("not compared" in text) == (set(lines.line) > set(last.line))
    assert ("another training may differ" in text) == (last.seeds.max() == 1)

    # A share is said of a gain alone, where there is something to gain.
    best = rows[(rows.line == BEST_POSSIBLE) & (rows.length == max(LENGTHS))].iloc[0]
    assert ("% of that" in text) == (best.verdict == first.verdict == "better")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["level", "better", "level"], "level or better at each of 3 lengths beyond 256 tokens."),
        (["level", "undecided", "better"], "level or better up to 512 tokens; at 1,024 it is undecided"),
        (["worse", "better", "level"], "Already at 512 tokens, the first length beyond 256, it is worse"),
    ],
)
def test_how_far_a_line_alone_goes(tables, verdicts, expected):
    rows = over_seeds(tables[0])
    longer = rows[(rows.line == "fox") & (rows.length > 256)]
    assert expected in answer(longer.assign(verdict=verdicts))[1]


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
def test_each_word_has_one_rule(low, high, word):
    assert verdict(low, high, 0.02) == word
