"""A sweep (`train.py -m`): every job is checked before the first one trains; one that fails is named, the others go on.

The truth is in the run directories: a run that is complete is left alone, a broken one continues, whatever launches
the jobs. Beside them, in the folder .sweep, lie the errors of failed jobs, and what jobs print that run in parallel.
"""

import contextlib
import math
import os
import sys
import time
import traceback
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf.cli import configure, explain, fail, overrides_of
from conf.rundir import RunDir
from conf.schema import ConfigError, Trainer
from model.machine import forget_past_work
from model.processes import started_by

FAILED = 1  # exit code of a sweep of which jobs failed
_GROUP = "WANDB_RUN_GROUP"  # wandb's own variable


class Sweep(Callback):
    """Hydra's hooks. What `on_multirun_start` finds out travels with this object to the processes of the jobs."""

    def __init__(self) -> None:
        self.runs: list[Path] = []  # of the jobs, in their order
        self.complete: set[Path] = set()  # those that were so before
        self.replaced: dict[Path, int | None] = {}  # and when the results of the others were written

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check every job, or exit: Hydra would turn an exception into a warning."""
        try:
            self._check(config)
        except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
            fail(error)
        self.began = time.time()
        print(f"sweep of {len(self.runs)} runs: {len(self.replaced)} to train, {len(self.complete)} complete")
        for number, path in enumerate(self.runs, 1):
            if path in self.complete:
                print(f"[{number}/{len(self.runs)}] {path.name}: complete")
            _beside(path, "error").unlink(missing_ok=True)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if not (path := self._to_train(config)):
            return
        forget_past_work()
        self.job = ExitStack()
        if "n_jobs" in config.hydra.launcher:  # several would print at once
            log = self.job.enter_context(_beside(path, "log").open("w", encoding="utf-8"))
            self.job.enter_context(contextlib.redirect_stdout(log))
        if _GROUP not in os.environ:
            os.environ[_GROUP] = self.group
            self.job.callback(os.environ.pop, _GROUP)
        self.job_began = time.perf_counter()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if not (path := self._to_train(config)):
            return
        self.job.close()
        error, job_return.return_value = job_return.return_value, None  # not every error survives pickling
        number = f"[{config.hydra.job.num + 1}/{len(self.runs)}] {path.name}"
        if isinstance(error, Exception):
            where = "" if isinstance(error, ValueError | OSError) else "".join(traceback.format_exception(error))
            _beside(path, "error").write_text(f"{explain(error)}\n{where}", encoding="utf-8")
            print(f"{where}{number}: failed: {explain(error)}", file=sys.stderr, flush=True)
        elif self._is_done(path):
            minutes, seconds = divmod(round(time.perf_counter() - self.job_began), 60)
            print(f"{number}: done in {minutes}:{seconds:02}; {self._remaining()}", flush=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Name what failed, and exit with FAILED if anything did."""
        failed = [path for path in self.runs if not self._is_done(path)]
        print(f"sweep: {len(self.runs) - len(failed)} of {len(self.runs)} runs are complete")
        for path in failed:
            file = _beside(path, "error")
            why = file.read_text(encoding="utf-8").splitlines()[0] if file.is_file() else "ended without a message"
            print(f"  {path.name} failed: {why}", file=sys.stderr)
        if failed:
            print("with the cause gone, the same command trains these and leaves the others alone", file=sys.stderr)
            raise SystemExit(FAILED)

    def _check(self, config: DictConfig) -> None:
        """Find out the runs of the jobs.

        Raises:
            ConfigError: what is wrong with which of them, or which would be the same run.
        """
        loader = GlobalHydra.instance().config_loader()
        typed = overrides_of(config.hydra)
        fixed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        overrides = OverridesParser.create(loader).parse_overrides([*fixed, *typed])
        last = {override.get_key_element(): override for override in overrides}
        swept = [key for key, override in last.items() if override.is_sweep_override()]
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        mistakes, named = defaultdict(list), defaultdict(list)
        for job in jobs:
            label = " ".join(override for override in job if override.partition("=")[0] in swept) or "the job"
            try:
                composed = loader.load_sweep_config(config, job)
                HydraConfig.instance().set_config(composed)  # for ${hydra:...}
                cfg = configure(composed, job)
                _check_processes(cfg.trainer, composed.hydra.launcher.get("tasks_per_node", 1))
                run = RunDir(cfg)
                run.check()
            except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
                mistakes[explain(error)].append(label)
                continue
            self.runs.append(run.path)
            named[run.path].append(label)
            if run.complete:
                self.complete.add(run.path)
            else:
                self.replaced[run.path] = _written(run.path)
        if mistakes:
            raise ConfigError("\n".join(f"{message} ({', '.join(of)})" for message, of in mistakes.items()))
        for path, of in named.items():
            if len(of) > 1:
                name = _distinct_name(swept, config.hydra.runtime.choices)
                raise ConfigError(f"{' and '.join(of)} would both be {path}: tell them apart, as with name='{name}'")
        shown = [override for override in typed if override.partition("=")[0] in (*swept, "experiment")]
        self.group = " ".join(shown)[:128]  # as long as wandb allows

    def _to_train(self, config: DictConfig) -> Path | None:
        """The run of this job, or None if it is complete, or this is no sweep."""
        path = self.runs[config.hydra.job.num] if self.runs else None
        return None if path in self.complete else path

    def _is_done(self, path: Path) -> bool:
        return path in self.complete or _written(path) not in (None, self.replaced[path])

    def _remaining(self) -> str:
        """How many jobs are to come, and how long they take if they are like those before."""
        ended = sum(self._is_done(path) or _beside(path, "error").is_file() for path in self.replaced)
        left = len(self.replaced) - ended
        minutes = math.ceil((time.time() - self.began) / 60 / max(1, ended) * left)
        return f"{left} left" + (f", about {minutes} min" if left else "")


def _check_processes(t: Trainer, tasks: int) -> None:
    """Raise ConfigError if a job needs several processes and is not given them: only Slurm does that in a sweep."""
    by, _, started = started_by()
    if started > 1:
        raise ConfigError(f"{by} started {started} processes: start a sweep once, it starts its own jobs")
    if tasks == 1 and (t.devices != 1 or t.num_nodes != 1 or t.strategy == "fsdp"):
        raise ConfigError(
            f"trainer.strategy={t.strategy} trainer.devices={t.devices}: a job of a sweep is one process, unless Slurm "
            f"starts it as several (hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N); leave out -m"
        )


def _beside(run: Path, kind: str) -> Path:
    return run.parent / ".sweep" / f"{run.name}.{kind}"


def _written(run: Path) -> int | None:
    """When the results of a run were written, if they are."""
    file = run / "results.json"
    return file.stat().st_mtime_ns if file.is_file() else None


def _distinct_name(swept: list[str], groups: DictConfig) -> str:
    """A `name` that shows every swept key."""
    parts = {"pe": "${pe.name}", "data": "${data.name}"}
    for key in swept:
        word = key.lstrip("+").rpartition(".")[2]
        parts.setdefault(key, f"${{hydra:runtime.choices.{key}}}" if key in groups else f"{word}${{{key.lstrip('+')}}}")
    return "-".join((parts | {"seed": "s${seed}"}).values())
