"""Benchmarks compare the same work, count memory rightly, and print their tables. No test looks at a time."""

import sys
from itertools import islice

import pytest
import torch
from conftest import build_pe, write_knots

from conf.schema import parse
from lab.benchmarks import attention, measure, rotation, training
from lab.kernels.check import outcome_of
from ropewalk.app import cli
from scripts import bench


@pytest.fixture
def options(tmp_path):
    """Makes options of a small model on a small text, and one head of 64 channels."""
    corpus = write_knots(tmp_path / "corpus")
    small = [
        f"data.files={corpus}/*.txt", f"data.cache_dir={tmp_path}", "data=text", "data.val_fraction=0.3",
        "device=cpu", "model.n_layer=2", "model.dim=32", "train_len=16", "trainer.batch_size=4", "rounds=2",
        "steps=1", "n_head=1",
    ]  # fmt: skip

    def make(*overrides):
        with cli.composed("bench", "mode=training", *small, *overrides) as config:
            return parse(bench.BenchOptions, cli.plain(config))

    return make


def test_the_measured_memory_is_all_that_is_held_at_once():
    """q.exp() is the result, and its gradient."""
    q = torch.zeros(1000, requires_grad=True)
    held = measure.peak_memory(lambda: torch.autograd.grad(q.exp().sum(), q), "cpu")
    assert held == pytest.approx(2 * q.nbytes, rel=0.1)


def test_cope_is_measured_at_its_worst_where_no_position_reaches_the_end_of_its_table(options):
    pe = build_pe("cope", n_head=1, head_dim=64, npos_max=64).eval()
    attention.layer(options(), 2048, pe)["forward"]()
    assert pe.metrics()["clamped_share"] == 0


def test_the_bare_loop_trains_what_train_py_does(options):
    cfg = training.configuration(options(), "cope")
    bare = torch.stack([*islice(training.bare(cfg), 6)])
    trained = torch.stack([*islice(training.trained(cfg), 6)])

    torch.testing.assert_close(trained, bare, rtol=1e-5, atol=0)
    assert bare[5] < bare[0]


def test_two_calls_are_timed_in_turns_and_compared_round_by_round():
    order = []
    seconds = {
        "a": iter([1.0, 10.0, 2.0]),
        "b": iter([2.0, 10.0, 6.0]),
    }

    def call(name):
        order.append(name)
        return next(seconds[name])

    of_a, of_b = measure.interleave(
        lambda: call("a"),
        lambda: call("b"),
        3,
    )

    assert order == [*"abbaab"]
    assert measure.ratio(of_b, of_a) == "2.00 (1.50 to 2.50)"  # of 2, 1 and 3


def test_a_table_of_times_has_ratios_to_its_first_row(options, monkeypatch):
    monkeypatch.setattr(measure, "timed", lambda function: function)

    def takes(forward, both):
        return lambda length: {"forward": lambda: forward, "both": lambda: both}

    rows = measure.compared(options("lengths=[8]"), {"first": takes(1.0, 2.0), "other": takes(3.0, 8.0)})
    times = [(row["forward, 8"], row["both, 8"]) for row in rows]

    assert times == [
        ("1e+03 ms", "2e+03 ms"),
        ("3.00 (3.00 to 3.00)", "4.00 (4.00 to 4.00)"),
    ]


def test_all_arithmetic_rotates_alike(options):
    rotated = []
    for arithmetic in rotation.ARITHMETIC:
        passes = rotation.rotation(options(), 8, arithmetic=arithmetic, compiled=False)
        rotated.append(passes["forward"]())
    half, real, by_complex = rotated

    torch.testing.assert_close(by_complex, real)
    torch.testing.assert_close(half.norm(), real.norm())
    assert not torch.allclose(half, real)


@pytest.mark.parametrize(
    ("mode", "first"),
    [
        ("attention", "| SDPA | "),
        ("training", "| rope, bare loop | "),
    ],
)
def test_each_mode_makes_a_table(options, mode, first):
    rows = bench.MODES[mode](options("encodings=[t5]", "lengths=[32]"))
    header, _, first_row, *_, last_row = measure.markdown(rows)

    assert header.startswith("|  |")
    assert first_row.startswith(first)
    assert last_row.startswith("| t5 | ")


def test_a_program_that_breaks_its_process_is_said_and_what_it_printed_before_its_time_is_kept():
    def outcome(program, limit=60.0):
        return outcome_of([sys.executable, "-c", program], limit)

    assert outcome("print('{}')") == "{}"
    assert outcome("raise ValueError('harm')") == "failed: ValueError: harm"
    assert outcome("import os; os.abort()") == "failed: exit code -6"

    late = outcome("import time; print('a row', flush=True); time.sleep(3600)", 5.0)

    assert late.splitlines() == ["a row", "took more than 5 seconds"]
