"""A run directory: everything that belongs to one run, in plain files that can be read without this program.

config.yaml           the resolved configuration
data.json             identity of the data, and of the weights that the run starts from; earlier trainer.max_steps
environment.json      run_id, and for each start of the run: command, commit, versions, machine
git-HASH.diff         how the source differed from that commit, new files included
metrics.jsonl         one JSON object for each logged optimizer step
checkpoints/          step=N.ckpt: what resuming needs; the newest trainer.keep_checkpoints of them
model.safetensors     final weights; model.json: their architecture
evals/                results, see `ropewalk.evaluation.results`
tokenizer/            the tokenizer, if it consists of files
training.json         steps, time, memory and validation loss; written last: with it the run is complete
report.html           a page about the results
"""

import contextlib
import json
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel

from conf.errors import ConfigError, flatten
from conf.files import (
    PATIENCE,
    copy_files,
    read_json,
    read_yaml,
    refuse_link,
    refuse_links,
    sealed,
    sync,
    unsealed,
    write_json,
    write_text,
)
from conf.schema import Config, S, parse, without_removed
from ropewalk.run.processes import is_rank_zero, rank_zero_only
from ropewalk.run.provenance import provenance, source_state

RESTORE = "restore it, or train again under another name"
MADE_OF = "made_of"  # key of data.json: a hash of the weights that a run starts from
# Key of data.json: [trainer.max_steps, the last step that was trained with it] before each change of that number.
EARLIER_STEPS = "earlier_max_steps"


class Environment(BaseModel):
    run_id: str  # distinguishes this run from others of its name, here or elsewhere
    starts: list[dict[str, Any]]  # see `ropewalk.run.provenance`


# Key prefixes that may change when a run is resumed. None of them changes what a step samples. World size, strategy,
# trainer.checkpointing and trainer.deterministic may change the order of its sums, and so the last bits.
FREE = (
    "name", "runs_dir", "eval.", "logger.", "trainer.sample_every", "trainer.strategy", "trainer.devices",
    "trainer.replicas", "trainer.context_parallel", "trainer.checkpoint", "trainer.deterministic",
    "trainer.keep_checkpoints", "trainer.time_limit", "data.cache_dir", "objective",
)  # fmt: skip


class RunDir:
    """The directory of the run that `cfg` describes. Making the object touches nothing."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.path = Path(cfg.runs_dir, str(cfg.name))
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"

    @rank_zero_only
    def check(self) -> None:
        """Raise ConfigError if another run or something else is in this place."""
        if not self.path.exists():
            self._check_place()
            return
        if not self.begun:
            raise ConfigError(f"{self.path} exists and is not a run: choose another name=...")
        refuse_links(self.path)
        # A line for each key because of which the run that lies here cannot be resumed.
        old = flatten(read_config(self.path))
        new = flatten(self.cfg.model_dump())
        # A run may end later, or earlier, but not before what it has trained. Without a checkpoint any number but 0
        # passes here; `rows.check_rows` refuses a run that was trained.
        if new["trainer.max_steps"] >= max(steps_in(self.checkpoints), default=1):
            new["trainer.max_steps"] = old["trainer.max_steps"]
        differences = []
        for key in sorted(old.keys() | new.keys()):
            # The file has what a machine made of "auto".
            is_open = key.startswith("trainer.") and new.get(key) == "auto"
            if old.get(key) != new.get(key) and not is_open and not key.startswith(FREE):
                recorded = f"{old.get(key)!r} in {self.path / 'config.yaml'}"
                if key == "trainer.max_steps":
                    recorded += f", trained to step {max(steps_in(self.checkpoints), default=0)}"
                differences.append(f"  {key}: {recorded}, {new.get(key)!r} on this command line")
        if differences:
            title = f"{self.path} holds a run with another configuration:"
            raise ConfigError("\n".join([title, *differences, "choose another name=..., or delete that run"]))

    def _check_place(self) -> None:
        """Raise ConfigError if no directory can be made where this one is to lie."""
        place = next(parent for parent in self.path.parents if parent.exists())
        try:
            tempfile.TemporaryDirectory(dir=place).cleanup()
        except OSError as error:
            raise ConfigError(
                f"runs_dir={self.cfg.runs_dir}: cannot create a directory in {place} ({error.strerror})"
            ) from None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the `lock` of the run, on rank zero."""
        with lock(self.path) if is_rank_zero() else contextlib.nullcontext():
            self.check()  # another process may have changed the run since the first check
            yield

    @property
    def begun(self) -> bool:
        """True if this run is on the disk."""
        return (self.path / "config.yaml").is_file()

    @property
    @rank_zero_only
    def complete(self) -> bool:
        """True if all steps that `cfg` asks for are trained and recorded."""
        recorded = (self.path / "training.json").is_file()
        return recorded and bool(read_training(self.path)["steps"] >= self.cfg.trainer.max_steps)

    @cached_property
    def run_id(self) -> str:
        """See `Environment`."""
        return read_environment(self.path).run_id if self.begun else uuid4().hex

    def append(self, row: dict[str, Any]) -> None:
        """Add a row to metrics.jsonl. Raises ConfigError: see `check_place`."""
        check_place(self.path, self.run_id)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(sealed(row)) + "\n")

    @rank_zero_only
    def sync(self) -> None:
        """Wait until the rows are on the disk, for a checkpoint that counts them. Raises ConfigError: as `append`."""
        check_place(self.path, self.run_id)
        sync(self.metrics)

    @rank_zero_only
    def create(self, identity: dict[str, Any], tokenizer_files: Iterable[Path] = ()) -> None:
        """Create the directory, or record another start in it.

        Call it only after everything that resuming needs was read: a run that is trained longer is unfinished from here
        on.

        Args:
            identity: of the data, for data.json.
            tokenizer_files: copied into the directory.
        """
        if self.begun:
            starts = read_environment(self.path).starts  # before anything changes: it may be damaged
            self._extend()
            self._record_start(self.path, starts)
            return
        # The directory gets its name only once it is whole. A process that was killed before leaves this one.
        partial = self.path.with_name(f".{self.path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_json(partial / "data.json", identity)
        write_text(partial / "config.yaml", yaml.safe_dump(self.cfg.model_dump(), sort_keys=False))
        copy_files(tokenizer_files, partial / "tokenizer")
        self._record_start(partial, [])
        partial.replace(self.path)

    def _extend(self) -> None:
        """Record another number of steps; with more of them the run is unfinished again."""
        config = read_config(self.path)
        steps = self.cfg.trainer.max_steps
        old_steps = config["trainer"]["max_steps"]
        if steps != old_steps:
            print(f"{self.path}: {steps} steps instead of {old_steps}; the learning rate now follows {steps}")
            identity = read_json(self.path / "data.json")
            earlier = identity.setdefault(EARLIER_STEPS, [])
            trained = max(steps_in(self.checkpoints), default=0)
            if trained > max((last for _, last in earlier), default=0):
                earlier.append([old_steps, trained])
                write_json(self.path / "data.json", identity)
            config["trainer"]["max_steps"] = steps
            write_text(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        if not self.complete:
            # Without this record the run is unfinished. The model of the shorter training stays until the new one
            # replaces it: a run never has less than it had.
            (self.path / "training.json").unlink(missing_ok=True)

    def _record_start(self, place: Path, starts: list[dict[str, Any]]) -> None:
        """Add this start of the run to the earlier `starts`, in environment.json at `place`."""
        packages = {name: version(name) for name in ("lightning", "hydra-core", "numpy", "tiktoken", "datasets")}
        start = provenance(threads=torch.get_num_threads(), platform=platform.platform(), packages=packages)
        _, diff = source_state()
        if diff:
            write_text(place / f"git-{start['diff_sha256'][:8]}.diff", diff)
        write_json(place / "environment.json", {"run_id": self.run_id, "starts": [*starts, start]})

    @rank_zero_only
    def truncate_metrics(self, step: int) -> None:
        """Drop the rows that a run resumed after `step` will write again, and a last line that was cut short."""
        rows = read_metrics(self.path) if self.metrics.is_file() else ()
        lines = [json.dumps(sealed(row)) + "\n" for row in rows if row["step"] <= step]
        write_text(self.metrics, "".join(lines))


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, ascending. Files with other names are ignored."""
    # Not `glob`, which finds nothing where this user may not read: such a run must not be trained anew.
    files = os.listdir(folder) if folder.exists() else []
    matches = [re.fullmatch(r"step=(\d{1,18})\.ckpt", name) for name in files]
    return sorted(int(match[1]) for match in matches if match)


@contextlib.contextmanager
def lock(run: Path) -> Iterator[None]:
    """Hold the lock of a run. Everything that writes into a run takes it, once in a process: twice would be an error.

    Raises:
        ConfigError: another process has it.
        OSError: its file cannot be made.
    """
    # The file lies beside the run, which may not be there yet.
    path = run.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock")
    # A run may come from somebody else: a link would let it reach files outside of it.
    refuse_link(file)
    try:
        held = FileLock(file, timeout=PATIENCE).acquire()
    except Timeout:
        raise ConfigError(
            f"another process is working on {run}: "
            f"wait for it, or choose another name=...; if there is none, delete {file}"
        ) from None
    with held:
        # Nobody else may write here, so what lies here half written is of a process that was killed.
        for leftover in [*path.glob(".*.tmp"), *path.glob("evals/.*.tmp")]:
            leftover.unlink()
        yield


def find(path: str | Path) -> Path:
    """Return the run directory at `path`.

    Raises:
        ConfigError: there is none, with a list of those nearby; or it holds links.
    """
    path = Path(path)
    if (path / "config.yaml").is_file():
        refuse_links(path)
        return path
    files = [*path.parent.glob("*/environment.json"), *Path("runs").glob("*/environment.json")]
    runs = {str(file.parent) for file in files}
    raise ConfigError(
        f"{path} is not a run directory: it has no config.yaml; write hf:{path} if it is a model of transformers; "
        f"there are: {', '.join(sorted(runs)) or 'none'}"
    )


def check_place(run: Path, run_id: str) -> None:
    """Raise ConfigError if another run was put in the place of the one with this id, which must not be written into."""
    if read_environment(run).run_id != run_id:
        raise ConfigError(f"{run} is another run by now; this one has ended, and wrote nothing into it")


@contextlib.contextmanager
def naming_damage(path: Path, remedy: str) -> Iterator[None]:
    """Make errors about the content of a file say that it is damaged, in a ConfigError with the `remedy`.

    An OSError stays what it is: a file that this user may not read may be whole.
    """
    try:
        yield
    except ValueError as error:
        state = "damaged" if path.exists() else "missing"
        raise ConfigError(f"{path} is {state}: {str(error).splitlines()[0]}; {remedy}") from None


def read_file(path: Path, schema: type[S], remedy: str) -> S:
    """Read a JSON file as an instance of `schema`.

    Raises:
        ConfigError: it is missing, a link or damaged, with the `remedy`.
        OSError: this user may not read it.
    """
    with naming_damage(path, remedy):
        return parse(schema, read_json(path))


def read_environment(run: Path) -> Environment:
    """Read environment.json. Raises ConfigError if it is missing or damaged."""
    return read_file(run / "environment.json", Environment, RESTORE)


def read_training(run: Path) -> dict[str, Any]:
    """Read training.json of a complete run: what `train.finish` and `ropewalk.training.rows.record` put there.

    Its keys include "steps", "tokens", "seconds", "tokens_per_s", and "validation", which is what
    `Evaluator.validate` returned.

    Raises ConfigError: it is damaged.
    """
    path = run / "training.json"
    with naming_damage(path, "delete it; the same train.py command writes it again"):
        return unsealed(read_json(path))


def read_config(run: Path) -> dict[str, Any]:
    """Read the configuration of a run, as plain values. Raises ConfigError, OSError: see `naming_damage`."""
    path = run / "config.yaml"
    with naming_damage(path, RESTORE):
        # Parsed also for the defaults of fields that the run is older than.
        return parse(Config, without_removed(read_yaml(path))).model_dump()


def check_identity(run: Path, identity: dict[str, Any]) -> None:
    """Raise ConfigError if the data of the run had another value for any key of `identity`."""
    recorded = read_json(run / "data.json")
    different = sorted(key for key, value in identity.items() if recorded.get(key) != value)
    if different:
        raise ConfigError(
            f"the data of {run} is not what it was trained on ({', '.join(different)}): "
            "restore it (data.tokenizer and all other keys of data as in its config.yaml), or train again"
        )


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl. A row that was changed, perhaps by hand, is a warning: no result is made of it.

    Raises ConfigError: names a damaged line.
    """
    path = refuse_link(run / "metrics.jsonl")
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            # A process that is killed while it writes leaves a line without an end: that row was never there.
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
                row["step"] += 0  # fails unless it is a number
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path}, line {number}, is damaged: restore it, or train again") from None
            try:
                unsealed(row)
            except ValueError:
                warnings.warn(f"{path}, line {number}, was changed after it was written", stacklevel=2)
            row.pop("checksum", None)
            yield row


def data_options(run: Path, cache_dir: str) -> dict[str, Any]:
    """Return the data section of a run, with the tokenizer in its directory, if it has one, and with `cache_dir`."""
    options = read_config(run)["data"]
    folder = run / "tokenizer"
    if (folder / "tokenizer.json").is_file():
        options["tokenizer"] = f"hf:{folder}"
    for vocabulary in folder.glob("*.tiktoken"):
        options["tokenizer"] = str(vocabulary)
    # A run may come from elsewhere, and must not decide where this machine writes.
    if "cache_dir" in options:
        options["cache_dir"] = cache_dir
    return options
