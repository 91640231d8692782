"""A run from its command line to its files: complete, continued, refused, repeated."""

import resource
import sys
from functools import partial

import pytest
import torch
from conftest import REPORT, rows_of
from torch._dynamo.testing import CompileCounterWithBackend

from conf.files import read_json
from ropewalk.evaluation.results import load_all
from ropewalk.report import page
from ropewalk.run.directory import read_config


def test_the_files_of_a_run(train, monkeypatch):
    monkeypatch.setattr(page, "html", REPORT)
    train("pe=yarn")
    run = train.runs / "yarn-text"

    assert read_config(run)["pe"]["original_len"] == 16  # resolved

    rows = rows_of(run)

    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]  # log_every=2, val_every=3
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    assert set(rows[0]) == {"step", "tokens", "train/loss", "lr", "grad_norm"}

    lengths = [8, 16, 32, 64, 128]
    measured = {e.variant.label: [m.length for m in e.measured] for e in load_all(run)}

    assert measured == {"yarn at scale 1": lengths, "yarn at scale 4": lengths}

    training = read_json(run / "training.json")

    assert training["tokens"] == rows[-1]["tokens"] == 6 * 64
    assert training["validation"]["loss"] == rows[-1]["val/loss"]
    unit = 2**20 if sys.platform == "darwin" else 2**10  # Linux counts KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    assert training["peak_memory_mb"] == pytest.approx(peak, rel=0.3)

    assert (run / "report.html").stat().st_size > 10_000


def test_a_complete_run_trains_nothing(trained):
    run = trained("pe=rope")
    (run / "report.html").unlink()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.*")}
    trained("pe=rope", "logger=tensorboard")  # who watches may differ

    assert (run / "report.html").exists()  # made anew
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_of_a_complete_run_what_is_new_is_measured(trained):
    run = trained("pe=rope")
    for new in ("eval.lengths=[1,3]", "eval.by_position=true", "eval.far_copies=true"):
        trained("pe=rope", new)

    assert {e.kind for e in load_all(run)} == {"lengths", "by_position", "far_copies"}

    trained("pe=rope", "trainer.max_steps=8")
    trained("pe=rope", "trainer.max_steps=8", "eval.lengths=[1,3]")  # measured of fewer steps alone

    assert {e.step for e in load_all(run) if e.eval.get("lengths") == [16, 48]} == {6, 8}


def test_each_scale_of_a_complete_run_is_measured(trained):
    run = trained("pe=yarn")
    for file in (run / "evals").glob("*-yarn-4-*"):
        file.unlink()
    trained("pe=yarn")

    assert {e.variant.scale for e in load_all(run)} == {1, 4}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32", torch.float32)])
def test_validation_computes_as_training_does(train, monkeypatch, precision, dtype):
    """In the run's own arithmetic: bf16 products give another loss than fp32."""
    used = set()
    forward = torch.nn.Linear.forward

    def look(self, x):
        out = forward(self, x)
        used.add((torch.is_grad_enabled(), out.dtype))
        return out

    monkeypatch.setattr(torch.nn.Linear, "forward", look)
    train("pe=rope", f"trainer.precision={precision}")

    assert used == {(True, dtype), (False, dtype)}


STAGES = "stages=[{steps: 2, train_len: 8}, {steps: 2, train_len: 8, pe: {window: 4}}]"


@pytest.mark.parametrize(
    ("graphs", "options"),
    [
        (3 + 2, ["pe=t5", "trainer.precision=bf16-mixed", STAGES]),
        (3, ["pe=t5", "trainer.precision=bf16-mixed", "trainer.checkpointing=true", STAGES]),  # its loss is in pieces
        (2 + 1, ["pe=gemma3", "model.n_layer=7"]),
    ],
    ids=["stages", "checkpointing", "two kinds of layers"],
)
def test_layers_of_a_kind_are_compiled_once(train, monkeypatch, graphs, options):
    """In each stage, and the loss for each length; what is evaluated needs no graph."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        train("trainer.compile=true", *options)

    assert counter.frame_count == graphs


def test_a_stage_is_the_beginning_of_a_run_of_its_length(trained):
    """Bit for bit: of one with as many tokens in a step. Then its length and encoding are others."""
    stage = "stages=[{steps: 3, train_len: 8, pe: {base: 500}}]"
    each = ["pe=rope", "trainer.log_every=1", "trainer.val_every=6", "eval.lengths=[1]"]
    short = rows_of(trained(*each, "train_len=8", "trainer.batch_size=8", "pe.base=500", name="short"))
    staged = rows_of(trained(*each, "train_len=16", "trainer.batch_size=4", stage, name="staged"))

    assert staged[:3] == short[:3]
    assert staged[3]["train/loss"] != short[3]["train/loss"]


def test_training_in_bf16_lowers_the_loss(trained):
    run = trained("pe=t5", "trainer.precision=bf16-true", "trainer.max_steps=30", "optim.lr=0.01", "eval.lengths=[1]")
    losses = [row["train/loss"] for row in rows_of(run)]

    assert losses[-1] < losses[0] - 0.5
