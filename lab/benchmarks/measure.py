"""Measure on a noisy machine: interleaved rounds and their ratios, the memory of a call, and a table of it all."""

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import profile
from torch.utils.benchmark import Timer

from ropewalk.run.provenance import provenance
from ropewalk.training.hardware import Hardware, tune

Passes = dict[str, Callable[[], Any]]  # "forward", and "both": forward and backward
Row = dict[str, str]  # {heading of a column: cell}

# Otherwise the profiler writes a line to stderr at each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def begun(options: Any) -> Any:
    """Print a sentence about the command and the machine; return the options with its device and kernels for "auto"."""
    precision = "32-true" if options.dtype == "float32" else "bf16-mixed"
    hardware = Hardware.resolve(accelerator=options.device, precision=precision, kernels=options.kernels)
    tune(hardware.device)
    about = provenance()
    device = torch.cuda.get_device_name() if hardware.device == "cuda" else hardware.device
    print(
        f"`{about['command']}`, {about['time']}; {about['processor']}, {torch.get_num_threads()} threads, {device}; "
        f"torch {about['torch']}; commit {about['commit']}; load before {os.getloadavg()[0]:.1f}. "
        f"Medians of {options.rounds} rounds (quartiles).\n",
        flush=True,
    )
    return options.model_copy(update={"device": hardware.device, "kernels": hardware.kernels})


def interleave(base: Callable[[], float], other: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Run two calls in turns, and return the seconds that each returned."""
    seconds: tuple[list[float], list[float]] = ([], [])
    # Every round has both, so that a change of the machine's speed affects both. The order alternates, so that neither
    # always finds the caches that the other leaves.
    for i in range(rounds):
        for n in (0, 1) if i % 2 == 0 else (1, 0):
            seconds[n].append((base, other)[n]())
    return seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> str:
    """Return median and quartiles of seconds / base, a ratio for each of at least two rounds."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def timed(function: Callable[[], Any]) -> Callable[[], float]:
    """Return a call that runs `function` once to warm up, then for at least 20 ms, and returns its median seconds."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return lambda: timer.blocked_autorange(min_run_time=0.02).median


def compared(options: Any, makers: Mapping[str, Callable[[int], Passes]]) -> Iterator[Row]:
    """Yield rows of a table: times as ratios to those of the first maker, which are in ms; memory of both passes.

    Args:
        makers: by name, a function of the length that makes what is measured.
    """
    first, *_ = makers.values()
    bases = {length: first(length) for length in options.lengths}
    for name, make in makers.items():
        row = {"": name}
        for length, base in bases.items():
            print(f"{name} at {length}", file=sys.stderr, flush=True)
            passes = base if make is first else make(length)
            for key, function in passes.items():
                base_seconds, seconds = interleave(timed(base[key]), timed(function), options.rounds)
                cell = f"{1e3 * statistics.median(seconds):.3g} ms" if passes is base else ratio(seconds, base_seconds)
                row[f"{key}, {length:,}"] = cell
            row[f"MB, {length:,}"] = f"{peak_memory(passes['both'], options.device) / 2**20:.1f}"
        yield row


def peak_memory(function: Callable[[], Any], device: str) -> int:
    """Return the most bytes that a call holds at once, including its result, beyond those held before it.

    On a CPU only PyTorch's own allocations count, not scratch memory of MKL and oneDNN.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        function()
    # Each allocation and each release is an event of so many bytes, negative for a release.
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def markdown(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of a table of rows with the same keys, which head the columns, as the rows come."""
    for n, row in enumerate(rows):
        for cells in (row, ["---"] * len(row), row.values()) if n == 0 else (row.values(),):
            yield f"| {' | '.join(cells)} |"
