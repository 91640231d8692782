"""Flip-flop: the grammar, its probabilities, and every label for any options."""

import pytest
from chance import fits
from hypothesis import given, settings
from hypothesis import strategies as st
from solvers import check, texts

from data.tasks.flip_flop import FlipFlop


@settings(max_examples=60, deadline=None)
@given(
    probabilities=st.lists(st.floats(-0.2, 1.2), min_size=3, max_size=3),
    length=st.integers(0, 70),
    difficulty=st.sampled_from(FlipFlop.difficulties),
    seed=st.integers(0, 9),
)
def test_any_options(probabilities, length, difficulty, seed):
    options = dict(zip(("ignore", "dense", "sparse"), probabilities, strict=True))
    if not all(0 <= p <= 1 for p in probabilities):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            FlipFlop(**options)
        return
    if length < 4 or length % 2:
        with pytest.raises(ValueError, match=f"{length} tokens are not possible"):
            FlipFlop(**options).batch("any", range(2), length, difficulty)
        return
    x, y = FlipFlop(**options).batch(f"any/{seed}", range(20), length, difficulty)
    check(FlipFlop(), x, y)
    for symbols, answers in texts(FlipFlop(), x, y):
        assert (symbols[0], symbols[-2]) == ("w", "r")
        assert set(symbols[0::2]) <= {"w", "r", "i"}
        assert set(symbols[1::2]) <= {"0", "1"}
        assert len(answers) == symbols.count("r") >= 1


@pytest.mark.parametrize(("difficulty", "p"), [("in-distribution", 0.8), ("dense", 0.1), ("sparse", 0.98)])
def test_probabilities(difficulty, p):
    x, y = FlipFlop().batch("test", range(500), 128, difficulty)
    bits = {instruction: {"0": 0, "1": 0} for instruction in "wir"}
    between = dict.fromkeys("iwr", 0)  # all but the first and the last instruction
    for symbols, _ in texts(FlipFlop(), x, y):
        for instruction, bit in zip(symbols[0::2], symbols[1::2], strict=True):
            bits[instruction][bit] += 1
        for instruction in symbols[2:-2:2]:
            between[instruction] += 1
    assert fits(list(between.values()), [p, (1 - p) / 2, (1 - p) / 2])
    assert fits(list(bits["w"].values()), [0.5, 0.5])
    assert fits(list(bits["i"].values()), [0.5, 0.5])


def test_always_and_never_ignored():
    task = FlipFlop(ignore=1.0, dense=0.0)
    for symbols, answers in texts(task, *task.batch("test", range(50), 40, "in-distribution")):
        assert symbols[0:2:2] + symbols[2:-2:2] + symbols[-2:-1] == ["w", *["i"] * 18, "r"]
        assert list(answers.values()) == [symbols[1]]
    for symbols, _ in texts(task, *task.batch("test", range(50), 40, "dense")):
        assert "i" not in symbols
