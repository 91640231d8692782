"""scripts/demo.py, shrunk: three readings of one training, each at three lengths."""

import math
import re

import pandas as pd

from ropewalk.evaluation.results import load_all
from scripts import demo


def test_the_table_has_the_bits_that_each_reading_measured(script, train):
    said = script(demo, *train.complete("data.tokenizer=bytes", "eval.lengths=[1,2,4]"))

    assert said.code == 0, said.err

    (run,) = train.runs.glob("*/evals")
    expected = {}
    for e in load_all(run.parent):
        bits = []
        for m in e.measured:
            nats = sum(m.nats) / sum(m.bytes)
            bits.append(f"{nats / math.log(2):.2f}")
        expected[e.variant.pe["name"]] = bits
    rows = re.findall(r"^(rope|yarn|rerope) +([\d. ]+)$", said.out, re.MULTILINE)

    assert {name: numbers.split() for name, numbers in rows} == expected


def test_the_end_says_which_reading_loses_least_and_whether_cutting_is_better():
    bits = pd.DataFrame({64: [2.0, 2.0], 256: [2.153, 2.09]}, index=["rope", "yarn"])
    assert "0.15 bits per byte as rope, and least as yarn: 0.09.\nCutting" in demo.verdict(bits, 64)

    bits.loc["yarn", 256] = 1.999
    assert "least as yarn: 0.00.\nRead so" in demo.verdict(bits, 64)
