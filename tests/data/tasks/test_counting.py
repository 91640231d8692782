"""Counting: the grammar as its released code draws it, its variants, every answer for any options."""

import random
import re
from collections import Counter

import pytest
from chance import alike, fits
from hypothesis import given, settings
from hypothesis import strategies as st
from solvers import check, texts

from data.tasks.counting import Counting


def grammar(chance, variables, weights, cap, random_values, n):
    """A program of n operations, what it asks and the answer, drawn one after another; anew if nothing is ever set."""
    while True:
        values, program = {}, []
        while len(program) < n:
            kind = chance.choices("spi", weights)[0]
            if kind == "s":
                variable = chance.choice("abcdefgh"[:variables])
                values[variable] = chance.randint(0, cap) if random_values else 0
                program.append(f"{variable}={values[variable]}")
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


def summary(program, asked, answer):
    """Traits of a program by which distributions are compared: a category for each."""
    first = next(i for i, operation in enumerate(program) if "=" in operation)
    last = max(i for i, operation in enumerate(program) if operation.startswith(f"{asked}="))
    return {
        "answer": answer,
        "asked": asked,
        "first set": first,
        "last set": last,
        "sets": sum("=" in operation for operation in program),
        "increments": sum("++" in operation for operation in program),
        "increments of a": program.count("a++"),
        "value set": program[last].split("=")[1],
        "second": program[1],
        "last": program[-1],
    }


def programs(task, length, difficulty, n, stream="test"):
    """(operations, variable asked for, answer) of n samples."""
    for symbols, answers in texts(task, *task.batch(stream, range(n), length, difficulty)):
        ((at, answer),) = answers.items()
        yield symbols[:at], symbols[at][0], int(answer)


@pytest.mark.parametrize(
    ("variables", "weights", "cap", "values"),
    [(1, [1, 50, 7], 10, "zero"), (3, [1, 2, 7], 3, "zero"), (5, [1, 4, 2], 10, "random"), (2, [1, 0, 4], 2, "random")],
)
def test_programs_are_as_the_grammar_draws_them(variables, weights, cap, values):
    task, n, samples = Counting(variables=variables, weights=weights, cap=cap, values=values), 24, 2000
    chance = random.Random(0)
    theirs = [summary(*grammar(chance, variables, weights, cap, values == "random", n)) for _ in range(samples)]
    ours = [summary(*program) for program in programs(task, n + 1, "full", samples)]
    for trait in ours[0]:
        a, b = Counter(s[trait] for s in ours), Counter(s[trait] for s in theirs)
        kinds = sorted(a | b, key=str)
        assert len(kinds) == 1 or alike([a[k] for k in kinds], [b[k] for k in kinds]), trait


def test_the_number_of_operations_is_uniform():
    sizes = Counter(len(program) for program, _, _ in programs(Counting(variables=2), 21, "in-distribution", 2000))
    assert sorted(sizes) == list(range(3, 21))
    assert fits([sizes[n] for n in sorted(sizes)], [1] * 18)
    assert {len(program) for program, _, _ in programs(Counting(), 21, "full", 100)} == {20}


@pytest.mark.parametrize("values", ["zero", "random"])
def test_balanced_answers(values):
    """Of programs of one size every answer is as frequent; 0 and the cap prevail otherwise."""
    task = Counting(variables=3, values=values, balance=True)
    answers = Counter(answer for _, _, answer in programs(task, 48, "full", 2000))
    assert fits([answers[value] for value in range(11)], [1] * 11)
    few = Counter(answer for _, _, answer in programs(task, 5, "full", 2000))
    reachable = 4 if values == "zero" else 11  # 3 increments after a set
    assert fits([few[value] for value in range(reachable)], [1] * reachable)
    assert sum(few.values()) == sum(few[value] for value in range(reachable))


def test_the_most_frequent_answer_without_balance():
    """A fifth of the programs: a model that has learned nothing is right in these."""
    answers = Counter(answer for _, _, answer in programs(Counting(), 256, "in-distribution", 1000))
    assert 150 < max(answers.values()) < 250


def test_balance_puts_the_counted_increments_anywhere_after_the_set():
    places = Counter()
    for program, asked, answer in programs(Counting(variables=2, weights=[1, 5, 1], balance=True), 8, "full", 3000):
        start = max(i for i, operation in enumerate(program) if operation == f"{asked}=0")
        counted = [i for i, operation in enumerate(program) if i > start and operation == f"{asked}++"]
        assert len(counted) == answer
        if answer == 1 and start == 2:
            places[counted[0]] += 1
    assert sorted(places) == [3, 4, 5, 6]
    assert fits([places[i] for i in range(3, 7)], [1] * 4)


@settings(max_examples=80, deadline=None)
@given(
    variables=st.integers(-1, 28),
    weights=st.lists(st.sampled_from([-1.0, 0, 1e-9, 0.5, 1, 7, 50]), min_size=2, max_size=4),
    cap=st.integers(-1, 101),
    values=st.sampled_from(["zero", "random"]),
    balance=st.booleans(),
    length=st.integers(0, 40),
    difficulty=st.sampled_from(Counting.difficulties),
)
def test_any_options(variables, weights, cap, values, balance, length, difficulty):
    options = {"variables": variables, "weights": weights, "cap": cap, "values": values, "balance": balance}
    wrong = []
    if not 1 <= variables <= 26:
        wrong.append(f"data.variables={variables}")
    if len(weights) != 3 or min(weights) < 0 or weights[0] == 0 or weights[2] > 10 * (weights[0] + weights[1]):
        wrong.append(f"data.weights={weights}")
    if not 1 <= cap <= 99:
        wrong.append(f"data.cap={cap}")
    if wrong:
        with pytest.raises(ValueError, match=re.escape(wrong[0])):
            Counting(**options)
        return
    task = Counting(**options)
    if length < 4:
        with pytest.raises(ValueError, match=f"at least 4 tokens, for 3 operations and the question, not {length}"):
            task.batch("any", range(2), length, difficulty)
        return
    x, y = task.batch("any", range(20), length, difficulty)
    check(task, x, y)
    for i, (symbols, answers) in enumerate(texts(task, x, y)):
        ((at, answer),) = answers.items()
        assert 3 <= at <= length - 1
        assert difficulty != "full" or at == length - 1
        assert symbols[at + 1 :] == [answer, *["-"] * (length - at - 2)][: length - at - 1]
        counts = dict.fromkeys("abcdefghijklmnopqrstuvwxyz"[:variables])
        for operation in symbols[:at]:
            if "=" in operation:
                counts[operation[0]] = int(operation[2:])
                assert counts[operation[0]] in range(cap + 1 if values == "random" else 1)
            elif operation != "pass":
                counts[operation[0]] += 1
                assert counts[operation[0]] <= cap
        one = task.batch("any", [i], length, difficulty)  # also where more operations had to be drawn for some rows
        assert (one[0][0].tolist(), one[1][0].tolist()) == (x[i].tolist(), y[i].tolist())
