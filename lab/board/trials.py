"""Trials: the runs of an encoding that is judged, trained side by side, and the losses that they measured.

A step of a small network is a row of small operations, so a second thread gains nothing, and a second process all.
"""

import contextlib
import hashlib
import inspect
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from conf.schema import Config, flatten
from model.position.base import PositionEncoding
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import for_this_machine, resolve, with_variants
from ropewalk.app.run_dir import FREE, RunDir, lock
from ropewalk.app.trained import resolve_encoding
from ropewalk.evaluation.loop import is_measured
from ropewalk.evaluation.measures.lengths import length_settings
from ropewalk.evaluation.results import Row, load_all, main_rows
from ropewalk.files import read_json, write_json
from ropewalk.training.distributed import die_with_parent
from ropewalk.training.stop import INTERRUPTED


def configuration(*overrides: str, **sections: Any) -> Config:
    """Return the configuration that train.py would make of a command line, with whole sections, as `pe`, replaced."""
    return for_this_machine(resolve(train_values(*overrides) | sections))[0]


def runs_of(cfg: Config, changes: Iterable[Mapping[str, Any]]) -> list[Config]:
    """Return a run as of `run_of` for each change of a configuration, such as its seed."""
    return [run_of(cfg.model_copy(update=change)) for change in changes]


def run_of(cfg: Config) -> Config:
    """Return the run that measures the encoding of `cfg`, which is its only variant.

    Its name changes with everything that decides the trained weights.
    """
    settings = {}
    for key, value in flatten(cfg.model_dump()).items():
        if not key.startswith((*FREE, "seed", "name")):
            settings[key] = value
    digest = _digest([settings, _source(cfg)])
    name = f"{cfg.pe['name']}-{cfg.data['name']}-{digest}-s{cfg.seed}"
    return with_variants(cfg, [cfg.pe]).model_copy(update={"name": name})


def _source(cfg: Config) -> list[str]:
    """Return the source of the modules that define the encodings of `cfg`: editing one makes another run."""
    _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
    modules: set[str] = set()
    for pe in net.encodings:
        modules.update(cls.__module__ for cls in type(pe).__mro__ if issubclass(cls, PositionEncoding))
    return [inspect.getsource(sys.modules[module]) for module in sorted(modules)]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def train_all(runs: Iterable[Config]) -> None:
    """Train, resume or measure the runs that are not complete, and print a line when one ends.

    What a run itself prints goes to RUNS_DIR/logs. The first failure ends all, as Ctrl-C does; the same call resumes.
    """
    distinct = {str(cfg.name): cfg for cfg in runs}
    waiting = [cfg for cfg in distinct.values() if not (RunDir(cfg).complete and is_measured(RunDir(cfg).path, cfg))]
    at_once = min(processes(), len(waiting))
    print(f"{len(waiting)} of {len(distinct)} runs to train or measure, {at_once} at once", flush=True)
    started = time.monotonic()
    # The threads only wait for processes. Leaving the loop cancels what has not begun.
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        ended = pool.map(_train_apart, waiting) if at_once > 1 else map(_train, waiting)
        for done, _ in enumerate(ended, 1):
            left = (len(waiting) - done) * (time.monotonic() - started) / done
            print(f"{done} of {len(waiting)} runs, about {left / 60:.0f} min left", flush=True)


def processes() -> int:
    """Return how many runs train at once: one for each core; one if they share a GPU."""
    if torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _train_apart(cfg: Config) -> None:
    """Train in a process of one thread; Ctrl-C reaches it, too, and it stops after a checkpoint."""
    spawn = multiprocessing.get_context("spawn")  # a forked process would inherit the threads of PyTorch
    process = spawn.Process(target=_train, args=(cfg, os.getpid()))
    process.start()
    process.join()
    if process.exitcode:
        print(f"{cfg.name} has not ended: its log is {_log(cfg)}", file=sys.stderr, flush=True)
        raise SystemExit(abs(process.exitcode))


def _train(cfg: Config, parent: int | None = None) -> None:
    from train import train  # it imports all that a run needs, and `train_all` none of it

    if parent:
        die_with_parent(parent)
        torch.set_num_threads(1)
    _log(cfg).parent.mkdir(parents=True, exist_ok=True)
    with (
        _log(cfg).open("a", buffering=1, encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            train(cfg)
        except KeyboardInterrupt:  # while it evaluates; while it trains, it stops after a step by itself
            raise SystemExit(INTERRUPTED) from None


def _log(cfg: Config) -> Path:
    return Path(cfg.runs_dir, "logs", f"{cfg.name}.txt")


def losses(run: Config) -> dict[int, Row]:
    """Return the losses of the encoding that a run of `run_of` measured, at train_len and at the longest length.

    A scaled encoding reads the training length as it was trained, and longer texts at its largest scale. A length that
    the encoding is not defined for is left out.
    """
    final = [e for e in load_all(RunDir(run).path) if e.step == run.trainer.max_steps]
    as_trained = [e for e in final if not e.variant.zero_shot]
    read = [e for e in final if [e.variant.pe] == run.eval.variants]
    scale = max(e.variant.scale for e in read)
    at_largest = [e for e in read if e.variant.scale == scale]
    rows: dict[int, Row] = {}
    for evaluations, wanted in ((as_trained, run.train_len), (at_largest, max(run.lengths))):
        found = main_rows(evaluations, "lengths", length_settings(run))
        rows |= {length: row for (_, length), row in found.items() if length == wanted}
    return rows


def begin(folder: Path, mine: Sequence[Config], against: Sequence[Config]) -> tuple[Path, int]:
    """Return the file of a verdict and the number of this try in the folder, which is counted once it has begun.

    A try that is repeated keeps its number. Another encoding, option, source, seed or evaluation is another try.
    """
    settings = [[run.name, run.eval.model_dump()] for run in [*mine, *against]]
    pe: Any = mine[0].eval.variants
    path = folder / "verdicts" / f"{pe[0]['name']}-{_digest(settings)}.json"
    # Two tries at once must not get one number.
    with lock(path.parent):
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"try": len([*path.parent.glob("*.json")]) + 1, "encoding": pe[0]})
    return path, int(read_json(path)["try"])
