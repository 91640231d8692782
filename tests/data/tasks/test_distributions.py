"""Are the tasks' samples distributed as their papers say? They are fixed, so a test that passes once always does."""

import random
from collections import Counter
from itertools import combinations, permutations
from math import comb

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare
from solvers import texts

from data.tasks.copy import Copy
from data.tasks.counting import Counting
from data.tasks.flip_flop import FlipFlop
from data.tasks.group import Group
from data.tasks.recall import Recall
from data.tasks.selective_copy import SelectiveCopy
from data.tasks.variables import Variables

P = 1 / 3000  # of rejecting what is true


def uniform(counts):
    return chisquare(list(counts.values())).pvalue > P


def alike(a, b):
    """Do two Counters have one distribution? Kinds that are rare in both count as one."""
    table = [(a[kind], b[kind]) for kind in a | b if a[kind] + b[kind] >= 10]
    rest = [(a[kind], b[kind]) for kind in a | b if a[kind] + b[kind] < 10]
    table += [tuple(map(sum, zip(*rest, strict=True)))] if rest else []
    return len(table) == 1 or chi2_contingency(table).pvalue > P


@pytest.mark.parametrize(("difficulty", "p"), [("in-distribution", 0.8), ("dense", 0.1), ("sparse", 0.98)])
def test_flip_flop(difficulty, p):
    between, bits = Counter(i=0, w=0, r=0), {"w": Counter(), "i": Counter(), "r": Counter()}
    for symbols, answers in texts(FlipFlop(), *FlipFlop().batch("test", range(500), 128, difficulty)):
        assert (symbols[0], symbols[-2]) == ("w", "r")
        assert len(answers) == symbols.count("r")
        between.update(symbols[2:-2:2])
        for instruction, bit in zip(symbols[0::2], symbols[1::2], strict=True):
            bits[instruction][bit] += 1
    expected = between.total() * np.array([p, (1 - p) / 2, (1 - p) / 2])
    assert chisquare([between[kind] for kind in "iwr"], expected).pvalue > P
    assert uniform(bits["w"])
    assert uniform(bits["i"])


@pytest.mark.parametrize(("difficulty", "blanks"), [("in-distribution", 2), ("dense", 1), ("sparse", 4)])
def test_selective_copy(difficulty, blanks):
    task, kinds, places = SelectiveCopy(kinds=5), Counter(), Counter()
    for symbols, answers in texts(task, *task.batch("test", range(6000), 8, difficulty)):
        kinds.update(answers.values())
        places["".join("." if symbol == "." else "s" for symbol in symbols[: symbols.index("|")])] += 1
    assert (len(kinds), len(places)) == (5, comb(2 + blanks, 2))
    assert uniform(kinds)
    assert uniform(places)
    ((symbols, answers),) = texts(task, *task.batch("test", [0], 512, difficulty))
    assert (symbols.count("."), len(answers)) == (64 * blanks, 128)  # the paper's sizes


def test_recall():
    task = Recall(pairs=3, keys=4, values=5)
    keys, values, orders, places = Counter(), Counter(), Counter(), Counter()
    for symbols, answers in texts(task, *task.batch("test", range(4000), 13, "in-distribution")):
        stored = symbols[0:6:2]
        keys[tuple(stored)] += 1
        values[tuple(symbols[1:6:2])] += 1
        orders[tuple(stored.index(symbols[at]) for at in answers)] += 1
        places[tuple(answers)] += 1
    assert sorted(keys) == sorted(permutations(["k0", "k1", "k2", "k3"], 3))
    assert sorted(orders) == sorted(permutations(range(3)))
    assert (len(values), len(places)) == (5**3, comb(5, 3))  # 2 of filler and 3 queries
    assert all(uniform(found) for found in (keys, values, orders, places))


def test_the_gaps_of_recall_are_drawn_one_after_another_by_their_weight():
    """As numpy's choice(replace=False, p=...) draws them, which the generator of MQAR's authors calls."""
    task, found, n = Recall(pairs=2, keys=2, gap_power=0.25), Counter(), 4000
    for _, answers in texts(task, *task.batch("test", range(n), 10, "in-distribution")):
        first, second = sorted(answers)
        found[first - 4, second - 5] += 1  # two pairs before them, and the first query
    p = np.arange(1, 6) ** -0.75
    p /= p.sum()
    expected = {(i, j): p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j])) for i, j in combinations(range(5), 2)}
    assert chisquare([found[gaps] for gaps in expected], [n * q for q in expected.values()]).pvalue > P


@pytest.mark.parametrize(("density", "pairs"), [(None, (8, 8, 8)), (0.5, (4, 8, 64))])
def test_a_longer_recall_has_more_filler_or_as_many_pairs_for_its_length(density, pairs):
    task = Recall(density=density, keys=64)
    for length, n in zip((32, 64, 512), pairs, strict=True):
        for difficulty, shortest, longest in (("near", 1, 4 * n - 1), ("far", length + 2 - 4 * n, length)):
            for symbols, answers in texts(task, *task.batch("test", range(20), length, difficulty)):
                assert len(answers) == n
                assert all(shortest <= at - symbols.index(symbols[at]) <= longest for at in answers)


def test_variables():
    task = Variables(chains=2, hops=1)
    names, orders, places, hops = Counter(), Counter(), Counter(), Counter()
    for symbols, answers in texts(task, *task.batch("test", range(4000), 20, "in-distribution")):
        set_ = [symbols[i - 1] for i, symbol in enumerate(symbols) if symbol == "="]
        asked = [symbols[at] for at in answers]
        meaning = {symbols[i - 1]: symbols[i + 1] for i, symbol in enumerate(symbols) if symbol == "="}
        names.update(set_)
        roots = [meaning[name] if meaning[name] in meaning else name for name in set_]
        orders[tuple(roots.index(root) for root in roots)] += 1
        places[tuple(i for i, symbol in enumerate(symbols) if symbol == "=")] += 1
        hops[tuple(meaning[name] in meaning for name in asked)] += 1
    assert (len(names), len(orders), len(places), len(hops)) == (26, 3, comb(7, 4), 4)  # 3 of filler, 4 statements
    assert all(uniform(found) for found in (names, orders, places, hops))


@pytest.mark.parametrize(
    ("group", "generators", "kinds"),
    [("s3", False, "abc acb bac bca cab cba"), ("s3", True, "abc acb bac cba"), ("a3", False, "abc bca cab"),
     ("z5", True, "0 1"), ("z3", False, "0 1 2")],
)  # fmt: skip
def test_group(group, generators, kinds):
    task, found = Group(group=group, generators=generators), Counter()
    for symbols, _ in texts(task, *task.batch("test", range(200), 50, "in-distribution")):
        found.update(symbols[1:])
    assert " ".join(sorted(found)) == kinds
    assert uniform(found)
    x, _ = task.batch("test", range(200), 50, "sparse")
    assert abs((x[:, 1:] == 0).double().mean() - 0.9 - 0.1 / len(found)) < 4 * (0.09 / 9800) ** 0.5
    assert len(Group(group="a5").vocab) == 60 + 1  # of the subgroups of S5 only A5 has that many


@pytest.mark.parametrize(("task", "sizes"), [(Counting(variables=2), range(3, 21)), (Copy(), range(1, 11))])
def test_sizes_are_uniform(task, sizes):
    for difficulty, expected in (("in-distribution", sizes), ("full", sizes[-1:])):
        samples = texts(task, *task.batch("test", range(2000), 21, difficulty))
        found = Counter(min(answers) for _, answers in samples)  # tokens before the first answer
        assert sorted(found) == list(expected)
        assert len(found) == 1 or uniform(found)


def grammar(chance, variables, weights, cap, n):
    """A counting program of n operations, what it asks and the answer, drawn one after another; anew if none is set."""
    while True:
        values, program = {}, []
        while len(program) < n:
            kind = chance.choices("spi", weights)[0]
            if kind == "s":
                variable = chance.choice("abcdefgh"[:variables])
                values[variable] = 0
                program.append(f"{variable}=0")
            elif kind == "p":
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
    sets = [i for i, operation in enumerate(program) if "=" in operation]
    last = max(i for i in sets if program[i].startswith(asked))
    increments = sum("++" in operation for operation in program), program.count("a++")
    return answer, asked, sets[0], last, len(sets), *increments, program[1], program[-1]


@pytest.mark.parametrize(
    ("variables", "weights", "cap"), [(1, [1, 50, 7], 10), (3, [1, 2, 7], 3), (5, [1, 4, 2], 10), (2, [1, 0, 4], 2)]
)
def test_counting_is_as_its_grammar_draws_it(variables, weights, cap):
    task, n, samples = Counting(variables=variables, weights=weights, cap=cap), 24, 2000
    chance = random.Random(0)
    theirs = [traits(*grammar(chance, variables, weights, cap, n)) for _ in range(samples)]
    ours = []
    for symbols, answers in texts(task, *task.batch("test", range(samples), n + 1, "full")):
        ((at, answer),) = answers.items()
        ours.append(traits(symbols[:at], symbols[at][0], int(answer)))
    for i, (a, b) in enumerate(zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)):
        assert alike(Counter(a), Counter(b)), i
