"""Checkpoints in parts are resumed like those of one file, by any number of processes; a damaged one never."""

import shutil
import signal

import pytest
import torch
from conftest import build_gpt
from process_helpers import On, kill, live, together
from safetensors.torch import load_file, save_file
from soak import differences

from conf.schema import Optim
from ropewalk.training import checkpoints
from ropewalk.training.checkpoints import Progress, path_of, steps_in
from ropewalk.training.optimizer import make_optimizer

PARTS = ("pe=cope", "trainer.checkpoint_parts=true", "trainer.keep_checkpoints=2")
ONE_FILE = ("pe=cope", "trainer.keep_checkpoints=2")
OPTIM = Optim(lr=0.1, min_lr_ratio=0.1, warmup_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)


def trained(step=1, seed=0):
    """A network with tied embeddings, and its optimizer, after some steps."""
    net = build_gpt("cope", seed=seed)
    optimizer = make_optimizer(net, OPTIM)
    for _ in range(step):
        idx = torch.arange(8).view(1, 8)
        net(idx, targets=idx).backward()
        optimizer.step()
    return net, optimizer


def save(folder, net, optimizer, progress):
    checkpoints.Writer(folder, keep=9, parts=True, background=False).save(net, optimizer, progress)


def test_all_comes_back(tmp_path):
    net, optimizer = trained(step=2)
    save(tmp_path, net, optimizer, Progress(step=2, rows=1, seconds=0.1))
    other, its_optimizer = trained(step=0, seed=1)
    assert checkpoints.resume(tmp_path, other, its_optimizer) == Progress(step=2, rows=1, seconds=0.1)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, its_optimizer.state[q][key])


def change_a_byte(folder):
    (part,) = folder.glob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-10] ^= 1
    part.write_bytes(content)


def lose_the_index(folder):
    (folder / "index.json").unlink()


def lose_a_part(folder):
    (part,) = folder.glob("*.safetensors")
    part.unlink()


def add_a_part(folder):
    save_file({"model/strange": torch.zeros(2)}, folder / "strange.safetensors")


@pytest.mark.parametrize("damage", [change_a_byte, lose_the_index, lose_a_part, add_a_part])
def test_a_damaged_one_is_skipped(tmp_path, capsys, damage):
    net, optimizer = trained()
    for step in (1, 2):
        save(tmp_path, net, optimizer, Progress(step=step))
    damage(path_of(tmp_path, 2))
    assert checkpoints.resume(tmp_path, net, optimizer).step == 1
    assert f"{path_of(tmp_path, 2)} is damaged" in capsys.readouterr().err
    save(tmp_path, net, optimizer, Progress(step=2))  # in its place
    assert checkpoints.resume(tmp_path, net, optimizer).step == 2


@pytest.mark.parametrize(("layers", "problem"), [(1, "is missing"), (3, "is not part of this network")])
def test_that_of_another_network_is_not_loaded(tmp_path, capsys, layers, problem):
    net = build_gpt("cope", n_layer=layers)
    save(tmp_path, net, make_optimizer(net, OPTIM), Progress(step=1))
    other, optimizer = trained(step=0)
    with pytest.raises(ValueError, match="no checkpoint in"):
        checkpoints.resume(tmp_path, other, optimizer)
    assert problem in capsys.readouterr().err


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    net, optimizer = trained(step=0)
    with pytest.raises(OSError, match=r"cannot write .*step=1\.ckpt: No space left on device"):
        save(tmp_path, net, optimizer, Progress(step=1))
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
    parts = sorted(path_of(run / "checkpoints", 4).glob("*.safetensors"))
    assert len(parts) == 2
    whole = load_file(straight(*options) / "model.safetensors")
    assert sum(tensor.numel() for part in parts for tensor in load_file(part).values()) < 3.1 * sum(
        tensor.numel() for tensor in whole.values()
    )
    shutil.rmtree(path_of(run / "checkpoints", 6))
    (run / "training.json").unlink()
    outcome = train(*options, "name=sharded")
    assert outcome.code == 0, outcome.err
    assert "after step 4" in outcome.out
    for name, tensor in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=2e-5)
