"""Many small trainings at once: a process for each core, with one thread each.

A step of a small network is a row of small operations, so a second thread gains nothing, and a second network all.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from conf.schema import Config
from ropewalk.app.run_dir import RunDir
from ropewalk.evaluation.loop import is_measured
from ropewalk.training.distributed import die_with_parent


def train_all(runs: Sequence[Config]) -> None:
    """Train, resume or measure the runs that are not complete, and print a line when one ends.

    What a run itself prints goes to RUNS_DIR/logs. The first failure ends all; the same call resumes.
    """
    waiting = [cfg for cfg in runs if not (RunDir(cfg).complete and is_measured(RunDir(cfg).path, cfg))]
    if not waiting:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(cores, len(waiting))
    print(f"{len(waiting)} of {len(runs)} runs to train or measure, {processes} at once", flush=True)
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # a forked process would inherit the threads of PyTorch
    pool = ProcessPoolExecutor(processes, spawn, _begin, (os.getpid(),))
    try:
        for done, future in enumerate(as_completed([pool.submit(_train, cfg) for cfg in waiting]), 1):
            future.result()
            left = (len(waiting) - done) * (time.monotonic() - started) / done
            print(f"{done} of {len(waiting)} runs, about {left / 60:.0f} min left", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # a run that has begun goes on to its end, or to the checkpoint of a signal


def _begin(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)


def _train(cfg: Config) -> None:
    from train import train  # it imports all that a run needs, and `train_all` none of it

    log = Path(cfg.runs_dir, "logs", f"{cfg.name}.txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", buffering=1, encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        train(cfg)
