"""The order of training: a permutation, and the same samples in every step however the work is divided."""

import itertools
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from corpora import text_files, write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sampler import batch_indices, feistel_permutation, micro_batches


@settings(deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation(n, key):
    images = feistel_permutation(np.arange(n), n, [key, key // 3, 5, 7])
    assert sorted(images.tolist()) == list(range(n))


def test_permutation_shuffles():
    n = 10_000
    keys = np.random.SeedSequence(0).generate_state(4, np.uint64)
    images = feistel_permutation(np.arange(n), n, keys)
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 0.03  # 3 standard deviations of independent ranks
    steps = np.diff(images)
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.03  # -1/2 for independent neighbours
    counts = np.histogram2d(np.arange(n), images, bins=10)[0]
    assert ((counts - 100) ** 2 / 100).sum() < 150  # chi-squared with 81 degrees of freedom: 81 +- 13
    assert (images == feistel_permutation(np.arange(n), n, keys + np.uint64(1))).sum() < 10


def test_permutation_of_a_large_range_one_by_one():
    n = 3 * 10**12 + 1
    index = np.array([0, 1, n // 2, n - 1])
    images = feistel_permutation(index, n, [1, 2, 3, 4]).tolist()
    assert images == [feistel_permutation(index[i : i + 1], n, [1, 2, 3, 4]).item() for i in range(4)]
    assert len(set(images)) == 4
    assert all(0 <= image < n for image in images)


@pytest.mark.parametrize(("accumulate", "world_size"), list(itertools.product((1, 2, 3), (1, 2, 4))))
def test_a_step_has_the_same_samples_however_divided(accumulate, world_size):
    division = {"batch_size": 24, "grad_accum_steps": accumulate, "world_size": world_size}
    for step in range(3):
        ranks = [batch_indices(step, rank=rank, **division) for rank in range(world_size)]
        parts = [ranks[r][m] for m in range(accumulate) for r in range(world_size)]
        assert list(itertools.chain(*parts)) == list(*batch_indices(step, batch_size=24))
        assert {len(part) for part in parts} == {24 // accumulate // world_size}
    assert batch_indices(2, batch_size=24) == [range(48, 72)]


def test_a_batch_that_cannot_be_divided(source):
    match = r"trainer\.batch_size=24 must be a multiple of 10 \(trainer\.grad_accum_steps=5.*try trainer\.batch_size=30"
    with pytest.raises(ValueError, match=match):
        micro_batches(source, length=16, seed=1, batch_size=24, grad_accum_steps=5, world_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("sampler")
    source = text_files(write_corpus(root / "corpus"), root / "cache")
    source.prepare()
    return source


def take(source, n=5, **options):
    options = {"length": 16, "seed": 1, "batch_size": 24} | options
    return list(itertools.islice(micro_batches(source, **options), n))


def equal(batches, others):
    return all(torch.equal(a, b) for pair in zip(batches, others, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_are_the_samples_of_their_indices_for_any_number_of_workers(source, num_workers):
    division = {"batch_size": 24, "grad_accum_steps": 2, "rank": 1, "world_size": 3}
    batches = take(source, 4, num_workers=num_workers, start_step=7, **division)
    indices = batch_indices(7, **division) + batch_indices(8, **division)
    assert equal(batches, [source.train_batch(part, 16, 1) for part in indices])


def test_ranks_and_accumulation_and_resuming_change_nothing(source):
    one = torch.cat([x for x, _ in take(source)])
    parts = [take(source, 10, grad_accum_steps=2, rank=rank, world_size=2) for rank in (0, 1)]
    assert torch.equal(one, torch.cat([x for pair in zip(*parts, strict=True) for x, _ in pair]))
    whole, rest = take(source, 15, grad_accum_steps=3), take(source, 3, grad_accum_steps=3, start_step=4)
    assert equal(whole[12:], rest)


def test_global_random_state_is_neither_read_nor_changed(source):
    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    torch.manual_seed(0)
    before, first = state(), take(source)
    assert state() == before
    torch.manual_seed(5)
    assert equal(first, take(source))


def test_a_prepared_source_pickles_without_its_tokens(source):
    content = pickle.dumps(source)
    assert len(content) < source.prepared["train"].tokens
    assert torch.equal(pickle.loads(content).train_batch([3], 16, 0)[0], source.train_batch([3], 16, 0)[0])


def test_workers_outlive_the_signals_that_stop_a_run(source):
    before = set(multiprocessing.active_children())
    batches = micro_batches(source, length=16, seed=1, batch_size=24, num_workers=2)
    first = [next(batches), next(batches)]  # one of each worker
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for worker, number in itertools.product(workers, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)):
        os.kill(worker.pid, number)
    rest = list(itertools.islice(batches, 8))
    assert equal([*first, *rest], take(source, 10))
    assert all(worker.is_alive() for worker in workers)
    del batches
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()


PROGRAM = """
import time, torch
from data.sampler import micro_batches
class Samples:
    def train_batch(self, indices, length, seed):
        return torch.tensor(indices), torch.tensor(indices)
batches = micro_batches(Samples(), length=1, seed=0, batch_size=2, num_workers=2)
print(next(batches), flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["raise RuntimeError('a defect')", "time.sleep(1000)"])
def test_workers_do_not_outlive_the_program(end):
    """Nor does it wait for them: an error that nobody catches ends it."""
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "tensor([0, 1])" in process.stdout.readline()
        if "sleep" in end:
            process.kill()
        _, errors = process.communicate(timeout=100)  # returns when the last worker has closed the pipes
    assert process.returncode != 0
    assert ("a defect" in errors) == ("defect" in end)
