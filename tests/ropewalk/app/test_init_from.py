"""A checkpoint is opened in its own run, where it lies now, and says what it was trained to read."""

import shutil

import pytest
import torch

import ropewalk
from ropewalk.app.init_from import opened

OPTIONS = ["pe=rope", "trainer.keep_checkpoints=9", "eval.variants=[]", "eval.lengths=[1]"]


def test_weights_of_a_checkpoint_are_never_stale(trained):
    """Nor is another run made of them."""
    run = trained(*OPTIONS)
    with pytest.raises(ValueError, match="no checkpoint of step 0"):
        ropewalk.load(run, step=0)
    before = ropewalk.load(run, step=4).net.embedding.weight
    shutil.rmtree(run)
    trained(*OPTIONS, "trainer.max_steps=8")
    now = ropewalk.load(run, step=4).net.embedding.weight
    saved = torch.load(run / "checkpoints" / "step=4.ckpt")["model"]["embedding.weight"]

    assert torch.equal(now, saved)
    assert not torch.equal(now, before)
    assert sorted(path.name for path in run.parent.iterdir() if path.is_dir()) == [run.name]


def test_a_checkpoint_of_an_extended_model_has_the_length_that_it_was_extended_to(trained):
    base = trained(*OPTIONS, name="base")
    longer = trained(*OPTIONS, f"init_from={base}", "train_len=32", name="longer")
    finished = opened(longer, step=4).description
    (longer / "model.json").unlink()
    assert opened(longer, step=4).description.items() <= finished.items()
    assert finished["original_len"] == 32
