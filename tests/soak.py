"""Kill a run at random moments, start it again each time, and compare its end with that of a run left alone.

OMP_NUM_THREADS=1 python -m tests.soak kills=50 data=flip_flop model.dropout=0.1 trainer=ddp processes=2 > soak.md

A quarter of the SIGKILLs come while the process starts, a quarter just before a write to the disk, the others at any
time. They hit rank zero; the other ranks must end with it. A run that comes to its
end is compared, and the next one begins in its place. The other keys are those of train.py; overwrite=true is always
among them. Prints a report; exits with 1 if anything differs, or is left over.

Processes are forked with the libraries imported, which take most of the time of a start and write nothing.
"""

import json
import random
import signal
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

from conf.schema import ConfigError
from ropewalk.app.cli import program
from ropewalk.app.run_dir import read_metrics
from ropewalk.training.checkpoints import path_of, steps_in
from ropewalk.training.provenance import provenance

sys.path.append(str(Path(__file__).parent))  # as pytest does
from process_helpers import On, kill, start, start_ranks

# May differ: what a clock measured, the name, what tells one start of the program from another, and checksums of these.
CLOCK = {"tokens_per_s", "seconds", "logged_seconds", "peak_memory", "peak_memory_mb", "checksum"}
CLOCK |= {"run", "run_id", "provenance"}


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


# What writes: rows, checkpoints, JSON files and weights, all of which are synced and then renamed.
WRITES = ("ropewalk.app.run_dir:append", "torch:save", "os:fsync", "os:replace")


def draw(rng: random.Random, seconds: float, starting: float) -> tuple[float | None, On | None]:
    """A random moment of a process: seconds after its start, or a write to the disk, before which it is killed.

    Args:
        seconds: that a whole run takes.
        starting: that a process takes before it trains.
    """
    kind = rng.choice(("start", "write", "later", "later"))
    if kind == "write":
        return None, On(rng.choice(WRITES), rng.randint(1, 12), kill)
    return rng.uniform(0, starting if kind == "start" else seconds), None


def live(
    overrides: list[str], run: Path, processes: int = 1, delay: float | None = None, action: On | None = None
) -> bool:
    """Start train.py on `run`, kill its rank zero after the `delay` or by its `action`; False: it ended before.

    ConfigError: it ended by itself, but not well; or a process that it had started outlives it.
    """
    arguments = [*overrides, f"runs_dir={run.parent}", f"name={run.name}", "overwrite=true"]
    rows_before = rows_text(run)
    with tempfile.TemporaryDirectory() as said:
        if processes == 1:
            ranks = [start(arguments, action, f"{said}/0")]
        else:
            ranks = start_ranks(arguments, Path(said), action, *[None] * (processes - 1))
        first, *others = ranks
        first.join(delay)
        first.kill()
        first.join()
        # Ranks that have not met yet wait for each other for minutes: torchrun would end them.
        have_met = rows_text(run) != rows_before
        for process in others:
            process.join(600 if have_met else 10)
            outlives = process.is_alive()
            process.kill()
            if have_met and outlives:
                raise ConfigError("a process outlived rank zero by ten minutes")
        if first.exitcode not in (0, -signal.SIGKILL):
            text = "".join(path.read_text() for path in sorted(Path(said).iterdir()))
            raise ConfigError(f"train.py ended with {first.exitcode}: {text}")
        return first.exitcode != 0


def rows_text(run: Path) -> str:
    """What metrics.jsonl says so far."""
    rows = run / "metrics.jsonl"
    return rows.read_text() if rows.exists() else ""


def compare(straight: Path, killed: Path) -> list[str]:
    """What is wrong with a run that was killed: results of another run, or anything unlike that of `straight`."""
    run_id = json.loads((killed / "environment.json").read_text())["run_id"]
    theirs = {path.name: json.loads(path.read_text())["run_id"] for path in killed.glob("evals/*.json")}
    wrong = [f"{name} is another run's" for name, own in theirs.items() if own != run_id]
    left = {path.name for path in killed.rglob(".*")} | {path.name for path in killed.parent.glob(".*partial*")}
    return wrong + [f"{name} is left over" for name in sorted(left)] + differences(straight, killed)


@program("soak")
def main(composed: DictConfig) -> None:
    kills, processes = composed.kills, composed.processes
    rng = random.Random(composed.kill_seed)
    own = ("kills=", "kill_seed=", "processes=")
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith(own)]
    wrong: list[str] = []
    steps: list[int] = []  # of the newest checkpoint at each kill
    with tempfile.TemporaryDirectory() as folder:
        straight = Path(folder, "runs", "straight")
        start(["--version"]).join()  # the server imports all libraries once, which is no part of a start
        began = time.monotonic()
        live(overrides, straight, processes)
        seconds = time.monotonic() - began
        starting = (seconds - json.loads((straight / "training.json").read_text())["seconds"]) / 2
        runs = 0
        while len(steps) < kills:
            killed = straight.with_name(f"killed-{runs}")
            moment = draw(rng, seconds, starting)
            while live(overrides, killed, processes, *moment):
                steps.append(max(steps_in(killed / "checkpoints"), default=0))
                print(f"kill {len(steps)} of {kills}: newest checkpoint of step {steps[-1]}", file=sys.stderr)
                # After the last kill it is left alone.
                moment = draw(rng, seconds, starting) if len(steps) < kills else (None, None)
            wrong += compare(straight, killed)
            runs += 1
        compared = sum(map(len, contents(killed).values()))
    made = provenance()
    print(f"    {made['command']}\n\n{kills} SIGKILLs in {runs} runs, newest steps {min(steps)} to {max(steps)}.")
    print(f"Of {compared:,} numbers and tensors of each run, compared with one left alone, {len(wrong)} different.")
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.0f} minutes, {made['commit']}, {made['processor']}, torch {made['torch']}")
    if wrong:
        print("\nDifferent:", *wrong[:20], sep="\n- ")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
