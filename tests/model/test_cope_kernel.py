"""The linear-memory CoPE attention against its definition."""

import contextlib

import pytest
import torch
from conftest import build_gpt
from cope_cases import NAMES, assert_same, by_definition, inputs, results
from torch._dynamo.testing import CompileCounterWithBackend

from model.kernels import choice, cope


@pytest.fixture
def small(monkeypatch):
    """Blocks and tiles so small that a few dozen tokens have many."""
    monkeypatch.setattr(cope, "ROWS", 8)
    monkeypatch.setattr(cope, "TILE", 12)
    monkeypatch.setattr(cope, "SCORES", 200)


def visited(x: dict) -> torch.Tensor:
    """Where the keys each query visited end, [B Hkv, T], counted from the last token to the first."""
    return cope._forward(*(x.get(name) for name in NAMES[1:]), x["q"].size(-1) ** -0.5)[2][:, 0]


SHAPES = {
    "ragged": {"length": 53},
    "one token": {"length": 1},
    "shorter than a block": {"length": 5},
    "whole blocks and tiles": {"length": 48},
    "one position": {"length": 40, "npos": 1},
    "two positions": {"length": 40, "npos": 2},
    "more positions than tokens": {"length": 40, "npos": 64},
    "gates closed": {"length": 53, "gate": -5.0},
    "gates open": {"length": 53, "gate": 40.0},
    "grouped heads": {"length": 53, "heads": 6, "kv_heads": 2},
    "one key for many heads": {"length": 20, "heads": 12, "kv_heads": 1},
}


@pytest.mark.parametrize("extra", [(), ("position_q",), ("gate_keys",), ("position_q", "gate_keys")])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_definition(small, shape, extra):
    x = inputs(**shape, extra=extra)
    assert_same(results(cope.cope_attention, x), results(by_definition, x), 1e-10)


@pytest.mark.parametrize("gate", [0.0, -3.0, -7.0])
@pytest.mark.parametrize("npos", [8, 64])
def test_equals_definition_fp32(gate, npos):
    x = inputs(length=517, batch=1, kv_heads=1, dim=32, npos=npos, gate=gate, dtype=torch.float32)
    x["table"].data *= 0.3  # a rough table multiplies the rounding of the positions, in both versions
    assert_same(results(cope.cope_attention, x), results(by_definition, x), 1e-5)


@pytest.mark.parametrize("extra", [(), ("position_q", "gate_keys")])
@pytest.mark.parametrize("gate", [1.0, -3.0])
def test_gradcheck(small, gate, extra):
    x = inputs(length=25, batch=1, kv_heads=1, dim=3, npos=4, gate=gate, extra=extra)

    def attention(*tensors):
        return cope.cope_attention(**dict(zip(x, tensors, strict=True)), scale=0.6)

    assert torch.autograd.gradcheck(attention, tuple(x.values()), fast_mode=False)


def test_gates_at_saturation(small):
    """Gates of exactly 0 and 1, and positions at integers."""
    for gate in (-1e3, 1e3):
        x = inputs(length=53, gate=gate)
        found = results(cope.cope_attention, x)
        # a gradient that is zero in the definition is the rounding of logits of a thousand here
        assert_same({n: found[n] for n in ("out", "v")}, {n: results(by_definition, x)[n] for n in ("out", "v")}, 1e-10)
        assert all(t.isfinite().all() for t in found.values())


def test_the_shortcut_is_taken(small):
    """Open gates: no block visits more than the tile in which its positions reach the last one."""
    length, rows, tile = 100, cope.ROWS, cope.TILE
    x = inputs(length=length, batch=1, gate=40.0, npos=5)
    starts = torch.arange(length) // rows * rows
    # the block's oldest query visits from itself on, and needs npos - 1 gates
    tiles = -(-(rows + 5 - 2) // tile)
    assert visited(x).eq((starts + tiles * tile).clamp(max=length)).all()
    assert_same(results(cope.cope_attention, x), results(by_definition, x), 1e-10)


def test_without_fused_attention(small, monkeypatch):
    """A device that has none visits every key, with the same result."""
    x = inputs(length=53, npos=4)
    expected = results(cope.cope_attention, x)
    monkeypatch.setattr(cope, "_has_flash", lambda _: False)
    assert visited(x).eq(53).all()
    assert_same(results(cope.cope_attention, x), expected, 1e-10)


def test_heads_that_end_differently(small, monkeypatch):
    """One head clamps at once and one never does; heads are treated together only if they end alike."""
    x = inputs(length=53, npos=4, batch=1, heads=4, kv_heads=4)
    with torch.no_grad():
        x["k"][:, 1, :, 0] = -9.0
        x["k"][:, 2:, :, 0] = 9.0
    monkeypatch.setattr(cope, "SCORES", cope.ROWS * cope.TILE)  # one head at a time in the forward
    ends = visited(x)
    assert ends[1].eq(53).all()
    assert (ends[2:, 0] < 53).all()
    assert_same(results(cope.cope_attention, x), results(by_definition, x), 1e-10)


def test_causal(small):
    """Output t and its gradients know nothing of the tokens after t, exactly."""
    x, y = inputs(length=53), inputs(length=53, seed=1)
    changed = {n: torch.cat((x[n][:, :, :30], y[n][:, :, 30:]), dim=2) for n in ("q", "k", "v")}
    changed["table"] = x["table"]
    a, b = (cope.cope_attention(**z, scale=0.3) for z in (x, changed))
    torch.testing.assert_close(a[:, :, :30], b[:, :, :30], rtol=0, atol=1e-14)
    assert (a[:, :, 30:] - b[:, :, 30:]).abs().min() > 0
    grads = torch.autograd.grad(a[:, :, :30].sum(), [x["q"], x["k"], x["v"]])
    assert all(g[:, :, 30:].eq(0).all() for g in grads)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
def test_low_precision(dtype, tolerance):
    """Rounded inputs, computed in fp32: only the rounding of the output and the gradients is left."""
    x = inputs(length=600, batch=1, dim=32, npos=16, dtype=dtype)
    exact = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    found, expected = results(cope.cope_attention, x), results(by_definition, exact)
    assert {t.dtype for t in found.values()} == {dtype}
    assert_same(found, expected, tolerance)


def test_autocast():
    """Inside autocast the operator computes as outside: bf16 in and out, fp32 table, nothing rounded in between."""
    x = inputs(length=300, batch=1, dim=16, npos=16, dtype=torch.bfloat16)
    x["table"] = x["table"].detach().float().requires_grad_()
    expected = results(cope.cope_attention, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(cope.cope_attention, x)
    assert found["table"].dtype == torch.float32
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_gradients_accumulate(small):
    x = inputs(length=53)
    for _ in range(2):
        cope.cope_attention(**x, scale=0.3).sum().backward()
    once = torch.autograd.grad(cope.cope_attention(**x, scale=0.3).sum(), list(x.values()))
    for tensor, grad in zip(x.values(), once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * grad)


def test_strided_inputs(small):
    """Channels that are not neighbours in memory, and a gradient that is an expanded number."""
    x = inputs(length=53, npos=4)
    strided = {n: t if n == "table" else t.detach().mT.contiguous().mT.requires_grad_() for n, t in x.items()}
    found = torch.autograd.grad(cope.cope_attention(**strided, scale=0.3).sum(), list(strided.values()))
    expected = torch.autograd.grad(by_definition(**x, scale=0.3).sum(), list(x.values()))
    assert_same(dict(zip(x, found, strict=True)), dict(zip(x, expected, strict=True)), 1e-10)


def test_every_element_is_written(small):
    """With memory from torch.empty filled with NaN, no NaN comes out."""
    torch.use_deterministic_algorithms(True)  # fills empty tensors
    try:
        assert torch.empty(3).isnan().all()
        for gate in (40.0, -5.0):
            x = inputs(length=53, heads=4, gate=gate, extra=("position_q", "gate_keys"))
            assert_same(results(cope.cope_attention, x), results(by_definition, x), 1e-10)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("extra", [(), ("position_q", "gate_keys")])
def test_operator_contract(small, extra):
    """Schema, shapes of the fake tensors, autograd registration and dynamic shapes, as PyTorch checks them."""
    x = inputs(length=21, heads=4, kv_heads=2, extra=extra)
    torch.library.opcheck(cope._forward, (*(x.get(name) for name in NAMES[1:]), 0.3))


def test_compiled_equals_eager():
    """One graph without a break, and at most two over five lengths."""
    graphs = CompileCounterWithBackend("aot_eager")

    def step(x):
        return torch.tanh(cope.cope_attention(2 * x["q"], x["k"], x["v"], x["table"], scale=0.3))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for length in (31, 64, 90, 200, 257):
        x = inputs(length=length)
        expected = torch.autograd.grad(step(x).sum(), list(x.values()))
        found = torch.autograd.grad(compiled(x).sum(), list(x.values()))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert graphs.frame_count <= 2


def peak(length: int, gate: float) -> int:
    """Bytes allocated at the worst moment of a forward and backward, above the inputs."""
    x = inputs(length=length, batch=1, heads=2, npos=16, gate=gate, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        results(cope.cope_attention, x)
    now = most = 0
    for event in sorted(
        (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("gate", [2.0, -9.0])
def test_memory_is_linear(monkeypatch, gate):
    """Twice the length takes at most twice the memory, whether positions clamp or not."""
    monkeypatch.setattr(cope, "SCORES", 0)  # so that buffers of a constant size do not flatter the ratio
    small, large = peak(1024, gate), peak(2048, gate)
    assert 1.7 < large / small < 2.1
    assert large < 2048 * 2048 * 2 * 4  # one number for each score would be more


def test_lengths_differ():
    x = inputs(length=5)
    with pytest.raises(AssertionError, match="4 queries and 5 keys"):
        cope.cope_attention(x["q"][:, :, 1:], x["k"], x["v"], x["table"], scale=1.0)


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "kernel", "why"),
    [
        ({}, "triton", "CUDA"),
        ({"device": CPU}, "torch", "the device is cpu"),
        ({"device": torch.device("mps")}, "torch", "the device is mps"),
        ({"found": None}, "torch", "triton is not installed"),
        ({"capability": (7, 5)}, "torch", "compute capability 8.0"),
        ({"gate_keys": True}, "torch", "gates of the attention's keys alone"),
        ({"head_dim": 80}, "torch", "no head_dim 80"),
        ({"dtype": torch.float64}, "torch", "no float64"),
        ({"asked": "torch"}, "torch", "ROPEWALK_COPE=torch"),
        ({"wrong": "dq is 10% off"}, "torch", "dq is 10% off"),
        ({"wrong": "dq is 10% off", "asked": "triton"}, "triton", "CUDA"),
    ],
    ids=str,
)
def test_choice(monkeypatch, options, kernel, why):
    given = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": 64, "gate_keys": False} | options
    found, capability = given.pop("found", "a module"), given.pop("capability", (9, 0))
    wrong = given.pop("wrong", "")
    monkeypatch.setattr(choice, "disagreement", lambda *_: wrong)
    monkeypatch.setenv("ROPEWALK_COPE", given.pop("asked", "auto"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    chosen, reason = choice.kernel_for(**given)
    assert chosen == kernel
    assert why in reason


def test_choice_refused(monkeypatch):
    monkeypatch.setenv("ROPEWALK_COPE", "cuda")
    with pytest.raises(ValueError, match="ROPEWALK_COPE=cuda must be auto, torch or triton"):
        choice.kernel_for(CPU, torch.float32, 64, gate_keys=False)
    monkeypatch.setenv("ROPEWALK_COPE", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="ROPEWALK_COPE=triton cannot be met: the device is cpu"):
        choice.kernel_for(CPU, torch.float32, 64, gate_keys=False)


def test_data_parallel(tmp_path):
    """DistributedDataParallel, in a group of one process, with gradients accumulated over two batches."""
    net = build_gpt("cope_rope", pe={"gates": "projection"}).train()
    tokens = torch.randint(50, (2, 2, 41), generator=torch.Generator().manual_seed(0))
    for idx in tokens:
        net.loss(idx[:, :-1], idx[:, 1:]).backward()
    expected = {n: p.grad.clone() for n, p in net.named_parameters()}
    net.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(net)
        for i, idx in enumerate(tokens):
            with parallel.no_sync() if i == 0 else contextlib.nullcontext():
                parallel(idx[:, :-1], targets=idx[:, 1:]).backward()
        assert_same({n: p.grad for n, p in net.named_parameters()}, expected, 1e-6)
    finally:
        torch.distributed.destroy_process_group()
