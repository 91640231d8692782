"""scripts/demo.py, shrunk: three readings of one training, each at three lengths."""

import math
import re

import pandas as pd
import pytest

from ropewalk.evaluation.results import load_all
from scripts import demo


def test_the_table_has_the_bits_that_each_reading_measured(script, train):
    said = script(demo, *train.complete("data.tokenizer=bytes", "eval.lengths=[1,2,4]"))
    assert said.code == 0, said.err

    (run,) = train.runs.glob("*/evals")
    expected = {}
    for e in load_all(run.parent):
        bits = [sum(m.nats) / math.log(2) / sum(m.bytes) for m in e.measured]
        expected[e.variant.pe["name"]] = [f"{value:.2f}" for value in bits]
    table = dict(re.findall(r"^(rope|yarn|rerope) +([\d. ]+)$", said.out, re.MULTILINE))
    assert {name: numbers.split() for name, numbers in table.items()} == expected


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"rope": 0.153, "yarn": 0.09}, "0.15 bits per byte as rope, and least as yarn: 0.09.\nCutting the text to 64"),
        ({"rope": 0.15, "yarn": -0.001}, "0.15 bits per byte as rope, and least as yarn: 0.00.\nRead so, it needs no"),
    ],
)
def test_the_end_says_which_reading_loses_least_and_whether_cutting_is_better(lost, said):
    bits = pd.DataFrame({64: 2.0, 256: 2.0 + pd.Series(lost)})
    assert demo.verdict(bits, 64).startswith(f"At 256 tokens the model loses {said}")


def test_weights_that_yarn_cannot_read_are_an_error_before_the_training(script, train):
    said = script(demo, *train.complete("pe=alibi"))
    assert said.code == 2
    assert "cannot read weights trained with alibi" in said.err
    assert not train.runs.exists()
