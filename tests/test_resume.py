"""A run that ends at any moment and is started again by the same command ends as if nothing had happened.

What goes wrong with numbers, disks and data ends in a clear error, the last good state intact.
"""

import os
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from conftest import rows_of, snapshot
from differences import differences
from process_helpers import STEP, On, kill, live
from safetensors.torch import load_file, save_file

from model.gpt import GPT
from ropewalk.run.directory import steps_in
from ropewalk.run.stop import EXIT_INTERRUPTED, EXIT_STOPPED, noting_signals

STAGES = "stages=[{steps: 2, train_len: 8}, {steps: 3, train_len: 8, pe: {base: 500}}]"
HARD = (
    STAGES,
    "model.dropout=0.1",
    "trainer.positions=pose",
    "trainer.max_position=64",
    "trainer.grad_accum_steps=2",
    "trainer.log_every=3",
    "pe.window=6",
    "optim.lr=0.002",
)
TEXT = ("pe=rope", *HARD)
MUON = ("pe=cope", "optim=muon", *HARD[1:6])
TASK = ("pe=cope", "data=flip_flop", *[option for option in HARD if option != STAGES])
MOMENTS = {
    # Call 2 of the training step is the second half of step 1, call 6 that of step 3: the second stage begins there.
    "in mid-accumulation": (TEXT, [On(STEP, 2, kill), On(STEP, 6, kill)]),
    "with Muon": (MUON, [On(STEP, 6, kill)]),
    "at a checkpoint": (TASK, [On("torch.save", 2, kill), On("ropewalk.training.checkpoints.prune", 2, kill)]),
    "at the start and at the end": (
        TASK,
        [On("ropewalk.run.directory.provenance", 1, kill), On("train.write_json", 1, kill)],
    ),
}


@pytest.mark.parametrize("when", MOMENTS)
def test_killed_twice(train, straight, when):
    options, moments = MOMENTS[when]
    for moment in moments:
        assert live(train.complete(*options, "name=killed"), moment) == -signal.SIGKILL

    assert "resuming" in train(*options, "name=killed").out
    assert differences(train.runs / "killed", straight(*options)) == []
    assert not list((train.runs / "killed" / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("number", "code", "call", "step", "rows"),
    [(signal.SIGUSR1, EXIT_STOPPED, 9, 5, [1, 3]), (signal.SIGINT, EXIT_INTERRUPTED, 11, 6, [1, 3, 6])],
)
def test_a_signal_stops_after_the_step(train, straight, number, code, call, step, rows):
    """It comes in the first half of a step: of the fifth, at which nothing is due, or of the last."""
    options = [*TEXT, "trainer.checkpoint_every=6", "name=stopped"]
    handler = signal.getsignal(number)
    with On(STEP, call, partial(signal.raise_signal, number)):
        train(*options, code=code)

    assert signal.getsignal(number) is handler

    stopped = train.runs / "stopped"

    assert steps_in(stopped / "checkpoints") == [step]
    assert [row["step"] for row in rows_of(stopped)] == rows
    assert not (stopped / "training.json").exists()  # nothing was measured

    train(*options)

    assert differences(stopped, straight(*TEXT)) == []


def interrupt_twice() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interruption_ends_at_once(train):
    assert live(train.complete(*TEXT), On(STEP, 5, interrupt_twice)) == -signal.SIGINT


def test_checkpoints_by_the_clock(train):
    train("pe=rope", "trainer.checkpoint_every=6", "trainer.checkpoint_minutes=1e-9", "trainer.keep_checkpoints=4")
    assert steps_in(train.runs / "rope-text" / "checkpoints") == [3, 4, 5, 6]


SHORT = ("pe=rope", "eval.lengths=[1]", "eval.variants=[]")


def test_what_killed_writes_left_is_removed(trained):
    """Files as large as the model, and hidden: see `atomic_write`; and a checkpoint beyond those to keep."""
    run = trained(*SHORT, "trainer.keep_checkpoints=3")

    assert steps_in(run / "checkpoints") == [2, 4, 6]

    for name in (".model.safetensors.0a0a0a0a.tmp", "evals/.lengths.json.0a0a0a0a.tmp"):
        (run / name).touch()
    (run / "training.json").unlink()
    trained(*SHORT, "trainer.keep_checkpoints=1")

    assert not list(run.rglob("*.tmp"))
    assert steps_in(run / "checkpoints") == [6]


def test_a_difference_is_found(straight, tmp_path):
    """Of a bit of a weight: the other tests here rely on it."""
    run = shutil.copytree(straight("pe=rope"), tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    name = min(weights)
    weights[name].view(torch.int32).flatten()[-1] ^= 1
    save_file(weights, run / "model.safetensors")

    assert differences(run, straight("pe=rope")) == [f"/model.safetensors/{name}"]


def test_more_steps_go_on_from_the_end(train):
    train(*TEXT, "name=longer")
    assert "after step 6" in train(*TEXT, "name=longer", "trainer.max_steps=9").out

    rows = rows_of(train.runs / "longer")

    assert [row["step"] for row in rows] == [1, 3, 6, 9]
    assert rows[-1]["lr"] == pytest.approx(0.1 * 2e-3)  # the cosine of 9 steps ends here

    train(*TEXT, "name=longer", "trainer.max_steps=8", code=2)


@pytest.fixture
def run(train):
    """The folder of the run `train("pe=rope")`."""
    return train.runs / "rope-text"


@pytest.mark.parametrize(
    ("rate", "every", "message", "saved"),
    [
        (1e30, 1, "became infinite or NaN in step 2: lower optim.lr", [1]),
        (1e30, 100, "became infinite or NaN in step 2", []),  # gradients are looked at only in the last step
        (1e38, 1, "a weight became infinite or NaN in step 1", []),
    ],
)
def test_a_step_that_explodes(train, run, rate, every, message, saved):
    """It is named, and nothing of it or after it is saved."""
    options = [f"trainer.{key}={every}" for key in ("log_every", "val_every", "checkpoint_every")]
    options += [f"optim.lr={rate}", "optim.warmup_steps=0", "optim.grad_clip=null"]
    assert message in train("pe=rope", *options, code=2).err
    assert steps_in(run / "checkpoints") == saved


def test_an_infinite_loss_whose_gradient_is_finite(train, run, monkeypatch):
    forward = GPT.forward
    extra = iter([0.0, 0.0, float("inf"), 0.0])  # of the third step
    monkeypatch.setattr(
        GPT,
        "forward",
        lambda *args, **options: forward(*args, **options) + next(extra, 0.0),
    )
    assert "in step 3" in train("pe=rope", code=2).err
    assert steps_in(run / "checkpoints") == [2]


@pytest.fixture
def fill_disk():
    """A function, after which no file may become as large as a checkpoint."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=20_000: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_full_disk(train, run, straight, fill_disk):
    """No half-written checkpoint stays, and the run goes on where there is room again."""
    expected = straight("pe=rope")
    with On("ropewalk.training.checkpoints.save", 2, fill_disk):
        outcome = train("pe=rope", code=2)
    fill_disk(resource.RLIM_INFINITY)

    assert f"cannot write {run}/checkpoints/step=4.ckpt: File too large" in outcome.err
    assert os.listdir(run / "checkpoints") == ["step=2.ckpt"]

    train("pe=rope")

    assert differences(run, expected) == []


def test_changed_and_deleted_data_are_refused(train, run):
    with On(STEP, 1, partial(signal.raise_signal, signal.SIGTERM)):
        train("pe=rope", code=EXIT_STOPPED)
    before = snapshot(run)
    for path in train.corpus.iterdir():
        path.write_text(path.read_text() + "loose ends")

    assert "train_sha256" in train("pe=rope", code=2).err

    shutil.rmtree(train.corpus)

    assert "matches no file" in train("pe=rope", code=2).err
    assert snapshot(run) == before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_launcher_that_waits_for_a_signal_gets_it_after_a_checkpoint(train, number):
    """As submitit, whose handler requeues the job and ends the process."""
    checkpoints = []

    def requeue(number, frame):
        checkpoints.extend(path.name for path in train.runs.glob("*/checkpoints/*"))
        raise SystemExit(-1)

    old = signal.signal(number, requeue)
    try:
        with On("ropewalk.run.directory.RunDir.append", 2, partial(signal.raise_signal, number)):
            train(*SHORT, code=None)
    finally:
        signal.signal(number, old)

    assert checkpoints
    assert not (train.runs / "rope-text" / "training.json").exists()

    assert "resuming" in train(*SHORT).out


def test_a_time_limit_stops_after_a_checkpoint_and_the_same_command_resumes(train):
    outcome = train(*SHORT, "trainer.time_limit=1e-9", code=75)

    assert "trainer.time_limit: stopped after step 1; " in outcome.out
    assert "resuming" in train(*SHORT).out
    assert (train.runs / "rope-text" / "training.json").exists()


def test_signals_are_noted_in_the_main_thread_alone():
    """In another one, as of a notebook's server, nothing is changed."""

    def usable() -> bool:
        with noting_signals() as signals:
            return signals == []

    with ThreadPoolExecutor() as pool:
        assert pool.submit(usable).result()


def test_a_time_limit_is_of_a_run_and_not_of_the_process(train, monkeypatch):
    """Such as a notebook: an hour has passed since all modules were imported."""
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3600)
    train(*SHORT, "trainer.time_limit=30")
