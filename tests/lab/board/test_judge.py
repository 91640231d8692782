"""The verdict on an encoding: how often it names a better one among equal ones, and finds one that is better."""

import numpy as np
import pytest

from lab.board.judge import Side, judge, title
from ropewalk.evaluation.statistics import Sample

SHORT, LONG, SEEDS, TEXTS = 64, 512, 3, 64
GAIN = 2.0  # bits that all gain from long text


def differing(rng: np.random.Generator) -> np.ndarray:
    """What an encoding adds to the loss of each seed and text: as much for each text as for each text of a seed."""
    return 0.03 * rng.standard_normal((SEEDS, 1)) + rng.standard_normal(TEXTS) + rng.standard_normal((SEEDS, TEXTS))


STANDARD_ERROR = np.sqrt(2 * (0.03**2 / SEEDS + 1 / TEXTS + 1 / (SEEDS * TEXTS)))  # of the difference of two


def folder(seed: int, tries: int, better: float = 0.0) -> list[dict[str, str]]:
    """The words of each try in a folder, all against the same side; `better` in paired standard errors."""
    rng = np.random.default_rng(seed)
    shared = {n: 3 * rng.standard_normal((1, TEXTS)) + rng.standard_normal((SEEDS, 1)) for n in (SHORT, LONG)}

    def side(advantage: float) -> Side:
        losses = {}
        for length, values in shared.items():
            level = -advantage - GAIN * (length == LONG)
            losses[length] = Sample(values + level + differing(rng), np.ones(TEXTS))
        return Side(losses, Sample(advantage + differing(rng), np.ones(TEXTS)))

    against = side(0.0)
    words = []
    for number in range(1, tries + 1):
        findings = judge(side(better * STANDARD_ERROR), against, train_len=SHORT, longest=LONG, number=number)
        words.append({name: found.word for name, found in findings.items()})
    return words


def test_of_equal_encodings_few_folders_name_a_better_one_by_any_measure_at_any_time():
    named = 0
    for seed in range(300):
        named += any("better" in words.values() for words in folder(seed, tries=5))
    assert named <= 0.05 * 300


def test_an_encoding_that_is_ahead_by_four_paired_standard_errors_is_found():
    """By some measure in 95 % of folders, as in the test above; by the one that decides in 90 % with three seeds."""
    tries = [folder(seed, tries=1, better=4.0)[0] for seed in range(300)]
    assert sum("better" in words.values() for words in tries) >= 0.95 * 300
    assert sum(words["8x or cut"] == "better" for words in tries) >= 0.9 * 300


def constant(loss: float) -> Sample:
    """Texts of about this loss, alike for every side."""
    noise = 0.01 * np.random.default_rng(0).standard_normal((SEEDS, TEXTS))
    return Sample(loss + noise + 0.001 * loss * np.arange(TEXTS), np.ones(TEXTS))


@pytest.mark.parametrize(
    ("mine", "against", "expected"),
    [
        ((2.0, 2.0), (2.0, 3.0), {"8x or cut": "not separated", "8x": "better", "1x": "not separated"}),
        ((2.0, 1.5), (2.0, 3.0), {"8x or cut": "better", "8x": "better", "1x": "not separated"}),
        ((2.0, 2.5), (2.0, 3.0), {"8x or cut": "not separated", "8x": "better", "1x": "not separated"}),
        ((2.0, None), (2.0, 1.5), {"8x or cut": "worse", "1x": "not separated"}),
        ((2.1, 1.5), (2.0, 1.5), {"8x or cut": "not separated", "8x": "not separated", "1x": "worse"}),
        ((2.0, float("nan")), (2.0, 3.0), {"8x or cut": "not separated", "8x": "not separated", "1x": "not separated"}),
    ],
)
def test_beating_a_side_that_fails_on_long_text_is_not_enough(mine, against, expected):
    sides = []
    for short, long in (mine, against):
        losses = {SHORT: constant(short)}
        sides.append(Side(losses if long is None else losses | {LONG: constant(long)}))
    findings = judge(*sides, train_len=SHORT, longest=LONG, number=1)
    assert {name: found.word for name, found in findings.items()} == expected


def test_intervals_widen_with_the_number_of_the_try():
    sides = Side({SHORT: constant(2.0), LONG: constant(1.0)}), Side({SHORT: constant(2.1), LONG: constant(1.2)})
    halves = []
    for number in (1, 2, 7):
        findings = judge(*sides, train_len=SHORT, longest=LONG, number=number)
        halves.append(findings["8x or cut"].advantage.half)
    assert halves == sorted(halves)
    assert halves[2] > 1.5 * halves[0]


def test_encodings_of_one_name_are_told_apart_by_their_options():
    twice = {"name": "ntk", "scale": 2.0, "base": 1e4}
    assert title(twice | {"scale": 4.0}, twice) == "ntk (scale 4.0)"
    assert title(twice, {"name": "rope"}) == "ntk"
