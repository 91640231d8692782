"""Sweeps of train.py (-m): their runs are checked and named before the first one begins, and complete ones left out."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from conf.errors import ConfigError
from conf.schema import Config, parse
from ropewalk.app.compose import quoted
from ropewalk.app.configure import merged
from ropewalk.app.explain import ERRORS, check_overrides, explain
from ropewalk.app.init_from import check_start
from ropewalk.app.resolve import resolve
from ropewalk.evaluation.evaluator import is_measured
from ropewalk.report.page import PAGE
from ropewalk.run.directory import RunDir
from ropewalk.run.processes import started_by


def plan(jobs: Sequence[Sequence[str]], composed: Sequence[DictConfig], varying: Sequence[str]) -> dict[str, list[str]]:
    """Check the jobs of a sweep, and print the names of their runs.

    Args:
        jobs: the overrides of each.
        composed: what Hydra composes of them.
        varying: those of the overrides that vary among the jobs. They become part of the names where these do not tell
            the runs apart.

    Returns:
        {name: overrides} of the runs that are not complete, or not measured as they ask for; by path if there are
        several folders.

    Raises:
        ConfigError: a job is mistaken.
    """
    if started_by().world_size > 1:
        raise ConfigError("a sweep starts processes itself: start it without torchrun or srun, or leave out -m")
    configs = [_resolved(config, options) for config, options in zip(composed, varying, strict=True)]
    if len({RunDir(cfg).path for cfg in configs}) < len(configs):
        configs = [_with_name(cfg, options) for cfg, options in zip(configs, varying, strict=True)]
    runs = list(map(RunDir, configs))
    _check(runs)
    folders = sorted({str(run.path.parent) for run in runs})
    left = {}
    for number, (run, job) in enumerate(zip(runs, jobs, strict=True), 1):
        name = str(run.cfg.name)
        print(f"[{number}/{len(runs)}] {name}{': complete' if run.complete else ''}")
        if not is_done(run):
            # Equal jobs are one run. Several folders may have runs of one name.
            label = name if len(folders) == 1 else str(run.path)
            left[label] = [*job, f"name={quoted(name)}"]
    print("to compare: python scripts/report.py", shlex.quote(f"folders=[{','.join(folders)}]"), flush=True)
    return left


def _check(runs: Sequence[RunDir]) -> None:
    """Raise ConfigError: a directory holds another run than its own, or several runs would share one."""
    by_path: dict[Path, Config] = {}
    for run in runs:
        run.check()
        check_start(run)
        if by_path.setdefault(run.path, run.cfg) != run.cfg:
            raise ConfigError(
                f"{run.path} would be the place of several runs: give each a name, as name='lr${{optim.lr}}'"
            )


def _resolved(config: DictConfig, options: str) -> Config:
    """The configuration of a job with these varying options. Raises ConfigError: it is mistaken."""
    outer = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        check_overrides()
        return resolve(merged(config))
    except ERRORS as error:
        raise ConfigError(f"{options}: {explain(error)}".removeprefix(": ")) from None
    finally:
        HydraConfig.instance().cfg = outer


def _with_name(cfg: Config, options: str) -> Config:
    """Return `cfg` with its varying options in its name, unless it says so already; the seed is always at its end.

    Raises ConfigError: it would be no name, as one of more than 200 bytes.
    """
    seed = f"-s{cfg.seed}" if cfg.seed else ""
    words = str(cfg.name).removesuffix(seed).split("-")
    for option in options.split():
        key, _, value = option.partition("=")
        if key != "seed" and value not in words:
            words.append(option)
    name = "-".join(words) + seed
    # Hydra's grammar has a backslash before a character such as a colon, and names are those of folders.
    name = name.replace("\\", "").replace("/", "_")
    return parse(Config, cfg.model_dump() | {"name": name})


def is_done(run: RunDir) -> bool:
    """True if the run is complete, measured as it asks for, and has its page, which is written last."""
    return run.complete and is_measured(run.path, run.cfg) and (run.path / PAGE).is_file()
