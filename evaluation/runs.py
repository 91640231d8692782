"""Run directories as they lie on disk: finished, still training, or broken."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from conf.rundir import read_config, read_metrics
from conf.schema import ConfigError, flatten
from evaluation.results import Results, Saved, Training
from evaluation.retrieval import Passkey

_FILES = (
    "config.yaml", "data.json", "environment.json", "metrics.jsonl", "results.json", "swap.json", "passkey.json",
    "passkey_swap.json",
)  # fmt: skip
_MARKS = {"config.yaml", "metrics.jsonl", "results.json"}  # any of them makes a directory a run


T = TypeVar("T", bound=Saved)


class LeftOut(NamedTuple):
    """A run, or a part of one, that is missing from a comparison."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Run:
    """A run whose configuration can be read; what else there is of it may be less than the whole."""

    path: Path
    config: dict[str, Any]  # {"model.dim": 128, ...}
    identity: str  # of its data
    environment: dict[str, Any]
    results: Results | None  # None before the run is complete
    swap: Results | None
    passkey: Passkey | None
    passkey_swap: Passkey | None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def encoding(self) -> str:
        return self.config["pe.name"]

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration, such as "model"."""
        return {k.removeprefix(f"{name}."): v for k, v in self.config.items() if k.startswith(f"{name}.")}

    @property
    def training(self) -> Training | None:
        return self.results.training if self.results else None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; none if there is no such file, or it is damaged."""
        try:
            return [row for row in read_metrics(self.path) if isinstance(row.get("step"), int)]
        except (OSError, ValueError, TypeError, AttributeError):  # some line is no object
            return []

    @property
    def progress(self) -> str:
        step = self.metrics[-1]["step"] if self.metrics else 0
        return f"step {step:,} of {self.config['trainer.max_steps']:,}"


def find(folders: Iterable[Path]) -> Iterator[Path]:
    """Every run directory in or below `folders`, once, in the order of their names.

    Raises:
        ConfigError: a folder does not exist.
    """
    seen = set()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a directory")
        for at, below, files in os.walk(folder, followlinks=True):
            is_run = not _MARKS.isdisjoint(files)
            below[:] = [] if is_run else sorted(name for name in below if not name.startswith("."))
            path = Path(at)
            if path.resolve() in seen:  # also a link that leads back up
                below.clear()
            elif is_run:
                yield path
            seen.add(path.resolve())


def state(folders: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """When each file that is read was changed, and its size: equal as long as a comparison is."""
    files = [path / name for path in find(folders) for name in _FILES]
    files += [file for folder in folders for file in folder.rglob(".sweep/*.error")]
    return {file: (stat.st_mtime_ns, stat.st_size) for file in files if (stat := _stat(file))}


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:  # not there, or no more
        return None


def load(path: Path) -> tuple[Run | None, list[LeftOut]]:
    """The run at `path`, and what is missing of it. Only its configuration and data's identity are indispensable."""
    try:
        config = flatten(read_config(path))
        types = {"pe.name": str, "data.name": str, "seed": int, "train_len": int, "trainer.max_steps": int}
        for key, kind in types.items():
            if not isinstance(config.get(key), kind):
                raise ValueError(f"config.yaml has no {key}")
        identity = json.dumps(_read(path / "data.json"), sort_keys=True)
    except ValueError as error:
        return None, [LeftOut(path, f"broken: {error}")]
    try:
        environment = _read(path / "environment.json")
    except ValueError:
        environment = {}
    left_out = []

    def saved(name: str, schema: type[T]) -> T | None:
        try:
            return schema.load(path / name) if (path / name).exists() else None
        except ValueError as error:
            left_out.append(LeftOut(path, f"broken: {error}"))
            return None

    run = Run(
        path, config, identity, environment, saved("results.json", Results), saved("swap.json", Results),
        saved("passkey.json", Passkey), saved("passkey_swap.json", Passkey),
    )  # fmt: skip
    if not (path / "results.json").exists():
        why = f"; {failure}" if (failure := _failure(path)) else ""
        left_out.append(LeftOut(path, f"not finished: {run.progress}{why}"))
    return run, left_out


def _read(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return values


def never_began(folders: Iterable[Path]) -> Iterator[LeftOut]:
    """The jobs of sweeps that failed before they had a run directory."""
    for folder in folders:
        for file in sorted(folder.rglob(".sweep/*.error")):
            path = file.parents[1] / file.stem
            if not path.exists() and (failure := _failure(path)):
                yield LeftOut(path, failure)


def _failure(run: Path) -> str | None:
    """Why a sweep's job failed, as `conf.sweep` notes it beside the run."""
    try:
        lines = (run.parent / ".sweep" / f"{run.name}.error").read_text(encoding="utf-8").splitlines()
        return f"failed: {lines[0]}"
    except (OSError, ValueError, IndexError):
        return None
