"""What goes wrong with numbers, disks, data and processes ends in a clear error, the last good state intact."""

import os
import resource
import shutil

import pytest
from conftest import snapshot
from differences import differences
from process_helpers import On

from model.gpt import GPT
from ropewalk.training.checkpoints import steps_in
from ropewalk.training.stop import STOPPED


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
    outcome = train("pe=rope", *options, code=2)

    assert message in outcome.err
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
    train("pe=rope", "trainer.time_limit=1e-9", code=STOPPED)
    before = snapshot(run)
    for path in train.corpus.iterdir():
        path.write_text(path.read_text() + "loose ends")

    assert "train_sha256" in train("pe=rope", code=2).err

    shutil.rmtree(train.corpus)

    assert "matches no file" in train("pe=rope", code=2).err
    assert snapshot(run) == before
