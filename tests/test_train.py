"""A run from its command line to its files: complete, continued, refused, repeated."""

import json
import re
import shutil

import pytest
import torch
import yaml
from conftest import REPORT, rows_of
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import train as program
from ropewalk.app import ending
from ropewalk.evaluation.results import load_all
from ropewalk.report import page


def test_the_files_of_a_run(train, monkeypatch):
    monkeypatch.setattr(ending, "page", page)
    monkeypatch.setattr(page, "html", REPORT)
    outcome = train("pe=yarn")
    assert outcome.code == 0, outcome.err
    run = train.runs / "yarn-text"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["max_steps"] == 6
    assert config["pe"]["original_len"] == 16  # resolved
    assert json.loads((run / "environment.json").read_text())["starts"][0]["torch"] == torch.__version__
    assert json.loads((run / "data.json").read_text())["tokenizer"]
    assert (run / "report.html").stat().st_size > 10_000
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]  # log_every=2, val_every=3
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    assert all(row["tokens"] == 64 * row["step"] for row in rows)
    assert set(rows[0]) == {"step", "tokens", "train/loss", "lr", "grad_norm"}
    found = {e.variant.label: e for e in load_all(run) if e.kind == "lengths"}
    assert set(found) == {"yarn at scale 1", "yarn at scale 4"}
    assert all(e.step == 6 and [m.length for m in e.measured] == [8, 16, 32, 64, 128] for e in found.values())
    training = json.loads((run / "training.json").read_text())
    assert (training["tokens"], training["validation"]["loss"]) == (6 * 64, rows[-1]["val/loss"])
    assert min(training["tokens_per_s"], training["peak_memory_mb"]) > 0
    assert "scale 4" in outcome.out
    assert f"to look at: {run}/report.html" in outcome.out


def test_a_complete_run_trains_nothing(train, monkeypatch):
    train("pe=rope")
    run = train.runs / "rope-text"
    monkeypatch.setattr(ending, "page", page)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.*")}
    again = train("pe=rope", "logger=csv")  # who watches may differ
    assert (again.code, "is complete" in again.out, "bits per byte" in again.out) == (0, True, True)
    (run / "report.html").unlink()  # made anew
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.*")} == before
    assert "(3x)" in train("pe=rope", "eval.lengths=[1,3]").out  # what is new is measured
    train("pe=rope", "trainer.max_steps=8")
    train("pe=rope", "trainer.max_steps=8", "eval.lengths=[1,3]")  # measured of fewer steps alone
    assert {e.step for e in load_all(run) if e.eval.get("lengths") == [16, 48]} == {6, 8}
    shutil.rmtree(run / "checkpoints")  # then it is not trained anew
    gone = train("pe=rope", "trainer.max_steps=8", "eval.lengths=[1]")
    assert "scripts/evaluate.py measures a trained model" in gone.err
    assert rows_of(run)[-1]["step"] == 8


def test_validation_computes_as_training_does(train, monkeypatch):
    """In the run's own arithmetic: bf16 products give another loss than fp32."""
    seen = []
    forward = torch.nn.Linear.forward

    def look(self, x):
        out = forward(self, x)
        seen.append((torch.is_grad_enabled(), out.dtype))
        return out

    monkeypatch.setattr(torch.nn.Linear, "forward", look)
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("32", torch.float32)):
        seen.clear()
        assert train("pe=rope", f"trainer.precision={precision}", f"name=in-{precision}").code == 0
        assert set(seen) == {(True, dtype), (False, dtype)}


def test_tokens_per_s_of_an_asynchronous_device(train, monkeypatch):
    """Of 2 seconds a step, which pass when it is waited for; checkpoints and validations hide no time and add none."""
    training_step, clock, queue = program.Training.step, [0.0], []

    def step(*args):
        queue.append(2.0)
        return training_step(*args)

    def synchronize(device):
        clock[0] += sum(queue)
        queue.clear()

    def slow(function):
        def later(*args, **options):
            synchronize("")
            clock[0] += 7.0
            return function(*args, **options)

        return later

    monkeypatch.setattr(program.Training, "step", step)
    check = program.check_finite
    monkeypatch.setattr(program, "check_finite", lambda *args: (synchronize(""), check(*args)))
    monkeypatch.setattr(program.Training, "validate", slow(program.Training.validate))
    monkeypatch.setattr(program.checkpoints, "save", slow(program.checkpoints.save))
    monkeypatch.setattr(program.time, "perf_counter", lambda: clock[0])
    assert train("pe=rope", "trainer.log_every=4", "trainer.checkpoint_every=5").code == 0
    rows = [json.loads(row) for row in (train.runs / "rope-text" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["tokens_per_s"]) for row in rows] == [(step, 64 / 2) for step in (1, 3, 4, 6)]
    assert json.loads((train.runs / "rope-text" / "training.json").read_text())["seconds"] == 12


def test_utilisation_is_the_share_of_what_the_gpu_can_do(train, monkeypatch):
    monkeypatch.setattr("train.measured_flops", lambda device: 1e9)
    outcome = train("pe=rope")
    size = json.loads((train.runs / "rope-text" / "training.json").read_text())
    for line in (train.runs / "rope-text" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        expected = row["tokens_per_s"] * size["flops_per_token"] / 1e9
        assert row["utilisation"] == pytest.approx(expected, rel=0.01)
    assert "% of the GPU" in outcome.out


@pytest.fixture
def compile_with(monkeypatch):
    """`compile_with(backend)` lets the networks be compiled by it, without code generation."""
    compile = torch.compile
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield lambda backend: monkeypatch.setattr(
            torch, "compile", lambda *args, **options: compile(*args, **options | {"backend": backend})
        )
    torch._dynamo.reset()


STAGES = "stages=[{steps: 2, train_len: 8}, {steps: 2, train_len: 8, pe: {window: 4}}]"
# More stages than PyTorch's compiler has graphs of one function by default, which is 8.
TEN = ", ".join(f"{{steps: 1, train_len: 16, pe: {{window: {2 + i}}}}}" for i in range(10))


@pytest.mark.parametrize(
    ("graphs", "options"),
    [
        ("1 + 1", ["trainer.precision=32", "trainer.checkpointing=true"]),
        ("3 + 2", ["trainer.precision=bf16-mixed", "trainer.checkpointing=false", STAGES]),
        ("11 + 1", ["trainer.precision=32", f"stages=[{TEN}]", "trainer.max_steps=11"]),
        ("2 + 1", ["pe=gemma3", "model.n_layer=7"]),
    ],
)
def test_layers_of_a_kind_are_compiled_once(train, compile_with, graphs, options):
    """In each stage, and the loss for each length; what is evaluated needs no graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_with(counter)
    assert train("pe=t5", "trainer.compile=true", *options).code == 0
    blocks, losses = graphs.split(" + ")
    assert counter.frame_count == int(blocks) + int(losses)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cuda_graphs_may_overwrite_what_they_returned(checkpointing, train, compile_with, monkeypatch):
    """A new micro-batch does: it leaves gradients of earlier ones alone, and the run has the same bits.

    A parameter without a gradient is left alone, too: weight decay would pull one with a gradient of 0 towards 0.
    """
    returned = []  # memory of what graphs have returned since the last mark
    marks = []

    def graph(module, inputs):
        def call(*args):
            outputs = module(*args)
            given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
            for x in outputs:
                if isinstance(x, torch.Tensor) and x.data_ptr() not in given:
                    # Its memory alone: a gradient that somebody holds would be copied.
                    returned.append(x.untyped_storage())
            return outputs

        return make_boxed_func(call)

    def backend(module, inputs, mode=None):
        assert mode == ("reduce-overhead" if hardware.graphs else None)
        return aot_autograd(fw_compiler=graph, bw_compiler=graph)(module, inputs)

    def overwrite():
        marks.append(1)
        for memory in returned:
            memory.fill_(255)  # NaN
        returned.clear()

    compile_with(backend)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", overwrite)
    monkeypatch.setattr(program.Hardware, "resolve", lambda **options: hardware)
    unused = []
    make_optimizer = program.make_optimizer

    def with_an_unused_parameter(net, optim):
        net.unused = torch.nn.Parameter(torch.ones(2, 2))
        unused.append(net.unused)
        return make_optimizer(net, optim)

    monkeypatch.setattr(program, "make_optimizer", with_an_unused_parameter)
    rows = []
    for graphs in (False, True):
        hardware = program.Hardware("cpu", "32-true", compile=True, graphs=graphs)
        options = ["pe=t5", "trainer.grad_accum_steps=2", "model.dropout=0.1", "trainer.log_every=1", "overwrite=true"]
        options.append(f"trainer.checkpointing={checkpointing}")
        outcome = train(*options)
        assert outcome.code == 0, outcome.err
        rows.append([(row["train/loss"], row["grad_norm"]) for row in rows_of(train.runs / "t5-text")])
    assert rows[0] == rows[1]
    assert len(marks) == 2 * len(rows[1])
    assert torch.equal(*unused)


def test_a_stage_is_the_beginning_of_a_run_of_its_length(train):
    """Bit for bit: of one with as many tokens in a step. Then its length and encoding are others."""
    short = "train_len=8", "trainer.batch_size=8", "pe.base=500", "eval.lengths=[1]"
    stage = "train_len=16", "trainer.batch_size=4", "stages=[{steps: 3, train_len: 8, pe: {base: 500}}]"
    found = []
    for options in (short, stage):
        assert train("pe=rope", "trainer.log_every=1", *options, "overwrite=true").code == 0
        rows = rows_of(train.runs / "rope-text")
        found.append([[row[key] for key in ("step", "tokens", "train/loss", "grad_norm", "lr")] for row in rows])
    assert found[0][:3] == found[1][:3]
    assert found[0][3][2] != found[1][3][2]


def test_a_compiler_that_fails_is_explained(train, compile_with):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    compile_with(broken)
    outcome = train("pe=rope", "trainer.compile=true")
    assert outcome.code == 2
    assert "no C++ compiler" in outcome.err
    assert "trainer.compile=false" in outcome.err


def test_in_bf16(train):
    """The precision is recorded, so that a run is not continued in another."""
    assert train("pe=t5", "trainer.precision=bf16-mixed", "name=mixed").code == 0
    outcome = train("pe=t5", "trainer.precision=bf16-true", "name=pure", "trainer.max_steps=30", "optim.lr=0.01")
    assert outcome.code == 0, outcome.err
    losses = [row["train/loss"] for row in rows_of(train.runs / "pure")]
    assert losses[-1] < losses[0] - 0.5
    (train.runs / "mixed" / "training.json").unlink()
    refused = train("pe=t5", "trainer.precision=32", "name=mixed")
    assert refused.code == 2
    assert f"trainer.precision: 'bf16-mixed' in {train.runs}/mixed/config.yaml, '32-true' on this" in refused.err


def test_a_dry_run_writes_nothing(train):
    """It says how long the run and its evaluation would take."""
    outcome = train("pe=kerple", "dry_run=true")
    assert outcome.code == 0, outcome.err
    assert re.search(r"^a step takes \S+ s, 6 of them about ", outcome.out, re.MULTILINE)
    assert "cannot be exported" in outcome.out
    assert not train.runs.exists()
