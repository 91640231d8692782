"""Kill a run at random moments, start it again each time, and compare its end with that of a run left alone.

OMP_NUM_THREADS=1 python -m tests.soak kills=50 data=flip_flop model.dropout=0.1 > soak.md

A quarter of the SIGKILLs come while the process starts, a quarter just before a write to the disk, the others at any
time. A run that comes to its end is compared, and the next one begins in its place. The other keys are those of
train.py. Prints a report; exits with 1 if anything differs, or is left over.

Processes are forked with the libraries imported, which take most of the time of a start and write nothing.
"""

import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from conf.errors import ConfigError
from ropewalk.run.directory import steps_in
from ropewalk.run.provenance import provenance

sys.path.append(str(Path(__file__).parent))  # as pytest does
from differences import contents, differences
from process_helpers import On, kill, start

# What writes: rows, checkpoints, JSON files and weights, all of which are synced and then renamed.
WRITES = ("ropewalk.run.directory.RunDir.append", "torch.save", "os.fsync", "os.replace")


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


def ends_before(overrides: list[str], run: Path, delay: float | None = None, action: On | None = None) -> bool:
    """Start train.py on `run`, kill it after the `delay` or by its `action`; True: it ended before.

    ConfigError: it ended by itself, but not well.
    """
    arguments = [*overrides, f"runs_dir={run.parent}", f"name={run.name}"]
    with tempfile.NamedTemporaryFile("r") as said:
        process = start(arguments, action, said.name)
        process.join(delay)
        process.kill()
        process.join()
        if process.exitcode not in (0, -signal.SIGKILL):
            raise ConfigError(f"train.py ended with {process.exitcode}: {said.read()}")
    return process.exitcode == 0


def compare(straight: Path, killed: Path) -> list[str]:
    """What is wrong with a run that was killed: results of another run, or anything unlike that of `straight`."""
    run_id = json.loads((killed / "environment.json").read_text())["run_id"]
    theirs = {path.name: json.loads(path.read_text())["run_id"] for path in killed.glob("evals/*.json")}
    wrong = [f"{name} is another run's" for name, own in theirs.items() if own != run_id]
    left = {path.name for path in killed.rglob(".*")} | {path.name for path in killed.parent.glob(".*partial*")}
    return wrong + [f"{name} is left over" for name in sorted(left)] + differences(straight, killed)


def main(composed: DictConfig) -> None:
    kills = composed.kills
    rng = random.Random(composed.kill_seed)
    own = ("kills=", "kill_seed=")
    overrides = [o for o in HydraConfig.get().overrides.task if not o.startswith(own)]
    wrong: list[str] = []
    steps: list[int] = []  # of the newest checkpoint at each kill
    with tempfile.TemporaryDirectory() as folder:
        straight = Path(folder, "runs", "straight")
        start(["--version"]).join()  # the server imports all libraries once, which is no part of a start
        began = time.monotonic()
        ends_before(overrides, straight)
        seconds = time.monotonic() - began
        starting = (seconds - json.loads((straight / "training.json").read_text())["seconds"]) / 2
        runs = 0
        while len(steps) < kills:
            killed = straight.with_name(f"killed-{runs}")
            moment = draw(rng, seconds, starting)
            while not ends_before(overrides, killed, *moment):
                steps.append(max(steps_in(killed / "checkpoints"), default=0))
                print(f"kill {len(steps)} of {kills}: newest checkpoint of step {steps[-1]}", file=sys.stderr)
                # After the last kill it is left alone.
                moment = draw(rng, seconds, starting) if len(steps) < kills else (None, None)
            wrong += compare(straight, killed)
            runs += 1
        compared = len(contents(killed))
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
