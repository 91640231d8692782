"""Train runs side by side: a process for each core, of one thread each.

A step of a small network is a row of small operations, of which a second thread gains little, and a second process all.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from conf.schema import Config
from ropewalk.app.cli import ERRORS
from ropewalk.app.explain import explain
from ropewalk.app.resolve import for_this_machine
from ropewalk.app.run_dir import RunDir
from ropewalk.evaluation.loop import is_measured
from ropewalk.training.distributed import die_with_parent
from ropewalk.training.hardware import reset_peak_memory
from ropewalk.training.stop import INTERRUPTED, STOPPED

DONE = "done"
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
EACH = 2 * 2**30  # bytes of memory for a process: more than a small network takes


def processes(cfg: Config) -> int:
    """How many runs such as `cfg` train at once: one for each core, if memory allows; one if they share a GPU."""
    _, hardware = for_this_machine(cfg)
    if hardware.device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        memory = min(memory, int(CONTAINER_LIMIT.read_text()))
    return max(1, min(cores, memory // EACH))


def to_do(runs: Iterable[RunDir]) -> list[Config]:
    """The configurations of those runs that are not complete, or not measured as they ask for."""
    return [run.cfg for run in runs if not (run.complete and is_measured(run.path, run.cfg))]


def outcome(work: Callable[..., Any], *arguments: Any) -> str:
    """Do the work of a job: DONE, or why it failed. Raises SystemExit: it was stopped."""
    try:
        work(*arguments)
    except Exception as error:
        if not isinstance(error, ERRORS):  # a defect, not a mistake of the user
            traceback.print_exception(error)
        return f"failed: {explain(error)}"
    return DONE


def train_all(runs: Sequence[Config]) -> list[str]:
    """Train, resume or measure the runs that are `to_do`, and print a line when one ends.

    What a run itself prints goes to RUNS_DIR/.sweep/NAME.txt. One that fails is named with the reason, and the others
    go on.

    Returns:
        The names of those that failed.

    Raises:
        SystemExit: stopped by a signal, with checkpoints; the same call resumes.
    """
    distinct = {run.path: run for run in map(RunDir, runs)}
    waiting = to_do(distinct.values())
    at_once = min(processes(runs[0]), len(waiting) or 1)
    said = f"; what they print is in {Path(runs[0].runs_dir, '.sweep')}" if waiting else ""
    print(f"{len(waiting)} of {len(distinct)} runs to train or measure, {at_once} at once{said}", flush=True)
    failed = []
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # a forked process would inherit the threads of PyTorch
    of_each = 1 if at_once > 1 else torch.get_num_threads()
    pool = ProcessPoolExecutor(at_once, spawn, _begin, (os.getpid(), of_each))
    # A process dies with the thread that started it (see `die_with_parent`), so this one starts them.
    for _ in waiting[:at_once]:
        pool.submit(os.getpid)
    # Each thread has one run at a time. The pool alone would keep some ready, which would train after a stop.
    threads = ThreadPoolExecutor(at_once)
    handler = signal.signal(signal.SIGTERM, _stop_all)
    try:
        names = {threads.submit(outcome, _train_in, pool, cfg): str(cfg.name) for cfg in waiting}
        for done, run in enumerate(as_completed(names), 1):
            if run.result() != DONE:
                failed.append(names[run])
            left = len(waiting) - done
            minutes = left * (time.monotonic() - started) / done / 60
            print(f"{names[run]}: {run.result()}; {left} left, about {minutes:.0f} min", flush=True)
    finally:
        threads.shutdown(cancel_futures=True)
        pool.shutdown()
        signal.signal(signal.SIGTERM, handler)
    return failed


def _train_in(pool: ProcessPoolExecutor, cfg: Config) -> None:
    pool.submit(_train, cfg).result()


def _stop_all(*_: object) -> None:
    """Let each run stop after a step, with a checkpoint, as Ctrl-C does, which reaches them by itself."""
    for child in multiprocessing.active_children():
        child.terminate()
    raise SystemExit(STOPPED)


def _begin(parent: int, threads: int) -> None:
    """Make a process ready that `parent` has started."""
    die_with_parent(parent)
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # between two runs; the parent gives no other one


def _train(cfg: Config) -> None:
    from train import train  # it imports all that a run needs

    reset_peak_memory()  # of an earlier run in this process
    log = Path(cfg.runs_dir, ".sweep", f"{cfg.name}.txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", buffering=1, encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        # While it trains, either signal stops it after a step; these are for the time before and after.
        signal.signal(signal.SIGTERM, _stop)
        try:
            train(cfg)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stop(*_: object) -> None:
    raise SystemExit(STOPPED)
