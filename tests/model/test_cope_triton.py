"""The Triton kernel of CoPE attention against its definition: on a GPU, or in Triton's interpreter.

The interpreter multiplies bf16 wrongly, so that without a GPU fp32 alone is tested.
"""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, build_gpt
from cope_cases import NAMES, assert_same, by_definition, inputs, results

from model.kernels import dispatch
from model.position.cope import cope_attention as definition

pytest.importorskip("triton", reason="triton is not installed: pip install triton (Linux)")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from model.kernels import cope_triton  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # a gate of 0, in the interpreter


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setenv("ROPEWALK_COPE", "triton")


@pytest.fixture
def small(monkeypatch):
    """Blocks, tiles and chunks so small that a few dozen tokens have many; and no two alike, where they may differ."""
    cut = [(32, 32, 16), (32, 32, 16), (16, 16, 16), (16, 32, 32)]
    tilings = cope_triton.Tilings(*(cope_triton.Tiling(*sizes, num_warps=4) for sizes in cut))
    monkeypatch.setattr(cope_triton, "tilings", lambda *_: tilings)
    monkeypatch.setattr(cope_triton, "QUERY_CHUNK", 64)


def moved(x: dict) -> dict:
    return {n: t.detach().to(DEVICE).requires_grad_() for n, t in x.items()}


def compare(tolerance=2e-5, dtype=torch.float32, **shape) -> None:
    x = inputs(**{"batch": 1, "heads": 1, "kv_heads": 1, "dim": 32} | shape, dtype=dtype)
    exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    found = {n: t.cpu() for n, t in results(cope_triton.cope_attention, moved(x)).items()}
    assert {t.dtype for t in found.values()} == {dtype}
    assert_same(found, results(by_definition, exact), tolerance)


SHAPES = {
    "one token": {"length": 1, "npos": 16},
    "shorter than a block": {"length": 7},
    "ragged, in chunks": {"length": 65, "npos": 16},
    "gates closed, many positions": {"length": 65, "npos": 128, "gate": -5.0},
    "gates open": {"length": 65, "npos": 16, "gate": 40.0},
    "one position": {"length": 40, "npos": 1},
    "two positions": {"length": 40, "npos": 2},
    "a table that is no power of two": {"length": 40, "npos": 11, "gate": -1.0},
    "wide heads": {"length": 40, "npos": 16, "dim": 64},
    "grouped heads": {"length": 40, "heads": 4, "kv_heads": 2},
    "position queries": {"length": 40, "npos": 8, "extra": ("position_q",)},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_definition(small, shape):
    compare(**shape)


@pytest.mark.parametrize(("length", "npos", "gate"), [(130, 16, 0.0)] + [(517, 128, g) for g in (0, -3, -7)])
def test_with_its_own_tiles(length, npos, gate):
    if length > 130 and DEVICE == "cpu":
        pytest.skip("minutes in the interpreter")
    compare(length=length, npos=npos, gate=gate)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies bf16 wrongly")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("dim", dispatch.TRITON_HEAD_DIMS)
@pytest.mark.parametrize("gate", [0.0, -6.0])
def test_low_precision(dtype, tolerance, dim, gate):
    compare(length=700, dim=dim, npos=64, gate=gate, dtype=dtype, tolerance=tolerance)


def test_gates_at_saturation(small):
    """Gates of exactly 0 and 1: positions at integers."""
    for gate in (-1e3, 1e3):
        x = inputs(length=40, batch=1, heads=1, kv_heads=1, dim=32, gate=gate, dtype=torch.float32)
        exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
        found, expected = results(cope_triton.cope_attention, moved(x)), results(by_definition, exact)
        for name in ("out", "v"):  # the others are the rounding of logits of a thousand
            assert_same({name: found[name].cpu()}, {name: expected[name]}, 3e-4)
        assert all(t.isfinite().all() for t in found.values())


def test_the_shortcut_is_taken(small):
    """Open gates: no window is longer than what reaches the last position. Closed ones: every window holds all keys."""
    start = {}
    for gate in (40.0, -9.0):
        x = moved(inputs(length=65, batch=1, heads=1, kv_heads=1, dim=32, npos=9, gate=gate, dtype=torch.float32))
        _, _, first = cope_triton._forward(*(x[n].detach() for n in NAMES[1:5]), None, 32**-0.5)
        start[gate] = first[0, 0].tolist()
    # blocks of 32 queries: their first reaches position 8 among the keys before the block, which are read by 32
    assert start == {40.0: [0] * 64 + [32], -9.0: [0] * 65}


def test_causal(small):
    """Output t and its gradients know nothing of the tokens after t."""
    shape = {"length": 40, "batch": 1, "heads": 1, "kv_heads": 1, "dim": 32, "dtype": torch.float32}
    x, y = inputs(**shape), inputs(**shape, seed=1)
    changed = {n: torch.cat((x[n][:, :, :21], y[n][:, :, 21:]), dim=2) for n in ("q", "k", "v")}
    changed["table"] = x["table"]
    x, changed = moved(x), moved(changed)
    a, b = (cope_triton.cope_attention(**z, scale=0.3) for z in (x, changed))
    assert torch.equal(a[:, :, :21], b[:, :, :21])
    assert (a[:, :, 21:] - b[:, :, 21:]).abs().min() > 0
    grads = torch.autograd.grad(a[:, :, :21].sum(), [x["q"], x["k"], x["v"]])
    assert all(g[:, :, 21:].eq(0).all() for g in grads)


def test_strided_inputs_and_memory_never_written(small):
    """Views of one [B, T, 3 H D] projection, an expanded gradient, and NaN wherever nothing was written."""
    dim, heads, length = 32, 2, 40
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, length, 3 * heads * dim, generator=generator).to(DEVICE).requires_grad_()
    q, k, v = (x.unflatten(-1, (heads, dim)).transpose(1, 2) for x in qkv.chunk(3, dim=-1))
    table = torch.randn(dim, 5, generator=generator).to(DEVICE).requires_grad_()
    torch.use_deterministic_algorithms(True)  # fills empty tensors
    try:
        found = torch.autograd.grad(cope_triton.cope_attention(q, k, v, table, scale=0.2).sum(), [qkv, table])
    finally:
        torch.use_deterministic_algorithms(False)
    expected = torch.autograd.grad(by_definition(q, k, v, table, scale=0.2).sum(), [qkv, table])
    assert_same(dict(enumerate(found)), dict(enumerate(expected)), 2e-5)


def test_compiled_equals_eager(small):
    x = moved(inputs(length=20, batch=1, heads=2, kv_heads=1, dim=32, dtype=torch.float32))

    def step(x):
        return torch.tanh(cope_triton.cope_attention(2 * x["q"], x["k"], x["v"], x["table"], scale=0.3))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(x).sum(), list(x.values())) for f in (compiled, step))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "options"), [("cope", {"scaling": "code", "shared": True}), ("cope_rope", {})])
def test_network_equals_that_without_the_kernel(small, monkeypatch, name, options):
    net = build_gpt(name, pe=options, n_layer=1, n_head=2, n_kv_head=1, dim=32).to(DEVICE).train()
    idx = torch.randint(50, (1, 34), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = {}
    for kernel in ("triton", "torch"):
        monkeypatch.setenv("ROPEWALK_COPE", kernel)
        assert ("Triton" in net.encodings[0].describe()[0]) == (kernel == "triton")
        loss = net.loss(idx[:, :-1], idx[:, 1:])
        grads = torch.autograd.grad(loss, list(net.parameters()))
        found[kernel] = {"loss": loss.detach()} | {
            n: g for (n, _), g in zip(net.named_parameters(), grads, strict=True)
        }
    assert_same(found["triton"], found["torch"], 2e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_16_bit_kernels_spill_no_registers():
    """Compiled for two generations of GPUs; no GPU is needed. Fails if any does."""
    command = [sys.executable, "tests/model/compile_kernels.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kernel_that_is_wrong_is_not_chosen(monkeypatch):
    test = dispatch.self_test.__wrapped__
    device = torch.device(DEVICE)
    assert test(device, torch.float32, 32, definition) == ""

    def wrong(*arguments, **options):
        return cope_attention(*arguments, **options) * 1.1

    def unable(*arguments, **options):
        raise RuntimeError("out of shared memory")

    cope_attention = cope_triton.cope_attention
    monkeypatch.setattr(cope_triton, "cope_attention", wrong)
    assert "output is 1e-01 off" in test(device, torch.float32, 32, definition)
    monkeypatch.setattr(cope_triton, "cope_attention", unable)
    assert "out of shared memory" in test(device, torch.float32, 32, definition)


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"device": CPU}, "the device is cpu"),
        ({"device": torch.device("mps")}, "the device is mps"),
        ({"found": None}, "triton is not installed"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"head_dim": 80}, "no head_dim 80"),
        ({"dtype": torch.float64}, "no float64"),
        ({"asked": "torch"}, "ROPEWALK_COPE=torch"),
        ({"wrong": "dq is 10% off"}, "dq is 10% off"),
        ({"wrong": "dq is 10% off", "asked": "triton"}, ""),
    ],
    ids=str,
)
def test_choice(monkeypatch, options, why):
    given = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": 64, "definition": definition} | options
    found, capability = given.pop("found", "a module"), given.pop("capability", (9, 0))
    wrong = given.pop("wrong", "")
    monkeypatch.setattr(dispatch, "self_test", lambda *_: wrong)
    monkeypatch.setenv("ROPEWALK_COPE", given.pop("asked", "auto"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    reason = dispatch.why_not_triton(**given)
    assert (why in reason) if why else reason == ""


def test_choice_refused(monkeypatch):
    monkeypatch.setenv("ROPEWALK_COPE", "cuda")
    with pytest.raises(ValueError, match="ROPEWALK_COPE=cuda must be auto, torch or triton"):
        dispatch.why_not_triton(CPU, torch.float32, 64, definition)
    monkeypatch.setenv("ROPEWALK_COPE", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="ROPEWALK_COPE=triton cannot be met: the device is cpu"):
        dispatch.why_not_triton(CPU, torch.float32, 64, definition)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("cope", {"gates": "values"}, "not of the values"),
        ("cope", {"window": 8}, "neither a bias nor a window"),
        ("cope_relative", {}, "neither a bias nor a window"),
    ],
)
def test_what_the_kernel_cannot_do_is_done_in_blocks(name, options, why):
    assert why in build_gpt(name, pe=options).encodings[0].describe()[0]
