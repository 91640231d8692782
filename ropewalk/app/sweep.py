"""Hydra's jobs. In a sweep (-m) a job that fails is reported, and the others go on.

With Hydra's own sweeper train.py checks all jobs before the first one trains, and leaves complete runs alone. Jobs that
would train the same network, as with pe=rope,yarn, train it once: the first of them measures the others' encodings
zero-shot. Other sweepers choose their jobs by earlier results, so their jobs are checked one by one.
"""

import itertools
import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # as of Hydra 1.3: no public way to its jobs
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.schema import Config, ConfigError
from model import position
from ropewalk.app.cli import ERRORS, composed, explain, fail, plain
from ropewalk.app.encodings import resolve_encoding
from ropewalk.app.init_from import merged, recipe
from ropewalk.app.resolve import for_this_machine, resolve, with_variants
from ropewalk.app.run_dir import RunDir
from ropewalk.training.distributed import die_with_parent, env_rank, started_by
from ropewalk.training.hardware import reset_peak_memory

_sweep: "Jobs | None" = None  # the sweep whose job this process runs


class Skip(Exception):  # noqa: N818 - nothing went wrong
    """Ends a job of a sweep that has nothing to do."""


def configure(composed: DictConfig) -> Config:
    """Return the configuration of a run, checked and with nothing left open. Prints warnings about doubtful choices.

    In a sweep, a run that trains for other jobs also measures their encodings.

    Raises:
        ValueError: a line for each mistake.
        Skip: the run is complete, or another job trains the same network.
    """
    cfg = resolve(merged(plain(composed)))
    if _sweep is not None and _sweep.labels:
        cfg = _sweep.share_of(cfg)
    cfg = for_this_machine(cfg)
    if env_rank() == 0:
        _print_doubts(cfg)
    return cfg


def _print_doubts(cfg: Config) -> None:
    """Print which recipe was chosen for the user, and warnings about options that are probably a mistake."""
    warmup = cfg.optim.warmup_steps
    steps = cfg.trainer.max_steps
    experiments = recipe(cfg.init_from)
    if experiments:
        schedule = f"learning rate {cfg.optim.lr:g}, {warmup} steps of warm-up, {steps} in all"
        print(f"{experiments[0]}, beneath what is given:\n  {schedule}")
    if warmup >= steps > 0:
        print(f"warning: in {steps} steps the learning rate never leaves its warm-up of {warmup}", file=sys.stderr)
    layers = cfg.model.n_layer
    if "pattern" in cfg.pe:
        pattern = cfg.pe["pattern"]
        unused = sorted(position.parts(cfg.pe).keys() - set(pattern[:layers]))
        if unused:
            names = ", ".join(unused)
            print(f"warning: no layer gets {names}: model.n_layer={layers}, pe.pattern={pattern}", file=sys.stderr)


class Jobs(Callback):
    """Hydra's hooks. The plan of `on_multirun_start` is pickled with this object for the processes of the jobs."""

    def __init__(self) -> None:
        self.main = os.getpid()
        self.labels: list[str] = []  # one for each job; empty with other sweepers, whose jobs are not known before
        self.trained: dict[Path, list[dict[str, Any]]] = {}  # run -> encodings of jobs that train the same network
        self.before: dict[Path, int | None] = {}  # run to train -> when it was last completed; None: never
        self.failed: list[str] = []  # labels of failed jobs; Hydra's own launcher alone runs them in this process
        self.started = 0.0  # when this process's job began
        self.seconds: list[float] = []  # of the jobs that have ended in this process

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        HydraConfig.instance().set_config(config)
        is_train = config.hydra.job.config_name == "config"
        if is_train and config.hydra.runtime.choices["hydra/sweeper"] == "basic":
            # Hydra makes a warning of an exception in a hook, and goes on. So `fail` ends the program here.
            try:
                self._plan(config)
            except Exception as error:
                fail(error)
                raise
        for number, label in enumerate(self.labels, 1):
            print(f"[{number}/{len(self.labels)}] {label}")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        global _sweep
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        _sweep = self
        # Jobs share one process: each must measure its own peak, without what the job before it still holds.
        reset_peak_memory()

        self.started = time.monotonic()
        # Workers of joblib print at once, so each job has a file; and they outlive a killed main process.
        if "n_jobs" in config.hydra.launcher and os.getpid() != self.main:
            die_with_parent(self.main)
            folder = Path(config.hydra.sweep.dir)
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{config.hydra.job.num + 1}.log"
            sys.stdout = log.open("w", buffering=1, encoding="utf-8")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        global _sweep
        _sweep = None
        error = None
        if job_return.status == JobStatus.FAILED:
            error = job_return._return_value  # the public property would raise the error
        if config.hydra.mode != RunMode.MULTIRUN:
            if error:
                fail(error)
            return

        label = self._label(config.hydra.job.num)
        if error is None:
            print(f"{label}: done in {self._time()}", file=sys.__stdout__, flush=True)
        elif not isinstance(error, Skip):
            if not isinstance(error, ERRORS):  # a defect, not a mistake of the user
                traceback.print_exception(error)
            print(f"{label}: failed: {explain(error)}", file=sys.stderr, flush=True)
            self.failed.append(label)
        # Hydra's own sweeper would end at the first failure, so it is told that the job succeeded; the exit code of
        # the sweep comes from `on_multirun_end`. Other sweepers count failures themselves.
        if error is not None and self.labels:
            job_return.return_value = None
            job_return.status = JobStatus.COMPLETED

    def _label(self, job: int) -> str:
        """The name in messages of job number `job`, counted from 0."""
        if not self.labels:
            return f"job {job + 1}"
        return f"[{job + 1}/{len(self.labels)}] {self.labels[job]}"

    def _unfinished(self) -> list[str]:
        """The names of the runs that are still to train, or have failed."""
        # Jobs may run in other processes, so only the disk tells which have succeeded: those whose training.json was
        # written since the sweep began.
        return [path.name for path, old in self.before.items() if _completed(path) in (None, old)]

    def _time(self) -> str:
        """The time that this process's job took and, if jobs run one after another, about what the others will take."""
        self.seconds.append(time.monotonic() - self.started)
        words = _minutes(self.seconds[-1])
        left = len(self._unfinished()) - len(self.failed)
        if os.getpid() == self.main and left > 0:
            words += f"; {left} left, about {_minutes(left * sum(self.seconds) / len(self.seconds))}"
        return words

    def share_of(self, cfg: Config) -> Config:
        """Return this job's configuration; its variants include the encodings of jobs that train the same network.

        Raises:
            Skip: the run is complete, or another job trains the same network.
        """
        run = RunDir(cfg)
        if run.path not in self.trained:
            raise Skip
        others = self.trained[run.path]
        if run.complete and not others:
            raise Skip
        own_variants: list[Any] = cfg.eval.variants or []
        return with_variants(cfg, own_variants + others)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print how to compare the runs; exit with 1 if a run of train.py failed."""
        if config.hydra.job.config_name != "config":
            return
        failed = self._unfinished()
        if self.labels:
            print(f"sweep: {len(self.trained) - len(failed)} of {len(self.trained)} runs are complete")
        folders = {str(path.parent) for path in self.trained} or {str(config.runs_dir)}
        argument = f"folders=[{','.join(sorted(folders))}]"
        print(f"to compare: python scripts/report.py {shlex.quote(argument)}", flush=True)
        # A complete run that was only to be measured is not among them.
        failed = failed or self.failed
        if failed:
            print(f"failed: {', '.join(failed)}; the same command tries these again", file=sys.stderr)
            raise SystemExit(1)

    def _plan(self, config: DictConfig) -> None:
        """Check all jobs, and decide which of them train.

        Raises:
            ConfigError: a job is mistaken, or two would be the same run.
        """
        jobs = _jobs_of(config)
        labels: dict[Path, str] = {}  # run -> the options of its job that differ among jobs
        trained_by: dict[str, Path] = {}  # everything that decides the weights -> the first run that trains them
        # All jobs have the same options in the same order, so an option varies if its place has several values.
        varies = [len(set(values)) > 1 for values in zip(*jobs, strict=True)]
        for job in jobs:
            label = " ".join(itertools.compress(job, varies))
            try:
                run = _checked_run(config, job)
            except ERRORS as error:
                where = f"{label}: " if label else ""
                raise ConfigError(where + explain(error)) from None
            if run.path in labels:
                remedy = "a name that shows what differs tells them apart, as in name='${pe.name}-${seed}'"
                raise ConfigError(f"{labels[run.path]} and {label} would both be {run.path}: {remedy}")
            labels[run.path] = label
            first = trained_by.setdefault(training_key(run.cfg), run.path)
            self._add(run, first)

    def _add(self, run: RunDir, first: Path) -> None:
        """Add what the job of `run` does to the plan; the run at `first` is the first that trains the same network."""
        # A run that already exists is left as it is, even if another one would train the same weights.
        if first != run.path and not run.begun:
            self.trained[first].append(run.cfg.pe)
            self.labels.append(f"{run.path.name}: trains as {first.name}, which measures it zero-shot")
            return
        self.trained[run.path] = []
        if run.complete:
            self.labels.append(f"{run.path.name}: complete")
        else:
            self.labels.append(run.path.name)
            self.before[run.path] = _completed(run.path)


def _jobs_of(config: DictConfig) -> list[list[str]]:
    """The command line of each job of a sweep, as Hydra's own sweeper makes them."""
    # First the options that a file sweeps (hydra.sweeper.params), then those of the command line: Hydra's order.
    arguments = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    arguments += typed
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
    return jobs


def _checked_run(config: DictConfig, job: list[str]) -> RunDir:
    """The run of a job. Raises ValueError, OSError: it is mistaken, cannot be resumed, or needs several processes."""
    with composed(config.hydra.job.config_name, *job) as job_config:
        cfg = resolve(merged(plain(job_config)))
    run = RunDir(cfg)
    # Fabric starts further processes by the command line, which here is that of the sweep: each would run all jobs.
    # Only Slurm's launcher gives a job several processes.
    t = cfg.trainer
    several = t.devices != 1 or t.num_nodes != 1 or t.strategy == "fsdp"
    job_is_one_process = config.hydra.launcher.get("tasks_per_node", 1) == 1
    if started_by().world_size > 1 or (job_is_one_process and several):
        slurm = "hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N"
        reason = f"trainer.devices={t.devices}: a job of a sweep is one process"
        raise ConfigError(f"{reason}: leave out -m, or use {slurm}")
    run.check()
    return run


def training_key(cfg: Config) -> str:
    """Everything that decides the trained weights: equal for runs of which one is enough."""
    rest = cfg.model_dump(exclude={"pe": True, "name": True, "eval": {"variants"}})
    return f"{rest} {_trained_encodings(cfg)}"


def _trained_encodings(cfg: Config) -> list[tuple[str, dict[str, Any]]]:
    """The class and options that each layer trains with."""
    # A scaled RoPE whose scaling is not active in training computes what RoPE does: it counts as a RoPE, with the
    # options of that class alone.
    _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
    parts = position.parts(cfg.pe)
    names = itertools.cycle(cfg.pe.get("pattern", [""]))
    trained = []
    for name, layer in zip(names, net.encodings, strict=False):
        cls = layer.trains_as
        options = {option: parts[name].get(option) for option in position.options_of(cls)}
        trained.append((str(cls), options))
    return trained


def _minutes(seconds: float) -> str:
    """A time in minutes and seconds: "2:05"."""
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def _completed(run: Path) -> int | None:
    """The time at which the run was completed, in nanoseconds; None if it is not complete."""
    file = run / "training.json"
    return file.stat().st_mtime_ns if file.is_file() else None
