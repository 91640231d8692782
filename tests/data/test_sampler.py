"""The order of training: a permutation, and the same samples in every step however the work is divided."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from data.sampler import batch_indices, feistel_permutation, micro_batches


@settings(max_examples=30)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_has_each_index_once(n, key):
    keys = [key, key // 3, 5, 7]
    images = feistel_permutation(np.arange(n), n, keys)

    assert sorted(images.tolist()) == list(range(n))


def test_a_permutation_looks_random():
    n = 10_000
    keys = np.random.SeedSequence(0).generate_state(4, np.uint64)

    images = feistel_permutation(np.arange(n), n, keys)

    counts, *_ = np.histogram2d(np.arange(n), images, bins=10)

    assert chisquare(counts.flatten()).pvalue > 1e-3


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_has_the_same_samples_however_divided(accumulate, world_size):
    division = {"batch_size": 24, "grad_accum_steps": accumulate, "world_size": world_size}
    ranks = [batch_indices(2, rank=rank, **division) for rank in range(world_size)]
    parts = [*itertools.chain(*zip(*ranks, strict=True))]  # in each micro-step those of all ranks

    assert {len(part) for part in parts} == {24 // accumulate // world_size}
    assert [*itertools.chain(*parts)] == [*range(48, 72)]


def test_a_batch_that_cannot_be_divided_is_an_error():
    with pytest.raises(ValueError, match=r"trainer\.batch_size=24 must be a multiple of .*try trainer\.batch_size=35"):
        batch_indices(0, batch_size=24, grad_accum_steps=5, world_size=7)


class Samples:
    """Each sample is its index."""

    vocab_size = 99

    def train_batch(self, indices, length, seed):
        return torch.tensor([*indices]), torch.tensor(length)


DIVISION = {"grad_accum_steps": 2, "rank": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("start", "division", "expected"),
    [
        (
            0,
            {},
            [
                (range(8), 8),
                (range(8, 16), 8),
                (range(8, 12), 16),
            ],
        ),
        (3, {}, [(range(12, 16), 16)]),
        (
            1,
            DIVISION,
            [
                ([10, 11], 8),
                ([14, 15], 8),
                ([9], 16),
                ([11], 16),
                ([13], 16),
            ],
        ),
    ],
)
def test_a_step_has_the_same_samples_whatever_came_before(start, division, expected):
    """Shorter sequences up to step 2, longer ones then: each step counts its own from its number alone."""

    def shape(step):
        return (8, 8) if step < 2 else (4, 16)

    batches = micro_batches(Samples(), shape, 0, start_step=start, **division)
    for indices, length in expected:
        x, y = next(batches)
        assert x.tolist() == list(indices)
        assert int(y) == length


def test_an_error_in_the_data_is_raised_and_the_thread_ends():
    threads = threading.active_count()
    batches = micro_batches(Samples(), lambda step: (50, 1), 0)

    next(batches)

    with pytest.raises(ValueError, match="an input of the data is token 99, but `vocab_size` is 99"):
        next(batches)

    assert threading.active_count() == threads
