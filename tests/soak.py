"""Kill a run at random moments, start it again each time, and compare its end with that of a run left alone.

python -m tests.soak kills=50 data=flip_flop model.dropout=0.1 trainer=ddp trainer.devices=2 > soak.md

A quarter of the SIGKILLs come while the process starts, the others in training or in the evaluation after it. They hit
rank zero; the other ranks must end with it. Meanwhile evaluate.py and report.py look at the run. The other keys are
those of train.py; overwrite=true is always among them. Prints a report; exits with 1 if anything differs.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from safetensors.torch import load_file

from app.cli import program
from app.run_dir import read_metrics
from conf.schema import ConfigError
from training.checkpoints import path_of, steps_in
from training.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
# May differ: what a clock measured, the name, and what tells one start of the program from another.
CLOCK = ("tokens_per_s", "seconds", "logged_seconds", "peak_memory", "peak_memory_mb", "run", "run_id", "provenance")


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


def live(overrides: list[str], run: Path, step: float = float("inf"), delay: float = 0) -> bool:
    """Start train.py on `run` and kill it so many seconds after a row of `step` is written; False: it ended before.

    ConfigError: it ended by itself, but not well; or a process that it had started outlives it."""
    metrics = run / "metrics.jsonl"
    command = [sys.executable, "train.py", *overrides, f"runs_dir={run.parent}", f"name={run.name}", "overwrite=true"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said, process_group=0)
        while process.poll() is None:
            if max((row["step"] for row in read_metrics(run)), default=0) >= step if metrics.exists() else step <= 0:
                time.sleep(delay)
                process.kill()
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):  # its group has ended
            for _ in range(600):
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
            raise ConfigError("a process outlived rank zero by a minute")
        said.seek(0)
        text = said.read()
        locked = "another process works on" in text  # evaluate.py does
        if process.returncode == 2 and locked:
            return live(overrides, run, step, delay)
        if process.returncode not in (0, -signal.SIGKILL):
            raise ConfigError(f"train.py ended with {process.returncode}: {text}")
        return process.returncode != 0


def look(run: Path, rng: random.Random, over: threading.Event, seen: Counter[str], wrong: list[str]) -> None:
    """Until `over` run evaluate.py and report.py on `run`; refusing is fine, a failure goes to `wrong`."""
    while not over.wait(rng.uniform(0, 60)):
        script, argument = rng.choice([("evaluate", f"run={run}"), ("report", f"folders={run.parent}")])
        command = [sys.executable, f"scripts/{script}.py", argument]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        seen[script + (" refused" if done.returncode else "")] += 1
        if "Traceback" in done.stderr or (done.returncode and "error: " not in done.stderr):
            wrong.append(f"{script}.py ended with {done.returncode}: {done.stderr}")


@program("soak")
def main(composed: DictConfig) -> None:
    kills, last, rng = composed.kills, composed.trainer.max_steps, random.Random(composed.kill_seed)
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith(("kills=", "kill_seed="))]
    over, seen, steps, wrong = threading.Event(), Counter[str](), list[int](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        straight, killed = Path(folder, "straight"), Path(folder, "killed")
        began = time.monotonic()
        live(overrides, straight)
        training = json.loads((straight / "training.json").read_text())["seconds"]
        around = (time.monotonic() - began - training) / 2  # what starting takes, or evaluating
        other = threading.Thread(target=look, args=(killed, random.Random(rng.random()), over, seen, wrong))
        other.start()
        try:
            while len(steps) < kills:
                step = 0 if rng.random() < 0.25 else min(last, (len(steps) + rng.random()) * 1.1 * last / kills)
                if live(overrides, killed, step, rng.uniform(0, training / kills if 0 < step < last else around)):
                    steps.append(max(steps_in(killed / "checkpoints"), default=0))
                    print(f"kill {len(steps)} of {kills}: newest checkpoint of step {steps[-1]}", file=sys.stderr)
            live(overrides, killed)
        finally:
            over.set()
            other.join()
        run_id = json.loads((killed / "environment.json").read_text())["run_id"]
        theirs = {path.name: json.loads(path.read_text())["run_id"] for path in killed.glob("evals/*.json")}
        wrong += [f"{name} is another run's" for name, theirs in theirs.items() if theirs != run_id]
        wrong += differences(straight, killed)
        compared = sum(map(len, contents(killed).values()))
    made, beside = provenance(), ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
    print(f"    {made['command']}\n\n{kills} SIGKILLs, newest steps {min(steps)} to {max(steps)}. {beside}.")
    print(f"Of {compared:,} numbers and tensors of the same run left alone {len(wrong)} different.")
    print(f"{(time.monotonic() - began) / 60:.0f} minutes, {made['processor']}, torch {made['torch']}")
    if wrong:
        print("\nDifferent:", *wrong[:20], sep="\n- ")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
