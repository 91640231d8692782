"""The command line of the judge: what it trains, what it counts, and how it ends."""

import json

import pytest

from lab.board import trials
from scripts import judge as program


@pytest.fixture
def judge(train, script, monkeypatch):
    """`judge("pe=alibi", ...)` runs the command line on the small corpus and model of `train`."""
    monkeypatch.setattr(trials, "processes", lambda: 1)
    monkeypatch.setattr("train.show_results", lambda run: 0.0)
    return lambda *arguments: script(program, *train.complete("seeds=2", "eval.lengths=[1,4]", *arguments))


def runs_of(folder):
    return {str(path.parent) for path in folder.glob("*/training.json")}


def test_a_try_trains_what_is_missing_and_ends_with_one_line_and_a_file(judge, train):
    said = judge("pe=alibi")
    line = said.out.splitlines()[-1]
    assert line.startswith("alibi against rope: 4x or cut "), said.err
    assert line.endswith(f"; bits per byte; 2 seeds; try 1 of {train.runs}: intervals for 1")

    (file,) = (train.runs / "verdicts").glob("*.json")
    verdict = json.loads(file.read_text())
    assert verdict["sentence"] == line
    assert said.code == {"better": 0, "not separated": 3, "worse": 4}[verdict["verdict"]]
    assert (verdict["seeds"], verdict["decided_by"], len(verdict["runs"])) == ([0, 1], "4x or cut", 4)

    runs = runs_of(train.runs)
    assert sorted(runs) == sorted(verdict["runs"])

    # The same again, and a reading, whose network is trained like RoPE's.
    again = judge("pe=alibi", "format=json")
    assert json.loads(again.out.splitlines()[-1]) == verdict

    reading = judge("pe=ntk", "pe.scale=4").out.splitlines()[-1]
    assert reading.startswith("ntk against rope: ")
    assert "1x +0.000 ± 0.000 (not separated)" in reading
    assert reading.endswith(f"try 2 of {train.runs}: intervals for 2")
    assert len(runs_of(train.runs)) == len(runs) + 2


def test_an_encoding_whose_source_is_edited_is_another_try(judge, train, monkeypatch):
    judge("pe=alibi")
    before = runs_of(train.runs)
    monkeypatch.setattr("lab.board.trials.inspect.getsource", lambda module: "edited")
    assert "; try 2 of " in judge("pe=alibi").out
    assert len(runs_of(train.runs)) == 2 * len(before)


def test_mistakes_are_found_before_anything_is_trained_or_counted(judge, train):
    for arguments, message in (
        (["pe=rope"], "pe=rope and against are the same"),
        (["pe=alibi", "against=ropee"], "did you mean rope"),
        (["pe=alibi", "eval.lengths=[2,4]"], "lacks the training length: add 1"),
        (["pe=alibi", "seeds=1"], "seeds"),
        (["pe=alibi", "data=recall"], "data=recall is a task"),
    ):
        said = judge(*arguments)
        assert said.code == 2, arguments
        assert message in said.err
    assert not train.runs.exists()
