"""A run that ends at any moment and is started again by the same command ends as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT, rows_of
from process_helpers import STEP, On, kill, live
from safetensors.torch import load_file, save_file
from soak import differences

from ropewalk.training.checkpoints import steps_in
from ropewalk.training.stop import INTERRUPTED, STOPPED

SKIP = ("trainer.positions=pose", "trainer.max_position=64")
STAGES = "stages=[{steps: 2, train_len: 8}, {steps: 3, train_len: 8, pe: {base: 500}}]"
SMALL = ("pe=rope", STAGES, "model.dropout=0.1", *SKIP, "trainer.grad_accum_steps=2", "trainer.log_every=3")
SMALL += ("optim.lr=0.002", "pe.window=6", "trainer.short_window=3")
TASK = ("pe=cope", "data=flip_flop", *SMALL[2:])


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        # call 2 of the training step is the second half of step 1, call 6 that of step 3: the second stage begins there
        (SMALL, [On(STEP, 2, kill), On(STEP, 6, kill)]),
        (TASK, [On("torch:save", 2, kill), On("ropewalk.training.checkpoints:prune", 2, kill)]),
        (TASK, [On(what, 1, kill) for what in ("ropewalk.app.run_dir:provenance", "train:write_json")]),
    ],
    ids=["in mid-accumulation", "while a checkpoint is written", "while the directory is made, before training.json"],
)
def test_killed_twice(train, straight, options, moments):
    for moment in moments:
        assert live(train.complete(*options, "name=killed"), moment) == -signal.SIGKILL
    outcome = train(*options, "name=killed")
    assert outcome.code == 0, outcome.err
    assert "continuing" in outcome.out
    assert differences(train.runs / "killed", straight(*options)) == []
    assert not list((train.runs / "killed" / "checkpoints").glob(".*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, STOPPED), (signal.SIGINT, INTERRUPTED)])
def test_a_signal_stops_after_the_step(train, straight, monkeypatch, number, code):
    """It comes in the first half of step 5, at which neither a row nor a checkpoint is due."""
    options = [*SMALL, "trainer.checkpoint_every=6", "name=stopped"]
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        On(STEP, 9, partial(os.kill, os.getpid(), number))(patch.setattr)
        outcome = train(*options)
    assert outcome.code == code
    assert f"{number.name}: stopped after step 5; rerun the same command to resume" in outcome.out
    assert signal.getsignal(number) is before
    stopped = train.runs / "stopped"
    assert steps_in(stopped / "checkpoints") == [5]
    assert [row["step"] for row in rows_of(stopped)] == [1, 3]
    assert train(*options).code == 0
    assert differences(stopped, straight(*SMALL)) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, STOPPED), (signal.SIGINT, INTERRUPTED)])
def test_a_signal_in_the_last_step_stops_before_the_measurements(train, straight, monkeypatch, number, code):
    with monkeypatch.context() as patch:
        On(STEP, 11, partial(os.kill, os.getpid(), number))(patch.setattr)
        assert train(*SMALL, "name=told").code == code
    run = train.runs / "told"
    assert steps_in(run / "checkpoints")[-1] == 6
    assert not (run / "training.json").exists()
    assert train(*SMALL, "name=told").code == 0
    assert differences(run, straight(*SMALL)) == []


def interrupt_twice() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interruption_ends_at_once(train):
    assert live(train.complete(*SMALL), On(STEP, 5, interrupt_twice)) == -signal.SIGINT


def test_checkpoints_by_the_clock(train):
    train("pe=rope", "trainer.checkpoint_every=6", "trainer.checkpoint_minutes=1e-9", "trainer.keep_checkpoints=4")
    assert steps_in(train.runs / "rope-text" / "checkpoints") == [3, 4, 5, 6]


def test_checkpoints_beyond_those_to_keep_go_when_a_run_is_resumed(train):
    """A process that is killed between saving and deleting leaves one more behind."""
    assert train(*SMALL, "name=many", "trainer.keep_checkpoints=3").code == 0
    run = train.runs / "many"
    assert steps_in(run / "checkpoints") == [2, 4, 6]
    (run / "training.json").unlink()
    assert train(*SMALL, "name=many", "trainer.keep_checkpoints=1").code == 0
    assert steps_in(run / "checkpoints") == [6]


def test_a_difference_is_found(straight, tmp_path):
    run = shutil.copytree(straight(*SMALL), tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    name, value = next(iter(weights.items()))
    value.view(torch.int32).flatten()[-1] ^= 1
    save_file(weights, run / "model.safetensors")
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:-1]))
    found = differences(run, straight(*SMALL))
    assert f"model.safetensors/{name}" in found
    assert {where.partition("/")[0] for where in found} == {"model.safetensors", "metrics.jsonl"}


def test_more_steps_go_on_from_the_end(train):
    assert train(*SMALL, "name=longer").code == 0
    outcome = train(*SMALL, "name=longer", "trainer.max_steps=9")
    assert outcome.code == 0, outcome.err
    assert "9 steps instead of 6" in outcome.out
    assert "after step 6" in outcome.out
    rows = rows_of(train.runs / "longer")
    assert [row["step"] for row in rows] == [1, 3, 6, 9]
    assert rows[-1]["lr"] == pytest.approx(0.1 * 2e-3)  # the cosine of 9 steps ends here
    assert train(*SMALL, "name=longer", "trainer.max_steps=8").code == 2


@pytest.mark.slow
def test_soak(train):
    """Three kills at random moments; docs/log/soak.md has more."""
    arguments = [argument for argument in train.complete(*SMALL) if "runs_dir" not in argument]
    command = [
        sys.executable,
        "-m",
        "tests.soak",
        "kills=3",
        *arguments,
        "trainer.max_steps=300",
        "trainer.log_every=7",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared with one left alone, 0 different" in done.stdout


def test_what_killed_writes_left_is_removed(train):
    """As large as the model, and hidden: see `atomic_write`."""
    assert train("pe=rope", "name=left", "trainer.max_steps=1").code == 0
    run = train.runs / "left"
    left = [run / ".model.safetensors.0a0a0a0a.tmp", run / "evals" / ".lengths.json.0a0a0a0a.tmp"]
    for path in left:
        path.touch()
    assert train("pe=rope", "name=left", "trainer.max_steps=2").code == 0
    assert not any(path.exists() for path in left)
