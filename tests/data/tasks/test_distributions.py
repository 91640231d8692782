"""Are the tasks' samples distributed as their papers say? They are fixed, so a test that passes once always does."""

import random
import re
from collections import Counter
from itertools import combinations
from math import comb, factorial

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare
from solvers import texts

from data.tasks.counting import Counting
from data.tasks.flip_flop import FlipFlop
from data.tasks.recall import Recall
from data.tasks.selective_copy import SelectiveCopy
from lab.tasks.copy import Copy

pytestmark = pytest.mark.long
P = 1 / 3000  # of rejecting what is true


def samples_of(task, n, length, difficulty="in-distribution"):
    """The first n samples of the test set: (the symbols that are read, {place: the symbol to follow})."""
    return texts(task, *task.batch("test", range(n), length, difficulty))


def which_are_blank(symbols):
    """Of the places before the separator."""
    stored = symbols[: symbols.index("|")]
    return tuple(symbol == "." for symbol in stored)


COPY = SelectiveCopy(kinds=5)  # two symbols of 8 tokens, and as many blanks for each as the difficulty says
RECALL = Recall(pairs=3, keys=4, values=5)  # and of 13 tokens three queries and two of filler


def gap_chances(n=5, gap_power=0.25):
    """Of the gaps before two queries, up to n tokens: drawn one after another, without one gap twice.

    As numpy's choice(replace=False, p=...) draws them, which the generator of MQAR's authors calls.
    """
    weights = np.arange(1, n + 1) ** (gap_power - 1)
    p = weights / weights.sum()
    chances = {}
    for i, j in combinations(range(n), 2):
        i_first = p[i] * p[j] / (1 - p[i])
        j_first = p[i] * p[j] / (1 - p[j])
        chances[i, j] = i_first + j_first
    return chances


def instructions(symbols, answers):
    """Those of flip-flop between the first, which writes, and the last, which reads."""
    return symbols[2:-2:2]


# The task and the length, the difficulty, what of a sample, and the probability of each kind of it; or, where all are
# equal, how many kinds there are.
DRAWN = {
    "bits written": (
        (FlipFlop(), 128, "in-distribution"),
        lambda symbols, answers: re.findall(r"w (.)", " ".join(symbols)),
        2,
    ),
    "bits ignored": (
        (FlipFlop(), 128, "dense"),
        lambda symbols, answers: re.findall(r"i (.)", " ".join(symbols)),
        2,
    ),
    "symbols copied": (
        (COPY, 8, "in-distribution"),
        lambda symbols, answers: answers.values(),
        5,
    ),
    "places of blanks": (
        (COPY, 8, "in-distribution"),
        lambda symbols, answers: [which_are_blank(symbols)],
        comb(4, 2),
    ),
    "places of few blanks": (
        (COPY, 8, "dense"),
        lambda symbols, answers: [which_are_blank(symbols)],
        comb(3, 2),
    ),
    "places of many blanks": (
        (COPY, 8, "sparse"),
        lambda symbols, answers: [which_are_blank(symbols)],
        comb(6, 2),
    ),
    "keys": (
        (RECALL, 13, "in-distribution"),
        lambda symbols, answers: [tuple(symbols[0:6:2])],
        factorial(4),
    ),
    "values": (
        (RECALL, 13, "in-distribution"),
        lambda symbols, answers: [tuple(symbols[1:6:2])],
        5**3,
    ),
    "order of queries": (
        (RECALL, 13, "in-distribution"),
        lambda symbols, answers: [tuple(symbols[0:6].index(symbols[place]) for place in answers)],
        factorial(3),
    ),
    "places of queries": (
        (RECALL, 13, "in-distribution"),
        lambda symbols, answers: [tuple(answers)],
        comb(5, 3),
    ),
    "operations": (
        (Counting(variables=2), 21, "in-distribution"),
        lambda symbols, answers: [*answers],
        18,
    ),
    "symbols to copy": (
        (Copy(), 21, "in-distribution"),
        lambda symbols, answers: [min(answers)],
        10,
    ),
    "instructions": (
        (FlipFlop(), 128, "in-distribution"),
        instructions,
        {"i": 0.8, "w": 0.1, "r": 0.1},
    ),
    "dense instructions": (
        (FlipFlop(), 128, "dense"),
        instructions,
        {"i": 0.1, "w": 0.45, "r": 0.45},
    ),
    "sparse instructions": (
        (FlipFlop(), 128, "sparse"),
        instructions,
        {"i": 0.98, "w": 0.01, "r": 0.01},
    ),
    "gaps of recall": (
        (Recall(pairs=2, keys=2, gap_power=0.25), 10, "in-distribution"),
        # Two pairs are before them, and the first query before the second.
        lambda symbols, answers: [(min(answers) - 4, max(answers) - 5)],
        gap_chances(),
    ),
}


@pytest.mark.parametrize("what", DRAWN)
def test_what_is_drawn_has_its_distribution(what):
    (task, length, difficulty), kinds_of, chances = DRAWN[what]
    counts = Counter()
    for symbols, answers in samples_of(task, 4000, length, difficulty):
        counts.update(kinds_of(symbols, answers))
    if isinstance(chances, int):
        assert len(counts) == chances
        chances = dict.fromkeys(counts, 1 / chances)

    observed = [counts[kind] for kind in chances]
    expected = [counts.total() * chance for chance in chances.values()]

    assert counts.keys() == chances.keys()
    assert chisquare(observed, expected).pvalue > P


@pytest.mark.parametrize(
    ("task", "longest"),
    [
        (Counting(variables=2), 20),
        (Copy(), 10),
    ],
)
def test_full_samples_have_the_size_that_fits(task, longest):
    for _, answers in samples_of(task, 20, 21, "full"):
        assert min(answers) == longest


@pytest.mark.parametrize(
    ("density", "pairs"),
    [
        (None, (4, 4, 4)),
        (0.5, (4, 8, 64)),
    ],
)
def test_a_longer_recall_has_more_filler_or_as_many_pairs_for_its_length(density, pairs):
    task = Recall(density=density, keys=64)
    for length, n in zip((32, 64, 512), pairs, strict=True):
        distances = {
            "near": range(1, 4 * n),
            "far": range(length + 2 - 4 * n, length + 1),
        }
        for difficulty, expected in distances.items():
            for symbols, answers in samples_of(task, 20, length, difficulty):
                found = [place - symbols.index(symbols[place]) for place in answers]
                assert len(found) == n
                assert set(found) <= set(expected)


def grammar(chance, variables, weights, cap, n):
    """A counting program of n operations, what it asks and the answer, drawn one after another; anew if none is set."""
    values = {}
    program = []
    while len(program) < n:
        kind = chance.choices(["set", "pass", "increment"], weights)[0]
        if kind == "set":
            variable = chance.choice("abcdefgh"[:variables])
            values[variable] = 0
            program.append(f"{variable}=0")
        elif kind == "pass":
            program.append("pass")
        elif values:
            variable = chance.choice(list(values))
            if values[variable] < cap:
                values[variable] += 1
                program.append(f"{variable}++")
    if not values:
        return grammar(chance, variables, weights, cap, n)
    asked = chance.choice(list(values))
    return program, asked, values[asked]


@pytest.mark.parametrize(
    ("variables", "weights", "cap"),
    [
        (3, [1, 2, 7], 3),
        (5, [1, 4, 2], 3),
        (2, [1, 0, 4], 2),
    ],
)
def test_counting_is_as_its_grammar_draws_it(variables, weights, cap):
    """Its answers, and whether what is asked was set anew in the second half."""
    task = Counting(variables=variables, weights=weights, cap=cap)
    operations = 24
    n = 2000
    ours = Counter()
    for symbols, answers in samples_of(task, n, operations + 1, "full"):
        ((place, answer),) = answers.items()
        asked = symbols[place][0]
        ours[int(answer), f"{asked}=0" in symbols[12:place]] += 1
    chance = random.Random(0)
    by_grammar = Counter()
    for _ in range(n):
        program, asked, answer = grammar(chance, variables, weights, cap, operations)
        by_grammar[answer, f"{asked}=0" in program[12:]] += 1

    assert ours.keys() == by_grammar.keys()

    table = [[counts[kind] for kind in ours] for counts in (ours, by_grammar)]

    assert chi2_contingency(table).pvalue > P
