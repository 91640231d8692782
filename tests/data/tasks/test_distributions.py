"""Are the tasks' samples distributed as their papers say? They are fixed, so a test that passes once always does."""

import random
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


def bits_after(instruction):
    """The bits of flip-flop's instructions of a kind."""
    return lambda symbols, answers: [
        bit for bit, before in zip(symbols[1:], symbols, strict=False) if before == instruction
    ]


def which_are_blank(symbols, answers):
    stored = symbols[: symbols.index("|")]
    return [tuple(symbol == "." for symbol in stored)]


def order_of_queries(symbols, answers):
    """Of recall with three pairs."""
    stored_keys = symbols[0:6:2]
    return [tuple(stored_keys.index(symbols[place]) for place in answers)]


FLIP_FLOP = (FlipFlop(), 128)
# Two symbols, and as many blanks for each of them as the difficulty says.
COPY = (SelectiveCopy(kinds=5), 8)
# Three pairs, three queries and two of filler.
RECALL = (Recall(pairs=3, keys=4, values=5), 13)
# What is uniform: the task and the length, the difficulty, what of a sample, and how many kinds there are.
UNIFORM = {
    "bits written": (*FLIP_FLOP, "in-distribution", bits_after("w"), 2),
    "bits ignored": (*FLIP_FLOP, "dense", bits_after("i"), 2),
    "symbols copied": (*COPY, "in-distribution", lambda symbols, answers: answers.values(), 5),
    "places of blanks": (*COPY, "in-distribution", which_are_blank, comb(4, 2)),
    "places of few blanks": (*COPY, "dense", which_are_blank, comb(3, 2)),
    "places of many blanks": (*COPY, "sparse", which_are_blank, comb(6, 2)),
    "keys": (
        *RECALL,
        "in-distribution",
        lambda symbols, answers: [tuple(symbols[0:6:2])],
        factorial(4),
    ),
    "values": (*RECALL, "in-distribution", lambda symbols, answers: [tuple(symbols[1:6:2])], 5**3),
    "order of queries": (*RECALL, "in-distribution", order_of_queries, factorial(3)),
    "places of queries": (
        *RECALL,
        "in-distribution",
        lambda symbols, answers: [tuple(answers)],
        comb(5, 3),
    ),
    "operations": (
        Counting(variables=2),
        21,
        "in-distribution",
        lambda symbols, answers: [*answers],
        18,
    ),
    "symbols to copy": (Copy(), 21, "in-distribution", lambda symbols, answers: [min(answers)], 10),
}


@pytest.mark.parametrize("what", UNIFORM)
def test_what_is_drawn_without_a_weight_is_uniform(what):
    task, length, difficulty, kinds_of, n_kinds = UNIFORM[what]
    counts = Counter()
    for symbols, answers in samples_of(task, 4000, length, difficulty):
        counts.update(kinds_of(symbols, answers))

    assert len(counts) == n_kinds
    assert chisquare([*counts.values()]).pvalue > P


@pytest.mark.parametrize(("difficulty", "p"), [("in-distribution", 0.8), ("dense", 0.1), ("sparse", 0.98)])
def test_flip_flop_ignores_with_the_probability_of_its_difficulty(difficulty, p):
    instructions = Counter()
    for symbols, _ in samples_of(FlipFlop(), 500, 128, difficulty):
        assert (symbols[0], symbols[-2]) == ("w", "r")
        instructions.update(symbols[2:-2:2])  # the first and the last are given

    chances = {"i": p, "w": (1 - p) / 2, "r": (1 - p) / 2}
    counts = [instructions[kind] for kind in chances]
    expected = instructions.total() * np.array([*chances.values()])

    assert chisquare(counts, expected).pvalue > P


@pytest.mark.parametrize(("difficulty", "blanks"), [("in-distribution", 2), ("dense", 1), ("sparse", 4)])
def test_selective_copy_has_the_sizes_of_the_paper(difficulty, blanks):
    ((symbols, answers),) = samples_of(SelectiveCopy(), 1, 512, difficulty)
    assert symbols.count(".") == 64 * blanks
    assert len(answers) == 128


@pytest.mark.parametrize(("task", "longest"), [(Counting(variables=2), 20), (Copy(), 10)])
def test_full_samples_have_the_size_that_fits(task, longest):
    for _, answers in samples_of(task, 20, 21, "full"):
        assert min(answers) == longest


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
        distances = {
            "near": range(1, 4 * n),
            "far": range(length + 2 - 4 * n, length + 1),
        }
        for difficulty, expected in distances.items():
            for symbols, answers in samples_of(task, 20, length, difficulty):
                assert len(answers) == n
                for place in answers:
                    first_place = symbols.index(symbols[place])
                    assert place - first_place in expected


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


def traits(program, asked, answer):
    """Categories by which distributions of programs are compared."""
    assignments_of_asked = [i for i, operation in enumerate(program) if operation == f"{asked}=0"]
    n_assignments, n_increments = (sum(mark in operation for operation in program) for mark in ("=", "++"))
    return {
        "answer": answer,
        "last assignment of what is asked": assignments_of_asked[-1],
        "operations": (n_assignments, n_increments),
        "increments of a": program.count("a++"),
        "second and last operation": (program[1], program[-1]),
    }


def are_alike(a, b):
    """Do two Counters have one distribution? Kinds that are rare in both count as one."""
    table = Counter()
    for kind in {*a, *b}:
        is_rare = a[kind] + b[kind] < 10
        for side, counts in enumerate((a, b)):
            table["rare" if is_rare else kind, side] += counts[kind]
    rows = [(table[kind, 0], table[kind, 1]) for kind in {kind for kind, _ in table}]
    return len(rows) == 1 or chi2_contingency(rows).pvalue > P


@pytest.mark.parametrize(
    ("variables", "weights", "cap"),
    [(1, [1, 50, 7], 10), (3, [1, 2, 7], 3), (5, [1, 4, 2], 10), (2, [1, 0, 4], 2)],
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
        our_counts = Counter(sample[trait] for sample in ours)
        their_counts = Counter(sample[trait] for sample in by_grammar)
        assert are_alike(our_counts, their_counts), trait
