"""Hydra's jobs, one or a sweep (-m): in a sweep failing jobs are named and the others go on.

Where train.py sweeps with Hydra's own sweeper, all jobs are checked before the first one trains, complete runs are
left alone, and jobs that would train the same network, as with pe=rope,yarn, train once: the first of them measures the
others' encodings zero-shot. Other sweepers choose their jobs by earlier results, so these are checked one by one.
"""

import contextlib
import io
import itertools
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.compose import ERRORS, composed, explain, fail, plain
from conf.init_from import merged, resolve
from conf.run_dir import RunDir
from conf.schema import Config, ConfigError
from model.gpt import GPT
from training.distributed import started_by
from training.hardware import reset_peak_memory

_sweep: "Jobs | None" = None  # whose job this process does


class Skip(Exception):  # noqa: N818 - nothing went wrong
    """Ends a job of a sweep that has nothing to do."""


def planned(cfg: Config) -> Config:
    """The configuration of a job in a sweep: one that trains for others measures their encodings, too.

    Raises Skip if its run is complete, or another job trains the same network.
    """
    if _sweep is not None and _sweep.labels:
        run = RunDir(cfg)
        others = _sweep.trained.get(run.path, [])
        if run.path not in _sweep.trained or (run.complete and not others):
            raise Skip
        own = cfg.eval.variants or []
        cfg.eval.variants = own + [pe for pe in others if pe not in own]
    return cfg


class Jobs(Callback):
    """Hydra's hooks. What `on_multirun_start` finds out travels with this object to the processes of the jobs.

    Args:
        training: the jobs are runs of train.py.
    """

    def __init__(self, training: bool = False) -> None:
        self.training = training
        self.labels: list[str] = []  # of the jobs; none for other sweepers, which make theirs one by one
        self.trained: dict[Path, list[dict[str, Any]]] = {}  # run -> encodings of jobs that train the same network
        self.before: dict[Path, int | None] = {}  # run to train -> when it was last completed, if it is overwritten

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        HydraConfig.instance().set_config(config)
        if self.training and config.hydra.runtime.choices["hydra/sweeper"] == "basic":
            try:
                self._plan(config)
            except Exception as error:
                fail(error)
                raise  # Hydra makes a warning of it
        for number, label in enumerate(self.labels, 1):
            print(f"[{number}/{len(self.labels)}] {label}")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        global _sweep
        self.stack = contextlib.ExitStack()
        if config.hydra.mode == RunMode.MULTIRUN:
            _sweep = self
            reset_peak_memory()
            if "n_jobs" in config.hydra.launcher:  # joblib's: several would print at once
                log = Path(config.hydra.sweep.dir, f"{config.hydra.job.num}.log")
                file = self.stack.enter_context(log.open("w", encoding="utf-8"))
                self.stack.enter_context(contextlib.redirect_stdout(file))
                threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        global _sweep
        self.stack.close()
        _sweep, error = None, None
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # Hydra has a word of its own about errors
                _ = job_return.return_value
        except Exception as caught:
            error = caught
        if config.hydra.mode != RunMode.MULTIRUN:
            return fail(error) if error else None
        number = config.hydra.job.num
        label = f"[{number + 1}/{len(self.labels)}] {self.labels[number]}" if self.labels else f"job {number + 1}"
        if error is None:
            print(f"{label}: done", flush=True)
        elif not isinstance(error, Skip):
            where = "" if isinstance(error, ERRORS) else "".join(traceback.format_exception(error))
            print(f"{where}{label}: failed: {explain(error)}", file=sys.stderr, flush=True)
        if error is not None and self.labels:  # Hydra's own sweeper must go on; others count failures
            job_return.return_value, job_return.status = None, JobStatus.COMPLETED
        return None

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Say what comes next; exit with 1 if a job failed."""
        if not self.training:
            return
        failed = [path.name for path, old in self.before.items() if _completed(path) in (None, old)]
        if self.labels:
            print(f"sweep: {len(self.trained) - len(failed)} of {len(self.trained)} runs are complete")
        folders = ",".join(sorted({str(path.parent) for path in self.trained}) or [str(config.runs_dir)])
        print(f"to compare: python scripts/report.py {shlex.quote(f'folders=[{folders}]')}", flush=True)
        if failed:
            again = "the same command trains these and leaves the others alone"
            print(f"failed: {', '.join(failed)}; {again}", file=sys.stderr)
            raise SystemExit(1)

    def _plan(self, config: DictConfig) -> None:
        """Find out what each job is to do. Raises ConfigError: a job is mistaken, or two would be the same run."""
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        fixed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        overrides = {o.get_key_element(): o for o in parser.parse_overrides([*fixed, *typed])}
        swept = {key for key, override in overrides.items() if override.is_sweep_override()}
        if intervals := [key for key in swept if not overrides[key].is_discrete_sweep()]:
            raise ConfigError(f"{intervals[0]}: only a search, such as hydra/sweeper=optuna, takes an interval")
        values = [
            [f"{key}={v}" for v in (o.sweep_string_iterator() if key in swept else [o.get_value_element_as_str()])]
            for key, o in overrides.items()
        ]
        jobs: dict[Path, str] = {}
        alike: dict[str, list[RunDir]] = {}  # the runs to train, by their configurations without the encoding
        for job in itertools.product(*values):
            job_label = " ".join(override for override in job if override.partition("=")[0] in swept)
            try:
                with composed(config.hydra.job.config_name, *job) as job_config:
                    run = RunDir(resolve(merged(plain(job_config))))
                _check_processes(run.cfg, config.hydra.launcher.get("tasks_per_node", 1))
                run.check()
            except ERRORS as error:
                raise ConfigError(f"{job_label}: {explain(error)}") from None
            if run.path in jobs:
                raise ConfigError(
                    f"{jobs[run.path]} and {job_label} would both be {run.path}: a name that shows what differs tells "
                    f"them apart, as in name='${{pe.name}}-${{seed}}'"
                )
            jobs[run.path] = job_label
            rest = run.cfg.model_dump_json(exclude={"pe": True, "name": True, "eval": {"variants"}})
            twins = () if run.begun else (twin for twin in alike.get(rest, []) if _trains_alike(twin.cfg, run.cfg))
            if twin := next(iter(twins), None):
                self.trained[twin.path].append(run.cfg.pe)
                self.labels.append(f"{run.path.name}: trains as {twin.path.name}, which measures it zero-shot")
                continue
            alike.setdefault(rest, []).append(run)
            self.trained[run.path] = []
            self.labels.append(run.path.name + (": complete" if run.complete else ""))
            if not run.complete:
                self.before[run.path] = _completed(run.path)


def _trains_alike(*configs: Config) -> bool:
    """Whether networks with these encodings compute the same in training, to the bit."""
    found = []
    for cfg in configs:
        layers = min(cfg.model.n_layer, len(cfg.pe.get("pattern", [""])))
        model = cfg.model.model_copy(update={"n_layer": layers, "hidden_dim": 8, "dropout": 0.0})
        net = GPT(model, cfg.pe, vocab_size=64, train_len=cfg.train_len)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in (p for encoding in net.distinct_encodings for p in encoding.parameters()):
                p.add_(torch.randn(p.shape, generator=generator))  # at zero, options might make no difference
            idx = torch.randint(64, (1, cfg.train_len), generator=generator)
            found.append((net.family, net(idx).numpy().tobytes()))
    return len(set(found)) == 1


def _check_processes(cfg: Config, tasks: int) -> None:
    """Raise ConfigError if a job needs several processes and is not given them: in a sweep only Slurm does that."""
    t = cfg.trainer
    if started_by()[1] > 1 or (tasks == 1 and (t.devices != 1 or t.num_nodes != 1 or t.strategy == "fsdp")):
        raise ConfigError(
            f"trainer.strategy={t.strategy} trainer.devices={t.devices}: a job of a sweep is one process, unless Slurm "
            f"starts it as several (hydra/launcher=submitit_slurm hydra.launcher.tasks_per_node=N); leave out -m"
        )


def _completed(run: Path) -> int | None:
    """When the run was completed, if it was."""
    file = run / "training.json"
    return file.stat().st_mtime_ns if file.is_file() else None


def _end_with_parent(parent: int) -> None:
    """End this process when its parent does, however: a sweep that was killed leaves no jobs behind."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
