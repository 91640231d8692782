"""Benchmarks compare the same work, count memory rightly, and print their tables. No test looks at a time."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from process_helpers import CONTEXT
from small_options import SmallOptions, compile_without_code

from lab.benchmarks import attention, context, measure, rotation, training
from model import position
from model.position import PositionEncoding, Shape
from ropewalk.app import cli
from scripts import bench


@pytest.fixture
def options(tmp_path):
    return SmallOptions(tmp_path)


@pytest.fixture
def compiled_without_code(monkeypatch):
    compile_without_code(monkeypatch)


def held(options, pe, length):
    return measure.peak_memory(attention.layer(options, length, pe)["both"], "cpu")


def test_memory_counts_every_score(options):
    class Quadratic(PositionEncoding):
        def attend(self, q, k, v, state, ctx):
            return (q @ k.mT).masked_fill(~ctx.visible(), -torch.inf).softmax(-1) @ v

    shape = Shape(dim=64, n_head=1, n_kv_head=1, head_dim=64, train_len=2048, n_layer=1)
    scores = 4 * 2048**2  # bytes
    assert held(options(), Quadratic(shape), 2048) > 2 * scores  # the softmax and its gradient
    assert held(options(), PositionEncoding(shape), 2048) < scores / 2
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


class InProcess:
    """measure.Worker without its process; every step takes half a second."""

    def __init__(self, steps, train, *arguments):
        self.training = train(*arguments)
        self.losses = []
        self()

    def __call__(self):
        self.losses.append(next(self.training).item())
        return 0.5


def test_peers(options, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "Worker", InProcess)
    source = Path(__file__).with_name("nanogpt_standin.py").read_text()
    model = tmp_path / "model.py"
    model.write_text(source)
    (row,) = training.peers(options())
    assert row["network"] == "2 x 32, learned, batch 4 x 16"
    assert row["train.py, tokens/s"] == "128"
    model.write_text(source.replace("targets.flatten())", "targets.flatten()) * 1.03"))
    with pytest.raises(AssertionError, match="not close"):
        training.peers(options())


def test_the_cost_of_an_encoding_is_beside_that_of_rope(options, monkeypatch):
    monkeypatch.setattr(training, "Worker", InProcess)
    row = training.costs(options("encodings=[cope]"))[0]
    assert row == {"": "cope", "time of a step / rope's": "1.00 (1.00 to 1.00)", "tokens/s": "128"}


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


def test_ranks_that_share_a_text_hold_less_of_it(options, monkeypatch):
    monkeypatch.setattr(context.multiprocessing, "get_context", lambda kind: CONTEXT)  # has imported torch
    encoding = cli.encoding("fox")
    (alone,) = context.measured(options(), encoding, 256, 1)
    both = context.measured(options(), encoding, 256, 2)
    for rank in both:
        assert 0.3 * alone.kept < rank.kept < 0.6 * alone.kept
        assert rank.peak < 0.75 * alone.peak
        assert len(rank.shared) == len(rank.alone) == 2  # rounds

    monkeypatch.setattr(context, "RANKS", (1, 2))
    monkeypatch.setattr(context, "measured", lambda options, encoding, length, ranks: [alone] if ranks == 1 else both)
    one, two = context.context(options("encodings=[fox]", "lengths=[256]"))
    assert list(one) == ["", "ranks", "kept, 256", "peak, 256", "time, 256"]
    assert (one["time, 256"], two["ranks"]) == ("", "2")
    assert two["time, 256"]


def losses():
    yield from map(torch.tensor, [10.0, 9.0, 8.0, 7.0])


def test_worker_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr(measure.multiprocessing, "get_context", lambda kind: CONTEXT)  # has imported torch
    worker = measure.Worker(2, losses)
    worker()
    assert worker.losses == [10, 9, 8, 7]


def test_attention_prints_its_table(script):
    small = ["encodings=[alibi,{pe: cope, npos_max: 8}]", "lengths=[16,32]", "n_head=1", "head_dim=8", "rounds=2"]
    code, out, _ = script(bench, "mode=attention", "device=cpu", *small)
    assert code == 0
    head, _, *rows = out.strip().splitlines()[2:]
    assert head == "|  | forward, 16 | both, 16 | MB, 16 | forward, 32 | both, 32 | MB, 32 |"
    names = ["SDPA", "alibi", "pe: cope, npos_max: 8", "nope, window of T/8", "nope, sinks"]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in names]
    assert all(row.count("|") == head.count("|") for row in rows)


def test_a_mistake_is_one_message(script):
    code, _, err = script(bench, "mode=peers", "nanogpt=no/such/folder")
    assert (code, "checkout of nanoGPT" in err, "Traceback" in err) == (2, True, False)


def rotated(x, angle):
    """A pair of channels, each [.., T, D / 2], rotated by Euler's formula: e^(i angle)."""
    first, second = x
    turned = torch.complex(first, second) * torch.exp(1j * angle)
    return turned.real, turned.imag


@pytest.mark.parametrize("compiled", [False, True])
def test_real_and_complex_rotations_compute_the_same(options, compiled, compiled_without_code):
    length, dim = 48, 64
    small = options("mode=rotation", f"head_dim={dim}", "n_head=2")
    half, real, as_complex = [rotation.rotation(small, length, name, compiled) for name in rotation.ARITHMETIC]
    torch.testing.assert_close(as_complex["forward"](), real["forward"](), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(as_complex["both"]()[0], real["both"]()[0], rtol=1e-5, atol=1e-5)
    # Independent of both: Euler's formula in float64, pair by pair. The gradient is rotated back.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, length, dim, generator=generator).double()
    grad = torch.randn(1, 2, length, dim, generator=generator).double()
    theta = 10_000.0 ** -(torch.arange(0, dim, 2).double() / dim)
    angle = torch.arange(length)[:, None] * theta

    def assert_pairs(result, expected):
        result = tuple(part.double() for part in result)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)

    def interleaved(x):
        return x[..., 0::2], x[..., 1::2]

    assert_pairs(interleaved(as_complex["forward"]()), rotated(interleaved(x), angle))
    assert_pairs(interleaved(as_complex["both"]()[0]), rotated(interleaved(grad), -angle))
    assert_pairs(half["forward"]().chunk(2, dim=-1), rotated(x.chunk(2, dim=-1), angle))


def test_rotation_prints_its_table(script, compiled_without_code):
    code, out, _ = script(bench, "mode=rotation", "device=cpu", "lengths=[16,32]", "n_head=1", "head_dim=8", "rounds=2")
    torch._dynamo.reset()
    assert code == 0
    head, _, *rows = out.strip().splitlines()[2:]
    assert head == "|  | forward, 16 | both, 16 | forward, 32 | both, 32 |"
    names = [f"| {name}, {how}" for name in rotation.ARITHMETIC for how in ("eager", "compiled")]
    assert [row.split(" | ")[0] for row in rows] == names
    assert [row.count(" ms") for row in rows] == [4, 0, 0, 0, 0, 0]
