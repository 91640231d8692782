"""A run directory: everything that belongs to one run, in plain files that outlive this program.

config.yaml           the resolved configuration
data.json             identity of the data
environment.json      run_id, and for each start of the run: command, commit, versions, machine
git-HASH.diff         what differed from that commit, new source files included
metrics.jsonl         one JSON object for each logged optimizer step
checkpoints/          step=N.ckpt: what resuming needs; the newest trainer.keep_checkpoints of them
model.safetensors     final weights; model.json: their architecture
evals/                results, see `evaluation.results`
tokenizer/            its tokenizer, if it is one of files
training.json         what the training took; written last: with it the run is complete
report.html           a page about the results
"""

import contextlib
import fcntl
import json
import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import yaml
from pydantic import BaseModel

from app.resolve import check
from common.files import copy_files, read_json, refuse_link, refuse_links, write_json, write_text
from conf.schema import Config, ConfigError, S, flatten, parse
from training.distributed import is_rank_zero, rank_zero_only
from training.provenance import provenance, source_state


class Validation(BaseModel):
    """Means over every target of fixed windows of train_len."""

    loss: float  # nats per token
    bits_per_byte: float | None  # without the tokens that stand for no bytes, such as the end of a text
    error: float | None  # percent of the tokens; None for text
    tokens: int
    length: int


class TrainingRecord(BaseModel, extra="allow"):
    """What is read of training.json; train.py writes more."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    validation: Validation


class Environment(BaseModel):
    run_id: str  # distinguishes this run from others of its name, here or elsewhere
    starts: list[dict[str, Any]]  # see `training.provenance`


# Key prefixes that may change when a run is resumed: the samples stay the same; sums may be rounded otherwise.
FREE = (
    "overwrite", "runs_dir", "eval.", "logger.", "trainer.strategy", "trainer.devices", "trainer.num_nodes",
    "trainer.checkpoint", "trainer.deterministic", "trainer.keep_checkpoints", "trainer.time_limit", "data.cache_dir",
)  # fmt: skip


class RunDir:
    """The directory of the run `cfg` describes. Making the object touches nothing."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.path = Path(cfg.runs_dir, str(cfg.name))
        self.metrics = self.path / "metrics.jsonl"

    @rank_zero_only
    def check(self, locked: bool = False) -> None:
        """Raise ConfigError if another run or something else lies there, or another process works on this run."""
        if not self.path.exists():
            return
        if not (self.path / "config.yaml").is_file():
            raise ConfigError(f"{self.path} exists and is not a run: choose another name=...")
        refuse_links(self.path)
        if self.begun and (differ := self._differences()):
            remedy = "choose another name=..., or overwrite=true to lose that run"
            raise ConfigError("\n".join([f"{self.path} holds a run with another configuration:", *differ, remedy]))
        if not locked and not self.complete:
            with lock(self.path):  # it is taken later: here its error comes at once
                pass

    @contextmanager
    def lock(self) -> Iterator[None]:
        """`lock`, and what other processes made of this run meanwhile is checked."""
        with lock(self.path) if is_rank_zero() else contextlib.nullcontext():
            self.check(locked=True)
            yield

    def _differences(self) -> list[str]:
        """Why the run that is there cannot be continued, a line for each key."""
        there, asked = read_config(self.path), self.cfg.model_dump()
        old, new = flatten(there), flatten(asked)
        resolved = {"auto": old.get("trainer.precision"), 32: "32-true"}  # as training does later
        new["trainer.precision"] = resolved.get(new["trainer.precision"], new["trainer.precision"])
        if new["trainer.max_steps"] > old.get("trainer.max_steps", 0):  # a run may be trained longer
            new["trainer.max_steps"] = old.get("trainer.max_steps")
        keys = [key for key in sorted(old | new) if old.get(key) != new.get(key) and not key.startswith(FREE)]
        return [f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now" for key in keys]

    @property
    def begun(self) -> bool:
        """Whether this run is there, and not one that overwrite=true is to replace. One that is not finished and was
        itself begun with overwrite=true is this run: the same command resumes it."""
        if not (self.path / "config.yaml").is_file():
            return False
        if not self.cfg.overwrite:
            return True
        try:
            read_environment(self.path)
            unfinished = not (self.path / "training.json").is_file()
            return unfinished and read_config(self.path).get("overwrite") is True and not self._differences()
        except ConfigError:  # what cannot be read cannot be continued
            return False

    @property
    @rank_zero_only
    def complete(self) -> bool:
        done = self.begun and (self.path / "training.json").is_file()
        return done and read_training(self.path).steps >= self.cfg.trainer.max_steps

    @cached_property
    def run_id(self) -> str:
        """See `Environment`."""
        return read_environment(self.path).run_id if self.begun else uuid4().hex

    @rank_zero_only
    def create(self, identity: dict[str, Any], tokenizer_files: Iterable[Path] = ()) -> None:
        """Create the directory, or continue in it; with `overwrite`, in place of the old run. A kill does no harm."""
        packages = {name: version(name) for name in ("lightning", "hydra-core", "numpy", "tiktoken", "datasets")}
        start = provenance(threads=torch.get_num_threads(), platform=platform.platform(), packages=packages)
        partial, old = (self.path.with_name(f".{self.path.name}.{what}") for what in ("partial", "old"))
        for left in (partial, old):  # by a process that was killed here
            shutil.rmtree(left, ignore_errors=True)
        place, starts = self.path, []
        if self.begun:
            config, steps = read_config(place), self.cfg.trainer.max_steps
            starts = read_environment(place).starts
            if steps > (before := config["trainer"]["max_steps"]):  # it is trained longer
                print(f"{place}: {steps} steps instead of {before}; the learning rate follows their schedule now")
                config["trainer"]["max_steps"] = steps
                write_text(place / "config.yaml", yaml.safe_dump(config, sort_keys=False))
            if not self.complete:
                # Without this record the run is unfinished. The model of the shorter training stays until the new one
                # replaces it: a run never has less than it had.
                (place / "training.json").unlink(missing_ok=True)
        else:
            place = partial
            place.mkdir(parents=True)
            write_json(place / "data.json", identity)
            write_text(place / "config.yaml", yaml.safe_dump(self.cfg.model_dump(), sort_keys=False))
            copy_files(tokenizer_files, place / "tokenizer")
        if diff := source_state()[1]:
            write_text(place / f"git-{start['diff_sha256'][:8]}.diff", diff)
        write_json(place / "environment.json", {"run_id": self.run_id, "starts": [*starts, start]})
        if place is partial:
            if self.path.exists():
                self.path.replace(old)
            partial.replace(self.path)
            shutil.rmtree(old, ignore_errors=True)

    @rank_zero_only
    def truncate_metrics(self, step: int) -> None:
        """Drop the rows that a run resumed at `step` will write again, and one that was cut short."""
        rows = [row for row in read_metrics(self.path) if row["step"] <= step] if self.metrics.is_file() else []
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def lock(run: Path) -> Iterator[None]:
    """Whoever writes into a run does so within this. Not to be taken twice in a process: closing the file a second time
    would release it. Raises ConfigError: another process has it."""
    path = run.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as file:
        try:
            # POSIX's lock, which forked workers do not inherit: they outlive a killed process for some seconds
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process works on {run}: wait for it, or choose another name=...") from None
        yield


def find(path: str | Path) -> Path:
    """The run directory at `path`. Raises ValueError if there is none, naming those nearby, or it holds links."""
    path = Path(path)
    if (path / "config.yaml").is_file():
        refuse_links(path)
        return path
    runs = sorted({str(p.parent) for folder in (path.parent, Path("runs")) for p in folder.glob("*/environment.json")})
    there = f"; there are: {', '.join(runs)}" if runs else ""
    raise ConfigError(f"{path} is not a run directory (it has no config.yaml){there}")


def read_environment(run: Path) -> Environment:
    """environment.json. Raises ConfigError if it is missing or damaged."""
    return read_file(run / "environment.json", Environment, "restore it, or delete the run and train anew")


def read_training(run: Path) -> TrainingRecord:
    """training.json of a run that is complete. Raises ConfigError if it is damaged."""
    return read_file(run / "training.json", TrainingRecord, "delete it, and the same command of train.py makes it anew")


def read_file(path: Path, schema: type[S], remedy: str) -> S:
    """A JSON file. Raises ConfigError, with the `remedy`, if it is missing or a link, or does not fit `schema`."""
    try:
        return parse(schema, read_json(path))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]}; {remedy}") from None


def check_identity(run: Path, identity: dict[str, Any]) -> None:
    """Raise ConfigError if the data of the run had another value for any key of `identity`."""
    began = read_json(run / "data.json")
    if differ := ", ".join(sorted(key for key, value in identity.items() if began.get(key) != value)):
        remedy = "restore it (data.tokenizer and all other keys of data as in its config.yaml), or train anew"
        raise ConfigError(f"the data of {run} is not what it was trained on ({differ}): {remedy}")


def read_config(run: Path) -> dict[str, Any]:
    """The configuration of a run, as plain values. Raises ConfigError if the file is damaged."""
    path = run / "config.yaml"
    try:
        values = yaml.safe_load(refuse_link(path).read_text(encoding="utf-8"))
        json.dumps(values)  # neither a cycle nor what JSON has no word for
        sections = [values[name] for name in ("pe", "model", "data", "trainer", "eval")]
        if not all(isinstance(section, dict) for section in sections):
            raise ValueError("a section is no mapping")
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"{path} cannot be read: {what}; restore it, or delete the run and train anew") from None
    return values


def load_config(run: Path) -> Config:
    """The checked configuration of a run. Raises ConfigError: names the file and what is wrong in it."""
    values = read_config(run)
    try:
        return check(values)
    except ValueError as error:
        raise ConfigError(f"{run / 'config.yaml'}: {error}") from None


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl, without a last line that was cut short. Raises ConfigError: names a damaged line."""
    path = run / "metrics.jsonl"
    with refuse_link(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
                row["step"] += 0  # a number
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path}, line {number}, is damaged: restore it, or train anew") from None
            yield row


def data_options(run: Path, cache_dir: str) -> dict[str, Any]:
    """The data section of a run, with the tokenizer in its directory, if one is, and our own cache_dir: a run from
    elsewhere must not say where we write."""
    options = load_config(run).data
    folder = run / "tokenizer"
    if (folder / "tokenizer.json").is_file():
        options["tokenizer"] = f"hf:{folder}"
    for vocabulary in folder.glob("*.tiktoken"):
        options["tokenizer"] = str(vocabulary)
    return options | ({"cache_dir": cache_dir} if "cache_dir" in options else {})
