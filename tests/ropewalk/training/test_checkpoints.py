"""Checkpoints of one file and in parts: what comes back, by any number of processes, and what is never loaded."""

import json
import os
import shutil
import signal

import pytest
import torch
from conftest import build_gpt
from process_helpers import On, kill, live, together
from safetensors.torch import load_file, save_file
from soak import differences

from conf.schema import Optim
from ropewalk.files import sha256
from ropewalk.training import checkpoints
from ropewalk.training.checkpoints import Progress, path_of, steps_in
from ropewalk.training.optimizer import make_optimizer

PARTS = ("pe=cope", "trainer.checkpoint_parts=true", "trainer.keep_checkpoints=2")
ONE_FILE = ("pe=cope", "trainer.keep_checkpoints=2")
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


@pytest.fixture(params=[False, True], ids=["one file", "parts"])
def save(request, tmp_path):
    """`save(net, optimizer, progress)` writes a checkpoint into tmp_path; `save.parts`."""

    def save(net, optimizer, progress, keep=9):
        checkpoints.save(tmp_path, net, optimizer, progress, keep=keep, parts=request.param)

    save.parts = request.param
    return save


def assert_same_state(net, optimizer, other, its_optimizer):
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, its_optimizer.state[q][key])


@pytest.mark.parametrize("steps", [0, 2])
def test_all_comes_back(save, tmp_path, steps):
    """Into a network that has been trained, too."""
    net, optimizer = trained(steps)
    progress = Progress(step=steps, rows=1, seconds=0.1)
    save(net, optimizer, progress)
    for other in (trained(step=0, seed=1), trained(step=1, seed=1)):
        assert checkpoints.resume(tmp_path, *other) == progress
        if steps:
            assert_same_state(net, optimizer, *other)


def test_the_last_ones_are_kept(save, tmp_path):
    for step in range(1, 5):
        save(*trained(step=0), Progress(step=step), keep=2)
    assert steps_in(tmp_path) == [3, 4]


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_number(path, value, dtype=torch.float32):
    """Another number in a weight, with the checksums of what was written."""
    if path.suffix == ".ckpt":
        state = torch.load(path)
        state["model"]["norm.weight"] = state["model"]["norm.weight"].fill_(value).to(dtype)
        torch.save(state, path)
        return
    tensors = load_file(path)
    tensors["model/norm.weight"] = tensors["model/norm.weight"].fill_(value).to(dtype)
    save_file(tensors, path)
    index = json.loads((path.parent / "index.json").read_text())
    index["sha256"][path.name] = sha256(path)
    (path.parent / "index.json").write_text(json.dumps(index))


DAMAGE = {
    "a byte": change_a_byte,
    "infinite": lambda path: put_number(path, float("inf")),
    "integers": lambda path: put_number(path, 1.0, torch.int32),
}
OF_PARTS = {
    "a part lost": lambda folder: next(folder.glob("*.safetensors")).unlink(),
    "no index": lambda folder: (folder / "index.json").unlink(),
    "a part too many": lambda folder: save_file({"model/x": torch.zeros(2)}, folder / "x.safetensors"),
    "a sparse part": lambda folder: os.truncate(next(folder.glob("*.safetensors")), 2**42),
    "an endless part": lambda folder: (folder / "index.json").write_text(
        '{"progress": {}, "sha256": {"/dev/zero": ""}}'
    ),
}


def assert_skipped(tmp_path, capsys):
    other = trained(step=0, seed=1)
    assert checkpoints.resume(tmp_path, *other).step == 1
    assert f"{path_of(tmp_path, 2)} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_skipped(save, tmp_path, capsys, damage):
    net, optimizer = trained()
    for step in (1, 2):
        save(net, optimizer, Progress(step=step))
    path = path_of(tmp_path, 2)
    damage(*path.glob("*.safetensors") if save.parts else [path])
    assert_skipped(tmp_path, capsys)
    save(net, optimizer, Progress(step=2))  # in its place
    assert checkpoints.resume(tmp_path, net, optimizer).step == 2


@pytest.mark.parametrize("damage", OF_PARTS.values(), ids=OF_PARTS)
def test_a_damaged_folder_is_skipped(tmp_path, capsys, damage):
    net, optimizer = trained()
    for step in (1, 2):
        checkpoints.save(tmp_path, net, optimizer, Progress(step=step), keep=9, parts=True)
    damage(path_of(tmp_path, 2))
    assert_skipped(tmp_path, capsys)


@pytest.mark.parametrize(("layers", "problem"), [(1, "is missing"), (3, "is not part of this network")])
def test_that_of_another_network_is_not_loaded(save, tmp_path, capsys, layers, problem):
    save(*trained(step=0, n_layer=layers), Progress(step=1))
    with pytest.raises(ValueError, match="no checkpoint in"):
        checkpoints.resume(tmp_path, *trained(step=0))
    assert problem in capsys.readouterr().err


def test_names_of_an_older_version_are_read(save, tmp_path, monkeypatch):
    """The weights of the short convolution had another one."""
    net, optimizer = trained(step=2, conv=3)
    with monkeypatch.context() as patch:
        names = net.named_parameters
        old = [(name.replace("attn.mix.conv", "attn.qkv_conv.weight"), p) for name, p in names()]
        assert [name for name, _ in old] != [name for name, _ in names()]
        patch.setattr(net, "named_parameters", lambda: old)
        weights = {name.replace("attn.mix.conv", "attn.qkv_conv.weight"): p for name, p in net.state_dict().items()}
        patch.setattr(net, "state_dict", lambda: weights)
        save(net, optimizer, Progress(step=2))
    other = trained(step=0, seed=1, conv=3)
    assert checkpoints.resume(tmp_path, *other).step == 2
    assert_same_state(net, optimizer, *other)


@pytest.mark.parametrize("what", ["torch.save", "torch.distributed.checkpoint.filesystem._write_item"])
def test_a_full_disk_is_told(tmp_path, monkeypatch, what):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(what, full)
    with pytest.raises(OSError, match=r"cannot write .*step=1\.ckpt: .*No space left on device"):
        checkpoints.save(tmp_path, *trained(step=0), Progress(step=1), keep=1, parts=what != "torch.save")
    assert steps_in(tmp_path) == []


def test_killed_while_a_part_is_written(train, straight):
    moment = On("ropewalk.training.sharded_checkpoints:sha256", 2, kill)
    assert live(train.complete(*PARTS, "name=killed"), moment) == -signal.SIGKILL
    folder = train.runs / "killed" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [".step=4.ckpt.tmp", "step=2.ckpt"]
    outcome = train(*ONE_FILE, "name=killed")  # the kind may change
    assert outcome.code == 0, outcome.err
    assert "after step 2" in outcome.out
    assert differences(train.runs / "killed", straight(*ONE_FILE)) == []
    assert sorted(path.name for path in folder.iterdir()) == ["step=4.ckpt", "step=6.ckpt"]


def test_shards_of_two_processes_are_read_by_one(train, straight, tmp_path):
    """The second part of a run, from step 4 on, is computed alone; its first, in shards."""
    options = ("pe=cope", "trainer.precision=32", "trainer.keep_checkpoints=2")
    sharded = train.complete("trainer=fsdp", *options, "trainer.checkpoint_parts=true", "name=sharded")
    assert together(sharded, tmp_path / "said", None, None) == [0, 0]
    run = train.runs / "sharded"
    parts = [load_file(part) for part in path_of(run / "checkpoints", 4).glob("*.safetensors")]
    whole = load_file(straight(*options) / "model.safetensors")
    sizes = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (*parts, whole)]
    assert len(parts) == 2
    assert sum(sizes[:2]) < 3.1 * sizes[2]  # weights and two moments, once
    shutil.rmtree(path_of(run / "checkpoints", 6))
    (run / "training.json").unlink()
    outcome = train(*options, "name=sharded")
    assert outcome.code == 0, outcome.err
    assert "after step 4" in outcome.out
    for name, tensor in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=2e-5)
