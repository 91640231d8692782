"""The command line of the judge: what it trains, what it counts, and how it ends."""

import json

import pytest
from conftest import train_here

import train as train_program
from lab.board import trials, tries
from ropewalk.app.side_by_side import Ended
from ropewalk.run.directory import RunDir, read_config
from scripts import judge as program


@pytest.fixture
def judge(train, script, monkeypatch):
    """`judge("pe=alibi", ...)` runs the command line on the small corpus and model of `train`."""
    monkeypatch.setattr("train.page.show_results", lambda run: 0.0)
    monkeypatch.setattr(trials, "train_all", train_here)
    small = ("seeds=3", "eval.lengths=[1,4]")
    return lambda *arguments, code=None: script(program, *train.complete(*small, *arguments), code=code)


def runs_in(folder):
    return sorted(str(path.parent) for path in folder.glob("*/training.json"))


def test_a_try_ends_with_one_line_and_a_file_and_repeated_it_is_the_same_try(judge, train, tmp_path):
    said = judge("pe=alibi")
    line = said.out.splitlines()[-1]

    about = "intervals for 1; about four of five tries would find, with 3 seeds a lead of "
    assert f"; bits per byte; try 1 of {train.runs}: {about}" in line

    (file,) = (train.runs / "verdicts").glob("*.json")
    verdict = json.loads(file.read_text())

    assert verdict["sentence"] == line
    assert sorted(verdict["runs"]) == runs_in(train.runs)
    assert said.code == tries.CODES[verdict["verdict"]]

    # As an entry of the board it is the same try, too.
    entry = tmp_path / "2026-01-01-alibi"
    entry.mkdir()
    (entry / "pe.yaml").write_text("pe: alibi\n")
    (entry / "README.md").write_text("Slopes.\n")
    for again in ("pe=alibi", f"entry={entry}"):
        assert judge(again).out.splitlines()[-1] == line
    assert json.loads(file.read_text()) == verdict


def test_a_reading_and_an_edited_encoding_are_other_tries(judge, train, monkeypatch):
    judge("pe=alibi")

    assert len(runs_in(train.runs)) == 6

    # Read at the training length, its weights are trained as RoPE's are.
    reading = judge("pe=ntk", "pe.scale=4").out
    assert "1x +0.000 ± 0.000 (not separated)" in reading
    assert f"try 2 of {train.runs}: intervals for 2" in reading
    assert len(runs_in(train.runs)) == 9

    monkeypatch.setattr("lab.board.trials.inspect.getsource", lambda module: "edited")
    assert "; try 3 of " in judge("pe=alibi").out
    assert len(runs_in(train.runs)) == 15


MISTAKES = {
    "pe=rope": "pe=rope and against are the same",
    "pe=alibi against=ropee": "did you mean rope",
    "pe=alibi eval.lengths=[2,4]": "lacks the training length: add 1",
    "pe=alibi seeds=2": "seeds=2",
    "pe=alibi data=recall": "data=recall is a task",
}


def test_mistakes_are_found_before_anything_is_trained_or_counted(judge, train):
    for line, message in MISTAKES.items():
        assert message in judge(*line.split(), code=2).err
    assert not train.runs.exists()


def test_both_sides_start_from_the_model_as_it_reads(judge, train, straight):
    """Its base is that of both; what cannot read its weights is no opponent."""
    start = f"init_from={straight('pe=rope', 'pe.base=500.0', 'pe.window=0.25')}"
    for options, message in {
        ("pe=rope",): "pe=rope and against are the same",
        ("pe=rope", "train_len=32"): "pe=rope and against are the same",
        ("pe=yarn", "against=alibi"): "pe=alibi (ALiBi) cannot read weights trained with rope",
    }.items():
        assert message in judge(start, *options, code=2).err


def test_a_run_that_starts_from_a_model_has_the_encoding_that_is_judged(train, script, straight, monkeypatch):
    """The model's has other options."""

    def run_all(commands, places, logs):
        ((name, (_, *flags)),) = commands.items()
        script(train_program, *flags)
        return {name: Ended("", b"1.0", 1.0)}

    monkeypatch.setattr(trials, "run_all", run_all)
    start = f"init_from={straight('pe=rope')}", "trainer.max_steps=0"
    cfg = trials.run_of(trials.configuration(*train.complete(*start, "pe=hybrid", "eval.lengths=[1]")))

    assert trials.train_all([cfg]) == []
    assert read_config(RunDir(cfg).path)["pe"] == cfg.pe
