"""The order of training: a permutation, and the same samples in every step however the work is divided."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from corpora import text_files, write_corpus
from hypothesis import given
from hypothesis import strategies as st

from data.sampler import BatchSampler, permute, train_loader


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(n, key):
    taken = permute(np.arange(n), n, [key, key // 3, 5, 7])
    assert sorted(taken.tolist()) == list(range(n))


def test_permute_shuffles():
    n = 10_000
    keys = np.random.SeedSequence(0).generate_state(4, np.uint64)
    taken = permute(np.arange(n), n, keys)
    assert abs(np.corrcoef(np.arange(n), taken)[0, 1]) < 0.03  # 3 standard deviations of independent ranks
    steps = np.diff(taken)
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.03  # -1/2 for independent neighbours
    counts = np.histogram2d(np.arange(n), taken, bins=10)[0]
    assert ((counts - 100) ** 2 / 100).sum() < 150  # chi-squared with 81 degrees of freedom: 81 +- 13
    other = permute(np.arange(n), n, keys + np.uint64(1))
    assert (taken == other).sum() < 10


def test_permute_a_large_range_by_single_numbers():
    n = 3 * 10**12 + 1
    index = np.array([0, 1, n // 2, n - 1])
    together = permute(index, n, [1, 2, 3, 4])
    assert together.tolist() == [permute(np.array([i]), n, [1, 2, 3, 4]).item() for i in index]
    assert len(set(together.tolist())) == 4
    assert ((together >= 0) & (together < n)).all()


def sampler(**options):
    return BatchSampler(**{"batch_size": 24, "accumulate": 1, "rank": 0, "world_size": 1, "steps": 5} | options)


@pytest.mark.parametrize(("accumulate", "world_size"), list(itertools.product((1, 2, 3), (1, 2, 4))))
def test_a_step_has_the_same_samples_however_divided(accumulate, world_size):
    ranks = [list(sampler(accumulate=accumulate, rank=r, world_size=world_size)) for r in range(world_size)]
    for step in range(5):
        portions = [ranks[r][step * accumulate + m] for m in range(accumulate) for r in range(world_size)]
        assert list(itertools.chain(*portions)) == list(range(step * 24, (step + 1) * 24))
        assert len({len(p) for p in portions}) == 1


def test_resuming_skips_steps_but_not_length():
    whole, rest = sampler(accumulate=2), sampler(accumulate=2, start_step=3)
    assert list(whole)[6:] == list(rest)
    assert len(whole) == len(rest) == 10
    assert list(sampler(start_step=5)) == []


def test_a_batch_that_does_not_divide():
    with pytest.raises(
        ValueError, match=r"trainer\.batch_size=24 must be a multiple of 10 .*try trainer\.batch_size=30"
    ):
        sampler(accumulate=5, world_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("sampler")
    source = text_files(write_corpus(root / "corpus"), root / "cache")
    source.prepare()
    return source


def batches(source, *, num_workers=0, **options):
    return list(train_loader(source, sampler(**options), length=16, seed=1, num_workers=num_workers))


def test_the_same_batches_for_any_number_of_workers(source):
    alone, helped = batches(source), batches(source, num_workers=2)
    assert len(alone) == len(helped) == 5
    for (x, y), (x2, y2) in zip(alone, helped, strict=True):
        assert x.shape == (24, 16)
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


def test_two_ranks_see_what_one_sees(source):
    one = torch.cat([x for x, _ in batches(source)])
    parts = [[x for x, _ in batches(source, accumulate=2, rank=r, world_size=2)] for r in (0, 1)]
    assert torch.equal(one, torch.cat([x for pair in zip(*parts, strict=True) for x in pair]))


def test_a_resumed_loader_goes_on_where_the_other_was(source):
    whole, rest = batches(source, accumulate=3), batches(source, accumulate=3, start_step=4)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[12:], rest, strict=True))


def test_global_random_state_is_neither_read_nor_changed(source):
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = batches(source)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    torch.manual_seed(5)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, batches(source), strict=True))


def test_a_prepared_source_pickles_without_its_tokens(source):
    content = pickle.dumps(source)
    assert len(content) < source.prepared.train.tokens
    copy = pickle.loads(content)
    assert torch.equal(copy.train_batch([3], 16, 0)[0], source.train_batch([3], 16, 0)[0])
