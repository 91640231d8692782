"""Positions of long texts for short sequences: drawn as the papers say, and at work in training."""

from collections import Counter
from itertools import combinations

import torch
from conftest import rows_of
from scipy.stats import chisquare

from training.positions import draw_positions

TO_128 = ["trainer.max_position=128"]


def drawn(kind, length, max_position):
    """How often 4,000 draws give each list of positions."""
    torch.manual_seed(0)
    found = [draw_positions(kind, length, max_position, torch.device("cpu")) for _ in range(4000)]
    assert {reach for _, reach in found} == {max_position}
    return Counter(tuple(pos.tolist()) for pos, _ in found)


def test_they_are_drawn_as_the_papers_say():
    samples = drawn("random", 3, 7)
    assert sorted(samples) == sorted(combinations(range(7), 3))
    assert chisquare(list(samples.values())).pvalue > 1 / 3000
    chunks = drawn("pose", 5, 8)
    first_and_skip = [(first, skip) for first in (1, 2, 3) for skip in range(4)]
    assert set(chunks) == {(*range(first), *range(first + skip, 5 + skip)) for first, skip in first_and_skip}
    del chunks[0, 1, 2, 3, 4]  # no skip, three times as often
    assert chisquare(list(chunks.values())).pvalue > 1 / 3000


def test_training_sees_them(train):
    options = {"consecutive": [], "pose": TO_128, "random": TO_128, "no room": ["trainer.max_position=16"]}
    first = {}
    for name, more in options.items():
        kind = "random" if name == "no room" else name
        run = ["pe=rope", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]", f"trainer.positions={kind}"]
        assert train(*run, *more, f"name={name}").code == 0
        first[name] = rows_of(train.runs / name)[0]["train/loss"]
    assert first["no room"] == first["consecutive"]
    assert len(set(first.values())) == 3
