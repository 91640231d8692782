"""The order of training: which samples are in which batch, for any number of processes and workers."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.base import Data


def splitmix(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, a bijection of uint64 whose output looks random."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def feistel_permutation(index: np.ndarray, n: int, keys: Sequence[int]) -> np.ndarray:
    """Images of `index` under a permutation of 0..n-1 chosen by `keys`: int64, same shape.

    A Feistel network over the power of 4 that holds n, applied again until the result is below n (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). It needs no memory: an epoch may have a billion windows.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # bits of each half of a number
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = index.astype(np.uint64)
    outside = np.ones(index.shape, dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (splitmix(right + np.uint64(key)) & mask)
        out[outside] = (left << half) | right
        outside = out >= n
    return out.astype(np.int64)


def micro_batch_size(batch_size: int, grad_accum_steps: int, world_size: int) -> int:
    """Sequences in each micro-batch. Raises ValueError if the batch cannot be divided equally."""
    n = grad_accum_steps * world_size
    if batch_size % n:
        raise ValueError(
            f"trainer.batch_size={batch_size} must be a multiple of {n} (trainer.grad_accum_steps={grad_accum_steps} x "
            f"{world_size} processes); try trainer.batch_size={-(-batch_size // n) * n}"
        )
    return batch_size // n


def batch_indices(
    step: int, *, batch_size: int, grad_accum_steps: int = 1, rank: int = 0, world_size: int = 1
) -> list[range]:
    """Global sample indices of this rank's micro-batches in optimizer step `step`, the first step being 0.

    The step takes samples step * batch_size .. (step + 1) * batch_size - 1, in grad_accum_steps * world_size equal
    micro-batches; number m * world_size + rank is the m-th of this rank. So neither gradient accumulation nor the
    number of processes changes what a step sees. Raises ValueError if the batch cannot be divided equally.
    """
    assert 0 <= rank < world_size
    size = micro_batch_size(batch_size, grad_accum_steps, world_size)
    starts = [step * batch_size + (m * world_size + rank) * size for m in range(grad_accum_steps)]
    return [range(start, start + size) for start in starts]


def micro_batches(
    data: Data,
    *,
    length: int,
    seed: int,
    start_step: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
    **division: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches from optimizer step `start_step` on, endlessly: inputs and targets, int64 [b, length].

    `division` is what `batch_indices` takes: batch_size, grad_accum_steps, rank, world_size. The batches are the same
    for any `num_workers`. Worker processes end with the iterator or the program, also if it is killed.
    """
    batch_indices(start_step, **division)  # raises now, not at the first batch
    batches = (list(indices) for step in count(start_step) for indices in batch_indices(step, **division))
    at_exit = RawValue("b", 0)  # shared with the workers
    if num_workers:
        # Unlike atexit, also in a program that multiprocessing has started; before the workers are told to end.
        Finalize(None, setattr, (at_exit, "value", 1), exitpriority=100)
    loader: DataLoader[Any] = DataLoader(
        range(2**62),  # type: ignore[arg-type]  # of samples their indices; "collating" these makes a batch
        batch_sampler=batches,
        collate_fn=partial(data.train_batch, length=length, seed=seed),
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=partial(_keep_working, at_exit),
        generator=torch.Generator(),  # else iter() draws from the global generator
    )
    return iter(loader)


def _keep_working(at_exit: Any, worker: int) -> None:
    """Let a worker ignore the signals that stop a run: all its processes get them, but the step needs its batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # at the program's exit multiprocessing ends remaining workers by SIGTERM and waits for them
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if at_exit.value else None)
    # torch's own check misses a program that is killed while its workers start
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
