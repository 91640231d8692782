"""The order of training: a permutation, and the same samples in every step however the work is divided."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.sampler import batch_indices, feistel_permutation, micro_batches


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation(n, key):
    images = feistel_permutation(np.arange(n), n, [key, key // 3, 5, 7])
    assert sorted(images.tolist()) == list(range(n))


def test_permutation_shuffles():
    n = 10_000
    keys = np.random.SeedSequence(0).generate_state(4, np.uint64)
    images = feistel_permutation(np.arange(n), n, keys)
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 0.03  # 3 standard deviations of independent ranks
    counts = np.histogram2d(np.arange(n), images, bins=10)[0]
    chi_squared = ((counts - 100) ** 2 / 100).sum()
    assert chi_squared < 150  # of 81 degrees of freedom: 81 +- 13
    others = feistel_permutation(np.arange(n), n, keys + np.uint64(1))
    assert (images == others).sum() < 10
    last = 10**12
    huge = feistel_permutation(np.array([0, 1, last]), last + 1, keys).tolist()
    assert len(set(huge)) == 3
    assert min(huge) >= 0
    assert max(huge) <= last


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_has_the_same_samples_however_divided(accumulate, world_size):
    division = {"batch_size": 24, "grad_accum_steps": accumulate, "world_size": world_size}
    for step in range(3):
        ranks = [batch_indices(step, rank=rank, **division) for rank in range(world_size)]
        samples = []
        for m in range(accumulate):
            for micro_batches_of_rank in ranks:
                part = micro_batches_of_rank[m]
                assert len(part) == 24 // accumulate // world_size
                samples += part
        assert samples == list(range(24 * step, 24 * step + 24))
    with pytest.raises(ValueError, match=r"trainer\.batch_size=24 must be a multiple of .*try trainer\.batch_size=35"):
        batch_indices(0, batch_size=24, grad_accum_steps=5, world_size=7)


class Samples:
    """Each sample is its index."""

    def train_batch(self, indices, length, seed):
        if 99 in indices:
            raise ValueError("a defect")
        return torch.tensor([*indices]), torch.tensor(length)


def test_a_step_has_the_same_samples_whatever_came_before():
    """Shorter sequences up to step 2, longer ones then: each step counts its own from its number alone."""
    division = {"grad_accum_steps": 2, "rank": 1, "world_size": 2}

    def shape(step):
        return (8, 8) if step < 2 else (4, 16)

    for start, options, expected in (
        (0, {}, [([0, 1, 2, 3, 4, 5, 6, 7], 8), ([8, 9, 10, 11, 12, 13, 14, 15], 8), ([8, 9, 10, 11], 16)]),
        (3, {}, [([12, 13, 14, 15], 16)]),
        (1, division, [([10, 11], 8), ([14, 15], 8), ([9], 16), ([11], 16), ([13], 16)]),
    ):
        batches = micro_batches(Samples(), shape, 0, start_step=start, **options)
        for indices, length in expected:
            x, y = next(batches)
            assert x.tolist() == indices
            assert int(y) == length


def test_an_error_in_the_data_is_raised_and_the_thread_ends():
    threads = threading.active_count()
    batches = micro_batches(Samples(), lambda step: (50, 1), 0)
    assert next(batches)[0].tolist() == [*range(50)]
    with pytest.raises(ValueError, match="a defect"):
        next(batches)
    assert threading.active_count() == threads
