"""Intervals, paired differences, safe and useful lengths: on drawn runs whose truth is known, and by hand."""

import numpy as np
import pytest
from scipy import stats

from evaluation.statistics import Sample, difference, estimate, safe_length, useful_length

SETS, TEXTS = 200, 64


def draw(rng, seeds: int, effect: float, between_seeds: float) -> tuple[Sample, Sample, float]:
    """Two encodings, and their difference in truth: of each text (std 1), of each seed (`between_seeds` standard errors
    of the texts' mean) and of noise (std 0.4 each). What both share is ten times as large. Texts differ in size."""
    units = rng.integers(50, 150, TEXTS)
    error = 1 / np.sqrt(TEXTS)  # of the mean difference, from the texts
    shared = rng.normal(0, 10, (seeds, 1)) + rng.normal(0, 10, (1, TEXTS))
    a, b = (shared + rng.normal(0, 0.4, (seeds, TEXTS)) for _ in range(2))
    of_seeds = rng.normal(0, between_seeds * error, (seeds, 1))
    a = a + effect + of_seeds + rng.normal(0, 1, (1, TEXTS))
    truth = effect + (of_seeds.item() if seeds == 1 else 0.0)  # one seed is not compared with other seeds
    return Sample(a * units, units), Sample(b * units, units), truth


@pytest.mark.parametrize("seeds", [1, 3, 10])
@pytest.mark.parametrize("between_seeds", [0.0, 1.0, 4.0], ids=["seeds agree", "as texts", "seeds disagree"])
def test_drawn_sets_of_runs(seeds, between_seeds):
    """Equal encodings are not called separated, and intervals cover the truth as often as they say."""
    rng = np.random.default_rng([7, seeds, int(between_seeds)])
    found = [(*draw(rng, seeds, 0.0, between_seeds if seeds > 1 else 0.0),) for _ in range(SETS)]
    assert np.mean([difference(a, b).separated for a, b, _ in found]) <= 0.08
    covered = []
    for effect in (0.0, 1.5):
        for _ in range(SETS):
            a, b, truth = draw(rng, seeds, effect, between_seeds)
            d = difference(a, b)
            covered.append(d.low <= truth <= d.high)
    assert 0.92 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("seeds", [3, 10])
def test_differences_of_four_paired_standard_errors_are_found(seeds):
    """The noise that both encodings share is ten times as large and hides the difference of an unpaired comparison."""
    rng, sizes = np.random.default_rng(seeds), np.arange(50, 150)
    error = np.sqrt((1 + 2 * 0.4**2 / seeds) / TEXTS * (sizes**2).mean()) / sizes.mean()
    drawn = [draw(rng, seeds, 4 * error, 0.0)[:2] for _ in range(SETS)]
    assert np.mean([difference(a, b).low > 0 for a, b in drawn]) >= 0.95
    unpaired = [estimate(a).low > estimate(b).high for a, b in drawn]
    assert np.mean(unpaired) < 0.05


def test_one_seed_is_the_t_interval_over_texts():
    values = np.random.default_rng(0).normal(2, 1, (1, 30))
    found = estimate(Sample(values, np.ones(30)))
    low, high = stats.t.interval(0.95, 29, values.mean(), stats.sem(values[0]))
    assert found == pytest.approx((values.mean(), low, high, np.nan, 1, 30), nan_ok=True)


def constant(*means: float, noise: float = 0.0) -> Sample:
    rng = np.random.default_rng(1)
    return Sample(np.array(means)[:, None] + noise * rng.normal(size=(len(means), 40)), np.ones(40))


def test_seeds_that_disagree_have_the_t_interval_over_seeds():
    """Where texts do not matter, three runs are three numbers."""
    means = 2.0, 2.1, 2.4
    found = estimate(constant(*means, noise=1e-4))
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 2, 6.5 / 3, stats.sem(means)), rel=0.02)
    assert found.std == pytest.approx(np.std(means, ddof=1), rel=1e-3)


def test_differences_are_paired_by_seed_and_text():
    text = np.random.default_rng(2).normal(0, 0.5, 40)  # shared by both
    a, b = (Sample(s.values + text, s.units) for s in (constant(2.05, 2.15, 2.25), constant(2.0, 2.1, 2.2)))
    assert difference(a, b).low == pytest.approx(0.05)  # worse in every seed, though their ranges overlap
    assert not difference(a, a).separated
    assert difference(constant(*[2.5] * 9, 2.05), constant(*[2.0] * 10)).separated  # though one seed comes near
    with pytest.raises(ValueError, match="same seeds and texts"):
        difference(constant(1.99), constant(2.0, 2.1, 2.2))
    with pytest.raises(ValueError, match="same seeds and texts"):
        difference(Sample(np.ones((1, 2)), np.array([1, 2])), Sample(np.ones((1, 2)), np.array([2, 1])))


def test_the_mean_is_the_ratio_of_sums():
    sample = Sample(np.array([[10.0, 30.0]]), np.array([10, 10_000]))
    assert estimate(sample).value == pytest.approx(40 / 10_010)
    assert np.isnan(estimate(Sample(np.ones((1, 1)), np.ones(1))).low)
    assert not estimate(Sample(np.ones((1, 1)), np.ones(1))).separated
    sparse = Sample(np.array([[3.0, 5.0, 0.0, 0.0]]), np.array([1, 1, 0, 0]))  # as of far copies, which most texts lack
    assert estimate(sparse) == pytest.approx(estimate(Sample(np.array([[3.0, 5.0]]), np.ones(2))), nan_ok=True)
    with pytest.raises(ValueError, match="nothing was scored"):
        estimate(Sample(np.zeros((1, 3)), np.zeros(3)))


@pytest.mark.parametrize(
    ("own", "safe", "useful"),
    [
        ({64: 2.1, 128: 2.0, 256: 2.01, 512: 2.5}, 256, 128),
        ({64: 2.1, 128: 2.0, 256: 1.9, 512: 1.8}, 512, 512),
        ({64: 2.1, 128: 2.0, 256: 2.5, 512: 1.9}, 128, 128),  # shorter ones must hold too
        ({64: 2.0, 128: 2.0, 256: 2.02, 512: 2.0200001}, 256, 64),
        ({64: 2.3, 128: 2.2, 256: 2.2, 512: 2.2}, 0, 128),  # worse than cutting everywhere
        ({64: 2.1, 128: 2.0, 256: np.nan}, 128, 128),
    ],
)
def test_safe_and_useful_length(own, safe, useful):
    measured, cut = ({n: constant(bits) for n, bits in of.items()} for of in (own, {64: 2.1, 128: 2.0}))
    assert safe_length(measured, cut, 128, 0.02 + 1e-9) == safe
    assert useful_length(measured) == useful
    assert safe_length(measured, {64: cut[64]}, 128, 0.02) is None  # nothing to compare with


def test_a_gain_within_its_interval_is_not_useful():
    noisy = constant(2.1, noise=1.0)
    better = Sample(noisy.values - 0.01 * np.random.default_rng(9).normal(0.1, 5, 40), noisy.units)
    assert useful_length({64: noisy, 128: better}) == 64
