"""Benchmarks compare the same work, count memory rightly, and print their tables. No test looks at a time."""

import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch
from conftest import build_gpt, write_knots

from conf.schema import parse
from lab.benchmarks import attention, exactness, measure, rotation, training
from lab.benchmarks.checklist import Checklist, Job
from lab.kernels.check import outcome_of
from model import position
from model.position import PositionEncoding, Shape
from ropewalk.app import cli
from ropewalk.training.hardware import Hardware
from scripts import bench, check_gpu


@pytest.fixture
def options(tmp_path):
    """Makes options of a small model on a small text, and one head of 64 channels."""
    small = [
        f"data.files={write_knots(tmp_path / 'corpus')}/*.txt", f"data.cache_dir={tmp_path}", "data=text", "device=cpu",
        "model.n_layer=2", "model.dim=32", "train_len=16", "trainer.batch_size=4", "rounds=2",
        "data.val_fraction=0.3", "steps=1", "n_head=1",
    ]  # fmt: skip

    def make(*overrides, program="bench", schema=bench.BenchOptions):
        mode = ["mode=training"] if program == "bench" else []
        with cli.composed(program, *mode, *small, *overrides) as config:
            return parse(schema, cli.plain(config))

    return make


def test_memory_counts_every_score(options):
    class Quadratic(PositionEncoding):
        def attend(self, q, k, v, state, ctx):
            return (q @ k.mT + ctx.mask()).softmax(-1) @ v

    def held(pe):
        return measure.peak_memory(attention.layer(options(), 2048, pe)["both"], "cpu")

    shape = Shape(dim=64, n_head=1, n_kv_head=1, head_dim=64, train_len=2048, n_layer=1)
    scores = 4 * 2048**2  # bytes
    assert held(Quadratic(shape)) > 2 * scores  # the softmax and its gradient
    assert held(PositionEncoding(shape)) < scores / 2
    q = torch.zeros(1000, requires_grad=True)
    assert measure.peak_memory(lambda: torch.autograd.grad(q.exp().sum(), q), "cpu") == pytest.approx(8000, rel=0.1)


def test_cope_is_measured_at_its_worst_and_with_gates_of_a_half(options):
    (pe,) = position.build_encodings(cli.encoding("cope"), Shape(64, 1, 1, 64, 2048, 1))
    shares = []
    for small in (True, False):
        attention.layer(options(), 2048, pe.eval(), small_gates=small)["forward"]()
        shares.append(float(pe.metrics()["clamped_share"]))
    assert shares == [0, pytest.approx(0.9, abs=0.1)]


def test_bare_loop_trains_what_train_py_does(options):
    cfg = training.configuration(options(), "cope")
    bare = torch.stack([*islice(training.bare(cfg), 6)])
    trained = torch.stack([*islice(training.trained(cfg), 6)])
    torch.testing.assert_close(trained, bare, rtol=1e-5, atol=0)
    assert bare[5] < bare[0]


def test_both_take_turns_and_ratios_are_of_one_round():
    order = ""
    seconds = {"a": iter([1.0, 10.0, 2.0]), "b": iter([2.0, 10.0, 6.0])}

    def call(name):
        nonlocal order
        order += name
        return next(seconds[name])

    of_a, of_b = measure.interleave(lambda: call("a"), lambda: call("b"), 3)
    assert order == "abbaab"
    assert measure.ratio(of_b, of_a) == "2.00 (1.50 to 2.50)"  # of 2, 1 and 3


def test_all_arithmetic_rotates_alike(options):
    x = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(0))
    expected = rotation.rotation(options(), 8, "real, interleaved", compiled=False)["forward"]()
    found = rotation.rotation(options(), 8, "complex, interleaved", compiled=False)["forward"]()
    torch.testing.assert_close(found, expected)
    half = rotation.rotation(options(), 8, "real, half layout", compiled=False)["forward"]()
    torch.testing.assert_close(half.norm(), expected.norm())
    assert not torch.allclose(half, x)


@pytest.mark.parametrize("mode", ["attention", "cost"])
def test_each_mode_makes_a_table(options, mode):
    rows = bench.MODES[mode](options("encodings=[t5]", "lengths=[32]"))
    table = list(measure.markdown(rows))
    assert table[0].startswith("|  |")
    assert any(line.startswith("| t5 | ") for line in table)


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.01, False)])
def test_a_gradient_that_is_one_percent_off_is_found(factor, is_right, monkeypatch):
    net = build_gpt("t5", train_len=16, n_layer=1).train()
    exact = exactness.gradients(net, Hardware("cpu", "64", compile=False), 32)
    gradients = exactness.gradients

    def on_a_gpu(net, hardware, length):
        found = gradients(net, replace(hardware, device="cpu"), length)
        return {name: grad * (factor if hardware.device == "cuda" else 1) for name, grad in found.items()}

    monkeypatch.setattr(exactness, "gradients", on_a_gpu)
    assert exactness.worst_errors(net, exact, Hardware("cuda", "32-true", compile=False), 32).is_right == is_right


def test_what_a_gpu_is_checked_for_fits_into_ten_minutes(options):
    """With a clock of its own: a cold cache, where each check compiles for 40 seconds, and CoPE's for 100."""
    now = 0.0

    def run(command, seconds):
        nonlocal now
        took = min(seconds, 100.0 if any("cope" in part for part in command) else 40.0)
        now += took / 8  # of eight at once
        return '{"is_right": true, "worst": "1e-6"}'

    chosen = options("device=cpu", "kernels=false", program="check_gpu", schema=check_gpu.Options)
    usable = check_gpu.exactness_jobs(chosen, check_gpu.USABLE, "bf16-mixed")
    checks = Checklist(2.0, 1, run, clock=lambda: now)
    assert all(check_gpu.is_right(line) for line in checks.outcomes(usable).values())
    assert now <= 120
    every = check_gpu.exactness_jobs(chosen, cli.encoding_names(), "bf16-mixed")
    checks = Checklist(check_gpu.EXACTNESS * 10, 1, run, clock=lambda: now)
    outcomes = checks.outcomes(every)
    assert now <= 600
    assert [name for name, line in outcomes.items() if not line] == checks.left_out
    assert len(checks.left_out) < len(every) / 4


def test_a_check_that_breaks_its_process_costs_no_other():
    program = [sys.executable, "-c"]
    jobs = [Job("a", [*program, "print('{}')"]), Job("b", [*program, "import os; os.abort()"]), Job("c", ["false"])]
    assert Checklist(60, 3).outcomes(jobs) == {"a": "{}", "b": "failed: exit code -6", "c": "failed: exit code 1"}


def test_what_was_printed_before_the_time_was_over_is_kept():
    program = "import time; print('a row', flush=True); time.sleep(3600)"
    outcome = outcome_of([sys.executable, "-c", program], 5.0)
    assert outcome.splitlines() == ["a row", "took more than 5 seconds"]
