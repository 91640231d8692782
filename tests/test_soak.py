"""Killed at random moments, again and again, and started by the same command each time, a run ends as if left alone.

ROPEWALK_SOAK=25 pytest -m slow tests/test_soak.py      kills 25 times for each kind of run

Half of the SIGKILLs come just before a write to the disk, the others at any time, while the process starts too. They
hit rank zero. A run that comes to its end is compared, and the next one begins.
"""

import os
import random
import shutil
import signal
import time

import pytest
from differences import differences
from process_helpers import On, kill, start, start_ranks

KILLS = int(os.environ.get("ROPEWALK_SOAK", 8))
# What writes: rows, checkpoints, JSON files and weights, all of which are synced and then renamed.
WRITES = ("ropewalk.app.run_dir:append", "torch:save", "os:fsync", "os:replace")
OPTIONS = ("data=flip_flop", "pe=rope", "model.dropout=0.1", "trainer.max_steps=60", "trainer.checkpoint_every=10")
KINDS = {
    "one process": (),
    "ddp": ("trainer=ddp",),
    "fsdp": ("trainer=fsdp",),
    "shared texts": ("trainer=ddp", "trainer.context_parallel=2"),
}


@pytest.fixture
def ranks_of(train, tmp_path):
    """`ranks_of(kind, name, action)` starts the processes of the run `name`; rank zero does `action`."""

    def run(kind, name, action=None):
        arguments = train.complete(*OPTIONS, *KINDS[kind], f"name={name}", "overwrite=true")
        if not KINDS[kind]:
            return [start(arguments, action)]
        return start_ranks(arguments, tmp_path / "said", action, None)

    return run


def end(ranks, delay=None) -> bool:
    """Kill rank zero after `delay` seconds, and the others: True if it had come to its end by itself."""
    first, *others = ranks
    first.join(delay)
    first.kill()
    first.join()
    assert first.exitcode in (0, -signal.SIGKILL)
    for process in others:
        # Ranks that have not met yet wait for each other for minutes: torchrun would end them.
        process.join(30)
        process.kill()
    return first.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(train, ranks_of, kind):
    rng = random.Random(kind)
    began = time.monotonic()
    assert end(ranks_of(kind, "alone"))
    seconds = time.monotonic() - began

    killed = train.runs / "killed"
    kills = 0
    while kills < KILLS or killed.exists():
        action = delay = None
        if kills < KILLS and rng.random() < 0.5:
            action = On(rng.choice(WRITES), rng.randint(1, 12), kill)
        elif kills < KILLS:
            delay = rng.uniform(0, seconds)
        if not end(ranks_of(kind, "killed", action), delay):
            kills += 1
            continue
        assert differences(train.runs / "alone", killed) == []
        assert {path.suffix for path in train.runs.rglob(".*")} <= {".lock"}  # nothing is left over
        shutil.rmtree(killed)
