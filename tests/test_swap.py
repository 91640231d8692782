"""One model read by several encodings without training: scripts/evaluate.py pe=A,B."""

import pytest
import torch
from conftest import ENCODINGS, pe_options, rows_of

from conf import cli
from evaluation.results import Results
from model import position, store
from model.position.rotary import Rotary
from model.position.scaled_rotary import ScaledRotary
from scripts import evaluate

ROTARY = [name for name in ENCODINGS if issubclass(position.resolve(pe_options(name)["_target_"]), Rotary)]
SCALED = [name for name in ROTARY if issubclass(position.resolve(pe_options(name)["_target_"]), ScaledRotary)]


def swap(run, *arguments: str) -> Results:
    evaluate.main(dict(argument.split("=", 1) for argument in (f"run={run}", *arguments)))
    return Results.load(run / "swap.json")


def losses(results: Results) -> dict[tuple[str, int], float]:
    return {(row.reading, row.length): row.loss for row in results.lengths}


def test_other_encodings_stand_beside_the_run_as_trained(train):
    train("pe=rope", "pe.base=700", "trainer.max_steps=40", "eval.lengths=[1,4]")
    run = train.runs / "rope-text"
    before = (run / "results.json").read_bytes()
    swapped = swap(run, "pe=rope,linear,yarn,dynamic_ntk", "pe.beta_fast=4.0", "eval.lengths=[1,4]")
    assert (run / "results.json").read_bytes() == before
    assert (run / "figures" / "swap.png").exists()
    found, own = losses(swapped), losses(Results.load(run / "results.json"))
    labels = ["rope, as trained", "linear, scale 4", "yarn, scale 4", "dynamic_ntk, scale 1"]
    assert list(dict.fromkeys(label for label, _ in found)) == labels
    assert found["rope, as trained", 64] == own["as trained", 64]
    assert found["dynamic_ntk, scale 1", 16] == own["as trained", 16]  # up to original_len it is RoPE
    assert len({found[label, 64] for label in labels}) == 4


def test_scale_1_changes_nothing_bit_for_bit(train):
    """In every scaling of RoPE; and at 1x it is the run's own validation."""
    train("pe=rope", "trainer.max_steps=20", "eval.lengths=[1,4]")
    run = train.runs / "rope-text"
    own = losses(Results.load(run / "results.json"))
    dynamic = {"dynamic_ntk"}  # its 0 is what elsewhere is 1
    for names, scale in ((set(SCALED) - dynamic, 1), (dynamic, 0)):
        swapped = swap(run, f"pe={','.join(sorted(names))}", f"pe.scale={scale}", "eval.lengths=[1,4]")
        assert losses(swapped) == {
            (label, length): own["as trained", length]
            for label in ("rope, as trained", *(f"{name}, scale {scale}" for name in names))
            for length in (16, 64)
        }
        assert swapped.validation.loss == rows_of(run)[-1]["val/loss"]
    trained, idx = store.load(run), torch.arange(64)[None]
    for name in SCALED:
        net = store.load(run, pe=pe_options(name, scale=0.0 if name in dynamic else 1.0))
        assert torch.equal(net(idx), trained(idx)), name


def test_a_run_can_be_read_at_its_own_scale(train):
    train("pe=yarn", "eval.lengths=[1,4]")
    run = train.runs / "yarn-text"
    found, own = losses(swap(run, "pe=yarn,linear", "eval.lengths=[1,4]")), losses(Results.load(run / "results.json"))
    assert {label for label, _ in found} == {"yarn, as trained", "yarn, scale 4", "linear, scale 4"}
    assert found["yarn, scale 4", 64] == own["scale 4", 64]


def test_lengths_without_a_position_are_a_column_or_an_error(train, capfd):
    train("pe=learned", "eval.lengths=[1]")
    run = train.runs / "learned-text"
    swapped = swap(run, "pe=learned", "pe.scale=2", "eval.lengths=[1,2,4]")
    assert swapped.skipped == {"learned, as trained": [32, 64], "learned, scale 2": [64]}
    assert "no position" in capfd.readouterr().out
    swapped = swap(run, "pe=learned", "pe.scale=2", "eval.lengths=[2]")
    assert set(losses(swapped)) == {("learned, scale 2", 32)}
    for wrong in (["pe.scale=2", "eval.lengths=[3]"], ["pe.scale=1", "eval.lengths=[2]"]):
        with pytest.raises(ValueError, match=r"eval\.lengths: .* no position beyond .* tokens|has a position at"):
            swap(run, "pe=learned", *wrong)
    assert set(losses(Results.load(run / "swap.json"))) == {("learned, scale 2", 32)}  # nothing was written


def test_training_without_a_length_to_evaluate_is_refused(train):
    outcome = train("pe=learned", "pe.scale=2", "eval.lengths=[4,8]")
    assert outcome.code == 2
    assert "pe=learned has no position beyond 32 tokens, and the shortest length is 64" in outcome.err
    assert not train.runs.exists()


def test_mistakes_are_found_before_any_work(train, capfd, monkeypatch):
    train("pe=rope", "eval.lengths=[1]")
    run = train.runs / "rope-text"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for arguments, message in (
        (["pe=yarm"], "did you mean yarn?"),
        (["pe=yarn", "pe.beta_fats=3"], "did you mean pe.beta_fast"),
        (["pe=yarn", "pe.scale=eight"], "pe.scale='eight': it should be a valid number"),
        (["pe=rope,nope"], "pe=nope (no encoding) cannot read weights trained with rope"),
        (["pe=rope", "pe.layout=interleaved"], "interleaved layout"),
        (["pe.scale=4"], "pe.scale: choose encodings to read with"),
        (["eval.length=[1]"], "did you mean eval.lengths"),
        (["eval.lengths=[1000]"], "lower eval.lengths"),
    ):
        monkeypatch.setattr("sys.argv", ["evaluate.py", f"run={run}", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.script(evaluate.main)
        assert stop.value.code == cli.MISTAKE
        assert message in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
