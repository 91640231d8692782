"""What goes wrong with numbers, disks, data and processes ends in a clear error, the last good state intact."""

import ctypes
import os
import resource
import shutil
import signal
import sys
from functools import partial

import pytest
import torch
from conftest import snapshot
from process_helpers import STEP, On
from soak import differences
from torch.utils._python_dispatch import TorchDispatchMode

import train as program
from model.gpt import GPT
from ropewalk.app import ending
from ropewalk.app.run_dir import read_config, read_environment, read_training
from ropewalk.report import page
from ropewalk.training.checkpoints import path_of, steps_in
from ropewalk.training.stop import STOPPED
from scripts import evaluate

EXPLODES = ("pe=rope", "optim.lr=1e30", "optim.warmup_steps=0", "optim.grad_clip=null")  # in step 2


@pytest.fixture
def stopped(train, monkeypatch):
    """A run that was stopped after step 3."""
    with monkeypatch.context() as patch:
        On(STEP, 3, partial(os.kill, os.getpid(), signal.SIGTERM))(patch.setattr)
        assert train("pe=rope").code == STOPPED
    return train.runs / "rope-text"


@pytest.mark.parametrize("every", [1, 100])
def test_a_gradient_that_is_not_finite(train, monkeypatch, every):
    """The step and all later ones change nothing, also if the gradient is looked at only in the last one."""
    seen = []
    rehearse = program.Training.rehearse

    def remember(training):
        seen.append(training)
        rehearse(training)

    monkeypatch.setattr(program.Training, "rehearse", remember)
    outcome = train(*EXPLODES, "trainer.checkpoint_every=1", "trainer.time_limit=1e-9", "name=good")
    assert "trainer.time_limit=1e-09 minutes: stopped after step 1" in outcome.out
    good = torch.load(path_of(train.runs / "good" / "checkpoints", 1), weights_only=True)
    outcome = train(*EXPLODES, *[f"trainer.{key}={every}" for key in ("log_every", "val_every", "checkpoint_every")])
    assert outcome.code == 2
    assert "became infinite or NaN in step 2: lower optim.lr" in outcome.err
    assert steps_in(train.runs / "rope-text" / "checkpoints") == [1] * (every == 1)
    for name, p in seen[1].net.named_parameters():
        assert torch.equal(p, good["model"][name]), name
        for key, value in seen[1].optimizer.state[p].items():
            assert torch.equal(value, good["optimizer"][f"{name}/{key}"]), (name, key)


def test_no_step_looks_at_a_number(train):
    """A device is waited for as often in 8 steps as in 4, if all else is the same."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    every = [f"trainer.{key}=100" for key in ("log_every", "val_every", "checkpoint_every")]
    assert train("pe=rope", "dry_run=true").code == 0  # the first run prepares the data, which looks at numbers
    counts = {}
    for steps in (4, 8):
        with Count() as mode:
            mode.count = 0
            assert train("pe=rope", *every, f"trainer.max_steps={steps}", f"name=of{steps}").code == 0
        counts[steps] = mode.count
    assert 0 < counts[4] == counts[8]


def test_a_step_that_overflows_the_weights(train):
    outcome = train("pe=rope", "optim.lr=1e38", "optim.warmup_steps=0", "trainer.checkpoint_every=1")
    assert outcome.code == 2
    assert "a weight became infinite or NaN in step 1" in outcome.err
    assert not steps_in(train.runs / "rope-text" / "checkpoints")


def test_an_infinite_loss_whose_gradient_is_finite(train, monkeypatch):
    forward, calls = GPT.forward, iter(range(100))

    def infinite(*args, **options):
        return forward(*args, **options) + (float("inf") if next(calls) == 2 else 0.0)

    monkeypatch.setattr(GPT, "forward", infinite)
    outcome = train("pe=rope")
    assert outcome.code == 2
    assert "in step 3" in outcome.err
    assert steps_in(train.runs / "rope-text" / "checkpoints") == [2]


def fill_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # less than a checkpoint has, or a page


def test_a_full_disk(train, straight, monkeypatch):
    """Nothing half-written stays: no checkpoint, and no page with its pictures, without which a run is complete."""
    run, limit = train.runs / "rope-text", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch:
            On("ropewalk.training.checkpoints:save", 2, fill_disk)(patch.setattr)
            outcome = train("pe=rope")
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert outcome.code == 2
        assert f"cannot write {run}/checkpoints/step=4.ckpt: File too large" in outcome.err
        assert os.listdir(run / "checkpoints") == ["step=2.ckpt"]
        monkeypatch.setattr(ending, "page", page)
        monkeypatch.setattr(page, "html", lambda *_: "x" * 20_001)
        On("ropewalk.report.page:write_beside", 1, fill_disk)(monkeypatch.setattr)
        with pytest.warns(UserWarning, match=r"report.html was not written: .*File too large"):
            assert train("pe=rope").code == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(run.glob("*report.html*"))
    assert differences(run, straight("pe=rope")) == []


@pytest.fixture
def unprivileged():
    """Root may read and write everything: a thread without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH may not."""
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    effective, sets[0] = sets[0], sets[0] & ~(1 << 1) & ~(1 << 2)
    assert libc.capset(header, sets) == 0
    yield
    sets[0] = effective
    assert libc.capset(header, sets) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_read_only_directory(train, straight, stopped, unprivileged):
    before = snapshot(stopped / "checkpoints")
    (stopped / "checkpoints").chmod(0o555)
    outcome = train("pe=rope")
    assert outcome.code == 2
    assert f"cannot write {stopped}" in outcome.err
    assert "Permission denied" in outcome.err
    assert snapshot(stopped / "checkpoints") == before
    (stopped / "checkpoints").chmod(0o755)
    assert train("pe=rope").code == 0
    assert differences(stopped, straight("pe=rope")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_run_in_a_read_only_folder_is_evaluated_in_a_copy(train, script, unprivileged):
    assert train("pe=rope").code == 0
    (train.runs / ".rope-text.lock").unlink()  # nobody has written to the run where it lies now
    train.runs.chmod(0o555)
    outcome = script(evaluate, f"run={train.runs / 'rope-text'}")
    train.runs.chmod(0o755)
    assert outcome.code == 2
    assert "cannot be locked ([Errno 13] Permission denied" in outcome.err
    assert "copy it to a folder that you may write to" in outcome.err


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_file_that_may_not_be_read_is_not_to_be_deleted(tmp_path, unprivileged):
    """It may be whole, so the message is the system's and has no remedy that would lose it."""
    readers = {"config.yaml": read_config, "environment.json": read_environment, "training.json": read_training}
    for name, read in readers.items():
        (tmp_path / name).touch(mode=0)
        with pytest.raises(ValueError, match=rf"{name} cannot be read \(Permission denied\)$"):
            read(tmp_path)


def test_data_that_vanish_in_training(train, straight, monkeypatch):
    cache = train.corpus.parent / "cache"
    with monkeypatch.context() as patch:
        On(STEP, 4, partial(shutil.rmtree, cache))(patch.setattr)
        outcome = train("pe=rope")
    assert outcome.code == 2
    assert str(cache) in outcome.err
    assert train("pe=rope").code == 0
    assert differences(train.runs / "rope-text", straight("pe=rope")) == []


def test_changed_and_deleted_data_are_refused(train, stopped):
    before = snapshot(stopped)
    for path in train.corpus.iterdir():
        path.write_text(path.read_text() + "loose ends")
    assert "train_sha256" in train("pe=rope").err
    shutil.rmtree(train.corpus)
    assert "matches no file" in train("pe=rope").err
    assert snapshot(stopped) == before


def edited(name, change):
    """Damage: a file with `change` made to its text."""

    def damage(run):
        (run / name).write_text(change((run / name).read_text()))

    return damage


def cut_all_checkpoints(run):
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])


CANNOT_GO_ON = [
    (lambda run: shutil.rmtree(run / "checkpoints"), "checkpoints or rows are missing"),
    (lambda run: (run / "metrics.jsonl").unlink(), "has 0 rows up to step 6, and its newest checkpoint counts 5"),
    (edited("metrics.jsonl", lambda rows: rows + "{]\n"), "metrics.jsonl, line 6, is damaged"),
    (
        edited("metrics.jsonl", lambda rows: rows.replace('"lr": 0.00', '"lr": 0.01', 1)),
        "metrics.jsonl, line 1, is damaged",
    ),
    (lambda run: (run / "metrics.jsonl").chmod(0), "Permission denied"),
    (lambda run: (run / "checkpoints").chmod(0), "Permission denied"),
    (cut_all_checkpoints, "no checkpoint in"),
    (edited("training.json", lambda text: text.replace('"steps": 6', '"steps": 5')), "its checksum is not that of its"),
]


def tree(run):
    """Every entry of a run, with the bytes of files, also of what this user may not read."""
    modes = {path: path.stat().st_mode for path in run.iterdir()}
    for path, mode in modes.items():
        path.chmod(mode | 0o700)
    entries = {path: path.read_bytes() if path.is_file() else None for path in run.rglob("*")}
    for path, mode in modes.items():
        path.chmod(mode)
    return entries


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize(("damage", "message"), CANNOT_GO_ON)
def test_a_run_that_cannot_be_trained_longer_keeps_its_model(train, unprivileged, damage, message):
    """Not one file of it changes, so what is damaged can still be mended, and the trained model is there."""
    assert train("pe=rope").code == 0
    run = train.runs / "rope-text"
    damage(run)
    before = tree(run)
    outcome = train("pe=rope", "trainer.max_steps=9")
    assert outcome.code == 2
    assert message in outcome.err
    assert tree(run) == before
    assert {"model.safetensors", "model.json", "training.json"} <= {path.name for path in run.iterdir()}
