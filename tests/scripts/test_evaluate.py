"""scripts/evaluate.py on run directories: what it adds, what it leaves alone, what it prints, and mistakes."""

import shutil
from pathlib import Path

import pytest
import torch
from process_helpers import On, power_cut

from ropewalk.app.run_dir import lock, read_config
from ropewalk.evaluation.results import load_all
from ropewalk.report import frame
from ropewalk.report.table import results
from scripts import evaluate as program


@pytest.fixture
def make_run(train):
    """`make_run("pe=rope", ...)` is a run without results. Its weights are random and depend on position."""
    still = ["trainer.max_steps=0", "model.init_std=0.4", "train_len=64", "eval.sequences=12", "eval.variants=[]"]
    still += ["eval.lengths=[0.5,1,2,4]"]

    def make(*options: str) -> Path:
        before = set(train.runs.glob("*"))
        assert train(*still, *options).code == 0
        (run,) = {path for path in train.runs.glob("*") if path.is_dir()} - before
        shutil.rmtree(run / "evals")
        return run

    return make


@pytest.fixture
def evaluate(script, tmp_path):
    """`evaluate("run=...", ...)` runs the command line within this process."""
    return lambda *arguments: script(program, *arguments, f"cache_dir={tmp_path / 'cache'}")


def labels(run: Path, kind: str = "lengths") -> list[str]:
    return sorted(e.variant.label for e in load_all(run) if e.kind == kind)


def test_other_settings_stand_beside_each_other_and_the_same_replace(make_run, evaluate):
    """Two values of an option are two files; evaluating again does not delete what an earlier one measured."""
    run = make_run("pe=rope")
    for beta in ("2", "1e6"):
        assert evaluate(f"run={run}", "pe=yarn", "pe.scale=8", f"pe.beta_fast={beta}").code == 0
    before = {path: path.stat().st_mtime_ns for path in (run / "evals").iterdir()}
    assert labels(run) == ["rope", "yarn at scale 8", "yarn at scale 8"]
    assert {e.variant.pe.get("beta_fast") for e in load_all(run)} == {None, 2.0, 1e6}
    assert evaluate(f"run={run}", "pe=yarn", "pe.scale=8", "pe.beta_fast=2").code == 0
    assert set(before) == set((run / "evals").iterdir())
    changed = [path.name for path, mtime in before.items() if path.stat().st_mtime_ns != mtime]
    assert sum(name.startswith("lengths-yarn") for name in changed) == 1


def test_a_power_cut_keeps_what_was_measured(make_run, evaluate, monkeypatch):
    run = make_run("pe=rope")
    On("ropewalk.evaluation.scoring:Scorer.__call__", 10, power_cut)(
        monkeypatch.setattr
    )  # four lengths of rope, linear and ntk
    with pytest.raises(RuntimeError, match="power cut"):
        evaluate(f"run={run}", "measures=[lengths]", "eval.variants=[linear,ntk]")
    assert labels(run) == ["linear at scale 4", "rope"]


def test_what_it_writes(make_run, evaluate, monkeypatch):
    """An unfinished run, which was trained on another device and data folder, stays so; meanwhile it is locked."""
    run, held = make_run("pe=rope"), []
    (run / "training.json").unlink()
    (run / "report.html").write_text("old")
    config = (run / "config.yaml").read_text().replace("accelerator: cpu", "accelerator: cuda")
    (run / "config.yaml").write_text(config.replace(read_config(run)["data"]["cache_dir"], f"{run}/theirs"))

    def watched(path):
        held.append(path)
        return lock(path)

    monkeypatch.setattr(program, "lock", watched)
    said = evaluate(f"run={run}", "device=cpu", "eval.variants=[]", "eval.tolerance=99")
    assert said.code == 0, said.err
    assert "it is level with the text cut to 64 tokens" in " ".join(said.out.split())  # by this tolerance
    assert held == [run]
    assert not (run / "training.json").exists()
    assert not (run / "theirs").exists()
    assert (run / "report.html").read_text() != "old"
    (e,) = load_all(run)
    made = e.provenance
    assert "evaluate.py" in made["command"]
    assert (made["device"], made["precision"], made["torch"]) == ("cpu", "32-true", torch.__version__)
    assert (e.variant.label, e.step) == ("rope", 0)
    assert evaluate(f"run={run}", "device=mps").code == 2


def test_every_measure_of_several_runs(make_run, evaluate):
    runs = [make_run(f"pe={name}", "train_len=128") for name in ("rope", "alibi")]
    few = "eval.variants=[]", "eval.lengths=[4,5]", "ruler.depths=2", "ruler.trials=2"
    measures = "measures=[lengths,by_position,far_copies,ruler,reach]", "ruler.tasks=[niah_single,niah_multikey]"
    said = evaluate("-m", f"run={runs[0]},{runs[1]}", *measures, *few)
    assert said.code == 0, said.err
    for run in runs:
        assert sorted(e.kind for e in load_all(run)) == ["by_position", "far_copies", "lengths", "reach", "ruler"]
    assert "answers found in percent" in said.out
    assert "Ruler: gain, bits per answer" in said.out
    options = "measures=[ruler]", "ruler.tasks=[niah_single]", "pe=ntk", *few[1:]
    assert evaluate(f"run={runs[0]}", *options).code == 0
    assert labels(runs[0], "ruler") == ["ntk at scale 4", "rope", "rope"]


def test_mistakes_are_found_before_anything_is_written(make_run, evaluate):
    run = make_run("pe=rope")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for arguments, message in (
        (["pe=yarn", "pe.beta_fats=3"], "did you mean pe.beta_fast"),
        (["pe=nope"], "pe=nope (no encoding) cannot read weights trained with rope"),
        (["eval.lengths=[1000]"], "lower eval.lengths"),
        (["measures=[length]"], "measures: there is no length; did you mean lengths?"),
        (["measures=[ruler]", "data=recall"], "train.py init_from=RUN trainer.max_steps=0 data="),
        (["measures=[ruler]", "ruler.tasks=[niah]"], "ruler.tasks=['niah']: it should be 'niah_single'"),
        (["measures=[ruler]", "eval.lengths=[0.5,1]"], "a text of 32 tokens has no room for niah_single"),
        (["measures=[far_copies]", "eval.lengths=[1]"], "far_copies"),
        (["data=text"], "train.py init_from=RUN trainer.max_steps=0 data="),
        (["data.files=*.txt"], "train.py init_from=RUN trainer.max_steps=0 data="),
        (["model=tiny"], "model: there is no such key"),
    ):
        said = evaluate(f"run={run}", *arguments)
        assert (said.code, said.out) == (2, ""), arguments
        assert message in said.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert "run is missing" in evaluate().err
    assert f"there are: {run}" in evaluate(f"run={run.parent}/none").err


def test_key_tokens_are_chosen_by_another_run(make_run, evaluate, train):
    judge = make_run("pe=rope", "name=judge")
    run = make_run("pe=alibi")
    asked = (f"run={run}", "measures=[key_tokens]", "eval.lengths=[1,4]")
    for options, message in (
        ([], "key_tokens needs key_tokens.judge=RUN"),
        ([f"key_tokens.judge={run}/none"], "none"),
        ([f"key_tokens.judge={judge}", "key_tokens.pe=alibi"], "alibi"),
        ([f"key_tokens.judge={judge}", "key_tokens.threshold=0"], "key_tokens.threshold"),
        ([f"key_tokens.judge={judge}", "key_tokens.threshold=99"], "never worth 99 nats to the judge"),
    ):
        result = evaluate(*asked, *options)
        assert (result.code, message in result.err) == (2, True), (options, result.err)
    assert not list((run / "evals").glob("*"))
    other = make_run("pe=rope", "name=other", "data.tokenizer=train:260")
    assert "another tokenizer" in evaluate(*asked, f"key_tokens.judge={other}").err
    chosen = [f"key_tokens.judge={judge}", "key_tokens.pe=rerope", "key_tokens.threshold=0.01"]
    result = evaluate(*asked, *chosen)
    assert result.code == 0, result.err
    (evaluation,) = load_all(run)
    assert evaluation.kind == "key_tokens"
    assert [m.difficulty for m in evaluation.measured] == ["key", "other"]
    table = results(frame.load(run))
    gains = table[(table.measure == "key_tokens") & (table.quantity == "gain") & table.seed.isna()]
    assert set(gains.part) == {"key", "other"}
    assert gains.value.notna().all()
