"""What goes wrong with numbers, disks, data and processes ends in a clear error, the last good state intact."""

import ctypes
import os
import resource
import shutil
import sys

import pytest
import torch
from conftest import snapshot
from differences import differences
from process_helpers import On
from torch.utils._python_dispatch import TorchDispatchMode

from model.gpt import GPT
from ropewalk.app.run_dir import read_config
from ropewalk.report import page
from ropewalk.training.checkpoints import steps_in
from ropewalk.training.stop import STOPPED
from scripts import evaluate


@pytest.fixture
def run(train):
    """The folder of the run `train("pe=rope")`."""
    return train.runs / "rope-text"


def all_every(steps: int) -> list[str]:
    """Options by which rows, validation and checkpoints come every so many steps."""
    return [f"trainer.{key}={steps}" for key in ("log_every", "val_every", "checkpoint_every")]


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
    unbounded = "optim.warmup_steps=0", "optim.grad_clip=null"
    outcome = train("pe=rope", f"optim.lr={rate}", *unbounded, *all_every(every))
    assert outcome.code == 2
    assert message in outcome.err
    assert steps_in(run / "checkpoints") == saved


def test_an_infinite_loss_whose_gradient_is_finite(train, run, monkeypatch):
    forward = GPT.forward
    extra = iter([0.0, 0.0, float("inf"), 0.0])  # of the third step
    monkeypatch.setattr(GPT, "forward", lambda *args, **options: forward(*args, **options) + next(extra, 0.0))
    outcome = train("pe=rope")
    assert outcome.code == 2
    assert "in step 3" in outcome.err
    assert steps_in(run / "checkpoints") == [2]


class Waits(TorchDispatchMode):
    """Counts how often a number of a tensor is looked at, for which a device would be waited for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_no_step_looks_at_a_number(train):
    """A device is waited for as often in 8 steps as in 4, if all else is the same."""
    assert train("pe=rope", "trainer.max_steps=0", "name=first").code == 0  # prepares the data, which looks at numbers
    counts = []
    for steps in (4, 8):
        with Waits() as waits:
            assert train("pe=rope", *all_every(100), f"trainer.max_steps={steps}", f"name=of{steps}").code == 0
        counts.append(waits.count)
    assert 0 < counts[0] == counts[1]


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


def test_a_run_in_a_read_only_folder_is_not_evaluated(straight, script, tmp_path, unprivileged):
    run = shutil.copytree(straight("pe=rope"), tmp_path / "runs" / "run")
    run.parent.chmod(0o555)
    outcome = script(evaluate, f"run={run}")
    run.parent.chmod(0o755)
    assert outcome.code == 2
    assert "Permission denied" in outcome.err
    assert ".run.lock" in outcome.err


def test_a_file_that_may_not_be_read_is_not_to_be_deleted(tmp_path, unprivileged):
    """It may be whole, so the message is the system's and has no remedy that would lose it."""
    (tmp_path / "config.yaml").touch(mode=0)
    with pytest.raises(PermissionError):
        read_config(tmp_path)


def test_changed_and_deleted_data_are_refused(train, run):
    assert train("pe=rope", "trainer.time_limit=1e-9").code == STOPPED

    before = snapshot(run)
    for path in train.corpus.iterdir():
        path.write_text(path.read_text() + "loose ends")
    assert "train_sha256" in train("pe=rope").err

    shutil.rmtree(train.corpus)
    assert "matches no file" in train("pe=rope").err
    assert snapshot(run) == before
