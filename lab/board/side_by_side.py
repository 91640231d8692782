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

from conf.schema import Config, ConfigError
from ropewalk.app.explain import explain
from ropewalk.app.run_dir import RunDir
from ropewalk.evaluation.measures import lengths
from ropewalk.training.distributed import die_with_parent
from ropewalk.training.hardware import reset_peak_memory


def train_all(runs: Sequence[Config]) -> None:
    """Train, resume or measure the runs that are not complete, and print a line when one ends.

    What a run itself prints goes to RUNS_DIR/logs.

    Raises ConfigError: some failed; the others are complete.
    """
    waiting = []
    for cfg in runs:
        run = RunDir(cfg)
        run.check()
        if not (run.complete and lengths.is_measured(run.path, cfg)):
            waiting.append(cfg)
    if not waiting:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(cores, len(waiting))
    print(f"{len(waiting)} of {len(runs)} runs to train or measure, {processes} at once", flush=True)
    started = time.monotonic()
    failed = []
    spawn = multiprocessing.get_context("spawn")  # a forked process would inherit the threads of PyTorch
    with ProcessPoolExecutor(processes, spawn, _begin, (os.getpid(),)) as pool:
        futures = {pool.submit(_train, cfg): cfg for cfg in waiting}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                error = future.exception()
                if error:
                    failed.append(f"{futures[future].name}: {explain(error) or type(error).__name__}")
                left = (len(waiting) - done) * (time.monotonic() - started) / done
                print(f"{done} of {len(waiting)} runs, about {left / 60:.0f} min left", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the runs that have begun save a checkpoint, and end
            raise
    if failed:
        raise ConfigError("\n".join(["the same command tries these again:", *failed]))


def _begin(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)


def _train(cfg: Config) -> None:
    from train import train  # imports this package's users, and takes seconds

    log = Path(cfg.runs_dir, "logs", f"{cfg.name}.txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    reset_peak_memory()
    with log.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        train(cfg)
