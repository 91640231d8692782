"""scripts/demo.py, shrunk: three readings of one training, each at three lengths, and what each writes."""

import math
import re

import pytest

from ropewalk.evaluation.results import load_all
from scripts import demo


def test_each_reading_is_measured_and_writes(script, train):
    said = script(demo, *train.complete("data.tokenizer=bytes", "eval.lengths=[1,2,4]"))
    assert said.code == 0, said.err

    (run,) = train.runs.glob("*/evals")
    expected = {}
    for evaluation in load_all(run.parent):
        for m in evaluation.measured:
            expected[evaluation.variant.pe["name"], m.length] = sum(m.nats) / math.log(2) / sum(m.bytes)
    lines = re.findall(r"^as (\w+) +(\d+) tokens +([\d.]+) +([+-][\d.]+)", said.out, re.MULTILINE)
    readings = [(name, length) for name in ("rope", "yarn", "rerope") for length in ("16", "32", "64")]
    assert [line[:2] for line in lines] == readings
    for name, length, bits, lost in lines:
        assert float(bits) == pytest.approx(expected[name, int(length)], abs=0.006)
        assert float(bits) - expected["rope", 16] == pytest.approx(float(lost), abs=0.011)

    written, _, end = said.out.rpartition("\nAt 64 tokens ")
    (loss,) = re.findall(r"^the model loses (\S+) bits per byte as rope", end)
    assert float(loss) == pytest.approx(expected["rope", 64] - expected["rope", 16], abs=0.011)
    _, *texts = re.split(r"^as \w+:\n", written, flags=re.MULTILINE)
    assert len(texts) == 3
    for text in texts:
        # Of the 200 bytes that it draws, some are no character, or make one together.
        assert demo.CHARACTERS / 2 < len(text.rstrip("\n")) <= demo.CHARACTERS


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"rope": 0.153, "yarn": 0.09, "rerope": 0.068}, "0.15 bits per byte as rope, and least as rerope: 0.07. Cut"),
        ({"rope": -0.001, "yarn": -0.004}, "0.00 bits per byte as rope. Read so, it needs no cutting."),
        ({"rope": 0.05, "yarn": 0.09}, "0.05 bits per byte as rope. Cutting the text to 64 tokens loses nothing."),
        ({"rope": 0.15, "yarn": -0.02}, "0.15 bits per byte as rope, and least as yarn: -0.02. Read so, it needs no"),
    ],
)
def test_the_end_says_which_reading_loses_least_and_whether_cutting_is_better(lost, said):
    assert demo.verdict(lost, 64, 256).startswith(f"At 256 tokens the model loses {said}")


def test_weights_that_yarn_cannot_read_are_an_error_before_the_training(script, train):
    said = script(demo, *train.complete("pe=alibi"))
    assert said.code == 2
    assert "cannot read weights trained with alibi" in said.err
    assert not train.runs.exists()
