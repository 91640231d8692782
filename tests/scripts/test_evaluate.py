"""scripts/evaluate.py on run directories: what it adds, what it leaves alone, what it prints, and mistakes."""

import shutil

import pytest
from conftest import edit, snapshot
from process_helpers import On, power_cut

from ropewalk.evaluation.results import load_all
from scripts import evaluate as program

SCORER = "ropewalk.evaluation.scoring.Scorer.__call__"  # called once for each length


@pytest.fixture
def make_run(trained):
    """`make_run("rope", ...)` is a run without results. Its weights are random and depend on position."""
    still = [
        "trainer.max_steps=0",
        "model.init_std=0.4",
        "train_len=64",
        "eval.sequences=12",
        "eval.variants=[]",
        "eval.lengths=[0.5,1,2,4]",
    ]

    def make(pe, *options):
        run = trained(f"pe={pe}", *still, *options, name=pe)
        shutil.rmtree(run / "evals")
        return run

    return make


@pytest.fixture
def evaluate(script, tmp_path):
    """`evaluate("run=...", ...)` runs the command line within this process."""
    return lambda *arguments, code=0: script(program, *arguments, f"cache_dir={tmp_path / 'cache'}", code=code)


def test_a_power_cut_keeps_what_was_measured(make_run, evaluate):
    """Here in the third of four lengths of the second reading."""
    run = make_run("rope")
    with On(SCORER, 7, power_cut), pytest.raises(RuntimeError, match="power cut"):
        evaluate(f"run={run}", "measures=[lengths]", "eval.variants=[linear]")
    (e,) = load_all(run)
    assert e.variant.label == "rope"


def test_a_run_from_elsewhere_is_measured_here_and_stays_unfinished(make_run, evaluate):
    """It was trained on another device and data folder."""
    run = make_run("rope")
    (run / "training.json").unlink()
    (run / "report.html").write_text("old")
    edit(run / "config.yaml", "trainer", accelerator="cuda")
    edit(run / "config.yaml", "data", cache_dir=f"{run}/theirs")

    said = evaluate(f"run={run}", "device=cpu", "eval.variants=[]", "eval.tolerance=99")

    assert "it is level with the text cut to 64 tokens" in " ".join(said.out.split())  # by this tolerance
    assert not (run / "training.json").exists()
    assert not (run / "theirs").exists()
    assert (run / "report.html").read_text() != "old"

    (e,) = load_all(run)
    assert "evaluate.py" in e.provenance["command"]
    assert e.provenance["device"] == "cpu"


def test_every_measure_of_several_runs(make_run, evaluate):
    rope = make_run("rope", "train_len=128")
    alibi = make_run("alibi", "train_len=128")
    few = ["ruler.tasks=[niah_single,niah_multikey]", "ruler.depths=2", "ruler.trials=2", "eval.lengths=[4,5]"]
    measures = "measures=[lengths,by_position,far_copies,ruler,reach]"
    evaluate("-m", f"run={rope},{alibi}", measures, "eval.variants=[]", *few)

    for run in (rope, alibi):
        assert sorted(e.kind for e in load_all(run)) == ["by_position", "far_copies", "lengths", "reach", "ruler"]


def test_a_checkpoint_is_measured_in_its_own_run(trained, evaluate):
    """As eval.at measured it."""
    run = trained("pe=rope", "eval.at=[4]", "eval.variants=[]", "trainer.keep_checkpoints=9")
    before = {e.file_name: e.measured for e in load_all(run)}
    for e in load_all(run):
        if e.step == 4:
            (run / "evals" / e.file_name).unlink()
    evaluate(f"run={run}", "step=4", "device=cpu")

    assert {e.file_name: e.measured for e in load_all(run)} == before


def test_a_scaling_reaches_the_longest_text_unless_its_scale_is_given(make_run, evaluate):
    run = make_run("rope")
    for options in (["pe=linear"], ["pe=linear", "eval.lengths=[1,2]"], ["pe=linear", "pe.scale=3"]):
        evaluate(f"run={run}", "measures=[lengths]", *options)

    expected = {"rope", "linear at scale 4", "linear at scale 2", "linear at scale 3"}
    assert {e.variant.label for e in load_all(run)} == expected


def test_options_without_an_encoding_are_of_the_one_that_was_trained(make_run, evaluate):
    run = make_run("olmo3", "pe.pattern=[local,global]", "model.n_layer=2")
    evaluate(f"run={run}", "measures=[lengths]", "eval.lengths=[1]", "++pe.global.scale=16.0")
    readings = {e.variant.scale: e.variant.pe for e in load_all(run)}
    own = readings[1.0]

    assert readings == {1.0: own, 8.0: own, 16.0: own | {"global": own["global"] | {"scale": 16.0}}}


def test_readings_that_are_compared_have_one_precision(make_run, evaluate):
    """The trained encoding is measured again in that of the other reading, and only then."""
    run = make_run("rope")
    for encoding, precision in [("rope", "bf16-mixed"), ("ntk", "bf16-true"), ("linear", "bf16-true")]:
        said = evaluate(f"run={run}", "measures=[lengths]", "device=cpu", f"pe={encoding}", f"precision={precision}")
        assert ("of rope" in said.out) == (encoding != "linear")

    assert {e.provenance["precision"] for e in load_all(run)} == {"bf16-true"}


MISTAKES = {
    "pe=yarn pe.beta_fats=3": "did you mean pe.beta_fast",
    "pe=nope": "pe=nope (no encoding) cannot read weights trained with rope",
    "eval.lengths=[1000]": "lower eval.lengths",
    "measures=[length]": "measures=['length']: it should be 'lengths', 'by_position'",
    "measures=[ruler] ruler.tasks=[niah]": "ruler.tasks=['niah']: it should be 'niah_single'",
    "measures=[ruler] eval.lengths=[0.5,1]": "a text of 32 tokens has no room for niah_single",
    "measures=[far_copies] eval.lengths=[1]": "far_copies",
    "data=text": "train.py init_from=RUN trainer.max_steps=0 data=",
    "data.files=*.txt": "train.py init_from=RUN trainer.max_steps=0 data=",
    "model=tiny": "model: no such key",
    "run=none": "none is not a run directory",
    "device=cuda": "accelerator cuda is not available here; choose auto or: ",
}


def test_mistakes_are_found_before_anything_is_written(make_run, evaluate):
    run = make_run("rope")
    before = snapshot(run)
    for line, message in MISTAKES.items():
        said = evaluate(f"run={run}", *line.split(), code=2)
        assert said.out == ""
        assert message in said.err

    assert snapshot(run) == before
    assert "run is missing" in evaluate(code=2).err
