"""The order of training: which samples make which batch, for any number of processes and workers."""

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from data.base import Data


def splitmix(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection of uint64 that leaves no pattern of its argument."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: np.ndarray, n: int, keys: Sequence[int]) -> np.ndarray:
    """Where a permutation of 0..n-1 chosen by `keys` takes each `index`, int64 of the same shape.

    A Feistel network over the power of 4 that holds n, walked along until the result is below n (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). Nothing of size n is kept: an epoch may have a billion windows.
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


def micro_batch(batch_size: int, accumulate: int, world_size: int) -> int:
    """Sequences in each of the portions of a batch. Raises ValueError if it does not divide into them."""
    portions = accumulate * world_size
    if batch_size % portions:
        raise ValueError(
            f"trainer.batch_size={batch_size} must be a multiple of {portions} (trainer.accumulate={accumulate} x "
            f"{world_size} processes); try trainer.batch_size={-(-batch_size // portions) * portions}"
        )
    return batch_size // portions


class BatchSampler(Sampler[list[int]]):
    """Indices of this rank's micro-batches, for a whole run.

    Optimizer step k takes the samples k * batch_size .. (k + 1) * batch_size - 1, in `accumulate * world_size` equal
    portions: micro-batch m of rank r is portion m * world_size + r. So neither accumulation nor the number of processes
    changes what a step sees. Its length is that of the whole run, while iteration begins at `start_step`: Lightning
    counts the fetched batches on from those of the run it resumes.

    Args:
        batch_size: sequences in an optimizer step, over all ranks and accumulation.
        accumulate: micro-batches that each rank processes in an optimizer step.
        steps: optimizer steps of the whole run. start_step: those already done.

    Raises:
        ValueError: batch_size does not divide into the portions.
    """

    def __init__(
        self, *, batch_size: int, accumulate: int, rank: int, world_size: int, steps: int, start_step: int = 0
    ) -> None:
        assert 0 <= rank < world_size
        self.micro = micro_batch(batch_size, accumulate, world_size)
        self.accumulate, self.rank, self.world_size = accumulate, rank, world_size
        self.steps, self.start_step = steps, start_step

    def __iter__(self) -> Iterator[list[int]]:
        for m in range(self.start_step * self.accumulate, len(self)):
            start = (m * self.world_size + self.rank) * self.micro
            yield list(range(start, start + self.micro))

    def __len__(self) -> int:
        return self.steps * self.accumulate


class TrainSamples(Dataset[tuple[Tensor, Tensor]]):
    """The samples of `data` as torch's DataLoader fetches them, a whole batch at a time."""

    def __init__(self, data: Data, length: int, seed: int) -> None:
        self.data, self.length, self.seed = data, length, seed

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.data.train_batch(indices, self.length, self.seed)


def _as_is(batch: Any) -> Any:
    return batch


def _leave_signals(worker: int) -> None:
    """Those who stop a run signal all its processes, but the step that it finishes first still needs its workers."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def train_loader(
    data: Data, sampler: BatchSampler, *, length: int, seed: int, num_workers: int = 0, pin_memory: bool = False
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches (x, y), each int64 [micro-batch, length], in the order of `sampler`, the same for any `num_workers`."""
    return DataLoader(
        TrainSamples(data, length, seed),
        batch_sampler=sampler,
        collate_fn=_as_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals,
        generator=torch.Generator(),  # else every iter() advances the global one
    )
