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
from differences import differences
from process_helpers import STEP, On
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
def run(train):
    """The folder of the run `train("pe=rope")`."""
    return train.runs / "rope-text"


@pytest.fixture
def stopped(train, run, monkeypatch):
    """A run that was stopped after step 3."""
    with monkeypatch.context() as patch:
        On(STEP, 3, partial(os.kill, os.getpid(), signal.SIGTERM))(patch.setattr)
        assert train("pe=rope").code == STOPPED
    return run


@pytest.mark.parametrize("every", [1, 100])
def test_a_gradient_that_is_not_finite(train, run, monkeypatch, every):
    """The step and all later ones change nothing, also if the gradient is looked at only in the last one."""
    outcome = train(*EXPLODES, "trainer.checkpoint_every=1", "trainer.time_limit=1e-9", "name=good")
    assert "trainer.time_limit=1e-09 minutes: stopped after step 1" in outcome.out

    good = torch.load(path_of(train.runs / "good" / "checkpoints", 1), weights_only=True)

    trainings = []
    rehearse = program.Training.rehearse
    monkeypatch.setattr(program.Training, "rehearse", lambda self: [trainings.append(self), rehearse(self)])
    outcome = train(*EXPLODES, *[f"trainer.{key}={every}" for key in ("log_every", "val_every", "checkpoint_every")])
    assert outcome.code == 2
    assert "became infinite or NaN in step 2: lower optim.lr" in outcome.err
    assert steps_in(run / "checkpoints") == ([1] if every == 1 else [])

    (training,) = trainings
    for name, p in training.net.named_parameters():
        assert torch.equal(p, good["model"][name]), name
        for key, value in training.optimizer.state[p].items():
            assert torch.equal(value, good["optimizer"][f"{name}/{key}"]), (name, key)


class Waits(TorchDispatchMode):
    """Counts how often a number of a tensor is looked at, for which a device would be waited for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_no_step_looks_at_a_number(train):
    """A device is waited for as often in 8 steps as in 4, if all else is the same."""
    every = [f"trainer.{key}=100" for key in ("log_every", "val_every", "checkpoint_every")]
    assert train("pe=rope", "dry_run=true").code == 0  # the first run prepares the data, which looks at numbers
    counts = []
    for steps in (4, 8):
        with Waits() as waits:
            assert train("pe=rope", *every, f"trainer.max_steps={steps}", f"name=of{steps}").code == 0
        counts.append(waits.count)
    assert 0 < counts[0] == counts[1]


def test_a_step_that_overflows_the_weights(train, run):
    outcome = train("pe=rope", "optim.lr=1e38", "optim.warmup_steps=0", "trainer.checkpoint_every=1")
    assert outcome.code == 2
    assert "a weight became infinite or NaN in step 1" in outcome.err
    assert not steps_in(run / "checkpoints")


def test_an_infinite_loss_whose_gradient_is_finite(train, run, monkeypatch):
    forward = GPT.forward
    extra = iter([0.0, 0.0, float("inf"), 0.0])  # of the third step
    monkeypatch.setattr(GPT, "forward", lambda *args, **options: forward(*args, **options) + next(extra, 0.0))
    outcome = train("pe=rope")
    assert outcome.code == 2
    assert "in step 3" in outcome.err
    assert steps_in(run / "checkpoints") == [2]


@pytest.fixture
def fill_disk():
    """A function, after which no file may become as large as a checkpoint or a page."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=20_000: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_full_disk(train, run, straight, monkeypatch, fill_disk):
    """Nothing half-written stays: no checkpoint, and no page with its pictures, without which a run is complete."""
    expected = straight("pe=rope")
    with monkeypatch.context() as patch:
        On("ropewalk.training.checkpoints:save", 2, fill_disk)(patch.setattr)
        outcome = train("pe=rope")
    fill_disk(resource.RLIM_INFINITY)  # there is room again
    assert outcome.code == 2
    assert f"cannot write {run}/checkpoints/step=4.ckpt: File too large" in outcome.err
    assert os.listdir(run / "checkpoints") == ["step=2.ckpt"]

    monkeypatch.setattr(ending, "page", page)
    monkeypatch.setattr(page, "html", lambda *_: "x" * 20_001)
    On("ropewalk.report.page:write_beside", 1, fill_disk)(monkeypatch.setattr)
    with pytest.warns(UserWarning, match=r"report.html was not written: .*File too large"):
        assert train("pe=rope").code == 0
    assert not list(run.glob("*report.html*"))
    assert differences(run, expected) == []


@pytest.fixture
def unprivileged():
    """Root may read and write everything: a thread without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH may not."""
    if sys.platform != "linux":
        pytest.skip("capabilities are Linux's")
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~0b110
    assert libc.capset(header, sets) == 0
    yield
    sets[0] = effective
    assert libc.capset(header, sets) == 0


def test_a_run_in_a_read_only_folder_is_evaluated_in_a_copy(train, run, script, unprivileged):
    assert train("pe=rope").code == 0

    (train.runs / ".rope-text.lock").unlink()  # nobody has written to the run where it lies now
    train.runs.chmod(0o555)
    outcome = script(evaluate, f"run={run}")
    train.runs.chmod(0o755)
    assert outcome.code == 2
    assert "cannot be locked ([Errno 13] Permission denied" in outcome.err
    assert "copy it to a folder that you may write to" in outcome.err


@pytest.mark.parametrize("read", [read_config, read_environment, read_training])
def test_a_file_that_may_not_be_read_is_not_to_be_deleted(tmp_path, unprivileged, read):
    """It may be whole, so the message is the system's and has no remedy that would lose it."""
    for name in ("config.yaml", "environment.json", "training.json"):
        (tmp_path / name).touch(mode=0)
    with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\)$"):
        read(tmp_path)


def test_changed_and_deleted_data_are_refused(train, stopped):
    before = snapshot(stopped)
    for path in train.corpus.iterdir():
        path.write_text(path.read_text() + "loose ends")
    assert "train_sha256" in train("pe=rope").err

    shutil.rmtree(train.corpus)
    assert "matches no file" in train("pe=rope").err
    assert snapshot(stopped) == before


def edited(name, old, new):
    """Damage: a text in a file replaced by another one."""

    def damage(run):
        text = (run / name).read_text()
        (run / name).write_text(text.replace(old, new, 1))

    return damage


def cut_all_checkpoints(run):
    for path in (run / "checkpoints").iterdir():
        os.truncate(path, 1000)


CANNOT_GO_ON = {
    "checkpoints or rows are missing": lambda run: shutil.rmtree(run / "checkpoints"),
    "has 0 rows up to step 6, and its newest checkpoint counts 5": lambda run: (run / "metrics.jsonl").unlink(),
    "metrics.jsonl, line 1, is damaged": edited("metrics.jsonl", '"lr": 0.00', '"lr": 0.01'),
    "Permission denied": lambda run: (run / "metrics.jsonl").chmod(0),
    "no checkpoint in": cut_all_checkpoints,
    "its checksum is not that of its": edited("training.json", '"steps": 6', '"steps": 5'),
}


@pytest.mark.parametrize("message", CANNOT_GO_ON)
def test_a_run_that_cannot_be_trained_longer_keeps_its_model(train, run, unprivileged, message):
    """Not one file of it changes, so what is damaged can still be mended, and the trained model is there."""
    assert train("pe=rope").code == 0

    CANNOT_GO_ON[message](run)
    modified = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    outcome = train("pe=rope", "trainer.max_steps=9")
    assert outcome.code == 2
    assert message in outcome.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == modified
    assert {"model.safetensors", "model.json", "training.json"} <= {path.name for path in run.iterdir()}
