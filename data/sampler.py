"""The order of training: which samples are in which batch, for any number of processes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
from torch import Tensor

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


def turns(indices: np.ndarray, shares: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Of each sample in `indices`: the source whose turn it is, and how many of its samples came before; int64 each.

    Of the samples 0, 1, 2, ... each source has its share, evenly spread. The shares need not add up to 1.
    """
    source, rank = np.zeros_like(indices), indices
    for number in range(len(shares) - 1):  # between this one and those after it
        share, open_ = shares[number] / sum(shares[number:]), source == number
        before, after = (np.floor((rank + i) * share).astype(np.int64) for i in (0, 1))
        own = open_ & (after > before)
        rank = np.where(own, before, np.where(open_, rank - before, rank))
        source = np.where(open_ & ~own, number + 1, source)
    return source, rank


def micro_batch_size(batch_size: int, grad_accum_steps: int, world_size: int) -> int:
    """Sequences in each micro-batch. Raises ValueError if the batch cannot be divided equally."""
    n = grad_accum_steps * world_size
    if batch_size % n:
        said = f"{n} (trainer.grad_accum_steps={grad_accum_steps} x {world_size} processes)"
        remedy = f"try trainer.batch_size={-(-batch_size // n) * n}"
        raise ValueError(f"trainer.batch_size={batch_size} must be a multiple of {said}; {remedy}")
    return batch_size // n


def batch_indices(
    step: int, *, batch_size: int, grad_accum_steps: int = 1, rank: int = 0, world_size: int = 1
) -> list[range]:
    """Global sample indices of this rank's micro-batches in optimizer step `step`, the first step being 0.

    The step takes samples step * batch_size .. (step + 1) * batch_size - 1 in equal micro-batches, of which number
    m * world_size + rank is the m-th of this rank: neither gradient accumulation nor the number of processes changes
    what a step sees. Raises ValueError if the batch cannot be divided equally.
    """
    size = micro_batch_size(batch_size, grad_accum_steps, world_size)
    starts = [step * batch_size + (m * world_size + rank) * size for m in range(grad_accum_steps)]
    return [range(start, start + size) for start in starts]


def micro_batches(
    data: Data, shape: Callable[[int], tuple[int, int]], seed: int, *, start_step: int = 0, pin_memory: bool = False,
    **division: int,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """This rank's micro-batches from optimizer step `start_step` on, endlessly: inputs and targets, int64 [b, length].

    `shape` tells the sequences of a step and their length, `division` is what else `batch_indices` takes:
    grad_accum_steps, rank, world_size. A thread prepares the next micro-batch meanwhile.
    """
    shapes = ((step, *shape(step)) for step in count(start_step))
    parts = ((part, length) for step, n, length in shapes for part in batch_indices(step, batch_size=n, **division))
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(data.train_batch, *next(parts), seed)
        while True:
            x, y = following.result()
            following = thread.submit(data.train_batch, *next(parts), seed)
            yield (x.pin_memory(), y.pin_memory()) if pin_memory else (x, y)
