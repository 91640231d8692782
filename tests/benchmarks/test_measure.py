"""The measuring itself, on what is known beforehand."""

import os
import time
from functools import partial
from itertools import pairwise

import pytest
import torch

from benchmarks.measure import Clock, Pairs, beside, growth, in_fresh_process, ratio, take_turns, timed
from benchmarks.report import Table, cell
from model.machine import forget_past_work, peak_memory

MB = 2**20


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 1.5])
def test_exponent_of_known_growth(exponent):
    lengths = [256, 512, 1024, 4096]
    assert growth(lengths, [3e-6 * n**exponent for n in lengths]) == pytest.approx(exponent, abs=1e-9)


def test_no_exponent_of_too_few_values():
    assert growth([256, 512], [1.0, None]) is None
    assert growth([256], [1.0]) is None


def test_ratios_are_of_pairs():
    # the medians' ratio would be 2, the means' another
    assert ratio([1.0, 20.0, 3.0], [1.0, 4.0, 1.0]) == (3.0, 1.0, 5.0)
    pairs = Pairs([Clock(1, 2), Clock(2, 2)], [Clock(3, 2), Clock(2, 4)])
    assert pairs.ratio("wall") == (2.0, 1.0, 3.0)
    assert pairs.ratio("cpu") == (1.5, 1.0, 2.0)
    assert pairs.seconds("cpu") == 3


def test_each_is_timed_right_after_what_it_is_compared_with():
    calls = []
    functions = {name: partial(calls.append, name) for name in ("base", "a", "b")}
    pairs = beside(functions.pop("base"), functions, rounds=2, least=0)
    assert calls == ["base", "a", "b", *["base", "a", "base", "b"] * 2]  # the first three warm up
    assert [len(pairs["b"].own), len(pairs["b"].base)] == [2, 2]


def test_waiting_is_no_work():
    clock = timed(lambda: time.sleep(0.1))
    assert clock.wall >= 0.1
    assert clock.cpu < 0.05


def allocate(n: int) -> int:
    """Bytes at the peak of an allocation of n bytes, which is gone when they are counted."""
    torch.ones(1)
    forget_past_work()
    before = peak_memory("cpu")
    torch.ones(n, dtype=torch.uint8)
    return peak_memory("cpu") - before


def test_memory_of_a_known_allocation():
    assert in_fresh_process(allocate, 96 * MB) == pytest.approx(96 * MB, abs=4 * MB)
    assert in_fresh_process(allocate, 8 * MB) == pytest.approx(8 * MB, abs=4 * MB)  # nothing is left of the one before


def test_a_process_that_the_system_ends_has_no_memory_to_tell():
    assert in_fresh_process(os._exit, 9) is None


def contend(name: str, turn) -> None:
    began = 0.0
    for step in (1, 3, 5, 7):
        time.sleep(0.01)
        turn(step, name=name, began=began, ended=time.perf_counter())
        began = time.perf_counter()


def test_contenders_take_turns():
    courses = take_turns({"a": partial(contend, "a"), "b": partial(contend, "b")}, rounds=3)
    facts = [piece.facts for course in courses.values() for piece in course.pieces]
    assert [f["name"] for f in facts] == ["a"] * 3 + ["b"] * 3
    times = sorted((f["began"], f["ended"]) for f in facts)
    assert all(ended <= began for (_, ended), (began, _) in pairwise(times))
    for piece in courses["a"].pieces:
        assert piece.steps == 2
        assert piece.clock.wall >= 0.01
    assert courses["a"].per_step()[0] == courses["a"].pieces[0].clock.wall / 2
    assert courses["a"].peak_memory > 50 * MB  # PyTorch itself


def fails(turn) -> None:
    turn(1)
    raise ValueError("the third kind of failure")


def dies(turn) -> None:
    turn(1)
    os._exit(1)


def test_a_contender_that_fails_says_why():
    with pytest.raises(ValueError, match="third kind"):
        take_turns({"a": fails}, rounds=1)
    with pytest.raises(ValueError, match="process of a ended"):
        take_turns({"a": dies}, rounds=1)


def test_table():
    table = Table("T", [{"": "a|b", "x": 1234.5, "n": 12345}, {"": "c", "x": None, "n": 0}])
    assert table.markdown().splitlines()[2:] == [
        "|  | x | n |",
        "| --- | ---: | ---: |",
        "| a&#124;b | 1,234 | 12,345 |",
        "| c | - | 0 |",
    ]
    assert [cell(0.98765), cell(1.0), cell(12.34)] == ["0.988", "1.00", "12.3"]
