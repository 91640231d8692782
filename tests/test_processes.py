"""Two processes train what one does."""

import os
import signal
from functools import partial

import pytest
import torch
from conftest import rows_of
from lives import On, kill, together
from safetensors.torch import load_file

from model import shards
from model.checkpoints import checkpoints_in
from model.stop import STOPPED
from scripts.soak import differences

STEP = "model.lit:LitGPT.training_step"
SMALL = ("pe=cope", "trainer.accumulate=2", "trainer.log_every=3")
LOST = 2


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def job(train, tmp_path):
    """`job(action or None for each process, *options)`: exit codes, and what each process said."""

    def run(actions, *options):
        codes = together(train.complete("trainer=ddp", *options), tmp_path / "said", *actions)
        return codes, [(tmp_path / "said" / str(rank)).read_text() for rank in range(len(actions))]

    return run


def test_fsdp(train, job, straight):
    two, one = train.runs / "two", straight(*SMALL)
    codes, said = job([None, On(STEP, 9, stop)], *SMALL, "trainer.strategy=fsdp", "name=two")
    print(said)
    codes, said = job([None, None], *SMALL, "trainer.strategy=fsdp", "name=two")
    assert codes == [0, 0], said
    print(said)
    for a, b in zip(rows_of(one), rows_of(two), strict=True):
        print(a, b)
    w1, w2 = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    for k in w1:
        print(k, (w1[k] - w2[k]).abs().max())
    print(checkpoints_in(two / "checkpoints"), os.listdir(checkpoints_in(two / "checkpoints")[-1]))
    c=shards.read(checkpoints_in(two / "checkpoints")[-1])
    d=torch.load(checkpoints_in(one / "checkpoints")[-1], weights_only=True)
    print({k: v for k, v in c.items() if k not in ("state_dict", "optimizer_states")})
    print(c.keys() ^ d.keys(), c["state_dict"].keys() ^ d["state_dict"].keys())
    c, d = c["optimizer_states"][0], d["optimizer_states"][0]
    print(c["param_groups"], d["param_groups"])
    for i in d["state"]: print(i, d["state"][i].keys(), [(c["state"][i][k]-d["state"][i][k]).abs().max() for k in d["state"][i]])
    assert 0
