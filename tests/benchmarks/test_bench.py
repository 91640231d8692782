"""Benchmarks compare the same work, count memory rightly, and print their tables. No test looks at a time."""

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import write_knots
from process_helpers import CONTEXT

from app import cli
from benchmarks import attention, context, gpu, measure, rotation, training
from conf.schema import parse
from model import position
from model.position import PositionEncoding, Shape
from scripts import bench, check_gpu


@pytest.fixture
def options(tmp_path):
    """`options("rounds=3", ...)` for a small model on a small text, and one head of 64 channels."""
    small = [f"data.files={write_knots(tmp_path / 'corpus')}/*.txt", f"data.cache_dir={tmp_path}", "data=text"]
    small += ["device=cpu", "model.n_layer=2", "model.dim=32", "train_len=16", "trainer.batch_size=4", "rounds=2"]
    small += ["data.val_fraction=0.3", "steps=1", "n_head=1", f"nanogpt={tmp_path}", "shapes=[[2,4,32,16,4]]"]

    def made(*overrides):
        with cli.composed("bench", "mode=peers", *small, *overrides) as found:
            return parse(bench.BenchOptions, cli.plain(found))

    made.small = small
    return made


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


def test_a_gpu_is_checked(options, script, monkeypatch, compiled_without_code):
    """On a CPU, without code generation, and as if it had no fused kernel for grouped heads in fp32."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def fused(q, *args, **kwargs):
        if kwargs["enable_gqa"] and q.dtype == torch.float32:
            raise RuntimeError("No viable backend\nof many")
        return sdpa(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    small = [*options.small, "model=tiny", "encodings=[rope,t5]", "lengths=[16]", "nanogpt=null"]
    code, out, err = script(check_gpu, *small)
    torch._dynamo.reset()
    assert code == 1, err
    lines = out.splitlines()
    checks = {}
    for line in lines:
        if "(CPU " in line:
            name = line.split(" | ")[0].removeprefix("| ")
            checks[name] = line
    special = ["gpt_oss, sinks", "t5, sinks", "rope, documents", "kerple, documents", "cope, documents"]
    special += ["fire, documents", "relative, documents"]
    special += ["cope, 1100 tokens", "stick_breaking, 1100 tokens", "path, 1100 tokens"]
    assert list(checks)[2:] == special
    right = [name for name, line in checks.items() if line.endswith("| yes |")]
    assert right == ["t5", "t5, sinks", *special[3:]]
    assert checks["rope"].endswith("| fails: No viable backend | **no** |")
    graphs = {}
    for line in lines:
        if line.startswith(("| eager", "| compiled")):
            name, number, *_ = line.split(" | ")
            graphs[name] = number
    # One of the blocks, one of the loss.
    assert graphs == {"| eager": "0", "| compiled": "2", "| compiled, checkpointing": "2"}
    assert "Self CPU" in out  # the profile
    assert "Left out" not in out
    # Batches of 1 and 16.
    assert out.count("\n|  | forward, 16 | both, 16 | compiled, 16 |") == 1
    assert out.count("\n|  | forward, 16 | both, 16 | MB, 16 |") == 1
    assert out.count("| SDPA |") == 2
    assert "## Verdict, without kernels" in out
    wrong = "not exact: rope; gpt_oss, sinks; rope, documents"
    # Speed and memory of rope, t5, the window and sinks; and training.
    assert re.match(rf"{wrong}; \d of 9 targets met", out.strip().splitlines()[-1])


def test_a_check_that_is_out_of_time_names_what_it_left_out(options, script):
    """Nothing is called right that was not measured."""
    small = [*options.small, "model=tiny", "encodings=[rope]", "lengths=[16]", "nanogpt=null", "compiled=false"]
    steps = {"": "compiled", "share of 1 TFLOP/s": "0.40"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_gpu, "speed", lambda *args, **options: steps)
        patch.setattr(check_gpu, "profile", lambda options: "")
        code, out, _ = script(check_gpu, *small, "minutes=1e-9", "kernels=false")
    assert code == 0
    (left_out,) = re.findall("Left out after 1e-09 minutes: (.*)\\.\n", out)
    assert left_out.startswith("rope; gpt_oss, sinks; t5, sinks; rope, documents;")
    assert left_out.endswith("speed of SDPA; speed of rope; speed of nope, window of T/8; speed of nope, sinks")
    assert "all 0 checks are exact; 3 of 3 targets met" in out


@pytest.mark.parametrize(("difference", "right"), [(5e-4, "yes"), (5e-3, "**no**")])
def test_training_with_kernels_is_compared_with_training_without(options, monkeypatch, difference, right):
    """By the last ten losses of each."""

    def trained(cfg):
        assert (cfg.trainer.compile, cfg.model.n_layer) == (False, 2)
        yield from torch.full((gpu.TRAINED - 10,), 9.0 + cfg.trainer.kernels)
        while True:
            yield torch.tensor(2.0 + difference * cfg.trainer.kernels)

    monkeypatch.setattr(gpu, "trained", trained)
    row = gpu.agreement(options(), "kerple")
    assert row == {"": "kerple", "with kernels": f"{2 + difference:.4f}", "without": "2.0000", "right": right}


def test_the_verdict_names_what_is_wrong_and_what_is_slow():
    sdpa = {"": "SDPA", "forward, 16": "3 ms", "compiled, 16": "9 ms", "MB, 16": "4.0"}
    rope = {"": "rope", "compiled, 16": "1.15 (1.1 to 1.2)", "compiled, 32": "1.2 (1.1 to 1.3)", "MB, 16": "8.1"}
    dca = {"": "dca", "forward, 16": "2.5 (2.0 to 2.8)", "compiled, 16": "9 (8 to 10)"}
    steps = [{"": "eager", "share of 2 TFLOP/s": "0.2"}, {"": "compiled", "share of 2 TFLOP/s": "0.37"}]
    checks = [{"": "rope", "right": "yes"}]
    missed = "rope at 32 tokens (1.2, target 1.15); memory of rope at 16 tokens (2.02, target 2)"
    missed += "; dca at 16 tokens, forward (2.5, target 2); share of a large product in training (0.37, target 0.38)"
    found = gpu.verdict(checks, [sdpa, rope, dca], steps)
    assert found == f"all 1 checks are exact; 1 of 5 targets met, missed: {missed}"
    assert gpu.verdict([*checks, {"": "t5", "right": "**no**"}], [sdpa], []) == "not exact: t5; 0 of 0 targets met"


def test_a_mistake_is_one_message(script):
    code, _, err = script(bench, "mode=peers", "nanogpt=no/such/folder")
    assert (code, "checkout of nanoGPT" in err, "Traceback" in err) == (2, True, False)


@pytest.fixture
def compiled_without_code(monkeypatch):
    """torch.compile traces, and generates no code."""
    compile = torch.compile

    def traced(*args, **kwargs):
        return compile(*args, **kwargs | {"backend": "eager"})

    monkeypatch.setattr(torch, "compile", traced)


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
