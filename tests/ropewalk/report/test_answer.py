"""No answer says two things that exclude each other, in simulated tables and in tables of random numbers."""

import math
import re

import numpy as np
import pandas as pd
import pytest

from ropewalk.evaluation.statistics import Sample
from ropewalk.report.answer import amount, answer, listed
from ropewalk.report.frame import PROVENANCE, Runs
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results, verdict

NAMES = ("rope", "fox", "kerple", "alibi (slope 2)", "rope read as yarn at scale 8", "a <b>&", "x, y and z")
LENGTHS = (32, 64, 96, 128, 512)
TRAIN_LEN = 64
SAID = {
    "better": "it gains",
    "level": "it is level with",
    "worse": "it is worse than",
    "undecided": "is undecided",
}


def simulated(rng):
    """Runs on texts, where each line has a true gain; some are level, some fail, some are noise."""
    n_texts = rng.integers(2, 40)
    texts = rng.normal(2, rng.uniform(0, 0.5), n_texts)
    units = np.full(n_texts, 10)
    has_optimum = rng.random() < 0.5
    n_seeds = rng.integers(1, 4)
    rows = []
    for line in rng.permutation(NAMES)[: rng.integers(1, len(NAMES) + 1)]:
        level = rng.normal(0, 0.2)
        slope = rng.choice([0.0, 0.001, 0.01, 0.1, -0.01, -0.1, -2.0])
        noise = rng.choice([0.0, 0.01, 0.1, 1.0])
        for seed in range(n_seeds if rng.random() < 0.8 else 1):
            of_seed = rng.normal(0, noise / 3)
            for length in LENGTHS:
                gain = slope * max(0, math.log2(length / TRAIN_LEN)) + 0.1 * math.log2(min(length, TRAIN_LEN))
                bits = 10 * (texts + level + of_seed - gain + rng.normal(0, noise, n_texts))
                if rng.random() < 0.01:
                    bits = np.full(n_texts, np.nan)
                best = Sample(10 * (texts - 1 - 0.05 * math.log2(length))[None], units) if has_optimum else None
                samples = {"sample": Sample(bits[None], units), "optimum_sample": best}
                rows.append(row_of(line, seed, length, n_texts) | samples)
    frame = pd.DataFrame(rows)
    runs = frame.drop_duplicates("path").set_index("path")[["name", "group", "label", "settings"]]
    runs[["parameters", "tokens_per_s", "peak_memory_mb"]] = math.nan
    configs = {path: {"train_len": TRAIN_LEN, "data.name": "d", "eval.tolerance": 0.02} for path in runs.index}
    return results(Runs(runs, frame, configs, []))


def row_of(line, seed, length, texts):
    is_read = " read as " in line
    group = "rope" if is_read else line
    of_part = {"part": "text", "task": "text", "difficulty": "", "depth": math.nan, "continuation": ""}
    of_part |= {"span_start": math.nan, "span_end": math.nan}
    of_run = {"path": f"{line}-s{seed}", "name": f"{line}-s{seed}", "group": group, "label": group, "settings": ""}
    of_line = {"line": line, "encoding": line.split()[-1], "variant": line, "scale": 1.0, "zero_shot": is_read}
    of_measure = {"kind": "lengths", "quantity": "loss", "unit": "bits per byte", "eval": "{}", "section": "d"}
    of_row = {"seed": seed, "length": length, "texts": texts, "train_len": TRAIN_LEN, "step": 9}
    return of_part | of_run | of_line | of_measure | of_row | dict.fromkeys(PROVENANCE, "")


def scrambled(rng):
    """A table whose numbers have nothing to do with each other, as no measurement would be."""
    table = simulated(rng)
    value = rng.normal(0, 0.05, len(table))
    half = np.abs(rng.normal(0, 0.05, len(table)))
    table["gain"] = value
    table["gain_low"] = value - half
    table["gain_high"] = value + half
    ends = zip(table.gain_low, table.gain_high, strict=True)
    table["verdict"] = [verdict(low, high, 0.02) for low, high in ends]
    table["tied"] = rng.random(len(table)) < 0.5
    table["share"] = rng.normal(0, 1, len(table))
    return table


@pytest.mark.parametrize("make", [simulated, scrambled])
@pytest.mark.parametrize("number", range(100))
def test_no_answer_contradicts_itself_or_the_table(make, number):
    table = make(np.random.default_rng(number))
    sentences = answer(table)
    text = " ".join(sentences)
    assert 1 <= len(sentences) <= 4
    assert not re.search(r"\b(nan|inf)\b|-0\.000(?! ±)", text)
    assert sentences == answer(table.sample(frac=1, random_state=number)), "the order of rows decides"

    rows = over_seeds(table)
    rows = rows[(rows.length == max(LENGTHS)) & (rows.line != BEST_POSSIBLE)]
    finite = rows[rows.value.map(math.isfinite)].sort_values("rank")
    if finite.empty:
        return
    first = finite.iloc[0]
    # The first sentence has at most one of the words, that of the table.
    said = [word for word, words in SAID.items() if words in sentences[0]]
    assert said == ([] if math.isnan(first.gain) else [first.verdict])
    rivals = finite[finite.tied.eq(True) & (finite.line != first.line)]
    assert ("is best" in sentences[0]) == (len(finite) > 1 and rivals.empty)
    assert not ("is best" in sentences[0] and "not told apart" in text)

    # Nothing gains whose interval has 0, and every line has one word.
    gaining = finite[finite.gain_low.round(3) > 0]
    if "it gains" in text:
        assert first.line in set(gaining.line)
    if len(finite) > 1 and finite.verdict.notna().all():
        found = re.findall(r"(\d+) (?:is |are )?(gains?|level|worse|undecided)\b", sentences[1])
        assert sum(int(n) for n, _ in found) == len(finite)
        n_gaining = sum(int(n) for n, word in found if word.startswith("gain"))
        assert n_gaining == (finite.verdict == "better").sum() <= len(gaining)
    # A share of what is possible only for a line that gains, and no advice against what was said.
    assert "it gains" in sentences[0] or "possible predictor" not in text
    if "level or better at" in text:
        assert said in (["better"], ["level"])
        assert "Cut the text" not in text


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


def test_numbers_and_names_in_words():
    assert amount(-0.0001, -0.0002, 0.0, "+") == "+0.000 ± 0.000"
    assert amount(math.nan) == ""
    assert amount(2.0, math.nan, math.nan) == "2.000"
    assert [listed(["a", "b", "c", "d"][:n]) for n in (1, 2, 3, 4)] == [
        "a",
        "a and b",
        "a, b and c",
        "a, b, c and 1 more",
    ]
