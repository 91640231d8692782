"""A run directory: everything that belongs to one run, in plain files that outlive this program.

config.yaml           the resolved configuration
data.json             identity of the data
environment.json      versions, machine, command, git commit; git.diff beside it if the tree was changed
metrics.jsonl         one JSON object for each logged optimizer step; at the end those of a task's slices
checkpoints/          step=N.ckpt: what continuing needs; the newest, and that of the lowest val/loss in metrics.jsonl
model.safetensors     final weights
model.json            their architecture
results.json          the evaluation, see `evaluation.results`
swap.json, passkey.json, passkey_swap.json   what scripts/evaluate.py and scripts/passkey.py add
figures/, report.html pictures of it, and a page
"""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from conf.schema import Config, ConfigError, flatten
from model import processes
from model.files import append, read_json, replacing

# What may differ between the two halves of one run, by the beginnings of its keys: where it runs, how long, what it
# keeps for its continuation, and who watches. No number of the run depends on it.
FREE = (
    "overwrite",
    "runs_dir",
    "logger.",
    "trainer.strategy",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.num_workers",
    "trainer.checkpoint_",
    "trainer.keep_checkpoints",
    "trainer.time_limit",
    "data.cache_dir",
    "data.workers",
)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at once or not at all, also if the machine stops."""
    with replacing(path) as file:
        file.write(text.encode())


class RunDir:
    """The directory of the run `cfg` describes. Making the object touches nothing."""

    def __init__(self, cfg: Config) -> None:
        assert cfg.name is not None
        self.cfg = cfg
        self.path = Path(cfg.runs_dir) / cfg.name
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / "results.json"

    @processes.once
    def check(self) -> None:
        """Find out, before any work, whether this run may live here.

        Raises:
            ConfigError: another configuration has this name, another process works on it, something else than a run
                lies there, or nothing can be written.
        """
        if self.path.exists() and not self.exists:
            raise ConfigError(f"{self.path} exists and is not a run: choose another name=...")
        above = self.path
        while not above.exists():
            above = above.parent
        try:
            with tempfile.TemporaryFile(dir=above):  # permissions alone do not tell
                pass
        except OSError as error:
            raise ConfigError(f"runs_dir={self.cfg.runs_dir} cannot be written to: {error}") from None
        if not self.exists:
            return
        with self.lock():  # free now, it may not be when it is needed; taken now, nobody need wait for the message
            pass
        if self.cfg.overwrite:
            return
        old, new = flatten(read_config(self.path)), flatten(self.cfg.model_dump())
        if new["trainer.precision"] == "auto":  # not chosen yet
            new["trainer.precision"] = old.get("trainer.precision")
        differ = [k for k in sorted(old | new) if old.get(k) != new.get(k) and not k.startswith(FREE)]
        if differ:
            changes = "\n".join(f"  {k}: {old.get(k)!r} there, {new.get(k)!r} now" for k in differ)
            raise ConfigError(
                f"{self.path} holds a run with another configuration:\n{changes}\n"
                f"choose another name=..., or overwrite=true to lose that run"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes off this run. However this one ends, the system releases it. Of the processes that
        work on it together the first has the lock.

        Raises:
            ConfigError: another process has it.
        """
        if not processes.first():
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f".{self.path.name}.lock").open("a") as file:
            try:
                # POSIX's lock, which forked workers do not inherit: they outlive a killed process for some seconds
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process works on {self.path}: wait for it, or choose another name=..."
                ) from None
            yield

    @property
    def exists(self) -> bool:
        return (self.path / "config.yaml").is_file()

    @property
    @processes.once
    def complete(self) -> bool:
        return self.exists and self.results.is_file() and not self.cfg.overwrite

    @property
    @processes.once
    def continues(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        from model.checkpoints import newest_checkpoint

        return self.exists and not self.cfg.overwrite and newest_checkpoint(self.path / "checkpoints")[0] is not None

    def check_data(self, identity: dict[str, Any]) -> None:
        """Raise ConfigError if the data is not what this run began with."""
        if self.exists and not self.cfg.overwrite:
            check_identity(self.path, identity)

    @processes.once
    def make(self, identity: dict[str, Any]) -> None:
        """Create the directory, or continue in it; with `overwrite`, in place of the old run.

        It is made beside its place and renamed when whole, so that being killed here does no harm.
        """
        if self.exists and not self.cfg.overwrite:
            return
        partial, old = (self.path.with_name(f".{self.path.name}.{what}") for what in ("partial", "old"))
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "checkpoints").mkdir(parents=True)
        (partial / "data.json").write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        record = {"run_id": self.run_id} | environment()
        (partial / "environment.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (partial / "config.yaml").write_text(yaml.safe_dump(self.cfg.model_dump(), sort_keys=False), encoding="utf-8")
        diff = _git("diff", "HEAD")
        if diff:
            (partial / "git.diff").write_text(diff, encoding="utf-8")
        if self.path.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.path.replace(old)
        partial.replace(self.path)
        shutil.rmtree(old, ignore_errors=True)

    @cached_property
    def run_id(self) -> str:
        """What distinguishes this run from others of its name, here or elsewhere."""
        if self.exists and not self.cfg.overwrite:
            return json.loads((self.path / "environment.json").read_text(encoding="utf-8"))["run_id"]
        return uuid4().hex

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Add what was measured after the last step."""
        append(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    @processes.once
    def truncate_metrics(self, step: int) -> None:
        """Drop what a run resumed at `step` will write again, and a row that was cut short."""
        rows = [row for row in read_metrics(self.path) if row["step"] <= step] if self.metrics.is_file() else []
        write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))


def find(path: str | Path) -> Path:
    """The run directory at `path`. Raises ConfigError if there is none, naming those nearby."""
    path = Path(path)
    if (path / "config.yaml").is_file():
        return path
    runs = sorted(str(p.parent) for p in path.parent.glob("*/config.yaml")) if path.parent.is_dir() else []
    there = f"; there are: {', '.join(runs)}" if runs else ""
    raise ConfigError(f"run={path} is not a run directory (it has no config.yaml){there}")


def check_identity(run: Path, identity: dict[str, Any]) -> None:
    """Raise ConfigError if the data of the run had another value for any key of `identity`."""
    began = read_json(run / "data.json")
    differ = ", ".join(sorted(key for key, value in identity.items() if began.get(key) != value))
    if differ:
        raise ConfigError(f"the data of {run} is not what it was trained on ({differ}): restore it, or train anew")


def read_config(run: Path) -> dict[str, Any]:
    """The configuration of a run, as plain values. Raises ConfigError if the file is damaged."""
    try:
        values = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{run / 'config.yaml'} cannot be read: {error}") from None
    return values


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl on optimizer steps; a last line that was cut short is left out."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and "task" not in (row := json.loads(line)):
                yield row


def environment() -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    packages = ("torch", "lightning", "hydra-core", "numpy", "tiktoken", "datasets")
    return {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "git_commit": _git("rev-parse", "HEAD").strip() or None,
        "git_changed": bool(_git("status", "--porcelain")),
    }


def processor() -> str:
    """The CPU's model name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    """Output of a git command in the project, empty where there is no git or no repository."""
    try:
        root = Path(__file__).resolve().parents[1]
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
