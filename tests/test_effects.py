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
    results = pd.DataFrame(rows).assign(kind="lengths", quantity="loss", unit="bits per token")
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

    *_, row = effects.rows(measured, {"effect": (1, weights), "smaller": (1, {"a": 1, "c": -1})})

    assert row.startswith("| smaller | 64 tokens | 3 | +2.067 ± ")


def test_lines_of_several_training_lengths_have_no_common_multiple():
    measured = runs(a={0: 3.0}, b={0: 2.0})
    measured.results.loc[0, "train_len"] = 32

    with pytest.raises(ValueError, match="unpack"):
        effects.rows(measured, {"effect": (1, {"a": 1, "b": -1})})


def test_effects_of_features_are_differences_of_means():
    _, weights = effects.of_features()["length"]
    noise = np.random.default_rng(0).normal(size=len(weights))
    losses = dict(zip(weights, noise, strict=True))
    measured = runs(**{line: {0: loss} for line, loss in losses.items()})
    for feature, word in (("length", "-32-"), ("norm", "true"), ("heads", "heads-one-"), ("window", "quarter")):
        _, weights = effects.of_features()[feature]
        with_it = np.mean([loss for line, loss in losses.items() if word in line])
        without = np.mean([loss for line, loss in losses.items() if word not in line])

        effect = effects.effect(measured, 64, weights)

        assert effect.value == pytest.approx(with_it - without), feature
