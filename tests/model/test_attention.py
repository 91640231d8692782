"""Attention against loops over single numbers in float64: windows, biases, grouped queries, cached keys."""

import collections
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, at_last_scale, build_pe
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import (
    BLOCK,
    Context,
    KVCache,
    attention,
    fused_backward,
    fused_forward,
    has_log_sums,
    sdpa,
)
from model.position.layer import make_context

D, SCALE = 8, 0.3
LENGTHS = [(5, 5), (2 * BLOCK + 30, 2 * BLOCK + 30), (BLOCK + 3, 2 * BLOCK + 30), (1, BLOCK + 9)]  # queries, keys


def inputs(queries, keys, window=None, heads=4, kv_heads=2):
    torch.manual_seed(0)
    q = torch.randn(2, heads, queries, D, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, kv_heads, keys, D, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, kv_heads, keys, D, dtype=torch.float64, requires_grad=True)
    pos = torch.arange(keys)
    return (q, k, v), Context(pos[-queries:], pos, keys, None, SCALE, window)


def bias(q, ctx):
    """Of content and distance, [B, H, Tq, Tk]."""
    return 0.1 * q.sum(-1, keepdim=True) * ctx.distance


def by_loops(q, k, v, *, window=None, biased=False, sinks=None):
    """Attention of one query after the other; the queries are the newest tokens."""
    past = k.size(2) - q.size(2)
    groups = q.size(1) // k.size(1)
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    rows = []
    for n in range(q.size(2)):
        i = past + n
        first = 0
        if window is not None:
            first = max(0, i - window + 1)
        query = q[:, :, n]
        scores = SCALE * (query[:, :, None] * k[:, :, first : i + 1]).sum(-1)  # [B, H, keys seen]
        if biased:
            distance = i - torch.arange(first, i + 1)
            scores = scores + 0.1 * query.sum(-1, keepdim=True) * distance
        weights = scores.exp()[..., None] / scores.exp().sum(-1)[..., None, None]
        if sinks is not None:
            weights = scores.exp()[..., None] / (scores.exp().sum(-1) + sinks.exp())[..., None, None]
        rows.append((weights * v[:, :, first : i + 1]).sum(-2))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40, BLOCK + 20])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_outputs_and_gradients(queries, keys, window, biased, with_sinks):
    (q, k, v), ctx = inputs(queries, keys, window)
    leaves = [q, k, v]
    if with_sinks:
        leaves.append(torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True))
        ctx = replace(ctx, sinks=leaves[3])
    out = attention(q, k, v, ctx, bias=bias if biased else None)
    expected = by_loops(*leaves[:3], window=window, biased=biased, sinks=ctx.sinks)
    assert_same(out, expected, leaves)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_never_meet_the_math_kernel_on_cuda(monkeypatch, dtype, masked):
    """There PyTorch's fused kernels take them in 16 bit without a mask; else keys and values are repeated."""
    kernel = F.scaled_dot_product_attention
    calls = []

    def look(q, k, v, **options):
        calls.append((options["enable_gqa"], k.size(1)))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    with FakeTensorMode():  # a GPU that computes nothing
        q = torch.empty(1, 4, 9, D, device="cuda", dtype=dtype)
        k = torch.empty(1, 2, 9, D, device="cuda", dtype=dtype)
        visible = None
        if masked:
            visible = torch.ones(9, 9, dtype=torch.bool, device="cuda")
        assert sdpa(q, k, k, scale=SCALE, visible=visible, causal=not masked).shape == q.shape
    grouped = dtype == torch.bfloat16 and not masked
    assert calls == [(grouped, 2 if grouped else 4)]


class Count(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def test_queries_after_older_keys_are_two_fused_calls():
    """Forward and backward, without a mask."""
    (q, k, v), ctx = inputs(300, 700)
    with Count() as counted:
        attention(q, k, v, ctx).sum().backward()
    name = "_scaled_dot_product_flash_attention_for_cpu"
    fused = {call: n for call, n in counted.calls.items() if "attention" in call}
    assert fused == {name: 2, f"{name}_backward": 2}


def test_the_fused_calls_fit_the_private_operators_of_cuda(monkeypatch):
    """By their shapes alone: a GPU that computes nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        q = torch.empty(2, 4, 300, D, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 4, 700, D, device="cuda", dtype=torch.bfloat16)
        assert has_log_sums(q, k, k)
        assert not has_log_sums(q.float(), k.float(), k.float())
        out, log_sums, *state = fused_forward(q, k, k, causal=False, scale=SCALE)
        grads = fused_backward(out, q, k, k, out, log_sums, *state, causal=False, scale=SCALE)
        assert (out.shape, log_sums.shape) == (q.shape, q.shape[:3])
        assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_a_full_window_is_copied_once_in_as_many_tokens():
    """Of one token after the other: moving the window at every token would cost its length for each of them."""
    cache = KVCache(n_layer=1)
    window = 16
    n = 200
    moves = 0
    previous = None
    for i in range(n):
        kept = cache.append(0, window, k=torch.tensor([[i]]))["k"]
        first = max(0, i - window + 1)
        assert kept.flatten().tolist() == list(range(first, i + 1))
        # Two buffers that follow each other are alive at once, so they never have the same address.
        address = kept.untyped_storage().data_ptr()
        if address != previous:
            moves += 1
        previous = address
    assert moves <= n / (window - 1) + 5  # while it fills, the buffer doubles


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "relative", "profiles", "rerope", "dca"])
def test_scores_are_not_rounded_to_16_bit(name):
    """So bf16 costs every encoding what it costs RoPE, whose fused kernel keeps scores in fp32; here they are large."""

    def error(name):
        torch.manual_seed(0)
        pe = at_last_scale(build_pe(name, train_len=64))
        pos = torch.arange(300)
        q, k, v = (2.5 * torch.randn(3, 1, 4, 300, 16)).bfloat16()
        x = torch.randn(1, 300, 64)
        with torch.autocast("cpu", torch.bfloat16):
            state = pe.state(x)
            out = pe.attend(q, k, v, state, make_context(pe, pos, 300, 300))
        state = {key: value.double() for key, value in state.items()}
        pe.double()
        exact = pe.attend(q.double(), k.double(), v.double(), state, make_context(pe, pos, 300, 300))
        return (out - exact).norm() / exact.norm()

    assert error(name) < 1.5 * error("rope")
