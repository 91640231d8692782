"""How long a run takes from its command to its first step, and what imports have to do with it."""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

import conf.cli
from benchmarks import training
from benchmarks.measure import ratio
from benchmarks.report import Outcome, Table, progress
from conf.schema import ConfigError, Section, check
from model.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
# Packages that take long to import and that a plain run on text or tasks can do without. (plotly draws its page.)
HEAVY = ("datasets", "pandas", "scipy", "sklearn", "tensorboard", "torchvision", "transformers", "wandb")
_IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+(\d+) \|( *)(\S+)$")


class Arguments(Section):
    rounds: int = Field(5, ge=1)
    shown: int = Field(10, ge=1)  # packages
    threads: int = Field(0, ge=0)  # 0: as PyTorch chooses
    out: str | None = None  # JSON file


@dataclass(frozen=True)
class Request:
    args: Arguments
    device: str
    overrides: list[str]


def read(arguments: dict[str, str]) -> Request:
    """Keys other than those of `Arguments` are train.py's. Raises ConfigError."""
    args = training.parse_own(Arguments, arguments)
    for key in ("trainer.max_steps", "runs_dir", "name"):
        if key in arguments:
            raise ConfigError(f"{key} is set by the benchmark: drop it")
    overrides = [f"{key}={value}" for key, value in arguments.items()]
    cfg = check(conf.cli.compose(*overrides))
    device = Machine.choose(accelerator=cfg.trainer.accelerator, precision=32).device
    return Request(args, device, overrides)


def command(folder: str, overrides: Sequence[str]) -> list[str]:
    return ["train.py", *overrides, f"runs_dir={folder}", "name=bench", "trainer.max_steps=2"]


def first_step(overrides: Sequence[str], threads: int) -> float:
    """Seconds from the command to the line of step 1, without what follows. Raises ValueError if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command(folder, overrides)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(threads),
        )  # fmt: skip
        assert process.stdout
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if line.startswith("step 1/"):
                    return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    raise ValueError(f"train.py did not reach its first step: {''.join(said)[-500:].strip()}")


def environment(threads: int) -> dict[str, str]:
    return dict(os.environ) | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def imports(overrides: Sequence[str], threads: int) -> dict[str, float]:
    """Seconds of importing by package, in a run of two steps; what a package imports in turn counts for itself."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *command(folder, overrides)],
            capture_output=True, text=True, cwd=ROOT, env=environment(threads),
        )  # fmt: skip
    if done.returncode:
        raise ValueError(f"train.py failed: {done.stderr[-500:].strip()}")
    return by_package(done.stderr)


def by_package(report: str) -> dict[str, float]:
    """Seconds by top-level package of what `python -X importtime` wrote, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    for line in report.splitlines():
        if match := _IMPORT.match(line):
            seconds[match[4].split(".")[0]] += int(match[1]) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def seconds_of(code: str, threads: int) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment(threads))
    return time.perf_counter() - start


def measure(request: Request) -> Outcome:
    args = request.args
    progress("preparing the data")
    first_step(request.overrides, args.threads)
    ways: dict[str, list[float]] = {"import torch": [], "import train": [], "first step": []}
    for i in range(args.rounds):
        progress(f"round {i + 1}")
        for name in ("import torch", "import train"):
            ways[name].append(seconds_of(name, args.threads))
        ways["first step"].append(first_step(request.overrides, args.threads))
    rows = []
    for name, seconds in ways.items():
        against = ratio(seconds, ways["import torch"])
        rows.append(
            {
                "until": name,
                "/ import torch": against.median,
                "range": f"{against.low:.2f} to {against.high:.2f}",
                "seconds": statistics.median(seconds),
            }
        )
    packages = imports(request.overrides, args.threads)
    total = sum(packages.values())
    shown = [
        {"package": name, "share, %": 100 * seconds / total, "seconds": seconds}
        for name, seconds in list(packages.items())[: args.shown]
    ]
    heavy = [name for name in HEAVY if name in packages]
    note = f"Heavy packages imported without need: {', '.join(heavy) or 'none'} (of {', '.join(HEAVY)})."
    measured: list[dict[str, Any]] = [{"until": ways}, {"imports": packages}, {"heavy": heavy}]
    tables = [
        Table("From the command, with prepared data", rows),
        Table(f"Imports of a run, {total:.1f} s in all, slowed by being timed", shown),
    ]
    return Outcome(tables, measured, [note])
