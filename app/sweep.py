"""Hydra's jobs. In a sweep (-m) failing jobs are named and the others go on.

Where train.py sweeps with Hydra's own sweeper, all jobs are checked before the first one trains, complete runs are
left alone, and jobs that would train the same network, as with pe=rope,yarn, train once: the first of them measures the
others' encodings zero-shot. Other sweepers choose their jobs by earlier results, so these are checked one by one.
"""

import itertools
import os
import shlex
import sys
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

from app.cli import ERRORS, composed, explain, fail, plain
from app.encodings import resolve_encoding
from app.init_from import merged, recipe
from app.resolve import for_this_machine, resolve, with_variants
from app.run_dir import RunDir
from conf.schema import Config, ConfigError
from model import position
from training.distributed import die_with_parent, env_rank, started_by
from training.hardware import reset_peak_memory

_sweep: "Jobs | None" = None  # the sweep whose job this process runs


class Skip(Exception):  # noqa: N818 - nothing went wrong
    """Ends a job of a sweep that has nothing to do."""


def configure(composed: DictConfig) -> Config:
    """Return the configuration of a run, checked and with nothing left open; doubts are printed as warnings.

    In a sweep, a run that trains for other jobs measures their encodings, too.

    Raises ValueError: a line for each mistake. Skip: the run is complete, or another job trains the same network.
    """
    cfg = resolve(merged(plain(composed)))
    if _sweep is not None and _sweep.labels:
        cfg = _sweep.share_of(cfg)
    cfg = for_this_machine(cfg)
    if env_rank() == 0:
        _print_doubts(cfg)
    return cfg


def _print_doubts(cfg: Config) -> None:
    """Print which recipe was chosen for the user, and a warning about what is probably not meant."""
    lr, warmup, steps = cfg.optim.lr, cfg.optim.warmup_steps, cfg.trainer.max_steps
    experiments = recipe(cfg.init_from)
    if experiments:
        schedule = f"learning rate {lr:g}, {warmup} steps of warm-up, {steps} in all"
        print(f"{experiments[0]}, beneath what is given: {schedule}")
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
    """Hydra's hooks. What `on_multirun_start` finds out travels with this object to the processes of the jobs."""

    def __init__(self) -> None:
        self.main = os.getpid()
        self.labels: list[str] = []  # of the jobs; none for other sweepers, which make theirs one by one
        self.trained: dict[Path, list[dict[str, Any]]] = {}  # run -> encodings of jobs that train the same network
        self.before: dict[Path, int | None] = {}  # run to train -> when it was last completed, if it is overwritten

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        HydraConfig.instance().set_config(config)
        if config.hydra.job.config_name == "config" and config.hydra.runtime.choices["hydra/sweeper"] == "basic":
            try:
                self._plan(config)
            except Exception as error:
                fail(error)
                raise  # Hydra makes a warning of it
        for number, label in enumerate(self.labels, 1):
            print(f"[{number}/{len(self.labels)}] {label}")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        global _sweep
        if config.hydra.mode == RunMode.MULTIRUN:
            _sweep = self
            reset_peak_memory()
            if "n_jobs" in config.hydra.launcher and os.getpid() != self.main:  # a worker of joblib
                die_with_parent(self.main)
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - several would print at once

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        global _sweep
        _sweep = None
        error = None
        if job_return.status == JobStatus.FAILED:
            error = job_return._return_value  # the public property would raise it
        if config.hydra.mode != RunMode.MULTIRUN:
            if error:
                fail(error)
            return
        label = self._label(config.hydra.job.num)
        if error is None:
            print(f"{label}: done", file=sys.__stdout__, flush=True)
        elif not isinstance(error, Skip):
            if not isinstance(error, ERRORS):  # nobody's mistake
                print("".join(traceback.format_exception(error)), end="", file=sys.stderr)
            print(f"{label}: failed: {explain(error)}", file=sys.stderr, flush=True)
        if error is not None and self.labels:  # Hydra's own sweeper must go on; others count failures
            job_return.return_value = None
            job_return.status = JobStatus.COMPLETED

    def _label(self, job: int) -> str:
        """The name of a job, which is counted from 0, in messages."""
        if not self.labels:
            return f"job {job + 1}"
        return f"[{job + 1}/{len(self.labels)}] {self.labels[job]}"

    def share_of(self, cfg: Config) -> Config:
        """Return the run of this job with the encodings of jobs that train the same network among its variants.

        Raises Skip: the run is complete, or another job trains it.
        """
        run = RunDir(cfg)
        if run.path not in self.trained:
            raise Skip
        others = self.trained[run.path]
        if run.complete and not others:
            raise Skip
        return with_variants(cfg, [*(cfg.eval.variants or []), *others])  # type: ignore[list-item]

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Say what comes next; exit with 1 if a run of train.py failed."""
        if config.hydra.job.config_name != "config":
            return
        failed = [path.name for path, old in self.before.items() if _completed(path) in (None, old)]
        if self.labels:
            print(f"sweep: {len(self.trained) - len(failed)} of {len(self.trained)} runs are complete")
        folders = ",".join(sorted({str(path.parent) for path in self.trained}) or [str(config.runs_dir)])
        print(f"to compare: python scripts/report.py {shlex.quote(f'folders=[{folders}]')}", flush=True)
        if failed:
            print(f"failed: {', '.join(failed)}; the same command trains these again", file=sys.stderr)
            raise SystemExit(1)

    def _plan(self, config: DictConfig) -> None:
        """Find out what each job is to do.

        Raises ConfigError: a job is mistaken, or two would be the same run.
        """
        jobs = _jobs_of(config)
        labels: dict[Path, str] = {}  # run -> the options of its job that differ among jobs
        trained_by: dict[str, Path] = {}  # all that decides a training -> the run that makes it
        for job in jobs:
            varying = [option for i, option in enumerate(job) if any(other[i] != option for other in jobs)]
            label = " ".join(varying)
            try:
                run = _checked_run(config, job)
            except ERRORS as error:
                raise ConfigError(f"{label}: {explain(error)}") from None
            if run.path in labels:
                remedy = "a name that shows what differs tells them apart, as in name='${pe.name}-${seed}'"
                raise ConfigError(f"{labels[run.path]} and {label} would both be {run.path}: {remedy}")
            labels[run.path] = label
            first = trained_by.setdefault(_training(run.cfg), run.path)
            self._add(run, first)

    def _add(self, run: RunDir, first: Path) -> None:
        """Note what the job of `run` does; the run at `first` is the first one that trains the same network."""
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
    """The command line of each job of a sweep, as Hydra's own sweeper would make them."""
    fixed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*fixed, *typed])  # type: ignore[misc]
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return jobs


def _checked_run(config: DictConfig, job: list[str]) -> RunDir:
    """The run of a job. Raises ValueError, OSError: it is mistaken, cannot be continued, or needs several processes."""
    with composed(config.hydra.job.config_name, *job) as job_config:
        run = RunDir(resolve(merged(plain(job_config))))
    t = run.cfg.trainer
    several = t.devices != 1 or t.num_nodes != 1 or t.strategy == "fsdp"
    job_is_one_process = config.hydra.launcher.get("tasks_per_node", 1) == 1
    if started_by()[1] > 1 or (job_is_one_process and several):
        slurm = "hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N"
        reason = f"trainer.devices={t.devices}: a job of a sweep is one process"
        raise ConfigError(f"{reason}: leave out -m, or use {slurm}")
    run.check()
    return run


def _training(cfg: Config) -> str:
    """All that decides the trained weights: equal for runs of which one is enough."""
    rest = cfg.model_dump(exclude={"pe": True, "name": True, "eval": {"variants"}})
    return f"{rest} {_trained_encodings(cfg)}"


def _trained_encodings(cfg: Config) -> list[tuple[str, dict[str, Any]]]:
    """The class and options that each layer trains with: a RoPE whose scaling is not active is a RoPE."""
    _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
    parts = position.parts(cfg.pe)
    trained = []
    for name, layer in zip(itertools.cycle(cfg.pe.get("pattern", [""])), net.encodings, strict=False):
        cls = layer.trains_as
        trained.append((str(cls), {option: parts[name].get(option) for option in position.options_of(cls)}))
    return trained


def _completed(run: Path) -> int | None:
    """When the run was completed, if it was."""
    file = run / "training.json"
    return file.stat().st_mtime_ns if file.is_file() else None
