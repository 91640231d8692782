"""scripts/demo.py, shrunk: three readings of one training, each at three lengths, and what each writes."""

import math
import re

from ropewalk.evaluation.results import load_all
from scripts import demo


def test_each_reading_is_measured_and_writes(script, train):
    said = script(demo, *train.complete("data.tokenizer=bytes", "eval.lengths=[1,2,4]"))
    assert said.code == 0, said.err

    (run,) = train.runs.glob("*/evals")
    expected = {}
    for e in load_all(run.parent):
        bits = [sum(m.nats) / math.log(2) / sum(m.bytes) for m in e.measured]
        expected[e.variant.pe["name"]] = [f"{value:.2f}" for value in bits]
    table = dict(re.findall(r"^(rope|yarn|rerope) +([\d. ]+)$", said.out, re.MULTILINE))
    assert {name: numbers.split() for name, numbers in table.items()} == expected

    written, _, _ = said.out.rpartition("\nAt 64 tokens the model loses ")
    _, *texts = re.split(r"^as \w+:\n", written, flags=re.MULTILINE)
    assert len(texts) == 3

    for text in texts:
        # Of the 200 bytes that it draws, some are no character, or make one together.
        assert demo.CHARACTERS / 2 < len(text.rstrip("\n")) <= demo.CHARACTERS


def test_weights_that_yarn_cannot_read_are_an_error_before_the_training(script, train):
    said = script(demo, *train.complete("pe=alibi"))
    assert said.code == 2
    assert "cannot read weights trained with alibi" in said.err
    assert not train.runs.exists()
