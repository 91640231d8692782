"""The verdict on an encoding: how often it names a better one among equal ones, and finds one that is better."""

import numpy as np
import pytest
from scipy import stats

from lab.board.judge import at_level, judge, visible_lead
from ropewalk.evaluation.statistics import Sample, estimate

SHORT = 64
LONG = 512
TEXTS = 64
GAIN = 2.0  # bits that all gain from long text
OF_SEEDS = 0.03  # how much seeds differ, where a text's difference is 1


def side(rng, shared, advantage=0.0):
    """The losses of an encoding: what it adds to the `shared` ones is alike for all texts of a seed, for all seeds of a
    text, or for neither."""
    losses = {}
    for length, base in shared.items():
        seeds = len(base)
        own = OF_SEEDS * rng.standard_normal((seeds, 1)) + rng.standard_normal(TEXTS)
        noise = rng.standard_normal((seeds, TEXTS))
        gain = advantage + (GAIN if length == LONG else 0.0)
        losses[length] = Sample(base - gain + own + noise, np.ones(TEXTS))
    return losses


def findings_of(seed, tries, seeds=3, better=0.0):
    """What each try in a folder finds, all against the same side; `better` in paired standard errors."""
    rng = np.random.default_rng(seed)
    shared = {}
    for length in (SHORT, LONG):
        shared[length] = 3 * rng.standard_normal((1, TEXTS)) + rng.standard_normal((seeds, 1))
    against = side(rng, shared)
    for number in tries:
        mine = side(rng, shared, better * standard_error(seeds))
        yield judge(mine, against, train_len=SHORT, longest=LONG, number=number)


def standard_error(seeds):
    """Of the difference of two encodings."""
    return np.sqrt(2 * (OF_SEEDS**2 / seeds + 1 / TEXTS + 1 / (seeds * TEXTS)))


def words_of(seed, tries, **options):
    """The words of each try in a folder."""
    folder = findings_of(seed, range(1, tries + 1), **options)
    return [{name: found.word for name, found in findings.items()} for findings in folder]


FOLDERS = 300


def share_of_folders(holds, **options):
    return np.mean([holds(words_of(seed, **options)) for seed in range(FOLDERS)])


@pytest.mark.parametrize("seeds", [3, 5])
def test_corrected_intervals_leave_the_truth_out_as_rarely_as_they_say(seeds):
    """Of differences as were measured between texts, seeds and within texts. An interval at 0.05 stays as it is."""
    rng = np.random.default_rng(1)
    draws = 2000
    estimates = []
    for _ in range(draws):
        of_seeds = rng.normal(0, 0.015, (seeds, 1))
        of_texts = rng.normal(0, 0.09, 128)
        within = rng.normal(0, 0.145, (seeds, 128))
        values = of_seeds + of_texts + within
        estimates.append(estimate(Sample(values, np.ones(128))))
    for level in (0.012, 0.0053, 0.0013):  # of the second, third and sixth try of a folder
        separated = sum(at_level(e, level).separated for e in estimates)
        assert separated <= draws * level + 2 * np.sqrt(draws * level)

    assert at_level(estimates[0], 0.05) == pytest.approx(estimates[0], nan_ok=True)


def test_of_equal_encodings_few_folders_name_a_better_one_by_any_measure_at_any_time():
    def names_a_better_one(folder):
        return any("better" in words.values() for words in folder)

    assert share_of_folders(names_a_better_one, tries=5) <= 0.05


def test_an_encoding_that_is_ahead_by_four_paired_standard_errors_is_found():
    """By the measure that decides, in 90 % of folders with three seeds; by any, in 95 % with five."""
    decided = share_of_folders(lambda folder: folder[0]["8x or cut"] == "better", tries=1, seeds=3, better=4.0)
    by_any = share_of_folders(lambda folder: "better" in folder[0].values(), tries=1, seeds=5, better=4.0)

    assert decided >= 0.9
    assert by_any >= 0.95


@pytest.mark.parametrize(("seeds", "number"), [(3, 1), (3, 5), (5, 5)])
def test_a_visible_lead_is_found_in_about_four_of_five_tries(seeds, number):
    found = [next(findings_of(seed, [number], seeds)) for seed in range(FOLDERS)]
    leads = [visible_lead(findings["8x or cut"], seeds, seeds) for findings in found]
    ahead = np.sqrt(np.mean(np.square(leads))) / standard_error(seeds)
    tries = [next(findings_of(seed, [number], seeds, ahead)) for seed in range(FOLDERS)]

    assert 0.7 <= np.mean([findings["8x or cut"].word == "better" for findings in tries]) <= 0.95


def constant(loss):
    """Texts of about this loss, alike for every side."""
    noise = 0.01 * np.random.default_rng(0).standard_normal((3, TEXTS))
    return Sample(loss + noise + 0.001 * loss * np.arange(TEXTS), np.ones(TEXTS))


SAME = "not separated"


@pytest.mark.parametrize(
    ("mine", "against", "expected"),
    [
        ((2.0, 2.0), (2.0, 3.0), {"8x or cut": SAME, "8x": "better", "1x": SAME}),
        ((2.0, 1.5), (2.0, 3.0), {"8x or cut": "better", "8x": "better", "1x": SAME}),
        ((2.0, 2.5), (2.0, 3.0), {"8x or cut": SAME, "8x": "better", "1x": SAME}),
        ((2.0, None), (2.0, 1.5), {"8x or cut": "worse", "1x": SAME}),
        ((2.1, 1.5), (2.0, 1.5), {"8x or cut": SAME, "8x": SAME, "1x": "worse"}),
        ((2.0, float("nan")), (2.0, 3.0), {"8x or cut": SAME, "1x": SAME}),
    ],
)
def test_beating_a_side_that_fails_on_long_text_is_not_enough(mine, against, expected):
    sides = []
    for short, long in (mine, against):
        losses = {SHORT: constant(short)}
        sides.append(losses if long is None else losses | {LONG: constant(long)})
    findings = judge(*sides, train_len=SHORT, longest=LONG, number=1)

    assert {name: found.word for name, found in findings.items()} == expected


@pytest.mark.parametrize(("name", "losses"), [("pe", (float("nan"), 2.0)), ("against", (2.0, float("nan")))])
def test_a_side_without_a_loss_at_the_training_length_has_no_verdict(name, losses):
    sides = [{SHORT: constant(short), LONG: constant(2.0)} for short in losses]
    with pytest.raises(ValueError, match=f"{name} ends in NaN or infinity at"):
        judge(*sides, train_len=SHORT, longest=LONG, number=1)


def test_intervals_of_one_seed_are_student_s_over_texts():
    values = np.random.default_rng(0).normal(2, 1, 30)
    of_texts = estimate(Sample(values[None], np.ones(30)))
    student = stats.t(29, values.mean(), stats.sem(values))

    corrected = at_level(of_texts, 0.001)
    assert (corrected.low, corrected.high) == pytest.approx(student.interval(0.999))
