"""Recall: pairs and queries, where the filler lies, every label."""

from collections import Counter
from itertools import permutations
from math import comb

import pytest
from chance import fits
from hypothesis import given, settings
from hypothesis import strategies as st
from solvers import check, texts

from data.tasks.recall import Recall


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.integers(-1, 12),
    keys=st.integers(-1, 30),
    values=st.integers(-1, 30),
    length=st.integers(0, 80),
    difficulty=st.sampled_from(Recall.difficulties),
)
def test_any_options(pairs, keys, values, length, difficulty):
    options = {"pairs": pairs, "keys": keys, "values": values}
    wrong = "pairs" if pairs < 1 else "keys" if keys < pairs else "values" if values < 2 else None
    if wrong:
        with pytest.raises(ValueError, match=f"data.{wrong}={options[wrong]} must be at least"):
            Recall(**options)
        return
    task = Recall(**options)
    if length < 4 * pairs - 1:
        with pytest.raises(ValueError, match=f"at least {4 * pairs - 1} tokens, not {length}"):
            task.batch("any", range(2), length, difficulty)
        return
    x, y = task.batch("any", range(20), length, difficulty)
    check(task, x, y)
    for symbols, answers in texts(task, x, y):
        assert "." not in symbols[: 2 * pairs]
        asked = [symbols[at] for at in answers]
        assert sorted(asked) == sorted(symbols[0 : 2 * pairs : 2])
        assert len(set(asked)) == pairs
        filler = "." * (length + 1 - 4 * pairs)
        rest = "".join("." if symbol == "." else "q" for symbol in symbols[2 * pairs :])
        if difficulty == "near":
            assert rest == ("qq" * pairs + filler)[: len(rest)]  # the last token is not read
        if difficulty == "far":
            assert rest == (filler + "qq" * pairs)[: len(rest)]


def test_keys_values_order_and_places_are_uniform():
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
    for found in (keys, values, orders, places):
        assert fits(list(found.values()), [1] * len(found))


def test_a_longer_text_has_more_filler_not_more_pairs():
    task = Recall()
    for length in (32, 64, 512):
        for difficulty, shortest, longest in (("near", 1, 31), ("far", length - 30, length)):
            for symbols, answers in texts(task, *task.batch("test", range(20), length, difficulty)):
                assert len(answers) == 8
                assert all(shortest <= at - symbols.index(symbols[at]) <= longest for at in answers)
