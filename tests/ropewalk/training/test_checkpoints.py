"""Checkpoints: what comes back, and what is never loaded. Other numbers of processes: see test_processes.py."""

import pytest
import torch
from conftest import build_gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import Optim
from ropewalk.training import checkpoints
from ropewalk.training.checkpoints import Progress, path_of, prune, steps_in
from ropewalk.training.optimizer import make_optimizer

OPTIM = Optim(lr=0.1, min_lr_ratio=0.1, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)


def trained(step=1, seed=0, **cfg):
    """A network with tied embeddings, and its optimizer, after some steps."""
    net = build_gpt("cope", seed=seed, **cfg)
    optimizer = make_optimizer(net, OPTIM)
    for _ in range(step):
        idx = torch.arange(8).view(1, 8)
        net(idx, targets=idx).backward()
        optimizer.step()
    return net, optimizer


def untrained(**cfg):
    """Another network, to load into."""
    return trained(step=0, seed=1, **cfg)


def save(folder, net, optimizer, *steps):
    for step in steps:
        checkpoints.save(folder, net, optimizer, Progress(step=step, rows=1, seconds=0.1), keep=9)


def assert_same_state(net, optimizer, other, its_optimizer):
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, its_optimizer.state[q][key])


@pytest.mark.parametrize("trained_before", [0, 1])
def test_weights_optimizer_and_progress_come_back(tmp_path, trained_before):
    saved = trained(step=2)
    other = trained(trained_before, seed=1)
    save(tmp_path, *saved, 2)
    assert checkpoints.resume(tmp_path, *other) == Progress(step=2, rows=1, seconds=0.1)
    assert_same_state(*saved, *other)


def test_a_checkpoint_before_the_first_step_comes_back(tmp_path):
    """Where the optimizer has no state yet."""
    save(tmp_path, *trained(step=0), 0)
    assert checkpoints.resume(tmp_path, *untrained()).step == 0


def test_only_good_checkpoints_count(tmp_path):
    """Of steps 2, 4 and 5 the last is damaged, so the run went on after step 2. Files with other names are not ours."""
    kept = {"step=4.ckpt", "step=5.ckpt", "step=4 (copy).ckpt", "step=five.ckpt"}
    for name in {"step=2.ckpt", ".step=1.ckpt.tmp"} | kept:
        (tmp_path / name).touch()
    prune(tmp_path, newest=4, keep=1)
    assert steps_in(tmp_path) == [4, 5]
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2, the latter's content, and what was saved."""
    folder = tmp_path_factory.mktemp("two")
    saved = trained()
    save(folder, *saved, 1, 2)
    return folder, path_of(folder, 2).read_bytes(), saved


@settings(max_examples=30)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_any_damage_is_found_or_changes_nothing(two, at, bit, cut):
    folder, content, saved = two
    damaged = bytearray(content)
    place = int(at * len(content))
    damaged[place] ^= 1 << bit
    path_of(folder, 2).write_bytes(content[:place] if cut else damaged)
    loaded = untrained()
    step = checkpoints.resume(folder, *loaded).step
    assert step == 1 if cut else step in (1, 2)
    assert_same_state(*saved, *loaded)


MOMENT = "norm.weight/exp_avg"
WRONG = {
    "norm.weight/exp_avg is missing": ("optimizer", MOMENT, None),
    "exp_avg (torch.complex64 [64]) must hold": ("optimizer", MOMENT, lambda t: t.to(torch.complex64)),
    "norm.weight (torch.float32 [3]) must hold": ("model", "norm.weight", lambda t: t[:3]),
    "norm.weight (torch.int64 [64]) must hold": ("model", "norm.weight", torch.Tensor.long),
    "norm.weight (torch.float32 [64]) must hold finite": ("model", "norm.weight", lambda t: t * torch.nan),
    "more is not part of this network": ("model", "more", lambda t: torch.zeros(2)),
    "progress.step='many'": ("progress", "step", lambda step: "many"),
    "progress.seconds='x'": ("progress", "seconds", lambda seconds: "x"),
    "progress.extra": ("progress", "extra", lambda nothing: 1),
}


@pytest.mark.parametrize("message", WRONG)
def test_values_that_no_run_writes_are_not_loaded(tmp_path, capsys, message):
    """With checksums that fit them."""
    part, name, change = WRONG[message]
    save(tmp_path, *trained(), 1)
    state = torch.load(path_of(tmp_path, 1))
    old = state[part].pop(name, None)
    if change:
        state[part][name] = change(old)
    torch.save(state, path_of(tmp_path, 1))
    with pytest.raises(ValueError, match="no checkpoint in "):
        checkpoints.resume(tmp_path, *untrained())
    assert message in capsys.readouterr().err


def test_names_of_an_older_version_are_read(tmp_path):
    """The weights of the short convolution had another one."""
    saved = trained(conv=3)
    save(tmp_path, *saved, 1)
    state = torch.load(path_of(tmp_path, 1))
    older = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
    for part in ("model", "optimizer"):
        values = state[part].items()
        older[part] = {name.replace("attn.mix.conv", "attn.qkv_conv.weight"): value for name, value in values}
    assert older["model"].keys() != state["model"].keys()

    torch.save(older, path_of(tmp_path, 1))
    other = untrained(conv=3)
    assert checkpoints.resume(tmp_path, *other).step == 1
    assert_same_state(*saved, *other)
