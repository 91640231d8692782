"""Benchmarks compare the same work, count memory rightly, and print their tables. No test looks at a time."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import write_knots
from process_helpers import CONTEXT

from app import cli
from benchmarks import attention, measure, rotation, training
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

    shape, scores = Shape(64, 1, 1, 64, 2048, 1), 4 * 2048**2
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
    bare, trained = (torch.stack(list(islice(train(cfg), 6))) for train in (training.bare, training.trained))
    torch.testing.assert_close(trained, bare, rtol=1e-5, atol=0)
    assert bare[5] < bare[0]


class InProcess:
    """measure.Worker without its process; every step takes half a second."""

    def __init__(self, steps, train, *arguments):
        self.training, self.losses = train(*arguments), []
        self()

    def __call__(self):
        self.losses.append(next(self.training).item())
        return 0.5


def test_peers(options, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "Worker", InProcess)
    source, model = Path(__file__).with_name("nanogpt_standin.py").read_text(), tmp_path / "model.py"
    model.write_text(source)
    (row,) = training.peers(options())
    assert row["network"] == "2 x 32, learned, batch 4 x 16"
    assert row["train.py, tokens/s"] == "128"
    model.write_text(source.replace("targets.flatten())", "targets.flatten()) * 1.03"))
    with pytest.raises(AssertionError, match="not close"):
        training.peers(options())


def test_both_take_turns_and_ratios_are_of_one_round():
    order, seconds = [], {"a": iter([1.0, 10.0, 2.0]), "b": iter([2.0, 10.0, 6.0])}
    a, b = (lambda name=name: order.append(name) or next(seconds[name]) for name in "ab")
    of_a, of_b = measure.interleave(a, b, 3)
    assert "".join(order) == "abbaab"
    assert measure.ratio(of_b, of_a) == "2.00 (1.50 to 2.50)"  # of 2, 1 and 3


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
    names = ["SDPA", "alibi", "pe: cope, npos_max: 8", "nope, window of T/8"]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in names]
    assert all(row.count("|") == head.count("|") for row in rows)


def test_a_gpu_is_checked(options, script, monkeypatch):
    """On a CPU, without code generation, and as if it had no fused kernel for grouped heads in fp32."""
    compile, sdpa = torch.compile, torch.nn.functional.scaled_dot_product_attention

    def fused(q, *args, **kwargs):
        if kwargs["enable_gqa"] and q.dtype == torch.float32:
            raise RuntimeError("No viable backend\nof many")
        return sdpa(q, *args, **kwargs)

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile(*args, **kwargs | {"backend": "eager"}))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    small = [*options.small, "model=tiny", "encodings=[rope,t5]", "lengths=[16]", "nanogpt=null"]
    code, out, err = script(check_gpu, *small)
    torch._dynamo.reset()
    assert code == 1, err
    checks = {line.split(" | ")[0][2:]: line for line in out.splitlines() if "(CPU " in line}
    assert list(checks)[2:] == [
        "gpt_oss, sinks",
        "t5, sinks",
        *(f"{pe}, documents" for pe in ("rope", "kerple", "cope")),
    ]
    right = [name for name, line in checks.items() if line.endswith("| yes |")]
    assert right == ["t5", "t5, sinks", "kerple, documents", "cope, documents"]
    assert checks["rope"].endswith("| fails: No viable backend | **no** |")
    trained = dict(line.split(" | ")[:2] for line in out.splitlines() if line.startswith(("| eager", "| compiled")))
    again = "2" if torch.__version__ < "2.12" else "1"
    assert trained == {"| eager": "0", "| compiled": "1", "| compiled, checkpointing": again}
    heads = [line for line in out.splitlines() if line.startswith("|  | forward, 16 | both, 16 | compiled, 16 |")]
    assert (len(heads), out.count("| SDPA |")) == (2, 2)  # batches of 1 and 16


def test_a_mistake_is_one_message(script):
    code, _, err = script(bench, "mode=peers", "nanogpt=no/such/folder")
    assert (code, "checkout of nanoGPT" in err, "Traceback" in err) == (2, True, False)


@pytest.mark.parametrize("compiled", [False, True])
def test_real_and_complex_rotations_compute_the_same(options, compiled, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile(*args, **kwargs | {"backend": "eager"}))
    length, dim = 48, 64
    small = options("mode=rotation", f"head_dim={dim}", "n_head=2")
    half, real, as_complex = (rotation.rotation(small, length, name, compiled) for name in rotation.ARITHMETIC)
    torch.testing.assert_close(as_complex["forward"](), real["forward"](), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(as_complex["both"]()[0], real["both"]()[0], rtol=1e-5, atol=1e-5)
    # Independent of both: Euler's formula in float64, pair by pair. The gradient is rotated back.
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(1, 2, length, dim, generator=generator).double() for _ in range(2))
    angle = torch.arange(length)[:, None].double() * 10_000.0 ** -(torch.arange(0, dim, 2).double() / dim)
    for given, sign, result in ((x, 1, as_complex["forward"]()), (grad, -1, as_complex["both"]()[0])):
        turned = torch.complex(given[..., 0::2], given[..., 1::2]) * torch.exp(sign * 1j * angle)
        torch.testing.assert_close(result[..., 0::2].double(), turned.real, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[..., 1::2].double(), turned.imag, rtol=1e-5, atol=1e-5)
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.exp(1j * angle)
    torch.testing.assert_close(
        half["forward"]().double(), torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-5
    )


def test_rotation_prints_its_table(script, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile(*args, **kwargs | {"backend": "eager"}))
    code, out, _ = script(bench, "mode=rotation", "device=cpu", "lengths=[16,32]", "n_head=1", "head_dim=8", "rounds=2")
    torch._dynamo.reset()
    assert code == 0
    head, _, *rows = out.strip().splitlines()[2:]
    assert head == "|  | forward, 16 | both, 16 | forward, 32 | both, 32 |"
    names = [f"| {name}, {how}" for name in rotation.ARITHMETIC for how in ("eager", "compiled")]
    assert [row.split(" | ")[0] for row in rows] == names
    assert [row.count(" ms") for row in rows] == [4, 0, 0, 0, 0, 0]
