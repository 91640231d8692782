"""Kill a run at random moments, start it again each time, and compare its end with that of a run left alone.

python tests/soak.py kills=50 data=flip_flop model.dropout=0.1 trainer.max_steps=2000 > docs/soak.md

A quarter of the SIGKILLs come while the process starts, the others in training or in the evaluation after it. The other
keys are those of train.py; overwrite=true is always among them. Prints a report; exits with 1 if anything differs.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from safetensors.torch import load_file

from conf.cli import program
from conf.run_dir import provenance, read_metrics
from conf.schema import ConfigError
from training.checkpoints import path_of, steps_in

ROOT = Path(__file__).resolve().parents[1]
# May differ: what a clock measured, the name, and what tells one start of the program from another.
CLOCK = ("tokens_per_s", "seconds", "logged_seconds", "peak_memory_mb", "run", "run_id", "provenance")


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(where, what) of everything in nested dicts and lists; of a tensor its type, shape and bytes."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in CLOCK:
                yield from leaves(part, f"{at}/{key}")
    elif isinstance(value, torch.Tensor):
        yield at, (value.dtype, value.shape, value.flatten().view(torch.uint8).numpy().tobytes())
    else:
        yield at, value if value == value else "NaN"


def contents(run: Path) -> dict[str, dict[str, Any]]:
    """All numbers of a finished run, by file."""
    checkpoint = path_of(run / "checkpoints", steps_in(run / "checkpoints")[-1])
    read = {"metrics.jsonl": list(read_metrics(run)), "model.safetensors": load_file(run / "model.safetensors")}
    read |= {str(path.relative_to(run)): json.loads(path.read_text()) for path in run.glob("evals/*.json")}
    read |= {"training.json": json.loads((run / "training.json").read_text())}
    read |= {checkpoint.name: torch.load(checkpoint, weights_only=True)}
    return {name: dict(leaves(values)) for name, values in read.items()}


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same to the bit in two finished runs."""
    first, second = ({n + at: v for n, part in contents(run).items() for at, v in part.items()} for run in (one, other))
    unlike = {at for at in first.keys() & second.keys() if first[at] != second[at]}
    return sorted(unlike | (first.keys() ^ second.keys()))


def live(overrides: list[str], run: Path, step: float = float("inf"), delay: float = 0) -> float:
    """Start train.py on `run`; kill it so many seconds after a row of `step` is written. Returns the seconds it lived.

    ConfigError: it ended by itself, but not well."""
    began, metrics = time.monotonic(), run / "metrics.jsonl"
    command = [sys.executable, "train.py", *overrides, f"runs_dir={run.parent}", f"name={run.name}", "overwrite=true"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said)
        while process.poll() is None:
            if max((row["step"] for row in read_metrics(run)), default=0) >= step if metrics.exists() else step <= 0:
                time.sleep(delay)
                process.kill()
                process.wait()
                return time.monotonic() - began
            time.sleep(0.02)
        if process.returncode:
            said.seek(0)
            raise ConfigError(f"train.py ended with {process.returncode}: {said.read()}")
    return time.monotonic() - began


@program("soak")
def main(composed: DictConfig) -> None:
    kills, last, rng = composed.kills, composed.trainer.max_steps, random.Random(composed.kill_seed)
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith(("kills=", "kill_seed="))]
    with tempfile.TemporaryDirectory() as folder:
        straight, killed = Path(folder, "straight"), Path(folder, "killed")
        began, whole = time.monotonic(), live(overrides, straight)
        training = json.loads((straight / "training.json").read_text())["seconds"]
        early, steps = 0, []
        for kill in range(kills):
            if rng.random() < 0.25:  # while it starts
                early += 1
                live(overrides, killed, 0, rng.uniform(0, (whole - training) / 2))
            else:
                live(overrides, killed, (kill + rng.random()) * last / (kills + 1), rng.uniform(0, training / kills))
            steps.append(max(steps_in(killed / "checkpoints"), default=0))
            print(f"kill {kill + 1} of {kills}: the newest checkpoint is of step {steps[-1]}", file=sys.stderr)
        live(overrides, killed)
        found, compared = differences(straight, killed), sum(map(len, contents(killed).values()))
    made = provenance()
    print(
        f"# A run killed {kills} times\n\n    {made['command']}\n\n"
        f"{kills} SIGKILLs at random moments, {early} of them while the process started, the others in training; after "
        f"each the same command again, with overwrite=true. The newest checkpoint was then of step {min(steps)} "
        f"to {max(steps)}, {len(set(steps))} different ones.\n\nCompared with the same run left alone, to the bit, "
        f"without what a clock measured: {compared:,} numbers and tensors, {len(found)} different.\n\n"
        f"{(time.monotonic() - began) / 60:.0f} minutes, {made['processor']}, torch {made['torch']}."
    )
    if found:
        print("\nDifferent:", *found[:20], sep="\n- ")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
