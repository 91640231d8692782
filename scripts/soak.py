"""Kill a run at random moments, start it again each time, and compare its end with that of a run left alone.

python scripts/soak.py kills=50 seed=0 data=flip_flop model.dropout=0.1 trainer.max_steps=2000 > docs/soak.md

A quarter of the SIGKILLs come while the process starts, the others in training. Keys other than `kills` and `seed` are
those of train.py. Prints a report; exits with 1 if anything differs.
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import load_file

import conf.cli
from conf.rundir import environment, read_metrics
from conf.schema import ConfigError, Section, parse
from model.checkpoints import newest_checkpoint

ROOT = Path(__file__).resolve().parents[1]
CLOCK = ("tokens_per_s", "seconds", "peak_memory_mb", "run")  # may differ: what a clock measured, and the name


class Arguments(Section):
    kills: int = Field(50, ge=1)
    seed: int = Field(0, ge=0)


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(where, what) of everything in nested dicts and lists."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            if key not in CLOCK:
                yield from leaves(part, f"{at}/{key}")
    else:
        yield at, value


def contents(run: Path) -> dict[str, dict[str, Any]]:
    """All numbers of a finished run, by file."""
    path, _ = newest_checkpoint(run / "checkpoints")
    assert path is not None
    state = torch.load(path, weights_only=True)
    del state["since_row"]  # how long ago the last row was
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "metrics.jsonl": dict(leaves(rows)),
        "model.safetensors": dict(leaves(load_file(run / "model.safetensors"))),
        path.name: dict(leaves(state)),
        "results.json": dict(leaves(json.loads((run / "results.json").read_text(encoding="utf-8")))),
    }


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same to the bit in two finished runs."""
    first, second = contents(one), contents(other)
    found = [f"{name}: only in one" for name in first.keys() ^ second.keys()]
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        for at in a | b:
            if at not in a or at not in b or not same(a[at], b[at]):
                found.append(f"{name}{at}")
    return sorted(found)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


class Life:
    """A process of train.py on the run at `path`."""

    def __init__(self, overrides: list[str], path: Path) -> None:
        self.metrics = path / "metrics.jsonl"
        self.written = self._written()
        self.born = time.monotonic()
        command = [sys.executable, "train.py", *overrides, f"runs_dir={path.parent}", f"name={path.name}"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _written(self) -> int:
        return self.metrics.stat().st_mtime_ns if self.metrics.exists() else 0

    def wait(self, step: int = 0) -> float:
        """Until it writes metrics.jsonl, the first thing that training does, and `step` is in it: seconds since its
        start."""
        while self.process.poll() is None:
            if self._written() != self.written and (step == 0 or last_row(self.metrics.parent) >= step):
                break
            time.sleep(0.01)
        return time.monotonic() - self.born

    def finish(self) -> float:
        """Seconds from its start to its end. Raises ConfigError if it failed."""
        self._end(0)
        return time.monotonic() - self.born

    def kill(self, delay: float) -> None:
        """Kill it after so many seconds. Raises ConfigError if it had ended before."""
        time.sleep(delay)
        self.process.kill()
        self._end(-signal.SIGKILL)

    def _end(self, expected: int) -> None:
        said = self.process.communicate()[1]
        if self.process.returncode != expected:
            raise ConfigError(f"train.py ended with {self.process.returncode} instead of {expected}: {said}")


def last_row(run: Path) -> int:
    """The latest step in metrics.jsonl."""
    return max((row["step"] for row in read_metrics(run)), default=0)


def soak(overrides: list[str], folder: Path, kills: int, seed: int) -> tuple[list[int], int]:
    """Make the runs "straight" and "killed"; (steps of the newest checkpoint at each kill, kills while starting)."""
    rng = random.Random(seed)
    straight, killed = folder / "straight", folder / "killed"
    life = Life(overrides, straight)
    starting = life.wait()
    training = life.finish() - starting
    rows = len(list(read_metrics(straight)))
    part = last_row(straight) / (kills + 1)  # of the training, one for each kill
    steps: list[int] = []
    early = 0
    while len(steps) < kills:
        life = Life(overrides, killed)
        if rng.random() < 0.25:
            early += 1
            life.kill(rng.uniform(0, starting))
        else:
            life.wait(round((len(steps) + rng.random()) * part))
            life.kill(rng.uniform(0, training / rows))
        steps.append(newest_checkpoint(killed / "checkpoints")[1])
        print(f"kill {len(steps)} of {kills}: the newest checkpoint is of step {steps[-1]}", file=sys.stderr)
    Life(overrides, killed).finish()
    return steps, early


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, {key: arguments.pop(key) for key in ("kills", "seed") if key in arguments}, strings=True)
    overrides = [f"{key}={value}" for key, value in arguments.items()]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        steps, early = soak(overrides, Path(folder), args.kills, args.seed)
        found = differences(Path(folder) / "straight", Path(folder) / "killed")
        sizes = {name: len(part) for name, part in contents(Path(folder) / "killed").items()}
        rows = len(list(read_metrics(Path(folder) / "killed")))
    machine = environment()
    packages = machine["packages"]
    print(
        f"# A run killed {args.kills} times\n\n"
        f"    python scripts/soak.py kills={args.kills} seed={args.seed} {' '.join(overrides)}\n\n"
        f"{args.kills} SIGKILLs at random moments, {early} of them while the process started, the others in training; "
        f"after each the same command again. At the kills the newest checkpoint was of step {min(steps)} to "
        f"{max(steps)}, in the median {statistics.median(steps):g}, and {len(set(steps))} different ones.\n\n"
        f"Compared with the same run left alone, to the bit:\n\n"
        f"| file | numbers and tensors | different |\n|---|---|---|"
    )
    for name, size in sizes.items():
        print(f"| {name} | {size:,} | {sum(where.startswith(name) for where in found)} |")
    print(
        f"\nmetrics.jsonl has {rows} rows, one for each logged step. Left out is what a clock measured. "
        f"{(time.monotonic() - began) / 60:.0f} minutes on {machine['cores']} cores of {machine['processor']}, "
        f"Python {machine['python']}, torch {packages['torch']}, lightning {packages['lightning']}."
    )
    if found:
        print("\nDifferent:", *found[:20], sep="\n- ")
        raise SystemExit(1)


if __name__ == "__main__":
    conf.cli.script(main)
