"""Hydra's jobs. In a sweep (-m) failing jobs are named and the others go on.

Where train.py sweeps with Hydra's own sweeper, all jobs are checked before the first one trains, complete runs are
left alone, and jobs that would train the same network, as with pe=rope,yarn, train once: the first of them measures the
others' encodings zero-shot. Other sweepers choose their jobs by earlier results, so these are checked one by one."""

import itertools
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from app.cli import ERRORS, composed, explain, fail, plain
from app.init_from import merged, recipe, resolve
from app.resolve import resolve_encoding
from app.run_dir import RunDir
from conf.schema import Config, ConfigError
from model import position
from training.distributed import die_with_parent, env_rank, started_by
from training.hardware import reset_peak_memory

_sweep: "Jobs | None" = None  # whose job this process does


class Skip(Exception):  # noqa: N818 - nothing went wrong
    """Ends a job of a sweep that has nothing to do."""


def configure(composed: DictConfig) -> Config:
    """The checked configuration of a run, of which doubts are warnings. In a sweep, a run that trains for other jobs
    measures their encodings, too. Raises ValueError; Skip: it is complete, or another job trains the same network."""
    cfg = resolve(merged(plain(composed)))
    if _sweep is not None and _sweep.labels:
        run = RunDir(cfg)
        others = _sweep.trained.get(run.path, [])
        if run.path not in _sweep.trained or (run.complete and not others):
            raise Skip
        own = cfg.eval.variants or []
        cfg.eval.variants = own + [pe for pe in others if pe not in own]
    if env_rank():  # rank zero tells it
        return cfg
    lr, warmup, steps = cfg.optim.lr, cfg.optim.warmup_steps, cfg.trainer.max_steps
    if taken := recipe(cfg.init_from):
        print(f"{taken[0]}, beneath what is given: learning rate {lr:g}, {warmup} steps of warm-up, {steps} in all")
    if warmup >= steps > 0:
        print(f"warning: in {steps} steps the learning rate never leaves its warm-up of {warmup}", file=sys.stderr)
    layers, pattern = cfg.model.n_layer, cfg.pe.get("pattern", [])
    if unused := ", ".join(sorted(position.parts(cfg.pe).keys() - {*pattern[:layers]}) if pattern else []):
        print(f"warning: no layer gets {unused}: model.n_layer={layers}, pe.pattern={pattern}", file=sys.stderr)
    return cfg


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
        error = job_return._return_value if job_return.status == JobStatus.FAILED else None
        if config.hydra.mode != RunMode.MULTIRUN:
            if error:
                fail(error)
            return
        number = config.hydra.job.num + 1
        label = f"[{number}/{len(self.labels)}] {self.labels[number - 1]}" if self.labels else f"job {number}"
        if error is None:
            print(f"{label}: done", file=sys.__stdout__, flush=True)
        elif not isinstance(error, Skip):
            where = "" if isinstance(error, ERRORS) else "".join(traceback.format_exception(error))
            print(f"{where}{label}: failed: {explain(error)}", file=sys.stderr, flush=True)
        if error is not None and self.labels:  # Hydra's own sweeper must go on; others count failures
            job_return.return_value, job_return.status = None, JobStatus.COMPLETED

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
        """Find out what each job is to do. Raises ConfigError: a job is mistaken, or two would be the same run."""
        fixed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides = parser.parse_overrides([*fixed, *typed])  # type: ignore[misc]
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        labels: dict[Path, str] = {}
        alike: dict[str, Path] = {}  # what decides a training -> the run that makes it
        for job in jobs:
            label = " ".join(override for i, override in enumerate(job) if any(other[i] != override for other in jobs))
            try:
                with composed(config.hydra.job.config_name, *job) as job_config:
                    run = RunDir(resolve(merged(plain(job_config))))
                t, alone = run.cfg.trainer, config.hydra.launcher.get("tasks_per_node", 1) == 1
                if started_by()[1] > 1 or (alone and (t.devices != 1 or t.num_nodes != 1 or t.strategy == "fsdp")):
                    slurm = "hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N"
                    said = f"trainer.devices={t.devices}: a job of a sweep is one process"
                    raise ConfigError(f"{said}: leave out -m, or use {slurm}")
                run.check()
            except ERRORS as error:
                raise ConfigError(f"{label}: {explain(error)}") from None
            if first := labels.get(run.path):
                remedy = "a name that shows what differs tells them apart, as in name='${pe.name}-${seed}'"
                raise ConfigError(f"{first} and {label} would both be {run.path}: {remedy}")
            labels[run.path] = label
            rest = run.cfg.model_dump(exclude={"pe": True, "name": True, "eval": {"variants"}})
            twin = alike.setdefault(f"{rest} {_training(run.cfg)}", run.path)
            if twin != run.path and not run.begun:
                self.trained[twin].append(run.cfg.pe)
                self.labels.append(f"{run.path.name}: trains as {twin.name}, which measures it zero-shot")
                continue
            self.trained[run.path] = []
            self.labels.append(run.path.name + (": complete" if run.complete else ""))
            if not run.complete:
                self.before[run.path] = _completed(run.path)


def _training(cfg: Config) -> list[tuple[str, dict[str, Any]]]:
    """What decides how the layers' encodings train: a RoPE whose scaling is not active is a RoPE."""
    _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
    parts, found = position.parts(cfg.pe), []
    for name, layer in zip(itertools.cycle(cfg.pe.get("pattern", [""])), net.encodings, strict=False):
        cls = layer.trains_as
        found.append((str(cls), {option: parts[name].get(option) for option in position.options_of(cls)}))
    return found


def _completed(run: Path) -> int | None:
    """When the run was completed, if it was."""
    file = run / "training.json"
    return file.stat().st_mtime_ns if file.is_file() else None
