"""Positions of long texts for short sequences, and windows: drawn as the papers say, and at work in training."""

from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import torch
from conftest import rows_of
from scipy.stats import binomtest, chisquare

from ropewalk.training.positions import draw_positions, draw_window
from ropewalk.training.ranks import Ranks

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


def test_every_second_window_is_short_whatever_was_drawn_before():
    def windows(seed):
        return [draw_window(5, seed=seed, step=step) for step in range(1, 1001)]

    first = windows(0)
    torch.manual_seed(3)
    assert windows(0) == first
    assert set(first) == {5, None}
    assert binomtest(first.count(5), 1000).pvalue > 1 / 3000
    same_as_of_seed_1 = sum(a == b for a, b in zip(first, windows(1), strict=True))
    assert binomtest(same_as_of_seed_1, 1000).pvalue > 1 / 3000


def test_a_step_with_a_short_window_is_that_of_a_run_with_this_window(train):
    """And validation after it reads with the long one."""
    assert draw_window(3, seed=2, step=1) == 3
    run = ["pe=rope", "seed=2", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]"]
    options = {"drawn": ["pe.window=9", "trainer.short_window=3"], "short": ["pe.window=3"], "long": ["pe.window=9"]}
    rows = {}
    for name, windows in options.items():
        assert train(*run, *windows, f"name={name}").code == 0
        (rows[name],) = rows_of(train.runs / name)
    assert rows["drawn"]["train/loss"] == rows["short"]["train/loss"] != rows["long"]["train/loss"]
    assert rows["drawn"]["val/loss"] != rows["short"]["val/loss"]


def draws(world_size, grad_accum_steps, step=3):
    """What each micro-batch of a step draws at random, in the order of its samples."""
    drawn = {}
    for rank in range(world_size):
        ranks = SimpleNamespace(size=world_size, number=rank)
        for m in range(grad_accum_steps):
            Ranks.begin(ranks, 7, (step - 1) * grad_accum_steps + m)
            drawn[m * world_size + rank] = torch.rand(3).tolist()  # as `batch_indices` divides samples
    return [drawn[number] for number in sorted(drawn)]


def test_what_is_drawn_at_random_does_not_depend_on_the_number_of_ranks():
    alone = draws(1, 4)
    assert len({tuple(values) for values in alone}) == 4
    assert draws(2, 2) == draws(4, 1) == alone
    assert draws(1, 4, step=4) != alone
