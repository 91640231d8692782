"""Trials: the runs of an encoding that is judged, and the losses that they measured."""

import inspect
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from conf.errors import ConfigError, flatten
from conf.files import checksum, write_text
from conf.schema import Config
from model.position.base import PositionEncoding
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import for_this_machine, resolve, resolve_encoding, with_variants
from ropewalk.app.side_by_side import places_of, run_all
from ropewalk.app.sweep import is_done
from ropewalk.evaluation.objective import own_losses
from ropewalk.evaluation.results import Number
from ropewalk.run.directory import FREE, RunDir

TRAIN = str(Path(__file__).resolve().parents[2] / "train.py")
Losses = dict[int, Number]  # of one run, by length in tokens


def configuration(*overrides: str, **sections: Any) -> Config:
    """Return the configuration that train.py would make of a command line, with whole sections, as `pe`, replaced."""
    return for_this_machine(resolve(train_values(*overrides) | sections))[0]


def run_of(cfg: Config, **changes: Any) -> Config:
    """Return the run that measures the encoding of `cfg`, its only variant, with some changes, such as another seed.

    Its name changes with everything that decides the trained weights.
    """
    cfg = cfg.model_copy(update=changes)
    values = flatten(cfg.model_dump())
    settings = {key: value for key, value in values.items() if not key.startswith((*FREE, "seed"))}
    digest = checksum([settings, _source(cfg)])[:8]
    name = f"{cfg.pe['name']}-{cfg.data['name']}-{digest}-s{cfg.seed}"
    return with_variants(cfg, [cfg.pe]).model_copy(update={"name": name})


def _source(cfg: Config) -> list[str]:
    """Return the source of the modules that define the encodings of `cfg`: editing one makes another run."""
    _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
    modules = set()
    for pe in net.encodings:
        for cls in type(pe).__mro__:
            if issubclass(cls, PositionEncoding):
                modules.add(cls.__module__)
    return [inspect.getsource(sys.modules[module]) for module in sorted(modules)]


def train_and_measure(runs_by_side: Sequence[Sequence[Config]]) -> list[list[Losses]]:
    """Return the losses of the runs of each side, after training, resuming or measuring those that are not complete.

    Raises ConfigError: some failed.
    """
    failed = train_all([*itertools.chain(*runs_by_side)])
    if failed:
        raise ConfigError(f"these runs have not ended: {', '.join(failed)}; rerun the same command to retry")
    return [[losses(cfg) for cfg in runs] for runs in runs_by_side]


def train_all(configs: Sequence[Config]) -> list[str]:
    """Train, resume or measure those of the runs that are not done, side by side. Return the names of failed ones.

    Raises SystemExit: stopped by a signal, with checkpoints; the same call goes on.
    """
    logs = Path(configs[0].runs_dir, ".sweep").absolute()
    commands = {}
    for cfg in configs:
        if not is_done(RunDir(cfg)):
            logs.mkdir(parents=True, exist_ok=True)
            values = {"defaults": ["program", "_self_"], **cfg.model_dump()}
            write_text(logs / f"{cfg.name}.yaml", yaml.safe_dump(values, sort_keys=False))
            commands[str(cfg.name)] = [TRAIN, f"--config-dir={logs}", f"--config-name={cfg.name}"]
    ended = run_all(commands, places_of(configs[0].trainer.model_dump()), logs)
    return [name for name, end in ended.items() if end.problem]


def losses(cfg: Config) -> Losses:
    """Return the losses of the encoding of a run of `run_of`, see `own_losses`, at train_len and the longest length."""
    found = own_losses(RunDir(cfg))
    return {length: found[length]["text"] for length in (cfg.train_len, max(cfg.lengths)) if length in found}
