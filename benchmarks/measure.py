"""Measuring: two clocks, ratios of what ran side by side, growth, and the memory of a fresh process.

A machine's speed drifts, and others may use it. So every time is taken beside that of what it is compared with, a
ratio is the median over such pairs, and the CPU time of the process (over all its threads) stands beside the time on
the wall: with one thread, it is what other programs disturb least.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from model.machine import peak_memory

R = TypeVar("R")
Kind = Literal["wall", "cpu"]


class Clock(NamedTuple):
    """Seconds: on the wall, and of computing by all threads of the process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Clock":
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: "Clock", calls: int = 1) -> "Clock":
        """The time from `start`, divided by `calls`."""
        return Clock((self.wall - start.wall) / calls, (self.cpu - start.cpu) / calls)


class Ratio(NamedTuple):
    """Median and range of ratios taken in pairs."""

    median: float
    low: float
    high: float


@dataclass
class Pairs:
    """Times of two things that took turns: entry i of one is beside entry i of the other."""

    base: list[Clock] = field(default_factory=list)
    own: list[Clock] = field(default_factory=list)

    def ratio(self, kind: Kind = "wall") -> Ratio:
        """own / base."""
        return ratio([getattr(clock, kind) for clock in self.own], [getattr(clock, kind) for clock in self.base])

    def seconds(self, kind: Kind = "wall") -> float:
        """Median of our own."""
        return statistics.median(getattr(clock, kind) for clock in self.own)


def ratio(own: Sequence[float], base: Sequence[float]) -> Ratio:
    """own / base, pair by pair."""
    ratios = [a / b for a, b in zip(own, base, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def timed(function: Callable[[], Any], *, device: str = "cpu", least: float = 0.0) -> Clock:
    """Mean time of a call, over as many calls as take `least` seconds."""
    calls, start = 0, Clock.now()
    while not calls or time.perf_counter() - start.wall < least:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        calls += 1
    return Clock.now().since(start, calls)


def beside(
    base: Callable[[], Any],
    others: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    device: str = "cpu",
    least: float = 0.02,
) -> dict[str, Pairs]:
    """Time each of `others` right after `base`, `rounds` times, all in turn; before it, each once to warm up."""
    pairs = {name: Pairs() for name in others}
    for function in (base, *others.values()):
        timed(function, device=device)
    for _ in range(rounds):
        for name, function in others.items():
            pairs[name].base.append(timed(base, device=device, least=least))
            pairs[name].own.append(timed(function, device=device, least=least))
    return pairs


def growth(lengths: Sequence[int], values: Sequence[float | None]) -> float | None:
    """The exponent e of value ~ length^e, by least squares of the logarithms; None with fewer than two values."""
    known = [(n, value) for n, value in zip(lengths, values, strict=True) if value is not None and value > 0]
    if len({n for n, _ in known}) < 2:
        return None
    x, y = np.log(np.array(known, dtype=np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def _context() -> Any:
    """Processes forked from one that has imported what they need and run nothing: fresh, and quick to start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.attention", "benchmarks.training"])
    return context


def in_fresh_process(function: Callable[..., R], *args: Any) -> R | None:
    """What `function`, of a module, returns in a process of its own; None if the system ended it, out of memory."""
    with ProcessPoolExecutor(1, mp_context=_context()) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            return None


class Finished(BaseException):
    """Raised in a contender after its last piece of work, so that whatever it is within lets it out."""


class Turn:
    """In the process of a contender: `turn(step, ...)` ends a piece of work and waits until it may begin the next."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.start, self.step = pipe, Clock(0, 0), 0

    def __call__(self, step: int, **facts: Any) -> None:
        now = Clock.now()
        self.pipe.send((step - self.step, now.since(self.start), facts))
        if not self.pipe.recv():
            raise Finished
        self.step, self.start = step, Clock.now()


Contender = Callable[[Turn], Any]


class Piece(NamedTuple):
    """A piece of work: optimizer steps, their time, and what the contender said of it."""

    steps: int
    clock: Clock
    facts: dict[str, Any]


class Course(NamedTuple):
    """All that a contender did."""

    pieces: list[Piece]
    peak_memory: int  # bytes, of its process

    def per_step(self, kind: Kind = "wall") -> list[float]:
        return [getattr(piece.clock, kind) / piece.steps for piece in self.pieces]


def take_turns(contenders: Mapping[str, Contender], *, rounds: int, threads: int = 0) -> dict[str, Course]:
    """Let each contender, in a process of its own, do `rounds` pieces of work, while the others wait.

    What it does before its first turn, such as compiling, is not timed. `threads`: of each; 0 as PyTorch chooses.

    Raises:
        Exception: that of a contender.
    """
    context, pipes, processes = _context(), {}, []
    pieces: dict[str, list[Piece]] = {name: [] for name in contenders}
    try:
        for name, contender in contenders.items():
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=_contend, args=(theirs, contender, threads), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
            _receive(pipes[name], name)  # its preparation: one after the other too
        for i in range(rounds):
            # in one order and then in the other: none is always after the same one
            for name, pipe in list(pipes.items())[:: 1 if i % 2 else -1]:
                pipe.send(True)
                pieces[name].append(Piece(*_receive(pipe, name)))
        for pipe in pipes.values():
            pipe.send(False)
        return {name: Course(pieces[name], _receive(pipe, name)) for name, pipe in pipes.items()}
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _receive(pipe: Connection, name: str) -> Any:
    try:
        found = pipe.recv()
    except EOFError:
        raise ValueError(f"the process of {name} ended, perhaps for lack of memory: use a smaller model") from None
    if isinstance(found, BaseException):
        raise found
    return found


def _contend(pipe: Connection, contender: Contender, threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    try:
        contender(Turn(pipe))
    except Finished:
        pipe.send(peak_memory("cuda" if torch.cuda.is_initialized() else "cpu"))
    except Exception as error:
        pipe.send(error)
