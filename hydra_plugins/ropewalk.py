"""What -m does unless told otherwise: all combinations, checked before the first one begins, in processes side by side.

Hydra finds these plugins here. Each goes with others: any launcher with this sweeper, as hydra/launcher=joblib, and
this launcher with any sweeper, as hydra/sweeper=optuna. Nothing here imports PyTorch until a sweep begins.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

FLAGS = ("config_path", "config_name", "config_dir")  # of Hydra, that say what is composed


class Grid(BasicSweeper):
    """Hydra's own sweeper, but one mistaken job ends it before any work, and all that fail are named at the end.

    Args:
        plan: "module:function" that checks the jobs, and names those that are left, see `ropewalk.app.sweep.plan`;
            None: a job is right if it composes.
        params: what is swept unless the command line says otherwise: {key: values}.
    """

    def __init__(self, plan: str | None = None, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size=None, params=params)
        self.plan = plan

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        assert self.config is not None
        assert self.hydra_context is not None
        assert self.launcher is not None
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        _check_repeated(overrides)
        ((*jobs,),) = self.split_arguments(overrides, None)
        if not jobs:
            raise ValueError(f"{' '.join(arguments)}: no option matches glob(...), so there is nothing to run")
        configs = [loader.load_sweep_config(self.config, job) for job in jobs]
        labels = _varying(jobs)
        if self.plan:
            left = resolve_name(self.plan)(jobs, configs, labels)
            labels, jobs = [*left], [*left.values()]
        results = self.launcher.launch(jobs, initial_job_idx=0) if jobs else []
        failed = [label for label, result in zip(labels, results, strict=True) if result.status != JobStatus.COMPLETED]
        if failed:
            print(f"failed: {', '.join(failed)}; rerun the same command to retry", file=sys.stderr)
            raise SystemExit(1)
        return [results]


def _varying(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each job that not all of them have."""
    fixed = set.intersection(*map(set, jobs))
    labels = []
    for job in jobs:
        labels.append(" ".join(option for option in job if option not in fixed))
    return labels


def _check_repeated(overrides: Sequence[Override]) -> None:
    """Raise ValueError: a section is given twice. Hydra's sweeps keep the last one, other commands merge them."""
    times = Counter(override.get_key_element() for override in overrides)
    for override in overrides:
        key = override.get_key_element()
        value = override.value()
        parts = getattr(value, "list", [value])  # the values of a sweep
        if times[key] > 1 and any(isinstance(part, dict) for part in parts):
            raise ValueError(f"{key}={{...}} is given more than once: with -m write one, or {key}.KEY=VALUE for each")


class SideBySide(Launcher):
    """Each job is a command line of its own in a process of its own; what it prints goes to hydra.sweep.dir/NAME.txt.

    Args:
        n_jobs: how many run at once; None: one on each core or GPU, see `ropewalk.app.side_by_side.places_of`.
    """

    def __init__(self, n_jobs: int | None = None) -> None:
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        # Not in __init__, whose errors Hydra wraps in words of its own.
        if self.n_jobs is not None and (not isinstance(self.n_jobs, int) or self.n_jobs < 1):
            raise ValueError(f"hydra.launcher.n_jobs={self.n_jobs}: must be the number of runs at once, or null")
        self.config = config
        self.hydra_context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from ropewalk.app.side_by_side import places_of, run_all

        jobs = {}
        commands = {}
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, [*overrides])
            name = str(config.get("name") or number)
            if name in jobs:
                name = f"{name}-{number}"
            jobs[name] = config
            commands[name] = [*_program(self.config), *overrides, f"hydra.job.num={number}", f"hydra.job.id={number}"]
        # If one of them takes the whole machine, they take turns.
        places = min((places_of(config.get("trainer") or {}, self.n_jobs) for config in jobs.values()), key=len)
        ended = run_all(commands, places, Path(self.config.hydra.sweep.dir))
        results = []
        for name, config in jobs.items():
            problem, result, _ = ended[name]
            results.append(
                JobReturn(
                    cfg=config,
                    status=JobStatus.FAILED if problem else JobStatus.COMPLETED,
                    _return_value=RuntimeError(f"{name}: {problem}") if problem else json.loads(result or "null"),
                )
            )
        return results


def _program(config: DictConfig) -> list[str]:
    """The arguments of Python that start this program again, without what it sweeps."""
    import __main__

    start = [sys.argv[0]] if __main__.__spec__ is None else ["-m", __main__.__spec__.name]
    flags = vars(get_args_parser().parse_known_args(sys.argv[1:])[0])
    given = [f"--{name.replace('_', '-')}={flags[name]}" for name in FLAGS if flags[name]]
    of_hydra = [override for override in config.hydra.overrides.hydra if not override.startswith("hydra.mode=")]
    return [*start, *given, *of_hydra]


for _group, _name, _class, _options in (
    ("sweeper", "grid", "Grid", {"plan": None, "params": None}),
    ("sweeper", "runs", "Grid", {"plan": "ropewalk.app.sweep:plan", "params": None}),
    ("launcher", "side_by_side", "SideBySide", {"n_jobs": None}),
):
    node = {"_target_": f"{__name__}.{_class}", **_options}
    ConfigStore.instance().store(name=_name, node=node, group=f"hydra/{_group}")
