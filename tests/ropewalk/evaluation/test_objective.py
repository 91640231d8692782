"""The number that a search minimises."""

import json

import pytest

import ropewalk
from ropewalk.app.resolve import load_config
from ropewalk.evaluation.objective import objective
from ropewalk.run.directory import RunDir


@pytest.mark.parametrize("length", [32, 64])
def test_the_loss_at_a_length_is_that_of_the_table_of_runs(trained, length):
    path = trained("pe=rope", "train_len=32", "eval.lengths=[1,2]", "eval.variants=[]", f"objective={length / 32}")

    table = ropewalk.runs(path)
    rows = table[(table.measure == "lengths") & (table.length == length) & table.seed.notna()]
    assert objective(RunDir(load_config(path))) == pytest.approx(rows.value.mean(), rel=1e-5)


def test_unless_told_otherwise_it_is_the_validation_loss(trained):
    path = trained("pe=rope", "eval.lengths=[1]")

    assert (
        objective(RunDir(load_config(path))) == json.loads((path / "training.json").read_text())["validation"]["loss"]
    )
