"""Selective copying: sizes that follow from the length, uniform symbols at uniform places, every label."""

from collections import Counter
from math import comb

import pytest
from chance import fits
from hypothesis import given, settings
from hypothesis import strategies as st
from solvers import check, texts

from data.tasks.selective_copy import SelectiveCopy


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.integers(-1, 40),
    length=st.integers(0, 90),
    difficulty=st.sampled_from(SelectiveCopy.difficulties),
    seed=st.integers(0, 9),
)
def test_any_options(kinds, length, difficulty, seed):
    if kinds < 2:
        with pytest.raises(ValueError, match=f"data.kinds={kinds} must be at least 2"):
            SelectiveCopy(kinds=kinds)
        return
    task = SelectiveCopy(kinds=kinds)
    if length < 4:
        with pytest.raises(ValueError, match=f"at least 4 tokens, not {length}"):
            task.batch("any", range(2), length, difficulty)
        return
    x, y = task.batch(f"any/{seed}", range(20), length, difficulty)
    check(task, x, y)
    n = length // 4
    blanks = {"in-distribution": n, "dense": n // 2, "sparse": 2 * n}[difficulty]
    for symbols, answers in texts(task, x, y):
        assert len(symbols) == length
        assert symbols.count(".") == blanks
        assert symbols.index("|") == blanks + n
        assert len(answers) == n
        end = blanks + 2 * n + 1
        assert symbols[end:] == ["-"] * (length - end)
        assert "-" not in symbols[:end]


def test_512_tokens_are_the_paper_s_sizes():
    task = SelectiveCopy()
    for difficulty, blanks, used in (("in-distribution", 128, 385), ("dense", 64, 321), ("sparse", 256, 512)):
        ((symbols, answers),) = texts(task, *task.batch("test", [0], 512, difficulty))
        assert (symbols.count("."), len(answers)) == (blanks, 128)
        assert 512 - symbols.count("-") == used  # with sparse the last symbol is never read


@pytest.mark.parametrize(("difficulty", "blanks"), [("in-distribution", 2), ("dense", 1), ("sparse", 4)])
def test_symbols_and_places_are_uniform(difficulty, blanks):
    task = SelectiveCopy(kinds=5)
    kinds, places = dict.fromkeys(task.symbols[3:], 0), Counter()
    for symbols, answers in texts(task, *task.batch("test", range(6000), 8, difficulty)):
        for symbol in answers.values():
            kinds[symbol] += 1
        places["".join("." if symbol == "." else "s" for symbol in symbols[: symbols.index("|")])] += 1
    assert fits(list(kinds.values()), [1] * 5)
    assert len(places) == comb(2 + blanks, 2)
    assert fits(list(places.values()), [1] * len(places))
