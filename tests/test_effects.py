"""Effects between lines of a table, against scipy."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from docs import effects
from ropewalk.evaluation.statistics import Sample


def runs(**losses):
    """Runs on four texts of 10 tokens, which differ alike in every line; `losses`: of each seed, by line."""
    of_texts = np.array([1.0, -2.0, 0.5, 0.5])
    rows = []
    for line, of_seeds in losses.items():
        for seed, loss in of_seeds.items():
            sample = Sample((10 * loss + of_texts)[None], np.full(4, 10.0))
            rows.append({"line": line, "seed": seed, "length": 64, "train_len": 64, "sample": sample})
    about = {"kind": "lengths", "quantity": "loss", "unit": "bits per token", "eval": "usual", "texts": 4}
    results = pd.DataFrame(rows).assign(**about)
    return SimpleNamespace(results=results)


def test_an_effect_is_a_weighted_sum_over_the_seeds_that_all_lines_have():
    measured = runs(
        a={0: 3.0, 1: 3.2, 2: 3.1, 3: 9.0},
        b={0: 2.0, 1: 2.6, 2: 2.3},
        c={0: 1.0, 1: 1.0, 2: 1.1},
    )
    weights = {"a": 1, "b": -2, "c": 1}
    e = effects.effect(measured, 64, weights)
    by_seed = np.array([3.0 - 4.0 + 1.0, 3.2 - 5.2 + 1.0, 3.1 - 4.6 + 1.1])
    expected = stats.ttest_1samp(by_seed, 0)

    assert (e.seeds, e.value) == (3, pytest.approx(by_seed.mean()))
    assert e.half == pytest.approx(np.ptp(expected.confidence_interval(0.95)) / 2)
    assert effects.p_value(e) == pytest.approx(expected.pvalue)

    pair = {"a": 1, "c": -1}
    listed = [effects.Effect("effect", 1, weights), effects.Effect("smaller", 1, pair)]
    of_one, of_other = measured, runs(a={0: 3.0}, b={0: 2.0}, c={0: 1.0})
    *_, smaller, _, untested = effects.rows(listed, {"here": of_one, "there": of_other})
    p_values = [effects.p_value(effects.effect(measured, 64, terms)) for terms in (weights, pair)]

    assert smaller.startswith("| smaller, here | 64 tokens | 3 | +2.067 ± ")
    # The smallest of four, two of which have no test, counts four times.
    assert smaller.endswith(f"| {min(4 * min(p_values), 1):.3f} |")
    assert untested == "| smaller, there | 64 tokens | 1 | +2.000 ± 0.000 |  |"


def test_lines_are_compared_on_the_same_texts():
    measured = runs(a={0: 3.0}, b={0: 2.0})
    other = runs(a={0: 7.0}, c={0: 1.0}).results.assign(eval="other")
    measured.results = pd.concat([measured.results, other], ignore_index=True)

    assert effects.effect(measured, 64, {"a": 1, "b": -1}).value == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no seed has all of b, c at 64 tokens"):
        effects.effect(measured, 64, {"b": 1, "c": -1})


def test_lines_of_several_training_lengths_have_no_common_multiple():
    measured = runs(a={0: 3.0}, b={0: 2.0})
    measured.results.loc[0, "train_len"] = 32

    with pytest.raises(ValueError, match="unpack"):
        effects.rows([effects.Effect("effect", 1, {"a": 1, "b": -1})], {"": measured})


def test_effects_of_a_design_are_differences_of_means():
    factors = {"length": (128, 32), "norm": ("false", "true"), "heads": ("four", "one")}
    designed = effects.factorial("length-{length}-norm-{norm}-heads-{heads}", factors)
    lines = list(designed["length"])
    losses = dict(zip(lines, np.random.default_rng(0).normal(size=8), strict=True))
    measured = runs(**{line: {0: loss} for line, loss in losses.items()})

    def mean(*words):
        chosen = [loss for line, loss in losses.items() if all(word in line for word in words)]
        assert len(chosen) == 8 / 2 ** len(words)
        return np.mean(chosen)

    def of(name):
        return effects.effect(measured, 64, designed[name]).value

    assert of("norm") == pytest.approx(mean("true") - mean("false"))
    assert of("length") == pytest.approx(mean("-32-") - mean("-128-"))
    with_one = mean("-32-", "-one") - mean("-128-", "-one")
    with_four = mean("-32-", "-four") - mean("-128-", "-four")
    assert of("length x heads") == pytest.approx(with_one - with_four)


def test_a_section_may_name_lines_and_effects_above():
    terms = {"up": {"a": 1, "b": -1}, "more": {"at": [8], "up": 2, "a": -1, "c": -1}}
    found = effects.effects_of({"at": [1, 8], "effects": terms})

    assert [(effect.name, effect.times) for effect in found] == [("up", 1), ("up", 8), ("more", 8)]
    assert found[-1].weights == {"a": 1, "b": -2, "c": -1}
