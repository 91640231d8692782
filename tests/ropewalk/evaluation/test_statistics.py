"""Intervals, paired differences, corrections: on drawn runs whose truth is known, and by hand."""

import itertools

import numpy as np
import pytest
from scipy import stats

from ropewalk.evaluation.statistics import (
    Estimate,
    Sample,
    at_level,
    by_document,
    difference,
    estimate,
    holm,
    over_seeds,
    p_value,
    share,
    tied,
    upper_bound,
)

SETS = 200  # of runs that a test draws


def draw_two(rng, seeds, effect, between_seeds):
    """Two encodings, and their difference in truth.

    It is one of each text (std 1), of each seed (`between_seeds` standard errors of the texts' mean) and of noise (std
    0.4 each). What both share is ten times as large. Texts differ in size.
    """
    units = rng.integers(50, 150, 64)
    shared = rng.normal(0, 10, (seeds, 1)) + rng.normal(0, 10, (1, 64))
    a = shared + rng.normal(0, 0.4, (seeds, 64))
    b = shared + rng.normal(0, 0.4, (seeds, 64))

    of_seeds = rng.normal(0, between_seeds / np.sqrt(64), (seeds, 1))
    a += effect + of_seeds + rng.normal(0, 1, (1, 64))
    truth = effect + (of_seeds.item() if seeds == 1 else 0)  # one seed is not compared with other seeds
    return Sample(a * units, units), Sample(b * units, units), truth


@pytest.mark.parametrize("seeds", [1, 3, 10])
@pytest.mark.parametrize("between_seeds", [0.0, 1.0, 4.0], ids=["seeds agree", "as texts", "seeds disagree"])
def test_intervals_cover_the_truth_as_often_as_they_say(seeds, between_seeds):
    rng = np.random.default_rng([7, seeds, int(between_seeds)])
    covered = []
    halves = []
    for _ in range(2 * SETS):
        a, b, truth = draw_two(rng, seeds, 1.5, between_seeds)
        interval = difference(a, b)
        covered.append(interval.low <= truth <= interval.high)
        halves.append((interval.half, estimate(a).half))
    paired, alone = np.mean(halves, axis=0)
    assert paired < alone / 3  # what both share cancels
    assert 0.92 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("seeds", [3, 5])
def test_corrected_intervals_leave_the_truth_out_as_rarely_as_they_say(seeds):
    """Of differences as were measured between texts, seeds and within texts. An interval at 0.05 stays as it is."""
    rng = np.random.default_rng(1)
    draws = 2000
    estimates = []
    for _ in range(draws):
        values = 0.015 * rng.standard_normal((seeds, 1)) + 0.09 * rng.standard_normal(128)
        values = values + 0.145 * rng.standard_normal((seeds, 128))
        estimates.append(estimate(Sample(values, np.ones(128))))
    for level in (0.012, 0.0053, 0.0013):  # of the second, third and sixth try of a folder
        separated = sum(at_level(e, level).separated for e in estimates)
        assert separated <= draws * level + 2 * np.sqrt(draws * level)
    assert at_level(estimates[0], 0.05) == pytest.approx(estimates[0], nan_ok=True)


def test_one_seed_is_the_t_interval_over_texts():
    values = np.random.default_rng(0).normal(2, 1, 30)
    of_texts = estimate(Sample(values[None], np.ones(30)))
    mean = values.mean()
    error = stats.sem(values)
    low, high = stats.t.interval(0.95, 29, mean, error)
    assert of_texts == pytest.approx((mean, low, high, np.nan, 1, 30, error, 29), nan_ok=True)
    assert p_value(of_texts) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert upper_bound(of_texts) == pytest.approx(stats.t.interval(0.90, 29, mean, error)[1])

    corrected = at_level(of_texts, 0.001)
    assert (corrected.low, corrected.high) == pytest.approx(stats.t.interval(0.999, 29, mean, error))


def constant(*means, noise=0.0):
    """A sample of 40 texts, with a seed for each mean."""
    of_texts = np.random.default_rng(1).normal(size=(len(means), 40))
    return Sample(np.array(means)[:, None] + noise * of_texts, np.ones(40))


def test_numbers_of_seeds_have_the_t_interval():
    """So has a measure of which all texts say the same."""
    values = np.array([2.0, 2.1, 2.4, 1.9])
    of_seeds = over_seeds(values)
    assert (of_seeds.low, of_seeds.high) == pytest.approx(stats.t.interval(0.95, 3, values.mean(), stats.sem(values)))
    assert of_seeds[3:6] == pytest.approx((values.std(ddof=1), 4, 1))  # seeds and texts
    assert p_value(over_seeds(values - 2.0)) == pytest.approx(stats.ttest_1samp(values, 2.0).pvalue)
    assert p_value(over_seeds(np.zeros(4))) == 1.0  # the same encoding

    of_texts = estimate(constant(*values, noise=1e-4))
    assert (of_texts.low, of_texts.high) == pytest.approx((of_seeds.low, of_seeds.high), rel=0.02)


def test_holm_is_the_step_down_of_its_article():
    """The smallest of four is multiplied by 4, the next by 3, ...; none becomes smaller than one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_differences_are_paired_by_seed_and_text():
    of_text = np.random.default_rng(2).normal(0, 0.5, 40)  # shared by both
    a = Sample(constant(2.05, 2.15, 2.25).values + of_text, np.ones(40))
    b = Sample(constant(2.0, 2.1, 2.2).values + of_text, np.ones(40))
    assert difference(a, b).low == pytest.approx(0.05)  # worse in every seed, though their ranges overlap
    assert not difference(a, a).separated


def test_only_the_same_seeds_and_texts_are_compared():
    sample = Sample(np.ones((1, 40)), np.arange(1, 41))
    for other in (Sample(np.ones((2, 40)), sample.units), Sample(sample.values, sample.units[::-1])):
        with pytest.raises(ValueError, match="same seeds and texts"):
            difference(sample, other)


def test_the_mean_is_the_ratio_of_sums_of_the_texts_in_which_something_counts():
    sample = Sample(np.array([[10.0, 30.0, 0.0]]), np.array([10, 10_000, 0]))
    assert estimate(sample).value == pytest.approx(40 / 10_010)
    assert estimate(sample).texts == 2
    assert np.isnan(estimate(Sample(np.ones((1, 1)), np.ones(1))).low)
    with pytest.raises(ValueError, match="nothing was scored"):
        estimate(Sample(np.zeros((1, 3)), np.zeros(3)))


def estimate_with(p, error=1.0, seeds=3):
    """A difference of 20 degrees of freedom with this p-value and standard error."""
    value = -stats.t.ppf(p / 2, 20) * error
    half = stats.t.ppf(0.975, 20) * error
    return Estimate(value, value - half, value + half, 0.0, seeds, 30, error, 20)


TWO_SEEDS = [estimate_with(p, seeds=2) for p in (1e-9, 1e-8)]
SMALL_ERROR = [estimate_with(0.008, 0.5), estimate_with(0.06, 1.5), estimate_with(0.0001)]


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        pytest.param([estimate_with(p) for p in (0.04, 0.03)], [False, False], id="each interval excludes 0"),
        pytest.param([estimate_with(p) for p in (0.008, 0.009, 0.06)], [False, True, True], id="0.05 / 6 = 0.0083"),
        pytest.param(SMALL_ERROR, [True, True, False], id="an error below the mean counts as the mean"),
        pytest.param(TWO_SEEDS, [True, True], id="two seeds are too few"),
        pytest.param([None, estimate_with(1e-9)], [True, False], id="no seed is shared with the best"),
        pytest.param([estimate(Sample(np.ones((1, 1)), np.ones(1)))], [True], id="no interval"),
        pytest.param([], [], id="alone"),
    ],
)
def test_tied_with_the_best_by_hand(behind, expected):
    assert tied(behind) == expected


TEXTS = 128
OF_TEXT = 0.03  # std of what a text adds to an encoding, in every seed; and once more in each seed


def draw(rng, seeds, levels, between_runs=0.005):
    """Encodings that in truth differ only by their levels, in paired standard errors.

    What all share, of a text and of a seed, is ten times as large as what tells them apart. Texts differ in size.
    """
    units = rng.integers(50, 150, TEXTS)
    shared = 1.5 + rng.normal(0, 0.45, TEXTS) + rng.normal(0, 0.01, (seeds, 1))
    unequal = (units**2).mean() / units.mean() ** 2
    text_variance = unequal * (OF_TEXT**2 + OF_TEXT**2 / seeds) / TEXTS
    standard_error = np.sqrt(2 * (text_variance + between_runs**2 / seeds))
    samples = []
    for level in levels:
        of_runs = rng.normal(0, between_runs, (seeds, 1)) + rng.normal(0, OF_TEXT, (seeds, TEXTS))
        values = shared + rng.normal(0, OF_TEXT, TEXTS) + of_runs + level * standard_error
        samples.append(Sample(values * units, units))
    return samples


def tied_with_best(samples):
    """The number of the encoding with the lowest mean, and those that are tied with it."""
    best = int(np.argmin([estimate(sample).value for sample in samples]))
    others = [i for i in range(len(samples)) if i != best]
    differences = [difference(samples[i], samples[best]) for i in others]
    return best, set(itertools.compress(others, tied(differences)))


@pytest.mark.parametrize(("seeds", "between_runs"), [(1, 0.0), (3, 0.005), (3, 0.01), (10, 0.005)])
def test_of_equal_encodings_none_is_left_out_and_none_wins(seeds, between_runs):
    """At most 5 % familywise. One seed has no other run to differ from: its intervals are over texts alone."""
    rng = np.random.default_rng([14, seeds])
    numbers_tied = []
    for _ in range(SETS):
        _, others = tied_with_best(draw(rng, seeds, [0.0] * 14, between_runs))
        numbers_tied.append(len(others))
    assert min(numbers_tied) > 0
    assert np.mean(np.array(numbers_tied) < 13) <= 0.05


# Of 14 encodings four standard errors are not enough for 95 %, whatever the rule: with known variance, no test that is
# wrong in 5 % of ties names the best more often than in 89 % (Neyman and Pearson; see docs/results.md).
@pytest.mark.parametrize(("encodings", "ahead", "least"), [(2, 4.0, 0.95), (14, 4.0, 0.8), (14, 5.0, 0.95)])
def test_a_winner_that_is_ahead_is_named(encodings, ahead, least):
    rng = np.random.default_rng([encodings, 10])
    levels = [-ahead] + [0.0] * (encodings - 1)
    named = [tied_with_best(draw(rng, 10, levels)) == (0, set()) for _ in range(150)]
    assert np.mean(named) >= least


@pytest.mark.parametrize(("documents", "low", "high"), [(None, 0.5, 0.8), (list("abcdefghijklmnop") * 4, 0.92, 0.98)])
def test_texts_of_one_document_are_no_independent_draws(documents, low, high):
    """Texts that are alike within a document: by text the interval is too narrow, by document it covers the truth."""
    rng = np.random.default_rng(3)
    covered = []
    for _ in range(SETS):
        values = np.tile(rng.normal(0, 1, 16), 4) + rng.normal(0, 0.3, 64)
        e = estimate(by_document(Sample(values[None], np.ones(64)), documents))
        covered.append(e.low <= 0 <= e.high)
    assert low < np.mean(covered) < high


def test_a_share_of_what_is_possible():
    """Its interval covers the truth, and is narrower than that of the part alone, of which it shares the texts."""
    rng = np.random.default_rng(3)
    units = np.full(64, 8.0)
    covered = []
    for _ in range(SETS):
        whole = Sample(rng.gamma(4.0, 1.0, (1, 64)), units)
        part = Sample(0.7 * whole.values + rng.normal(0.0, 0.5, 64), units)
        interval = share(part, whole)
        covered.append(interval.low <= 0.7 <= interval.high)
        assert interval.half / interval.value < estimate(part).half / estimate(part).value
    assert 0.92 <= np.mean(covered) <= 0.98

    a_quarter = share(Sample(0.25 * whole.values, units), whole)
    assert (a_quarter.value, a_quarter.half) == pytest.approx((0.25, 0))
    assert np.isnan(share(part, Sample(np.zeros((1, 64)), units)).value)
