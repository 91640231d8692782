"""Two processes train what one does."""

import pytest
import torch
from conftest import rows_of
from lives import together
from safetensors.torch import load_file

from model.checkpoints import checkpoints_in

SMALL = ("pe=rope", "trainer.log_every=1")


@pytest.fixture
def job(train, tmp_path):
    """`job(action or None for each process, *options)`: exit codes, and what each process said."""

    def run(actions, *options):
        codes = together(train.complete("trainer=ddp", *options), tmp_path / "said", *actions)
        return codes, [(tmp_path / "said" / str(rank)).read_text() for rank in range(len(actions))]

    return run


def test_two_processes_are_one_run(train, job, straight):
    codes, said = job([None, None], *SMALL, "name=two")
    assert codes == [0, 0], said
    print(said)
    assert said[1] == ""
    one, two = straight(*SMALL), train.runs / "two"
    for a, b in zip(rows_of(one), rows_of(two), strict=True):
        print(a, b)
    w1, w2 = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    for k in w1:
        print(k, (w1[k] - w2[k]).abs().max())
    assert 0
