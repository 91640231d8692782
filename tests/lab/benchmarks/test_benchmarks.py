"""Benchmarks compare the same work, count memory rightly, and print their tables. No test looks at a time."""

import sys
from itertools import islice

import pytest
import torch
from conftest import write_knots

from conf.schema import parse
from lab.benchmarks import attention, measure, rotation, training
from lab.kernels.check import outcome_of
from model import position
from model.position import PositionEncoding, Shape
from ropewalk.app import cli
from scripts import bench


@pytest.fixture
def options(tmp_path):
    """Makes options of a small model on a small text, and one head of 64 channels."""
    small = [
        f"data.files={write_knots(tmp_path / 'corpus')}/*.txt", f"data.cache_dir={tmp_path}", "data=text", "device=cpu",
        "model.n_layer=2", "model.dim=32", "train_len=16", "trainer.batch_size=4", "rounds=2",
        "data.val_fraction=0.3", "steps=1", "n_head=1",
    ]  # fmt: skip

    def make(*overrides):
        with cli.composed("bench", "mode=training", *small, *overrides) as config:
            return parse(bench.BenchOptions, cli.plain(config))

    return make


def test_the_measured_memory_of_an_attention_has_all_its_scores(options):
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


def test_the_benchmark_of_cope_has_no_key_that_could_do_without_a_gate(options):
    """No position reaches the end of the table, so that all keys need it."""
    (pe,) = position.build_encodings(cli.encoding("cope"), Shape(64, 1, 1, 64, 2048, 1))
    attention.layer(options(), 2048, pe.eval())["forward"]()
    assert pe.metrics()["clamped_share"] == 0


def test_bare_loop_trains_what_train_py_does(options):
    cfg = training.configuration(options(), "cope")
    bare = torch.stack([*islice(training.bare(cfg), 6)])
    trained = torch.stack([*islice(training.trained(cfg), 6)])

    torch.testing.assert_close(trained, bare, rtol=1e-5, atol=0)
    assert bare[5] < bare[0]


def test_two_calls_are_timed_in_turns_and_compared_round_by_round():
    order = ""
    seconds = {"a": iter([1.0, 10.0, 2.0]), "b": iter([2.0, 10.0, 6.0])}

    def call(name):
        nonlocal order
        order += name
        return next(seconds[name])

    of_a, of_b = measure.interleave(lambda: call("a"), lambda: call("b"), 3)

    assert order == "abbaab"
    assert measure.ratio(of_b, of_a) == "2.00 (1.50 to 2.50)"  # of 2, 1 and 3


def test_a_table_of_times_has_ratios_to_its_first_row(options, monkeypatch):
    monkeypatch.setattr(measure, "timed", lambda function: function)

    def seconds(forward, both):
        return lambda length: {"forward": lambda: forward, "both": lambda: both}

    first, other = measure.compared(options("lengths=[8]"), {"first": seconds(1.0, 2.0), "other": seconds(3.0, 8.0)})

    assert (first["forward, 8"], first["both, 8"]) == ("1e+03 ms", "2e+03 ms")
    assert (other["forward, 8"], other["both, 8"]) == ("3.00 (3.00 to 3.00)", "4.00 (4.00 to 4.00)")


def test_all_arithmetic_rotates_alike(options):
    def rotated(arithmetic):
        return rotation.rotation(options(), 8, arithmetic=arithmetic, compiled=False)["forward"]()

    half, real, by_complex = map(rotated, rotation.ARITHMETIC)
    torch.testing.assert_close(by_complex, real)
    torch.testing.assert_close(half.norm(), real.norm())
    assert not torch.allclose(half, real)


@pytest.mark.parametrize("mode", ["attention", "training"])
def test_each_mode_makes_a_table(options, mode):
    rows = bench.MODES[mode](options("encodings=[t5]", "lengths=[32]"))
    header, _, first, *_, last = measure.markdown(rows)

    assert header.startswith("|  |")
    assert first.startswith({"attention": "| SDPA | ", "training": "| rope, bare loop | "}[mode])
    assert last.startswith("| t5 | ")


def test_a_program_that_breaks_its_process_is_said_and_what_it_printed_before_its_time_is_kept():
    def outcome(program, limit=60.0):
        return outcome_of([sys.executable, "-c", program], limit)

    assert outcome("print('{}')") == "{}"
    assert outcome("import os; os.abort()") == "failed: exit code -6"

    late = outcome("import time; print('a row', flush=True); time.sleep(3600)", 5.0)

    assert late.splitlines() == ["a row", "took more than 5 seconds"]
