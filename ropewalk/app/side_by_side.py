"""Programs side by side, each in a process of its own with a log of its own: on each core one, or on each GPU.

A step of a small network is a row of small operations: a second thread gains little, a second process twice the runs.
Nothing here imports PyTorch until it is asked which devices there are.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ropewalk.run.stop import EXIT_INTERRUPTED, EXIT_STOPPED, noting_signals

# Environment variables of the processes that are started here: the id of this one, with which they end, and the file
# handle that takes the result of their task as JSON.
LAUNCHER_ENV = "ROPEWALK_LAUNCHER"
RESULT_ENV = "ROPEWALK_RESULT"
POLL = 0.1  # seconds between two looks at the processes
REPORT = 60  # seconds between two lines about what runs, where there is no terminal
Place = Mapping[str, str]  # environment variables that give a process its device


class Ended(NamedTuple):
    """How a process ended."""

    problem: str  # what went wrong, or ""
    result: bytes  # what its task returned, as JSON
    seconds: float  # that it took


@dataclass
class Running:
    process: subprocess.Popen
    place: Place
    log: Path
    log_start: int  # where in the log its own lines begin, after those of earlier attempts
    result: int  # the end of a pipe to read from
    started: float = field(default_factory=time.monotonic)


def places_of(trainer: Mapping[str, Any], n_jobs: int | None = None) -> list[Place]:
    """Where runs with the options `trainer` train at the same time: on each core, as far as memory allows, or GPU.

    A run of several processes has the whole machine.

    Args:
        n_jobs: how many at the same time, whatever there is; None: one on each.
    """
    from ropewalk.training.hardware import device_of

    if trainer.get("strategy") in ("ddp", "fsdp") or trainer.get("devices", 1) != 1:
        return [{}]
    device = device_of(trainer.get("accelerator", "auto"))
    if device == "cpu":
        n = n_jobs or _cores()
        return [{"OMP_NUM_THREADS": "1"}] * n if n > 1 else [{}]
    gpus = _gpus() if device == "cuda" else [{}]
    return [gpus[i % len(gpus)] for i in range(n_jobs or len(gpus))]


def _gpus() -> list[Place]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names]


def _cores() -> int:
    """How many processes the cores and the memory of this machine have room for, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit of this container
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(1, min(cores, memory // 2**31))  # 2 GiB for a process: more than a small network takes


def run_all(commands: Mapping[str, Sequence[str]], places: Sequence[Place], logs: Path) -> dict[str, Ended]:
    """Run Python programs side by side, and print a line when one ends. One that fails harms no other.

    Args:
        commands: of each name the arguments of Python. What a program prints is added to NAME.txt in the folder `logs`.
        places: where they run, see `places_of`.

    Returns:
        How each ended.

    Raises:
        SystemExit: stopped by a signal, after all programs have stopped. The same call goes on.
    """
    waiting = [*commands]
    free = [*places][: len(waiting)]
    at_once = len(free)
    if waiting:
        print(f"{len(waiting)} to run, {at_once} at once; their output is in {logs}", flush=True)
        logs.mkdir(parents=True, exist_ok=True)
    running: dict[str, Running] = {}
    ended: dict[str, Ended] = {}
    with noting_signals() as signals, _shown(running) as show:
        while (waiting or running) and not signals:
            while waiting and free:
                name = waiting.pop(0)
                running[name] = _start(commands[name], free.pop(0), logs / f"{name}.txt")
            for name in [name for name, one in running.items() if one.process.poll() is not None]:
                one = running.pop(name)
                free.append(one.place)
                ended[name] = _outcome(one)
                print(f"{name}: {_said(ended, name, len(commands), at_once)}", flush=True)
            show()
            time.sleep(POLL)
        if running:
            _stop(running.values(), signals[0])
    if signals:
        print(
            f"{signals[0]}: stopped, {len(ended)} of {len(commands)} had ended; rerun the same command to resume",
            flush=True,
        )
        raise SystemExit(EXIT_INTERRUPTED if "SIGINT" in signals else EXIT_STOPPED)
    return ended


def _stop(running: Collection[Running], reason: str) -> None:
    """Let programs stop after a checkpoint, if they had begun to train."""
    print(f"{reason}: waiting for {len(running)} to write a checkpoint", flush=True)
    # Also after Ctrl-C, which has reached them all if it came from a terminal: a second one would kill them.
    for one in running:
        one.process.terminate()
    for one in running:
        one.process.wait()
        os.close(one.result)


def _said(ended: Mapping[str, Ended], name: str, of: int, at_once: int) -> str:
    """The line about a program that has just ended, one `of` so many, and about the time of those that are left."""
    left = of - len(ended)
    minutes = left / at_once * fmean(one.seconds for one in ended.values()) / 60
    about = f", about {minutes:.0f} min" if minutes >= 1 else ""
    return f"{ended[name].problem or 'done'}; {left} left{about}"


def _start(command: Sequence[str], place: Place, log: Path) -> Running:
    reader, writer = os.pipe()
    environment = {**os.environ, **place, LAUNCHER_ENV: str(os.getpid()), RESULT_ENV: str(writer)}
    if "OMP_NUM_THREADS" in os.environ:  # the user's own choice
        environment["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    environment.pop("HYDRA_FULL_ERROR", None)  # set by the command line of this process
    with log.open("a") as file:
        log_start = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-u", *command], env=environment, pass_fds=[writer], stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    os.close(writer)
    return Running(process, place, log, log_start, reader)


def _outcome(one: Running) -> Ended:
    with os.fdopen(one.result, "rb") as file:
        result = file.read()
    return Ended(_problem(one), result, time.monotonic() - one.started)


def _problem(one: Running) -> str:
    """What the exit code of a process means, and its last line; "" of one that ended well."""
    code = one.process.returncode
    if code == 0:
        return ""
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        return "stopped by a signal, after a checkpoint"
    if code == -signal.SIGKILL:
        return "killed, perhaps for lack of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    reason = last_line(one).removeprefix("error: ") or f"exit code {code}"
    return f"failed: {reason}"


def last_line(one: Running) -> str:
    """The last line that a process has printed so far."""
    with one.log.open("rb") as file:
        file.seek(max(one.log_start, one.log.stat().st_size - 2**14))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextlib.contextmanager
def _shown(running: Mapping[str, Running]) -> Iterator[Any]:
    """Yield a function that shows what runs: on a terminal a line for each program, else now and then one for all."""
    from rich.console import Console  # both take as long to import as half of Hydra
    from rich.live import Live

    console = Console()

    def lines() -> list[str]:
        return [f"{name}: {last_line(one) or 'starting'}" for name, one in running.items()]

    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda: live.update("\n".join(lines()), refresh=True)
        return
    last = time.monotonic()

    def show() -> None:
        nonlocal last
        if time.monotonic() - last > REPORT:
            last = time.monotonic()
            print(*lines(), sep="\n", flush=True)

    yield show
