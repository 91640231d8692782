"""Measuring on a noisy machine: interleaved rounds and their ratios, the memory of a call, and a table of it all."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile
from torch.utils.benchmark import Timer

from training.hardware import Hardware
from training.provenance import provenance

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write a line to stderr at each start and stop


def on_this_machine(options: Any) -> str:
    """Resolve the device of these options; a sentence about the command and the machine."""
    options.device = Hardware.resolve(accelerator=options.device, precision=32).device
    about, device = provenance(), torch.cuda.get_device_name() if options.device == "cuda" else options.device
    return (
        f"`{about['command']}`, {about['time']}; {about['processor']}, {torch.get_num_threads()} threads, {device}; "
        f"torch {about['torch']}; commit {about['commit']}; load before {os.getloadavg()[0]:.1f}. "
        f"Medians of {options.rounds} rounds (quartiles)."
    )


def interleave(base: Callable[[], float], own: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """The seconds that two calls return, run in turns, so that a change of the machine's speed meets both alike."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        for which in (1, 0) if i % 2 else (0, 1):
            seconds[which].append((base, own)[which]())
    return seconds


def ratio(own: Sequence[float], base: Sequence[float]) -> str:
    """Median and quartiles of own / base, a ratio for each of at least two rounds."""
    ratios = [a / b for a, b in zip(own, base, strict=True)]
    return "{1:.2f} ({0:.2f} to {2:.2f})".format(*statistics.quantiles(ratios, n=4, method="inclusive"))


def timed(function: Callable[[], Any]) -> Callable[[], float]:
    """A call that runs `function` once to warm up, then for at least 20 ms, and returns the median of its seconds."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return lambda: timer.blocked_autorange(min_run_time=0.02).median


class Worker:
    """Trains in a process of its own: no setting of the allocator or of matrix products is lent to another worker.

    A call takes `steps` losses from `train(*arguments)`, one for each optimizer step, and returns the seconds. The
    first call, to warm up, is made at once.
    """

    def __init__(self, steps: int, train: Callable[..., Iterator[Tensor]], *arguments: Any) -> None:
        self.work, self.losses = (steps, train, *arguments), list[float]()
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self()

    def __call__(self) -> float:
        seconds, losses = self.pool.submit(_advance, *self.work).result()
        self.losses += losses
        return seconds


_training: list[Iterator[Tensor]] = []  # the one of a worker's process


def _advance(steps: int, train: Callable[..., Any], *arguments: Any) -> tuple[float, list[float]]:
    if not _training:
        _training.append(train(*arguments))
    start = time.perf_counter()
    losses = torch.stack([next(_training[0]) for _ in range(steps)]).tolist()  # waits for the device
    return time.perf_counter() - start, losses


def peak_memory(function: Callable[[], Any], device: str) -> int:
    """Most bytes that a call holds at once, beyond what exists before it; its result counts.

    On a CPU these are PyTorch's own allocations, without scratch memory of MKL and oneDNN.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of rows with the same keys, which head the columns."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
