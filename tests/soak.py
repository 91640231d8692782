"""Kill a run at random moments, start it again each time, and compare its end with that of a run left alone.

OMP_NUM_THREADS=1 python -m tests.soak kills=50 data=flip_flop model.dropout=0.1 trainer=ddp processes=2 > soak.md

A quarter of the SIGKILLs come while the process starts, a quarter just before a write to the disk, the others in
training or in the evaluation after it. They hit rank zero; the other ranks must end with it. A run that comes to its
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
from typing import Any, NamedTuple

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
CLOCK = {"tokens_per_s", "utilisation", "seconds", "logged_seconds", "peak_memory", "peak_memory_mb", "checksum"}
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


class Moment(NamedTuple):
    """When rank zero is killed: `delay` seconds after a row of `step` or a later one, or by its own `action`."""

    step: float
    delay: float = 0.0
    action: On | None = None


LEFT_ALONE = Moment(float("inf"))
# What writes: rows, checkpoints, JSON files and weights, all of which are synced and then renamed.
WRITES = ("ropewalk.app.run_dir:append", "torch:save", "os:fsync", "os:replace")


def last_row(run: Path) -> int:
    """The step of the last row of a run; 0 if there is none."""
    if not (run / "metrics.jsonl").exists():
        return 0
    return max((row["step"] for row in read_metrics(run)), default=0)


def draw(rng: random.Random, run: Path, last: int, training: float, around: float) -> Moment:
    """A random moment of a process that begins `run` or goes on with it.

    Args:
        last: the last step of the run.
        training: seconds that all steps take.
        around: seconds that starting takes, or the evaluation at the end.
    """
    kind = rng.choice(("start", "write", "step", "step"))
    if kind == "start":
        return Moment(0, rng.uniform(0, around))
    if kind == "write":
        return Moment(float("inf"), action=On(rng.choice(WRITES), rng.randint(1, 12), kill))
    step = rng.uniform(last_row(run), 1.2 * last)
    if step > last:
        return Moment(last, rng.uniform(0, around))
    return Moment(step, rng.uniform(0, training / 20))


def live(overrides: list[str], run: Path, processes: int = 1, moment: Moment = LEFT_ALONE) -> bool:
    """Start train.py on `run` and kill it at the moment; False: it ended before.

    ConfigError: it ended by itself, but not well; or a process that it had started outlives it.
    """
    arguments = [*overrides, f"runs_dir={run.parent}", f"name={run.name}", "overwrite=true"]
    # A run that has its last row is killed after a delay alone, as one of step 0 is: perhaps while it starts.
    perhaps_starting = last_row(run) >= moment.step
    with tempfile.TemporaryDirectory() as said:
        if processes == 1:
            ranks = [start(arguments, moment.action, f"{said}/0")]
        else:
            ranks = start_ranks(arguments, Path(said), moment.action, *[None] * (processes - 1))
        while ranks[0].is_alive():
            if last_row(run) >= moment.step:
                ranks[0].join(moment.delay)
                ranks[0].kill()
            ranks[0].join(0.02)
        for process in ranks:
            # Ranks that have not met yet wait for each other for minutes: torchrun would end them.
            process.join(10 if perhaps_starting else 600)
            if process.is_alive():
                process.kill()
                if not perhaps_starting:
                    raise ConfigError("a process outlived rank zero by ten minutes")
        code = ranks[0].exitcode
        if code not in (0, -signal.SIGKILL):
            text = "".join(path.read_text() for path in sorted(Path(said).iterdir()))
            raise ConfigError(f"train.py ended with {code}: {text}")
        return code != 0


def compare(straight: Path, killed: Path) -> list[str]:
    """What is wrong with a run that was killed: results of another run, or anything unlike that of `straight`."""
    run_id = json.loads((killed / "environment.json").read_text())["run_id"]
    theirs = {path.name: json.loads(path.read_text())["run_id"] for path in killed.glob("evals/*.json")}
    wrong = [f"{name} is another run's" for name, own in theirs.items() if own != run_id]
    left = {path.name for path in killed.rglob(".*")} | {path.name for path in killed.parent.glob(".*partial*")}
    return wrong + [f"{name} is left over" for name in sorted(left)] + differences(straight, killed)


@program("soak")
def main(composed: DictConfig) -> None:
    kills, processes, last = composed.kills, composed.processes, composed.trainer.max_steps
    rng = random.Random(composed.kill_seed)
    own = ("kills=", "kill_seed=", "processes=")
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith(own)]
    wrong: list[str] = []
    steps: list[int] = []  # of the newest checkpoint at each kill
    with tempfile.TemporaryDirectory() as folder:
        straight = Path(folder, "runs", "straight")
        began = time.monotonic()
        live(overrides, straight, processes)
        training = json.loads((straight / "training.json").read_text())["seconds"]
        around = (time.monotonic() - began - training) / 2
        runs = 0
        while len(steps) < kills:
            killed = straight.with_name(f"killed-{runs}")
            moment = draw(rng, killed, last, training, around)
            if live(overrides, killed, processes, moment):
                steps.append(max(steps_in(killed / "checkpoints"), default=0))
                print(f"kill {len(steps)} of {kills}: newest checkpoint of step {steps[-1]}", file=sys.stderr)
                if len(steps) < kills:
                    continue
                live(overrides, killed, processes)
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
