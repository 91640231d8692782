"""Sweeps (-m): a program runs for each combination of what is swept. One that fails is named, the others go on.

The jobs of train.py are checked before the first one trains. They train side by side, each in a process of its own: one
on each core with one thread, or one after the other on a GPU. A step of a small network is a row of small operations,
of which a second thread gains little, and a second process all.
"""

import contextlib
import itertools
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from conf.errors import ConfigError
from conf.schema import Config, parse
from ropewalk.app.cli import ERRORS, TRAIN, Task, composed, plain
from ropewalk.app.explain import explain
from ropewalk.app.init_from import merged, train_values
from ropewalk.app.resolve import for_this_machine, resolve
from ropewalk.evaluation.evaluator import is_measured
from ropewalk.run.directory import RunDir
from ropewalk.run.processes import die_with_parent, started_by
from ropewalk.training.hardware import reset_peak_memory
from ropewalk.training.stop import INTERRUPTED, STOPPED

Job = tuple[Sequence[str], Sequence[str]]  # all overrides of a job, and those of them that vary among the jobs


def configure(config: DictConfig) -> Config:
    """Return the configuration of a run, checked, with nothing left open but what a machine decides.

    On rank zero prints which experiment is beneath the user's options, and a warning if the learning rate never leaves
    its warm-up. Raises ValueError: a line for each mistake.
    """
    cfg = resolve(merged(plain(config)))
    experiment = config.hydra.runtime.choices["experiment"]
    warmup, steps = cfg.optim.warmup_steps, cfg.trainer.max_steps
    if started_by().rank == 0 and experiment:
        print(f"settings of experiment={experiment} hold where yours say nothing")
    if started_by().rank == 0 and warmup >= steps > 0:
        print(f"warning: in {steps} steps the learning rate never leaves its warm-up of {warmup}", file=sys.stderr)
    return cfg


def sweep(name: str, task: Task, overrides: Sequence[str]) -> None:
    """Run the jobs of a sweep over the program that is configured by conf/`name`.yaml. Exits with 1 if one fails.

    Raises:
        ConfigError: a job is mistaken.
    """
    failed = _sweep_training(overrides) if name == TRAIN else _sweep_program(name, task, overrides)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries these again", file=sys.stderr)
        raise SystemExit(1)


def _sweep_training(overrides: Sequence[str]) -> list[str]:
    """Train the runs of a sweep side by side. Returns the names of those that failed."""
    runs = plan(overrides)
    for number, run in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {run.path.name}{': complete' if run.complete else ''}")
    failed = train_all([run.cfg for run in runs])
    folders = ",".join(sorted({str(run.path.parent) for run in runs}))
    print(f"to compare: python scripts/report.py {shlex.quote(f'folders=[{folders}]')}", flush=True)
    return failed


def _sweep_program(name: str, task: Task, overrides: Sequence[str]) -> list[str]:
    """Run the jobs of another program, one after the other in this process. Returns what varies in those that failed.

    Its keys are checked first, by composing all jobs.
    """
    jobs = _jobs(name, overrides)
    for options, _ in jobs:
        with composed(name, *options):
            pass
    failed = []
    for options, varying in jobs:
        # Each must measure its own peak, without what the job before it still holds.
        reset_peak_memory()
        said = ""
        try:
            with composed(name, *options) as config:
                said = outcome(task, config)
        except SystemExit as end:  # some programs say by their exit code what they have found
            if end.code in (STOPPED, INTERRUPTED):
                raise
        if said:
            label = " ".join(varying) or name
            print(f"{label}: {said}", file=sys.stderr, flush=True)
            failed.append(label)
    return failed


def plan(overrides: Sequence[str]) -> list[RunDir]:
    """Check the jobs of a sweep over train.py, and return their runs.

    What varies becomes part of the names where these do not tell the runs apart.

    Raises:
        ConfigError: a job is mistaken.
    """
    jobs = _jobs(TRAIN, overrides)
    configs = []
    for options, varying in jobs:
        try:
            configs.append(resolve(train_values(*options)))
        except ERRORS as error:
            raise ConfigError(f"{' '.join(varying)}: {explain(error)}".removeprefix(": ")) from None
    # Fabric starts further processes by the command line, which here is that of the sweep: each would run all jobs.
    of_several = [cfg for cfg in configs if cfg.trainer.devices != 1 or cfg.trainer.strategy == "fsdp"]
    if of_several or started_by().world_size > 1:
        raise ConfigError("trainer.devices: a job of a sweep is one process: leave out -m, or trainer=ddp or fsdp")
    runs = [RunDir(cfg) for cfg in configs]
    if len({run.path for run in runs}) < len(runs):
        runs = []
        for cfg, (_, varying) in zip(configs, jobs, strict=True):
            runs.append(RunDir(_with_name(cfg, varying)))
    for run in runs:
        run.check()
    return runs


def _swept_by_files(name: str, given: Sequence[Override]) -> Mapping[str, str]:
    """What the files that are chosen sweep, such as an experiment: {key: its values}."""
    # Composed without what is swept on the command line, and so without keys like pe.scale, which may belong to an
    # encoding that is swept. Such keys choose no file. But hydra.searchpath names the user's folders.
    unswept = [override for override in given if not override.is_sweep_override()]
    of_groups = [o for o in unswept if "." not in o.get_key_element() or o.is_hydra_override()]
    with composed(name, *[str(override.input_line) for override in of_groups]) as config:
        return config.hydra.sweeper.get("params") or {}


def _jobs(name: str, overrides: Sequence[str]) -> list[Job]:
    """The jobs of a sweep over a program, combined as by Hydra's own sweeper."""
    parser = OverridesParser.create()
    given = parser.parse_overrides([*overrides])
    in_files = [f"{key}={value}" for key, value in _swept_by_files(name, given).items()]
    choices = {}
    # First what a file sweeps, then the command line, in which a later override replaces an earlier one.
    for override in [*parser.parse_overrides(in_files), *given]:
        key = override.get_key_element()
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            choices[key] = [str(override.input_line)]
    several = [options for options in choices.values() if len(options) > 1]
    varying = set(itertools.chain(*several))
    jobs = itertools.product(*choices.values())
    return [(job, [option for option in job if option in varying]) for job in jobs]


def _with_name(cfg: Config, varying: Sequence[str]) -> Config:
    """Return `cfg` with what varies in its name, unless it says so already; the seed is always at its end.

    Raises ConfigError: it would be no name, as one of more than 200 bytes.
    """
    seed = f"-s{cfg.seed}" if cfg.seed else ""
    words = str(cfg.name).removesuffix(seed).split("-")
    for option in varying:
        key, _, value = option.partition("=")
        if key != "seed" and value not in words:
            words.append(option)
    name = "-".join(words) + seed
    # Hydra's grammar has a backslash before a character such as a colon, and names are those of folders.
    name = name.replace("\\", "").replace("/", "_")
    return parse(Config, cfg.model_dump() | {"name": name})


def processes(cfg: Config) -> int:
    """How many runs such as `cfg` train at once: one for each core, if memory allows; one if they share a GPU."""
    _, hardware = for_this_machine(cfg)
    if hardware.device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit of this container
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(1, min(cores, memory // 2**31))  # 2 GiB for a process: more than a small network takes


def to_do(runs: Iterable[RunDir]) -> list[Config]:
    """The configurations of those runs that are not complete, or not measured as they ask for."""
    return [run.cfg for run in runs if not (run.complete and is_measured(run.path, run.cfg))]


def outcome(work: Callable[..., Any], *arguments: Any) -> str:
    """Do the work of a job. Returns why it failed, or "". Raises SystemExit: it was stopped."""
    try:
        work(*arguments)
    except Exception as error:
        if not isinstance(error, ERRORS):  # a defect, not a mistake of the user
            traceback.print_exception(error)
        return f"failed: {explain(error)}"
    return ""


def train_all(configs: Sequence[Config]) -> list[str]:
    """Train, resume or measure those of the runs that are `to_do`, and print a line when one ends.

    What a run itself prints goes to RUNS_DIR/.sweep/NAME.txt. One that fails is named with the reason, and the others
    go on.

    Returns:
        The names of those that failed.

    Raises:
        SystemExit: stopped by a signal, with checkpoints; the same call resumes.
    """
    distinct = {run.path: run for run in map(RunDir, configs)}
    waiting = to_do(distinct.values())
    at_once = min(processes(configs[0]), len(waiting) or 1)
    said = f"; what they print is in {Path(configs[0].runs_dir, '.sweep')}" if waiting else ""
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
        for done, ended in enumerate(as_completed(names), 1):
            if ended.result():
                failed.append(names[ended])
            left = len(waiting) - done
            minutes = left * (time.monotonic() - started) / done / 60
            print(f"{names[ended]}: {ended.result() or 'done'}; {left} left, about {minutes:.0f} min", flush=True)
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
