"""A model that is opened is the one that lies there now, and says what it was trained to read."""

import json
import shutil

import pytest
import torch

import ropewalk

OPTIONS = ["pe=rope", "trainer.keep_checkpoints=9", "eval.variants=[]", "eval.lengths=[1]"]


def test_weights_that_were_replaced_are_not_opened_under_their_name(train):
    assert train(*OPTIONS, "name=x").code == 0
    ropewalk.load(train.runs / "x", step=4)

    assert train(*OPTIONS, "name=x", "trainer.max_steps=8", "overwrite=true").code == 0
    with pytest.raises(ValueError, match=r"x-step4 holds earlier weights of \S+: rename or delete it"):
        ropewalk.load(train.runs / "x", step=4)

    shutil.rmtree(train.runs / "x-step4")
    saved = torch.load(train.runs / "x" / "checkpoints" / "step=4.ckpt")["model"]["embedding.weight"]
    assert torch.equal(ropewalk.load(train.runs / "x", step=4).net.embedding.weight, saved)


def test_a_checkpoint_of_an_extended_model_has_the_length_that_it_was_extended_to(train):
    assert train(*OPTIONS, "name=base").code == 0
    assert train(*OPTIONS, f"init_from={train.runs / 'base'}", "train_len=32", "name=longer").code == 0
    ropewalk.load(train.runs / "longer", step=4)

    lengths = [
        json.loads((train.runs / name / "model.json").read_text())["original_len"]
        for name in ("longer", "longer-step4")
    ]
    assert lengths == [32, 32]


def test_a_complete_run_is_measured_again_for_another_measure(train):
    assert train(*OPTIONS, "name=x").code == 0
    assert train(*OPTIONS, "name=x", "eval.by_position=true").code == 0
    assert list((train.runs / "x" / "evals").glob("by_position-*"))

    written = sorted((train.runs / "x").rglob("*.json"))
    assert "complete and measured" in train(*OPTIONS, "name=x", "eval.by_position=true").out
    assert sorted((train.runs / "x").rglob("*.json")) == written
