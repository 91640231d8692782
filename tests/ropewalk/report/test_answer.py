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
    "undecided": "is undecided",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Long tables: of one line, of two, and of many that gain, stay level and fail."""
    tables = []
    for lines in (["fox"], ["alibi", "rope"], ["rope", "fox", "cope", "alibi", "nope"]):
        folder = tmp_path_factory.mktemp("runs")
        for seed, pe in enumerate(lines * 2):
            write_run(folder, pe, seed // len(lines), noise=0.01, variants=("yarn", "rerope") if pe == "rope" else ())
        tables.append(results(load(folder)))
    return tables


def scrambled(table, rng):
    """The table with numbers that have nothing to do with each other, as no measurement would have."""
    numbers = {"tied": rng.random(len(table)) < 0.5}
    for name in ("gain", "lead", "share"):
        value = rng.normal(0, 0.05, len(table))
        half = np.abs(rng.normal(0, 0.05, len(table)))
        numbers |= {name: value, f"{name}_low": value - half, f"{name}_high": value + half}
    words = [verdict(low, high, 0.02) for low, high in zip(numbers["gain_low"], numbers["gain_high"], strict=True)]
    table = table.assign(**numbers, verdict=words)
    table.loc[rng.random(len(table)) < 0.1, ["value", "low", "high"]] = math.nan  # diverged
    return table


@pytest.mark.parametrize("number", range(60))
def test_no_answer_contradicts_itself_or_the_table(measured, number):
    rng = np.random.default_rng(number)
    table = measured[number % 3]
    if number >= 3:
        table = scrambled(table, rng)
    sentences = answer(table)
    text = " ".join(sentences)
    assert 1 <= len(sentences) <= 4
    assert not re.search(r"\b(nan|inf)\b|-0\.000(?! ±)", text)
    assert sentences == answer(table.sample(frac=1, random_state=number)), "the order of rows decides"

    rows = over_seeds(table)
    finite = rows[rows.value.notna() & (rows.line != BEST_POSSIBLE)]
    finite = finite[finite.length == finite.length.max()].sort_values("rank")
    if finite.empty or finite.length.iloc[0] < max(LENGTHS):
        return
    # The first sentence has one of the words, that of the table.
    first = finite.iloc[0]
    assert [word for word, words in SAID.items() if words in sentences[0]] == [first.verdict]
    rivals = finite[finite.tied.eq(True) & (finite.line != first.line)]
    assert ("is best" in text) == (len(finite) > 1 and rivals.empty) == (len(finite) > 1 and "told apart" not in text)

    # Nothing gains whose interval has 0, every line has one word, and none is left out without a word.
    assert ("it gains" in text) <= (first.gain_low > 0)
    if len(finite) > 1:
        found = re.findall(r"(\d+) (?:is |are )?(gains?|level|worse|undecided)\b", sentences[1])
        assert sum(int(n) for n, _ in found) == len(finite)
        n_gaining = sum(int(n) for n, word in found if word.startswith("gain"))
        assert n_gaining == (finite.verdict == "better").sum() <= (finite.gain_low > 0).sum()
    assert ("level or better at each" in text) <= (first.verdict in ("better", "level"))
    others = set(rows[(rows.measure == "lengths") & (rows.line != BEST_POSSIBLE)].line) - set(finite.line)
    assert ("not compared" in text) == bool(others)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.03, 0.05, "better"), (0.001, 0.019, "level"), (-0.05, -0.03, "worse"), (-0.01, 0.03, "undecided"),
        (0.0004, 0.03, "undecided"), (-0.03, -0.0004, "undecided"), (math.nan, math.nan, "undecided"),
        (-0.019, 0.019, "level"), (0.001, 0.021, "better"), (-0.021, -0.001, "worse"),
    ],
)  # fmt: skip
def test_each_word_has_one_rule(low, high, word):
    assert verdict(low, high, 0.02) == word
