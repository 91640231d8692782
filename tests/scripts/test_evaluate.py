"""scripts/evaluate.py on run directories: what it adds, what it leaves alone, what it prints, and mistakes."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import outcome_of
from scipy import stats

from conf.run_dir import lock
from evaluation.results import load_all
from scripts import evaluate as program


@pytest.fixture
def make_run(train):
    """`make_run("pe=rope", ...)` is a run without results. Its weights are random and depend on position."""
    still = ["trainer.max_steps=1", "optim.lr=1e-12", "model.init_std=0.4", "train_len=64", "eval.sequences=12"]
    still += ["eval.lengths=[0.5,1,2,4]", "eval.variants=[]"]

    def make(*options: str) -> Path:
        mine = {option.split("=")[0] for option in options}
        assert train(*options, *(option for option in still if option.split("=")[0] not in mine)).code == 0
        run = max(train.runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns).parent
        shutil.rmtree(run / "evals")
        return run

    return make


@pytest.fixture
def evaluate(monkeypatch, capfd, tmp_path):
    """`evaluate("run=...", ...)` runs the command line within this process."""

    def run(*arguments: str):
        monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, arguments), f"cache_dir={tmp_path / 'cache'}"])
        capfd.readouterr()
        return outcome_of(program.main, capfd)

    return run


def labels(run: Path, kind: str = "lengths") -> list[str]:
    return sorted(e.variant.label for e in load_all(run) if e.kind == kind)


def independent(run: Path, tolerance: float, task: bool = False) -> dict[str, tuple]:
    """Safe and useful length of each variant from the JSON files alone; all texts have equally many bytes."""
    files = [json.loads(path.read_text()) for path in (run / "evals").glob("lengths-*.json")]
    own = next(f for f in files if not f["variant"]["zero_shot"])
    cut = {m["length"]: sum(m["nats"]) / math.log(2) / sum(m["bytes"]) for m in own["measured"]}
    found = {}
    for f in files:
        nats = {m["length"]: m["nats"] for m in f["measured"]}
        safe, useful = 0, min(nats)
        for length in sorted(nats):
            bits = sum(nats[length]) / math.log(2) / sum(f["measured"][0]["bytes"])
            if bits - cut[min(length, own["train_len"])] > tolerance:
                break
            safe = length
        for length in sorted(nats)[1:]:
            gains = [a - b for a, b in zip(nats[useful], nats[length], strict=True)]
            if not stats.ttest_1samp(gains, 0).confidence_interval(0.95).low > 0:
                break
            useful = length
        found[f["variant"]["label"]] = safe, useful, len(nats)
    return found


def test_printed_lengths_agree_with_an_independent_computation(make_run, evaluate):
    run = make_run("pe=rope")
    said = evaluate(f"run={run}", "eval.variants=[{pe: yarn, scale: 4},ntk]", "eval.tolerance=0.5")
    assert said.code == 0, said.err
    found = independent(run, 0.5)
    assert len(found) == 3
    words = [line.removeprefix("How far: ") for line in said.out.splitlines() if line.startswith("How far: ")]
    for label, lengths in found.items():
        name = label if label == "rope" else f"rope read as {label}"
        for sentence, length in zip(words, lengths, strict=False):  # safe, useful
            parts = sentence.removesuffix(".").split("; ")
            (place,) = [part.split(": ")[0] for part in parts if re.search(rf"[:,] {name}(,|$)", part)]
            assert place.endswith(f" {length / 64:g}x" if length else "at no length")
    assert "Bits per byte" in said.out
    assert "rope cut to 64" in said.out


def test_other_settings_stand_beside_each_other_and_the_same_replace(make_run, evaluate):
    """Two values of an option are two files; evaluating again does not delete what an earlier one measured."""
    run = make_run("pe=rope")
    for beta in ("2", "3.2e1"):
        assert evaluate(f"run={run}", "pe=yarn", "pe.scale=8", f"pe.beta_fast={beta}").code == 0
    assert evaluate("-m", f"run={run}", "pe=linear,rerope").code == 0
    before = {path: path.stat().st_mtime_ns for path in (run / "evals").iterdir()}
    assert labels(run) == ["linear at scale 4", "rerope", "rope", "yarn at scale 8", "yarn at scale 8"]
    assert {e.variant.pe.get("beta_fast") for e in load_all(run)} == {None, 2.0, 32.0}
    assert evaluate(f"run={run}", "pe=yarn", "pe.scale=8", "pe.beta_fast=2").code == 0
    changed = [path.name for path, mtime in before.items() if path.stat().st_mtime_ns != mtime]
    assert set(before) == set((run / "evals").iterdir())
    assert any(name.startswith("lengths-yarn") for name in changed)
    assert not any(name.startswith("lengths-linear") for name in changed)
    assert evaluate(f"run={run}", "eval.lengths=[1,2]", "eval.variants=[]").code == 0
    assert len(list((run / "evals").iterdir())) == len(before) + 1


def test_the_run_itself_is_not_measured_twice(make_run, evaluate):
    run = make_run("pe=yarn", "pe.scale=4.0")
    said = evaluate(f"run={run}", "pe=yarn", "pe.scale=4.0")
    assert said.code == 0, said.err
    assert labels(run) == ["yarn at scale 1", "yarn at scale 4"]
    assert "measuring lengths of yarn at scale 1" not in evaluate(f"run={run}", "pe=linear").out


def test_what_it_writes(make_run, evaluate, monkeypatch):
    """An unfinished run, which was trained on another device, stays unfinished; meanwhile it is locked."""
    run, held = make_run("pe=rope"), []
    (run / "training.json").unlink()
    (run / "report.html").write_text("old")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("accelerator: cpu", "accelerator: cuda"))

    def watched(path, run_id):
        held.append(path)
        return lock(path, run_id)

    monkeypatch.setattr(program, "lock", watched)
    said = evaluate(f"run={run}", "device=cpu", "eval.variants=[]")
    assert said.code == 0, said.err
    assert held == [run]
    assert not (run / "training.json").exists()
    assert (run / "report.html").read_text() != "old"
    (e,) = load_all(run)
    made = e.provenance
    assert "evaluate.py" in made["command"]
    assert (made["device"], made["precision"], made["torch"]) == ("cpu", "32-true", torch.__version__)
    assert (e.variant.label, e.step) == ("rope", 1)
    assert evaluate(f"run={run}", "device=mps").code == 2


def test_every_measure_of_several_runs(make_run, evaluate):
    runs = [make_run(f"pe={name}", "train_len=128") for name in ("rope", "alibi")]
    said = evaluate(
        "-m", f"run={runs[0]},{runs[1]}", "measures=[lengths,by_position,far_copies,ruler]", "eval.variants=[]",
        "ruler.depths=2", "ruler.trials=2", "eval.lengths=[4,5]", "ruler.tasks=[niah_single,niah_multikey]",
    )  # fmt: skip
    assert said.code == 0, said.err
    for run in runs:
        assert sorted(e.kind for e in load_all(run)) == ["by_position", "far_copies", "lengths", "ruler"]
    assert "depth 1.00" in said.out


def test_ruler_without_essays_needs_the_tokenizer_only(make_run, evaluate, tmp_path):
    run = make_run("pe=rope")
    for path in (tmp_path / "corpus").iterdir():
        path.unlink()
    options = "ruler.depths=2", "ruler.trials=2", "eval.lengths=[8]", "ruler.tasks=[niah_single]"
    said = evaluate(f"run={run}", "measures=[ruler]", "pe=ntk", *options)
    assert said.code == 0, said.err
    assert len(labels(run, "ruler")) == 2
    assert "RULER: Above chance (gain above 0)" in said.out


def test_mistakes_are_found_before_anything_is_written(make_run, evaluate):
    run = make_run("pe=rope")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for arguments, message in (
        (["pe=yarn", "pe.beta_fats=3"], "did you mean pe.beta_fast"),
        (["pe=nope"], "pe=nope (no encoding) cannot read weights trained with rope"),
        (["eval.lengths=[1000]"], "lower eval.lengths"),
        (["measures=[length]"], "did you mean lengths?"),
        (["measures=ruler"], "measures='ruler': it should be a valid list"),
        (["measures=[ruler]", "ruler.depths=1"], "ruler.depths=1"),
        (["measures=[ruler]", "ruler.tasks=[]"], "ruler.tasks=[]"),
        (["measures=[ruler]", "eval.lengths=[0.5,1]"], "a text of 32 tokens has no room for niah_single"),
        (["measures=[far_copies]", "eval.lengths=[1]"], "far_copies"),
    ):
        said = evaluate(f"run={run}", *arguments)
        assert (said.code, said.out) == (2, ""), arguments
        assert message in said.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_no_run_and_no_text(make_run, evaluate):
    run = make_run("pe=rope", "data=flip_flop", "eval.lengths=[1,2]", "name=bits")
    assert "run is missing" in evaluate().err
    assert f"there are: {run}" in evaluate(f"run={run.parent}/none").err
    assert "needs text" in evaluate(f"run={run}", "measures=[ruler]").err
