"""Checkpoints: what comes back, and what is never loaded. Other numbers of processes: see test_processes.py."""

import pytest
import torch
from conftest import build_gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import Optim
from ropewalk.run.directory import steps_in
from ropewalk.training import checkpoints
from ropewalk.training.checkpoints import Progress, path_of, prune
from ropewalk.training.optimizer import make_optimizer

OPTIM = Optim(lr=0.1, min_lr_ratio=0.1, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)


def trained(steps, seed=0):
    """A network and its optimizer after some steps."""
    net = build_gpt("cope", seed=seed, conv=3)
    optimizer = make_optimizer(net, OPTIM)
    for _ in range(steps):
        idx = torch.arange(8).view(1, 8)
        net(idx, targets=idx).backward()
        optimizer.step()
    return net, optimizer


def save(folder, net, optimizer, step):
    checkpoints.save(folder, net, optimizer, Progress(step=step, rows=1, seconds=0.1), keep=9)


def assert_same_state(net, optimizer, other, its_optimizer):
    state = [optimizer.state[p] for p in net.parameters()]
    its_state = [its_optimizer.state[p] for p in other.parameters()]
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(its_state, state, rtol=0, atol=0)


def test_names_of_older_versions_are_read(tmp_path):
    """The weights of the short convolution had another one."""
    saved = trained(2)
    save(tmp_path, *saved, 2)
    state = torch.load(path_of(tmp_path, 2))
    for part in ("model", "optimizer"):
        for name in list(state[part]):
            older = name.replace("attn.mix.conv", "attn.qkv_conv.weight")
            state[part][older] = state[part].pop(name)
    assert "blocks.0.attn.qkv_conv.weight" in state["model"]
    torch.save(state, path_of(tmp_path, 2))
    other = trained(1, seed=1)

    assert checkpoints.resume(tmp_path, *other) == Progress(step=2, rows=1, seconds=0.1)
    assert_same_state(*saved, *other)


def test_only_good_checkpoints_count(tmp_path):
    """Of steps 2, 4 and 5 the last is damaged, so the run went on after step 2. Files with other names are not ours."""
    kept = {"step=4.ckpt", "step=5.ckpt", "step=4 (copy).ckpt", "step=five.ckpt"}
    for name in kept | {"step=2.ckpt", ".step=1.ckpt.tmp"}:
        (tmp_path / name).touch()
    prune(tmp_path, newest=4, keep=1)

    assert steps_in(tmp_path) == [4, 5]
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2, the latter's content, and what was saved."""
    folder = tmp_path_factory.mktemp("two")
    saved = trained(1)
    save(folder, *saved, 1)
    save(folder, *saved, 2)
    return folder, path_of(folder, 2).read_bytes(), saved


@settings(max_examples=30)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_any_damage_is_found_or_changes_nothing(two, at, bit, cut):
    """The checkpoint before it is taken; a few bits of the file mean nothing."""
    folder, content, saved = two
    place = int(at * len(content))
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    path_of(folder, 2).write_bytes(content[:place] if cut else damaged)
    loaded = trained(0, seed=1)

    assert checkpoints.resume(folder, *loaded).step in ((1,) if cut else (1, 2))
    assert_same_state(*saved, *loaded)


MOMENT = "norm.weight/exp_avg"
WRONG = {
    "norm.weight/exp_avg is missing": ("optimizer", {MOMENT: None}),
    "exp_avg (torch.complex64 [64]) must hold": ("optimizer", {MOMENT: torch.ones(64, dtype=torch.complex64)}),
    "norm.weight (torch.float32 [3]) must hold": ("model", {"norm.weight": torch.ones(3)}),
    "norm.weight (torch.int64 [64]) must hold": ("model", {"norm.weight": torch.ones(64).long()}),
    "norm.weight (torch.float32 [64]) must hold finite": ("model", {"norm.weight": torch.full([64], torch.nan)}),
    "more is not part of this network": ("model", {"more": torch.ones(2)}),
    "progress.step='many'": ("progress", {"step": "many"}),
    "progress.seconds='x'": ("progress", {"seconds": "x"}),
    "progress.extra": ("progress", {"extra": 1}),
}


@pytest.mark.parametrize("message", WRONG)
def test_values_that_no_run_writes_are_not_loaded(tmp_path, capsys, message):
    """With checksums that fit them."""
    part, changes = WRONG[message]
    save(tmp_path, *trained(1), 1)
    state = torch.load(path_of(tmp_path, 1))
    values = state[part] | changes
    state[part] = {name: value for name, value in values.items() if value is not None}
    torch.save(state, path_of(tmp_path, 1))

    with pytest.raises(ValueError, match="no checkpoint in "):
        checkpoints.resume(tmp_path, *trained(0, seed=1))
    assert message in capsys.readouterr().err
