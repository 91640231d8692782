"""Tries of encodings against another: the runs that a verdict needs, and how many verdicts a folder has seen."""

import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from conf.schema import Config, flatten
from model.position.base import PositionEncoding
from ropewalk.app.resolve import with_variants
from ropewalk.app.run_dir import FREE, lock
from ropewalk.app.sweep import training_key
from ropewalk.app.trained import resolve_encoding
from ropewalk.files import read_json, write_json

VERDICTS = "verdicts"  # folder beside the runs: a file for each try, written when it begins


class Contestant(NamedTuple):
    """One side of a try: its runs, a seed each, and the encoding that reads their weights."""

    runs: list[Config]
    pe: dict[str, Any]


def contestants(mine: Config, against: Config, seeds: int) -> tuple[Contestant, Contestant]:
    """Return both sides, with `seeds` runs each from the seed of `mine` on.

    If both encodings train the same network, as RoPE and its scalings do, one run of a seed serves both: it measures
    the encoding `mine` zero-shot.
    """
    shared = training_key(mine) == training_key(against)
    trained = with_variants(against, [mine.pe] if shared else [])
    own = trained if shared else with_variants(mine, [])
    return Contestant(_seeded(own, seeds), mine.pe), Contestant(_seeded(trained, seeds), against.pe)


def _seeded(cfg: Config, seeds: int) -> list[Config]:
    """Return `cfg` for each seed, with a name that changes with everything that decides the trained weights."""
    settings = {}
    for key, value in flatten(cfg.model_dump()).items():
        if not key.startswith((*FREE, "seed", "name")):
            settings[key] = value
    digest = _digest([settings, _source(cfg)])
    runs = []
    for seed in range(cfg.seed, cfg.seed + seeds):
        name = f"{cfg.pe['name']}-{cfg.data['name']}-{digest}-s{seed}"
        runs.append(cfg.model_copy(update={"name": name, "seed": seed}))
    return runs


def _source(cfg: Config) -> list[str]:
    """Return the source of the modules that define the encodings of `cfg`: editing one makes another try."""
    _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
    modules: set[str] = set()
    for pe in net.encodings:
        modules.update(cls.__module__ for cls in type(pe).__mro__ if issubclass(cls, PositionEncoding))
    return [inspect.getsource(sys.modules[module]) for module in sorted(modules)]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def begin(folder: Path, mine: Contestant, against: Contestant) -> tuple[Path, int]:
    """Return the file of a verdict and the number of this try in the folder, which is counted once it has begun.

    A try that is repeated keeps its number. Another encoding, option, source, seed or evaluation is another try.
    """
    settings: list[Any] = [mine.pe, against.pe]
    for side in (mine, against):
        settings += [[run.name for run in side.runs], side.runs[0].eval.model_dump(exclude={"variants"})]
    verdicts = folder / VERDICTS
    path = verdicts / f"{mine.pe['name']}-{_digest(settings)}.json"
    # Two tries at once must not get one number.
    with lock(verdicts):
        if not path.exists():
            verdicts.mkdir(exist_ok=True)
            write_json(path, {"try": len([*verdicts.glob("*.json")]) + 1, "encoding": mine.pe})
    return path, int(read_json(path)["try"])
