"""Measure on a noisy machine: interleaved rounds and their ratios, the memory of a call, and a table of it all."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import profile
from torch.utils.benchmark import Timer

from conf.schema import Section
from ropewalk.training.hardware import Hardware
from ropewalk.training.provenance import provenance

Chosen = TypeVar("Chosen", bound=Section)
Passes = dict[str, Callable[[], Any]]  # "forward", and "both": forward and backward

# Otherwise the profiler writes a line to stderr at each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def resolved_device(options: Chosen) -> Chosen:
    """Return the options with this machine's device and kernels where they say "auto"."""
    values = options.model_dump()
    precision = 32 if values["dtype"] == "float32" else "bf16-mixed"
    hardware = Hardware.resolve(accelerator=values["device"], precision=precision, kernels=values["kernels"])
    return options.model_copy(update={"device": hardware.device, "kernels": hardware.kernels})


def on_this_machine(options: Any) -> str:
    """Return a sentence about the command and the machine."""
    about = provenance()
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    return (
        f"`{about['command']}`, {about['time']}; {about['processor']}, {torch.get_num_threads()} threads, {device}; "
        f"torch {about['torch']}; commit {about['commit']}; load before {os.getloadavg()[0]:.1f}. "
        f"Medians of {options.rounds} rounds (quartiles)."
    )


def interleave(base: Callable[[], float], other: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Run two calls in turns, and return the seconds that each returned."""
    base_seconds = []
    other_seconds = []
    # Every round has both, so that a change of the machine's speed affects both. The order alternates, so that neither
    # always finds the caches that the other leaves.
    for i in range(rounds):
        if i % 2 == 0:
            base_seconds.append(base())
            other_seconds.append(other())
        else:
            other_seconds.append(other())
            base_seconds.append(base())
    return base_seconds, other_seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> str:
    """Return median and quartiles of seconds / base, a ratio for each of at least two rounds."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def timed(function: Callable[[], Any]) -> Callable[[], float]:
    """Return a call that runs `function` once to warm up, then for at least 20 ms, and returns its median seconds."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return lambda: timer.blocked_autorange(min_run_time=0.02).median


def compared(passes: Passes, base: Passes, rounds: int, *, is_base: bool) -> dict[str, str]:
    """Return a cell of a table for each pass: ratios of time to `base`, or the time of the base itself in ms.

    The pass "compiled" is compared with "both" of the base.
    """
    cells = {}
    for name in passes:
        of_base = base["forward"] if name == "forward" else base["both"]
        base_seconds, seconds = interleave(timed(of_base), timed(passes[name]), rounds)
        cell = ratio(seconds, base_seconds)
        if is_base:
            cell = f"{1e3 * statistics.median(seconds):.3g} ms"
        cells[name] = cell
    return cells


def at_length(cells: Mapping[str, str], length: int) -> dict[str, str]:
    """Return the cells with the length, in tokens, in the headings of their columns."""
    return {f"{heading}, {length:,}": cell for heading, cell in cells.items()}


class Worker:
    """A training in a process of its own, whose settings of allocator and matrix products affect no other worker.

    A call takes `steps` losses from `train(*arguments)`, one for each optimizer step, and returns the seconds. The
    constructor makes the first call, to warm up.
    """

    def __init__(self, steps: int, train: Callable[..., Iterator[Tensor]], *arguments: Any) -> None:
        self.work = (steps, train, *arguments)
        self.losses: list[float] = []
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self()

    def __call__(self) -> float:
        seconds, losses = self.pool.submit(_advance, *self.work).result()
        self.losses += losses
        return seconds


# The training of a worker's process, once it has begun: an iterator cannot be sent from the parent process.
_training: list[Iterator[Tensor]] = []


def _advance(steps: int, train: Callable[..., Any], *arguments: Any) -> tuple[float, list[float]]:
    """Take some steps of the training of this process, and return the seconds and the losses."""
    if not _training:
        _training.append(train(*arguments))
    start = time.perf_counter()
    losses = [next(_training[0]) for _ in range(steps)]
    # Reading the values waits for the device, so it belongs to the time.
    values = torch.stack(losses).tolist()
    return time.perf_counter() - start, values


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
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = accumulate(event.nbytes() for event in events)
    return max(held, default=0)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows with the same keys, which head the columns; "" without rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [list(row.values()) for row in rows]
    return "\n".join(table_line(line) for line in lines)


def table_line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def reason_of(failure: BaseException) -> str:
    """The type of an exception and what says most of its message: the first line, and the one that names the fault.

    Of a chain it is the first exception. A compiler prints code first and the fault later.
    """
    while failure.__cause__ is not None:
        failure = failure.__cause__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    first, rest = lines[:1], lines[1:]
    faults = [line for line in rest if "error" in line or "fatal" in line]
    said = first + (faults or rest[-1:])[:1]
    return f"{type(failure).__name__}: {' ... '.join(said)}".removesuffix(": ")
