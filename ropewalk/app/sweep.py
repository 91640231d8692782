"""Sweeps (-m): a program runs for each combination of what is swept. One that fails is named, the others go on.

The jobs of train.py are checked before the first one trains, and train in processes of their own.
"""

import itertools
import shlex
import sys
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from conf.schema import Config, ConfigError
from ropewalk.app.cli import ERRORS, TRAIN, Task, composed, plain
from ropewalk.app.explain import explain
from ropewalk.app.init_from import merged, train_values
from ropewalk.app.resolve import resolve
from ropewalk.app.run_dir import RunDir
from ropewalk.app.side_by_side import DONE, outcome, train_all
from ropewalk.training.distributed import started_by
from ropewalk.training.hardware import reset_peak_memory

Job = tuple[Sequence[str], Sequence[str]]  # the overrides of a job, and those of them that vary


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
    failed = _train(overrides) if name == TRAIN else _run(name, task, overrides)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries these again", file=sys.stderr)
        raise SystemExit(1)


def _train(overrides: Sequence[str]) -> list[str]:
    """Train the runs of a sweep side by side. Returns the names of those that failed."""
    runs = plan(overrides)
    for number, run in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {run.path.name}{': complete' if run.complete else ''}")
    failed = train_all([run.cfg for run in runs])
    folders = ",".join(sorted({str(run.path.parent) for run in runs}))
    print(f"to compare: python scripts/report.py {shlex.quote(f'folders=[{folders}]')}", flush=True)
    return failed


def _run(name: str, task: Task, overrides: Sequence[str]) -> list[str]:
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
        with composed(name, *options) as config:
            said = outcome(task, config)
        if said != DONE:
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
    configs = [_checked(*job) for job in jobs]
    runs = [RunDir(cfg) for cfg in configs]
    if len({run.path for run in runs}) < len(runs):
        runs = [RunDir(_with_name(cfg, varying)) for cfg, (_, varying) in zip(configs, jobs, strict=True)]
    for run in runs:
        run.check()
    return runs


def _jobs(name: str, overrides: Sequence[str]) -> list[Job]:
    """The jobs of a sweep over a program, combined as by Hydra's own sweeper."""
    parser = OverridesParser.create()
    given = parser.parse_overrides([*overrides])
    # Only files may sweep something, so only what chooses files is asked: a key may belong to an option that is swept.
    fixed = [override for override in given if not override.is_sweep_override()]
    of_files = [o.input_line for o in fixed if "." not in o.get_key_element() or o.is_hydra_override()]
    with composed(name, *of_files) as config:
        swept = config.hydra.sweeper.get("params") or {}
    choices = {}
    # First what a file sweeps, then the command line, in which a later override replaces an earlier one.
    for override in [*parser.parse_overrides([f"{key}={value}" for key, value in swept.items()]), *given]:
        key = override.get_key_element()
        choices[key] = [str(override.input_line)]
        if override.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    varying = {option for options in choices.values() if len(options) > 1 for option in options}
    jobs = itertools.product(*choices.values())
    return [(job, [option for option in job if option in varying]) for job in jobs]


def _checked(overrides: Sequence[str], varying: Sequence[str]) -> Config:
    """The configuration of a job. Raises ConfigError: it is mistaken, or needs several processes."""
    try:
        cfg = resolve(train_values(*overrides))
    except ERRORS as error:
        raise ConfigError(f"{' '.join(varying)}: {explain(error)}".removeprefix(": ")) from None
    # Fabric starts further processes by the command line, which here is that of the sweep: each would run all jobs.
    t = cfg.trainer
    if started_by().world_size > 1 or t.devices != 1 or t.strategy == "fsdp":
        raise ConfigError(f"trainer.devices={t.devices}: a job of a sweep is one process: leave out -m")
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
