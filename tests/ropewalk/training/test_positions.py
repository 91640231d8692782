"""Positions of long texts for short sequences, and windows: drawn as the papers say, and at work in training."""

import shutil
from collections import Counter
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
from conftest import rows_of
from scipy.stats import chisquare

from ropewalk.training.ranks import Ranks
from ropewalk.training.schedule import draw_positions


def drawn(kind, length, max_position):
    """How often 4,000 draws give each list of positions."""
    torch.manual_seed(0)
    counts = Counter()
    for _ in range(4000):
        positions, reach = draw_positions(kind, length, max_position, torch.device("cpu"))
        assert reach == max_position
        counts[tuple(positions.tolist())] += 1
    return counts


def test_random_positions_are_each_choice_equally_often():
    samples = drawn("random", 3, 7)
    assert sorted(samples) == sorted(combinations(range(7), 3))
    assert chisquare(list(samples.values())).pvalue > 1 / 3000


def test_pose_skips_anywhere_after_a_first_chunk_of_up_to_half():
    chunks = drawn("pose", 5, 8)
    expected = set()
    for first, skip in product((1, 2, 3), range(4)):
        expected.add((*range(first), *range(first + skip, 5 + skip)))

    assert set(chunks) == expected

    del chunks[0, 1, 2, 3, 4]  # no skip, three times as often
    assert chisquare(list(chunks.values())).pvalue > 1 / 3000


@pytest.fixture
def first_step(train):
    """`first_step("seed=1", ...)` is the row of the first step of such a run."""

    def run(*options):
        short = ["pe=rope", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]"]
        shutil.rmtree(train.runs, ignore_errors=True)
        train(*short, "name=it", *options)
        (row,) = rows_of(train.runs / "it")
        return row

    return run


def test_training_reads_other_positions_than_consecutive_ones_if_there_is_room(first_step):
    consecutive = first_step()
    no_room = first_step("trainer.positions=random", "trainer.max_position=16")
    random = first_step("trainer.positions=random", "trainer.max_position=128")
    pose = first_step("trainer.positions=pose", "trainer.max_position=128")
    assert no_room == consecutive
    assert len({row["train/loss"] for row in (consecutive, random, pose)}) == 3


def draws(world_size, grad_accum_steps, step=3):
    """What each micro-batch of a step draws at random, in the order of its samples."""
    drawn = []
    ranks = object.__new__(Ranks)
    ranks.fabric = SimpleNamespace(world_size=world_size)
    for m in range(grad_accum_steps):
        for ranks.fabric.global_rank in range(world_size):  # as `batch_indices` divides samples
            ranks.seed(7, (step - 1) * grad_accum_steps + m)
            drawn.append(torch.rand(3).tolist())
    return drawn


def test_what_is_drawn_at_random_does_not_depend_on_the_number_of_ranks():
    alone = draws(1, 4)
    assert len({tuple(values) for values in alone}) == 4
    assert draws(2, 2) == draws(4, 1) == alone
    assert draws(1, 4, step=4) != alone
