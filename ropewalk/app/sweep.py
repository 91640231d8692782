"""Sweeps (-m): Hydra runs the jobs. One that fails is named, and the others go on.

The jobs of train.py are checked before the first one trains, and complete runs are left alone. Jobs that would train
the same network, as with pe=rope,yarn, train it once: the first of them measures the others' encodings zero-shot.
A sweeper that searches chooses its jobs by earlier results, so its jobs are checked one by one.
"""

import itertools
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from conf.schema import Config, ConfigError
from model import position
from ropewalk.app.cli import CONF_DIR, ERRORS, TRAIN, Task, composed, hydra_main, plain
from ropewalk.app.explain import explain
from ropewalk.app.init_from import merged
from ropewalk.app.resolve import resolve, warn, with_variants
from ropewalk.app.run_dir import RunDir
from ropewalk.app.trained import resolve_encoding
from ropewalk.training.distributed import die_with_parent, env_rank, started_by
from ropewalk.training.hardware import reset_peak_memory

_IN_EVERY_NAME = ("pe", "data", "seed")  # of runs that the user does not name
_job: "Job | None" = None  # the planned job that this process runs


@dataclass
class Job:
    """A job of train.py, as planned."""

    run: Path
    state: str = ""  # why it trains nothing: its run is complete, or another job trains the same network
    variants: list[dict[str, Any]] = field(default_factory=list)  # encodings of jobs that would train the same network

    def __str__(self) -> str:
        return self.run.name + self.state


def configure(config: DictConfig) -> Config:
    """Return the configuration of a run, checked, with nothing left open but what a machine decides.

    Prints warnings about doubtful choices. In a sweep, a run that trains for other jobs also measures their encodings.

    Raises ValueError: a line for each mistake.
    """
    cfg = resolve(merged(plain(config)))
    if _job is not None:
        own_variants: list[Any] = cfg.eval.variants or []
        cfg = with_variants(cfg.model_copy(update={"name": _job.run.name}), own_variants + _job.variants)
    if env_rank() == 0:
        _tell_recipe(config.hydra.runtime.choices)
        warn(cfg)
    return cfg


def _tell_recipe(choices: Mapping[str, Any]) -> None:
    """Say which experiment lies beneath the command line, and which one that suits the data does not."""
    chosen, of_data = choices["experiment"], choices["data"]
    if chosen:
        print(f"experiment={chosen} lies beneath what is given")
    if chosen != of_data and (CONF_DIR / "experiment" / f"{of_data}.yaml").is_file():
        print(f"experiment={of_data}, which suits data={of_data}, does not: only one experiment is taken")


def sweep(name: str, task: Task, flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Run the jobs of a sweep over the program that is configured by conf/`name`.yaml. Exits with 1 if one fails.

    Raises:
        ConfigError: nothing is swept, a job is mistaken, or two would be the same run.
    """
    if not overrides:
        raise ConfigError("-m runs a job for each of several values: say of what, as in -m pe=rope,alibi seed=0,1")
    searches = any(override.startswith("hydra/sweeper=") for override in overrides)
    jobs = Jobs(name, task, searches, [] if searches or name != TRAIN else plan(name, overrides))
    for number, job in enumerate(jobs.planned, 1):
        print(f"[{number}/{len(jobs.planned)}] {job}")
    try:
        hydra_main(name, jobs, *flags, *overrides)
    except ERRORS:
        if not jobs.planned:
            raise
        jobs.failed.append("a job in another process")
    unfinished = [job.run.name for job in jobs.unfinished()]
    runs = {job.run for job in jobs.planned if "trains as" not in job.state}
    if runs:
        print(f"sweep: {len(runs) - len(unfinished)} of {len(runs)} runs are complete")
        folders = ",".join(sorted({str(run.parent) for run in runs}))
        print(f"to compare: python scripts/report.py {shlex.quote(f'folders=[{folders}]')}", flush=True)
    # A complete run that was only to be measured is not among the unfinished.
    failed = unfinished or jobs.failed
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries these again", file=sys.stderr)
        raise SystemExit(1)


class Jobs:
    """What Hydra calls for each job. It is pickled, with the plan, for jobs in other processes."""

    def __init__(self, name: str, task: Task, searches: bool, planned: Sequence[Job]) -> None:
        self.name = name
        self.task = task
        self.searches = searches
        self.planned = planned
        self.process = os.getpid()
        self.failed: list[str] = []  # labels of the jobs that failed in this process

    def __call__(self, config: DictConfig) -> Any:
        """Run the job of a configuration that Hydra has composed."""
        global _job
        section = HydraConfig.get()
        number = section.job.num + 1
        label = f"job {number}"
        job = None
        if self.planned:
            job = self.planned[section.job.num]
            label = f"[{number}/{len(self.planned)}] {job}"
            if job.state and not job.variants:
                return None
        in_parallel = os.getpid() != self.process
        if in_parallel and "n_jobs" in section.launcher:
            # Workers of joblib print at once, so each job has a file; and they would outlive a killed main process.
            die_with_parent(self.process)
            log = Path(section.sweep.dir, f"{number}.log")
            log.parent.mkdir(parents=True, exist_ok=True)
            sys.stdout = log.open("w", buffering=1, encoding="utf-8")
        # Jobs share one process: each must measure its own peak, without what the job before it still holds.
        reset_peak_memory()
        started = time.time()
        _job = job
        try:
            with composed(self.name, *section.overrides.task) as own:  # over the recipe of its data
                result = self.task(own)
        except Exception as error:
            if not isinstance(error, ERRORS):  # a defect, not a mistake of the user
                traceback.print_exception(error)
            print(f"{label}: failed: {explain(error)}", file=sys.stderr, flush=True)
            self.failed.append(label)
            # Hydra ends at the first failure, so it is not told of one: others go on. A search has to know.
            if self.searches or in_parallel:
                raise
            return None
        finally:
            _job = None
        minutes = (time.time() - started) / 60
        print(f"{label}: done in {minutes:.1f} minutes; {len(self.unfinished())} left", file=sys.__stdout__, flush=True)
        return result

    def unfinished(self) -> list[Job]:
        """The jobs whose runs are still to train, or have failed."""
        # Jobs may run in other processes, so only the disk tells: training.json is written when a run is complete.
        return [job for job in self.planned if not (job.state or (job.run / "training.json").is_file())]


def plan(name: str, overrides: Sequence[str]) -> list[Job]:
    """Check all jobs of train.py, and decide which of them train.

    Raises:
        ConfigError: a job is mistaken, or two would be the same run.
    """
    jobs = []
    trained_by: dict[str, Job] = {}  # everything that decides the weights -> the job that trains them
    for run in _runs(name, _choices(name, overrides)):
        run.check()
        job = Job(run.path)
        jobs.append(job)
        first = trained_by.setdefault(training_key(run.cfg), job)
        # A run that already exists is left as it is, even if another one would train the same weights.
        if first is not job and not run.begun:
            first.variants.append(run.cfg.pe)
            job.state = f": trains as {first.run.name}, which measures it zero-shot"
        elif run.complete:
            job.state = ": complete"
    return jobs


def _runs(name: str, choices: Mapping[str, Sequence[str]]) -> list[RunDir]:
    """The run of each combination of the choices, each with a name of its own. Raises ConfigError: one is mistaken."""
    varies = [key for key, values in choices.items() if len(values) > 1]
    runs: dict[str, RunDir] = {}  # by the options in which the jobs differ
    for job in itertools.product(*choices.values()):
        options = dict(zip(choices, job, strict=True))
        label = " ".join(options[key] for key in varies)
        try:
            with composed(name, *job) as config:
                runs[label] = RunDir(resolve(merged(plain(config))))
                _check_processes(runs[label].cfg, config.hydra.launcher)
        except ERRORS as error:
            raise ConfigError(f"{label}: {explain(error)}".removeprefix(": ")) from None
    for said in (_IN_EVERY_NAME, ()):  # a name that the user has given need not say the encoding, the data or the seed
        if len({run.path for run in runs.values()}) < len(runs):
            runs = {label: RunDir(_renamed(run.cfg, label, said)) for label, run in runs.items()}
    if len({run.path for run in runs.values()}) < math.prod(len(values) for values in choices.values()):
        raise ConfigError(f"two jobs would be one run: {', '.join(runs)}; leave out what is there twice")
    return [*runs.values()]


def _choices(name: str, overrides: Sequence[str]) -> dict[str, list[str]]:
    """{key: the overrides of it that the jobs combine}, as Hydra's own sweeper combines them."""
    parser = OverridesParser.create()
    fixed = [str(o.input_line) for o in parser.parse_overrides([*overrides]) if not o.is_sweep_override()]
    with composed(name, *fixed) as config:
        swept: Mapping[str, str] = config.hydra.sweeper.get("params") or {}
    choices = {}
    # First what a file sweeps, then the command line, in which a later override replaces an earlier one.
    for override in parser.parse_overrides([*(f"{key}={value}" for key, value in swept.items()), *overrides]):
        key = override.get_key_element()
        choices[key] = [str(override.input_line)]
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise ConfigError(f"{override.input_line}: only a search has ranges; add hydra/sweeper=optuna")
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    return choices


def _check_processes(cfg: Config, launcher: Mapping[str, Any]) -> None:
    """Raise ConfigError if a job needs several processes, and the launcher does not start them."""
    # Fabric starts further processes by the command line, which here is that of the sweep: each would run all jobs.
    # Only Slurm's launcher gives a job several processes.
    t = cfg.trainer
    several = t.devices != 1 or t.num_nodes != 1 or t.strategy == "fsdp"
    if started_by().world_size > 1 or (several and launcher.get("tasks_per_node", 1) == 1):
        remedy = "leave out -m, or use hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N"
        raise ConfigError(f"trainer.devices={t.devices}: a job of a sweep is one process: {remedy}")


def _renamed(cfg: Config, label: str, said: Sequence[str]) -> Config:
    """Return `cfg` with the options in which it differs, but for the keys `said`, added to its name."""
    new = [option for option in label.split(" ") if option.partition("=")[0] not in said]
    seed = f"-s{cfg.seed}" if cfg.seed else ""
    name = "-".join([str(cfg.name).removesuffix(seed), *new]).replace("/", "_") + seed
    return cfg.model_copy(update={"name": name})


def training_key(cfg: Config) -> str:
    """Everything that decides the trained weights: equal for runs of which one is enough."""
    rest = cfg.model_dump(exclude={"pe": True, "name": True, "eval": {"variants"}})
    _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
    trained = []
    for pe in net.encodings:
        # A scaled RoPE whose scaling is not active in training computes what RoPE does: it counts as a RoPE, with the
        # options of that class alone.
        options = {option: pe.options.get(option) for option in position.options_of(pe.trains_as)}
        trained.append((str(pe.trains_as), options))
    return f"{rest} {trained}"
