"""Which samples are in which batch, for any number of processes; what a sample is, the data decide."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
from torch import Tensor

from data.base import Data, check_tokens


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
    images = index.astype(np.uint64)
    outside = np.ones(index.shape, dtype=bool)
    # A permutation of the larger range leads every number back below n after finitely many applications ("cycle
    # walking"), and no two numbers to the same one. The power of 4 is below 4 n, so that few rounds are needed.
    while outside.any():
        left = images[outside] >> half
        right = images[outside] & mask
        for key in keys:
            mixed = splitmix(right + np.uint64(key)) & mask
            left, right = right, left ^ mixed
        images[outside] = (left << half) | right
        outside = images >= n
    return images.astype(np.int64)


def micro_batch_size(batch_size: int, grad_accum_steps: int, world_size: int) -> int:
    """Sequences in each micro-batch. Raises ValueError if the batch cannot be divided equally."""
    n = grad_accum_steps * world_size
    if batch_size % n:
        next_multiple = -(-batch_size // n) * n
        raise ValueError(
            f"trainer.batch_size={batch_size} must be a multiple of {n} (trainer.grad_accum_steps={grad_accum_steps} x "
            f"{world_size} processes); try trainer.batch_size={next_multiple}"
        )
    return batch_size // n


def batch_indices(
    steps_done: int, *, batch_size: int, grad_accum_steps: int = 1, rank: int = 0, world_size: int = 1
) -> list[range]:
    """Global sample indices of this rank's micro-batches in the optimizer step after `steps_done` steps.

    It takes samples steps_done * batch_size .. (steps_done + 1) * batch_size - 1 in equal micro-batches, of which
    number m * world_size + rank is the m-th of this rank: neither gradient accumulation nor the number of processes
    changes what a step sees. Raises ValueError if the batch cannot be divided equally.
    """
    size = micro_batch_size(batch_size, grad_accum_steps, world_size)
    starts = [steps_done * batch_size + (m * world_size + rank) * size for m in range(grad_accum_steps)]
    return [range(start, start + size) for start in starts]


def micro_batches(
    data: Data, batch_shape: Callable[[int], tuple[int, int]], seed: int, *, start_step: int = 0,
    pin_memory: bool = False, **division: int,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """This rank's micro-batches from optimizer step `start_step`, counted from 0, on, endlessly.

    A thread prepares the next micro-batch while the caller works on this one.

    Args:
        batch_shape: steps done -> sequences in the next optimizer step, and their length.
        division: grad_accum_steps, rank and world_size, as for `batch_indices`.

    Yields:
        Inputs and targets, int64 [sequences in the micro-batch, length].
    """

    # Samples are numbered for the whole run, so the data need no state: any step can be asked for at once.
    def requests() -> Iterator[tuple[range, int]]:
        for steps_done in count(start_step):
            batch_size, length = batch_shape(steps_done)
            for indices in batch_indices(steps_done, batch_size=batch_size, **division):
                yield indices, length

    def read(indices: range, length: int) -> tuple[Tensor, Tensor]:
        x, y = data.train_batch(indices, length, seed)
        check_tokens(x, y, data.vocab_size)
        return x, y

    # One thread reads one micro-batch ahead, which hides the time of reading as long as it is shorter than a step.
    request = requests()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(read, *next(request))
        while True:
            x, y = following.result()
            following = thread.submit(read, *next(request))
            if pin_memory:
                x, y = x.pin_memory(), y.pin_memory()
            yield x, y
