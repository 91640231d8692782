"""Checkpoints written in a thread, as on a GPU: of the moment they are due, one at a time, and none lost silently."""

import functools
import signal
import threading
from concurrent.futures import wait

import pytest
import torch
from conftest import build_gpt
from process_helpers import On, kill, live
from soak import differences

from conf.schema import Optim
from ropewalk.training.checkpoints import Progress, Writer, path_of, resume, steps_in
from ropewalk.training.optimizer import make_optimizer
from ropewalk.training.stop import STOPPED

OPTIM = Optim(lr=0.1, min_lr_ratio=0.1, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)
OPTIONS = ("pe=rope", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=2")


def use_threads(then=lambda: None, put=setattr):
    """Let all runs write in a thread, on a CPU too; then call `then`."""
    init = Writer.__init__
    put(Writer, "__init__", lambda self, *args, **options: init(self, *args, **options | {"background": True}))
    then()


@pytest.fixture
def gate(monkeypatch):
    """While it is closed, no checkpoint is written."""
    opened = threading.Event()
    write = torch.save

    def wait(*args):
        assert opened.wait(60)
        write(*args)

    monkeypatch.setattr(torch, "save", wait)
    opened.set()
    yield opened
    opened.set()


def step(net, optimizer):
    idx = torch.arange(8).view(1, 8)
    net(idx, targets=idx).backward()
    optimizer.step()


def trained():
    net = build_gpt("cope")
    optimizer = make_optimizer(net, OPTIM)
    step(net, optimizer)
    return net, optimizer


def test_a_checkpoint_is_of_the_step_at_which_it_was_due(tmp_path, gate):
    net, optimizer = trained()
    progress = Progress(step=1)
    with Writer(tmp_path / "run", keep=1, parts=False, background=True) as writer:
        writer.save(net, optimizer, progress)
        assert writer._pending is None  # the first is waited for

        step(net, optimizer)
        expected = {name: p.clone() for name, p in net.named_parameters()}
        moments = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
        progress.step, progress.rows = 2, 7
        gate.clear()
        writer.save(net, optimizer, progress)
        progress.step, progress.rows = 3, 8
        step(net, optimizer)
        assert not path_of(tmp_path / "run", 2).exists()
        gate.set()
    assert steps_in(tmp_path / "run") == [2]

    other = build_gpt("cope", seed=1)
    its_optimizer = make_optimizer(other, OPTIM)
    assert resume(tmp_path / "run", other, its_optimizer) == Progress(step=2, rows=7)
    for name, p in other.named_parameters():
        assert torch.equal(p, expected[name])
    for p, moment in zip(other.parameters(), moments, strict=True):
        assert torch.equal(its_optimizer.state[p]["exp_avg"], moment)


NEXT_CALLS = {
    "save": lambda writer, *trained: writer.save(*trained, Progress(step=3)),
    "wait": lambda writer, *trained: writer.wait(),
    "the end": lambda writer, *trained: writer.__exit__(None),
}


@pytest.mark.parametrize("call", NEXT_CALLS.values(), ids=NEXT_CALLS)
def test_what_fails_is_told_by_the_next_call(tmp_path, monkeypatch, call):
    def full(*args):
        raise OSError(28, "No space left on device")

    net, optimizer = trained()
    writer = Writer(tmp_path / "run", keep=1, parts=False, background=True)
    writer.save(net, optimizer, Progress(step=1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        writer.save(net, optimizer, Progress(step=2))
        wait([writer._pending])
    with pytest.raises(OSError, match=r"cannot write .*step=2.ckpt: No space left"):
        call(writer, net, optimizer)
    assert steps_in(tmp_path / "run") == [1]


def test_a_run_ends_as_without_threads(train, straight, monkeypatch):
    with monkeypatch.context() as patch:
        use_threads(put=patch.setattr)
        assert train(*OPTIONS).code == 0
    assert differences(train.runs / "rope-text", straight(*OPTIONS)) == []


@pytest.mark.parametrize("call", [1, 2, 4])
def test_killed_while_the_thread_writes(train, straight, monkeypatch, call):
    moment = functools.partial(use_threads, On("torch:save", call, kill))
    assert live(train.complete(*OPTIONS, "name=killed"), moment) == -signal.SIGKILL
    use_threads(put=monkeypatch.setattr)
    assert train(*OPTIONS, "name=killed").code == 0
    assert differences(train.runs / "killed", straight(*OPTIONS)) == []
    assert not list((train.runs / "killed" / "checkpoints").glob(".*"))


def test_a_signal_waits_for_the_thread(train, straight, monkeypatch):
    """It stops after step 2, whose checkpoint is whole before the process ends."""
    with monkeypatch.context() as patch:
        use_threads(put=patch.setattr)
        stop = On("train:Training.step", 2, functools.partial(signal.raise_signal, signal.SIGTERM))
        stop(patch.setattr)
        assert train(*OPTIONS).code == STOPPED
    assert steps_in(train.runs / "rope-text" / "checkpoints") == [1, 2]
    assert train(*OPTIONS).code == 0
    assert differences(train.runs / "rope-text", straight(*OPTIONS)) == []
