"""Are the tasks' samples distributed as their papers say? They are fixed, so a test that passes once always does."""

import random
from collections import Counter
from itertools import combinations, permutations
from math import comb

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


def uniform(counts):
    return chisquare(list(counts.values())).pvalue > P


def alike(a, b):
    """Do two Counters have one distribution? Kinds that are rare in both count as one."""
    kinds = a.keys() | b.keys()
    rare = {kind for kind in kinds if a[kind] + b[kind] < 10}
    table = [[a[kind], b[kind]] for kind in kinds - rare]
    if rare:
        table.append([sum(counter[kind] for kind in rare) for counter in (a, b)])
    return len(table) == 1 or chi2_contingency(table).pvalue > P


def samples_of(task, n, length, difficulty="in-distribution"):
    """The first n samples of the test set: (the symbols that are read, {place: the symbol to follow})."""
    return texts(task, *task.batch("test", range(n), length, difficulty))


@pytest.mark.parametrize(("difficulty", "p"), [("in-distribution", 0.8), ("dense", 0.1), ("sparse", 0.98)])
def test_flip_flop(difficulty, p):
    instructions = Counter()
    bits = {"w": Counter(), "i": Counter(), "r": Counter()}

    for symbols, answers in samples_of(FlipFlop(), 500, 128, difficulty):
        assert (symbols[0], symbols[-2]) == ("w", "r")
        assert len(answers) == symbols.count("r")
        instructions.update(symbols[2:-2:2])  # the first and the last are given
        for instruction, bit in zip(symbols[0::2], symbols[1::2], strict=True):
            bits[instruction][bit] += 1

    chances = {"i": p, "w": (1 - p) / 2, "r": (1 - p) / 2}
    counts = [instructions[kind] for kind in chances]
    expected = instructions.total() * np.array(list(chances.values()))
    assert chisquare(counts, expected).pvalue > P
    assert uniform(bits["w"])
    assert uniform(bits["i"])


@pytest.mark.parametrize(("difficulty", "blanks"), [("in-distribution", 2), ("dense", 1), ("sparse", 4)])
def test_selective_copy(difficulty, blanks):
    task = SelectiveCopy(kinds=5)
    kinds = Counter()
    places = Counter()
    for symbols, answers in samples_of(task, 6000, 8, difficulty):
        kinds.update(answers.values())
        stored = symbols[: symbols.index("|")]
        places[tuple(symbol == "." for symbol in stored)] += 1

    assert len(kinds) == 5
    assert len(places) == comb(2 + blanks, 2)
    assert uniform(kinds)
    assert uniform(places)

    # The paper's sizes.
    ((symbols, answers),) = samples_of(task, 1, 512, difficulty)
    assert symbols.count(".") == 64 * blanks
    assert len(answers) == 128


def test_recall():
    task = Recall(pairs=3, keys=4, values=5)
    keys = Counter()
    values = Counter()
    orders = Counter()
    places = Counter()
    for symbols, answers in samples_of(task, 4000, 13):
        stored_keys = symbols[0:6:2]
        stored_values = symbols[1:6:2]
        keys[tuple(stored_keys)] += 1
        values[tuple(stored_values)] += 1
        orders[tuple(stored_keys.index(symbols[place]) for place in answers)] += 1
        places[tuple(answers)] += 1

    assert sorted(keys) == sorted(permutations(["k0", "k1", "k2", "k3"], 3))
    assert sorted(orders) == sorted(permutations(range(3)))
    assert len(values) == 5**3
    assert len(places) == comb(5, 3)  # 2 of filler and 3 queries
    for counts in (keys, values, orders, places):
        assert uniform(counts)


def test_the_gaps_of_recall_are_drawn_one_after_another_by_their_weight():
    """As numpy's choice(replace=False, p=...) draws them, which the generator of MQAR's authors calls."""
    n = 4000
    task = Recall(pairs=2, keys=2, gap_power=0.25)
    gaps = Counter()
    for _, answers in samples_of(task, n, 10):
        first, second = sorted(answers)
        gaps[first - 4, second - 5] += 1  # two pairs before them, and the first query

    # A gap of g has the weight g^(gap_power - 1).
    weights = np.arange(1, 6) ** -0.75
    p = weights / weights.sum()
    counts = []
    expected = []
    for i, j in combinations(range(5), 2):
        i_then_j = p[i] * p[j] / (1 - p[i])
        j_then_i = p[j] * p[i] / (1 - p[j])
        expected.append(n * (i_then_j + j_then_i))
        counts.append(gaps[i, j])

    assert chisquare(counts, expected).pvalue > P


@pytest.mark.parametrize(("density", "pairs"), [(None, (8, 8, 8)), (0.5, (4, 8, 64))])
def test_a_longer_recall_has_more_filler_or_as_many_pairs_for_its_length(density, pairs):
    task = Recall(density=density, keys=64)
    for length, n in zip((32, 64, 512), pairs, strict=True):
        near = range(1, 4 * n)
        far = range(length + 2 - 4 * n, length + 1)
        for difficulty, distances in (("near", near), ("far", far)):
            for symbols, answers in samples_of(task, 20, length, difficulty):
                assert len(answers) == n
                for place in answers:
                    first_place = symbols.index(symbols[place])
                    assert place - first_place in distances


@pytest.mark.parametrize(("task", "sizes"), [(Counting(variables=2), range(3, 21)), (Copy(), range(1, 11))])
def test_sizes_are_uniform(task, sizes):
    for difficulty, expected in (("in-distribution", sizes), ("full", sizes[-1:])):
        samples = samples_of(task, 2000, 21, difficulty)
        tokens_before_first_answer = Counter(min(answers) for _, answers in samples)
        assert sorted(tokens_before_first_answer) == list(expected)
        assert len(expected) == 1 or uniform(tokens_before_first_answer)


def grammar(chance, variables, weights, cap, n):
    """A counting program of n operations, what it asks and the answer, drawn one after another; anew if none is set."""
    while True:
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
        if values:
            asked = chance.choice(list(values))
            return program, asked, values[asked]


def traits(program, asked, answer):
    """Categories by which distributions of programs are compared."""
    of_asked = [i for i, operation in enumerate(program) if operation == f"{asked}=0"]
    return {
        "answer": answer,
        "last assignment of what is asked": of_asked[-1],
        "operations": tuple(sum(mark in operation for operation in program) for mark in ("=", "++")),
        "increments of a": program.count("a++"),
        "second and last operation": (program[1], program[-1]),
    }


@pytest.mark.parametrize(
    ("variables", "weights", "cap"), [(1, [1, 50, 7], 10), (3, [1, 2, 7], 3), (5, [1, 4, 2], 10), (2, [1, 0, 4], 2)]
)
def test_counting_is_as_its_grammar_draws_it(variables, weights, cap):
    task = Counting(variables=variables, weights=weights, cap=cap)
    operations = 24
    samples = 2000
    ours = []
    for symbols, answers in samples_of(task, samples, operations + 1, "full"):
        ((place, answer),) = answers.items()
        ours.append(traits(symbols[:place], symbols[place][0], int(answer)))
    chance = random.Random(0)
    by_grammar = [traits(*grammar(chance, variables, weights, cap, operations)) for _ in range(samples)]

    for trait in ours[0]:
        our_counts, their_counts = (Counter(sample[trait] for sample in programs) for programs in (ours, by_grammar))
        assert alike(our_counts, their_counts), trait
