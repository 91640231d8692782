"""A checkpoint that is opened is the one that lies there now, and says what it was trained to read."""

import shutil

import pytest

import ropewalk
from conf.files import read_json

OPTIONS = ["pe=rope", "trainer.keep_checkpoints=9", "eval.variants=[]", "eval.lengths=[1]"]


def test_weights_that_were_replaced_are_not_opened_under_their_name(trained):
    run = trained(*OPTIONS)
    ropewalk.load(run, step=4)
    with pytest.raises(ValueError, match="no checkpoint of step 0"):
        ropewalk.load(run, step=0)
    shutil.rmtree(run)
    trained(*OPTIONS, "trainer.max_steps=8")
    with pytest.raises(ValueError, match=r"run-step4 holds earlier weights of \S+: rename or delete it"):
        ropewalk.load(run, step=4)


def test_a_checkpoint_of_an_extended_model_has_the_length_that_it_was_extended_to(train, trained):
    base = trained(*OPTIONS, name="base")
    ropewalk.load(trained(*OPTIONS, f"init_from={base}", "train_len=32", name="longer"), step=4)
    for name in ("longer", "longer-step4"):
        assert read_json(train.runs / name / "model.json")["original_len"] == 32
