"""Positions of long texts for short sequences, and windows: drawn as the papers say, and at work in training."""

from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import torch
from conftest import rows_of
from scipy.stats import binomtest, chisquare

from ropewalk.training.positions import draw_positions, draw_window
from ropewalk.training.ranks import Ranks


def drawn(kind, length, max_position):
    """How often 4,000 draws give each list of positions."""
    torch.manual_seed(0)
    counts = Counter()
    for _ in range(4000):
        positions, reach = draw_positions(kind, length, max_position, torch.device("cpu"))
        assert reach == max_position
        counts[tuple(positions.tolist())] += 1
    return counts


def test_positions_are_drawn_as_the_papers_say():
    samples = drawn("random", 3, 7)
    assert sorted(samples) == sorted(combinations(range(7), 3))
    assert chisquare(list(samples.values())).pvalue > 1 / 3000

    chunks = drawn("pose", 5, 8)
    first_and_skip = [(first, skip) for first in (1, 2, 3) for skip in range(4)]
    assert set(chunks) == {(*range(first), *range(first + skip, 5 + skip)) for first, skip in first_and_skip}

    del chunks[0, 1, 2, 3, 4]  # no skip, three times as often
    assert chisquare(list(chunks.values())).pvalue > 1 / 3000


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


def losses(train, **runs):
    """The losses of the first step of runs with these options, by name."""
    of_training, of_validation = {}, {}
    for name, options in runs.items():
        assert train("pe=rope", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]", *options).code == 0
        (row,) = rows_of(train.runs / name)
        of_training[name] = row["train/loss"]
        of_validation[name] = row["val/loss"]
    return of_training, of_validation


def test_training_sees_the_positions_that_were_drawn(train):
    def positions(name, kind, max_position):
        return [f"name={name}", f"trainer.positions={kind}", f"trainer.max_position={max_position}"]

    first, _ = losses(
        train,
        consecutive=["name=consecutive"],
        no_room=positions("no_room", "random", 16),
        random=positions("random", "random", 128),
        pose=positions("pose", "pose", 128),
    )
    assert first["no_room"] == first["consecutive"]
    assert len(set(first.values())) == 3


def test_a_step_with_a_short_window_is_that_of_a_run_with_this_window(train):
    """And validation after it reads with the long one."""
    assert draw_window(3, seed=2, step=1) == 3
    of_training, of_validation = losses(
        train,
        drawn=["name=drawn", "seed=2", "pe.window=9", "trainer.short_window=3"],
        short=["name=short", "seed=2", "pe.window=3"],
        long=["name=long", "seed=2", "pe.window=9"],
    )
    assert of_training["drawn"] == of_training["short"] != of_training["long"]
    assert of_validation["drawn"] != of_validation["short"]


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
