"""Sweeps (-m): runs train side by side on a CPU, else Hydra runs the jobs. One that fails is named, the others go on.

The jobs of train.py are checked before the first one trains, and complete runs are left alone. A sweeper that searches
chooses its jobs by earlier results, so its jobs are checked one by one.
"""

import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from conf.schema import Config, ConfigError
from ropewalk.app import side_by_side
from ropewalk.app.cli import ERRORS, TRAIN, Task, composed, plain, quoted
from ropewalk.app.explain import CONF_DIR, explain
from ropewalk.app.init_from import merged
from ropewalk.app.resolve import resolve
from ropewalk.app.run_dir import RunDir
from ropewalk.evaluation.loop import is_measured
from ropewalk.training.distributed import started_by
from ropewalk.training.hardware import reset_peak_memory

Choices = Mapping[str, Sequence[str]]  # {key: the overrides of it that the jobs combine}


def configure(config: DictConfig) -> Config:
    """Return the configuration of a run, checked, with nothing left open but what a machine decides.

    Prints a warning if the learning rate never leaves its warm-up. Raises ValueError: a line for each mistake.
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
    searches = any(override.startswith("hydra/sweeper=") for override in overrides)
    jobs = Jobs(name, task, searches, plan(overrides) if name == TRAIN and not searches else [])
    for number, run in enumerate(jobs.runs, 1):
        print(f"[{number}/{len(jobs.runs)}] {run.path.name}{': complete' if run.complete else ''}")
    configs = [run.cfg for run in jobs.runs]
    is_left_to_hydra = "hydra/launcher=" in " ".join(overrides)
    if not is_left_to_hydra and len(side_by_side.to_do(configs)) > 1 and side_by_side.processes(configs[0]) > 1:
        jobs.failed = side_by_side.train_all(configs)
    else:
        jobs.run(overrides)
    unfinished = jobs.unfinished()
    if jobs.runs:
        print(f"sweep: {len(jobs.runs) - len(unfinished)} of {len(jobs.runs)} runs are complete")
        folders = ",".join(sorted({str(run.path.parent) for run in jobs.runs}))
        print(f"to compare: python scripts/report.py {shlex.quote(f'folders=[{folders}]')}", flush=True)
    failed = unfinished or jobs.failed
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries these again", file=sys.stderr)
        raise SystemExit(1)


class Jobs:
    """What Hydra calls for each job. It is pickled, with the runs, for jobs in other processes."""

    def __init__(self, name: str, task: Task, searches: bool, runs: Sequence[RunDir]) -> None:
        self.name = name
        self.task = task
        self.searches = searches
        self.runs = runs  # of train.py, in the order of the jobs; none if they are not known beforehand
        self.process = os.getpid()
        self.failed: list[str] = []  # labels of the jobs that failed in this process

    def __call__(self, config: DictConfig) -> Any:
        """Run the job of a configuration that Hydra has composed."""
        section = HydraConfig.get()
        number = section.job.num + 1
        label = f"job {number}"
        overrides = [*section.overrides.task]
        if self.runs:
            run = self.runs[section.job.num]
            if run.complete and is_measured(run.path, run.cfg):
                return None
            label = f"[{number}/{len(self.runs)}] {run.path.name}"
            overrides.append(f"name={quoted(run.path.name)}")
        # Jobs share one process: each must measure its own peak, without what the job before it still holds.
        reset_peak_memory()
        try:
            with composed(self.name, *overrides) as own:  # over the recipe of its data
                result = self.task(own)
        except Exception as error:
            if not isinstance(error, ERRORS):  # a defect, not a mistake of the user
                traceback.print_exception(error)
            print(f"{label}: failed: {explain(error)}", file=sys.stderr, flush=True)
            self.failed.append(label)
            # Hydra ends at the first failure, so it is not told of one: others go on. A search has to know.
            if self.searches or os.getpid() != self.process:
                raise
            return None
        print(f"{label}: done; {len(self.unfinished())} left", file=sys.__stdout__, flush=True)
        return result

    def run(self, overrides: Sequence[str]) -> None:
        """Let Hydra run the jobs: one after the other, or as the launcher and the sweeper that were chosen do."""
        sys.stdout.flush()
        sys.argv[1:] = ["--multirun", *overrides]
        try:
            hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=self.name)(self)()
        except ERRORS:
            if not self.runs:
                raise
            self.failed.append("a job in another process")

    def unfinished(self) -> list[str]:
        """The names of the runs that are still to train, or have failed."""
        # Jobs may run in other processes, so only the disk tells: training.json is written when a run is complete.
        return [run.path.name for run in self.runs if not (run.path / "training.json").is_file()]


def plan(overrides: Sequence[str]) -> list[RunDir]:
    """Check the jobs of a sweep over train.py, and return their runs.

    What varies becomes part of the names where these do not tell the runs apart.

    Raises:
        ConfigError: a job is mistaken.
    """
    choices = _choices(overrides)
    jobs = [*itertools.product(*choices.values())]
    varying = [
        [option for option, values in zip(job, choices.values(), strict=True) if len(values) > 1] for job in jobs
    ]
    configs = [_checked(job, " ".join(options)) for job, options in zip(jobs, varying, strict=True)]
    runs = [RunDir(cfg) for cfg in configs]
    if len({run.path for run in runs}) < len(runs):
        runs = [RunDir(_with_name(cfg, options)) for cfg, options in zip(configs, varying, strict=True)]
    for run in runs:
        run.check()
    return runs


def _choices(overrides: Sequence[str]) -> Choices:
    """What the jobs combine, as Hydra's own sweeper combines it."""
    parser = OverridesParser.create()
    fixed = [str(o.input_line) for o in parser.parse_overrides([*overrides]) if not o.is_sweep_override()]
    with composed(TRAIN, *fixed) as config:
        swept: Mapping[str, str] = config.hydra.sweeper.get("params") or {}
    choices = {}
    # First what a file sweeps, then the command line, in which a later override replaces an earlier one.
    for override in parser.parse_overrides([*(f"{key}={value}" for key, value in swept.items()), *overrides]):
        key = override.get_key_element()
        choices[key] = [str(override.input_line)]
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    return choices


def _checked(overrides: Sequence[str], label: str) -> Config:
    """The configuration of a job. Raises ConfigError: it is mistaken, or needs processes that nobody starts."""
    try:
        with composed(TRAIN, *overrides) as config:
            cfg = resolve(merged(plain(config)))
            starts_several = config.hydra.launcher.get("tasks_per_node", 1) > 1
    except ERRORS as error:
        raise ConfigError(f"{label}: {explain(error)}".removeprefix(": ")) from None
    # Fabric starts further processes by the command line, which here is that of the sweep: each would run all jobs.
    # Only Slurm's launcher gives a job several processes.
    t = cfg.trainer
    needs_several = t.devices != 1 or t.strategy == "fsdp"
    if started_by().world_size > 1 or (needs_several and not starts_several):
        remedy = "leave out -m, or use hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N"
        raise ConfigError(f"trainer.devices={t.devices}: a job of a sweep is one process: {remedy}")
    return cfg


def _with_name(cfg: Config, varying: Sequence[str]) -> Config:
    """Return `cfg` with what varies in its name, unless it says so already; the seed is always at its end."""
    seed = f"-s{cfg.seed}" if cfg.seed else ""
    words = str(cfg.name).removesuffix(seed).split("-")
    for option in varying:
        key, _, value = option.partition("=")
        if key != "seed" and value not in words:
            words.append(option)
    return cfg.model_copy(update={"name": "-".join(words).replace("/", "_") + seed})
