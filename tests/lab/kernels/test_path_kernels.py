"""PaTH's Triton kernels against its definition, in Triton's interpreter, on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from conftest import build_gpt, build_pe
from seen_keys import first_seen, ranges, visible
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.zoo.path import PaTH, within_block
from model.attention import for_heads_of, softmax
from model.position.layer import attend, make_context

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab.kernels import path as kernels
from lab.kernels import reflections

T = 71  # five tiles, of which the last one is not full
SCALE = 0.25


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels, which have tiles of 16 tokens and spans of two tiles."""
    calls = []
    whole = kernels.path
    monkeypatch.setattr(kernels, "path", lambda *args, **options: calls.append(args) or whole(*args, **options))
    monkeypatch.setattr(kernels, "tiles", lambda *_: reflections.Tiles(16, 2, 4, 4, 1))
    monkeypatch.setattr(kernels, "CHUNK", 48)  # the backward pass takes several
    return calls


def drawn(dtype, *, rows=1, n_head=1, n_kv_head=1, length=T, head_dim=16, gates=False, sinks=False):
    """Inputs of attention by name; queries, keys and values are rounded to 16 bit."""
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator)

    sizes = {"q": n_head, "k": n_kv_head, "v": n_kv_head}
    inputs = {name: random(rows, heads, length, head_dim).half().to(dtype) for name, heads in sizes.items()}
    inputs["w"] = F.normalize(random(rows, n_kv_head, length, head_dim), dim=-1)
    inputs["beta"] = 2 * random(rows, n_kv_head, length, 1).sigmoid()
    if gates:
        inputs["keys"] = random(rows, n_head, length).double().abs().div(20).cumsum(2)
    if sinks:
        inputs["sinks"] = random(n_head)
    return inputs


def by_definition(first, q, k, v, w, beta, keys=None, sinks=None):
    """Attention to one block of all tokens."""
    k, v, w, beta = (for_heads_of(q, x) for x in (k, v, w, beta))
    logits, _ = within_block(q, k, w, beta)
    scores = logits * SCALE
    if keys is not None:
        scores = scores + (keys[:, :, None] - keys[..., None]).to(scores.dtype)
    return softmax(scores.masked_fill(~visible(first)[:, None], -torch.inf), sinks) @ v


def by_kernel(first, **inputs):
    return kernels.path(**inputs, **ranges(first), scale=SCALE)


def results(attention, first, inputs, dtype=None):
    """Output and gradients of all inputs, in `dtype` or the inputs' own."""
    leaves = {name: x.to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    out = attention(first, **leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).half().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)]


# What is drawn, what is seen, and the tiles of a span.
CASES = {
    "all keys": ({}, {}, 2),
    "grouped heads, gates": ({"n_head": 4, "n_kv_head": 2, "gates": True, "length": 35}, {}, 1),
    "24 channels, sinks": ({"head_dim": 24, "sinks": True}, {}, 3),
    "a window, gates, sinks": ({"n_head": 2, "gates": True, "sinks": True}, {"window": 40}, 2),
    "one other key": ({"gates": True}, {"window": 2}, 2),
    "documents and a window": ({"gates": True, "rows": 2}, {"documents": [[37, 50], [1]], "window": 30}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_all_gradients_are_those_of_the_definition_in_float64(case, monkeypatch):
    options, seen, span = CASES[case]
    monkeypatch.setattr(kernels, "tiles", lambda *_: reflections.Tiles(16, span, 4, 4, 1))
    first = first_seen(options.get("rows", 1), options.get("length", T), **seen)
    inputs = drawn(torch.float32, **options)
    exact = results(by_definition, first, inputs, torch.float64)
    usual = results(by_definition, first, inputs)
    found = results(by_kernel, first, inputs)
    for name, a, b, c in zip(("out", *inputs), found, usual, exact, strict=True):
        error = (a.double() - c).norm()
        limit = (b.double() - c).norm()
        assert error <= 2 * limit + 1e-6 * c.norm(), (name, float(error), float(limit))


def test_16_bit_is_rounded_as_16_bit():
    """Scores, reflections and sums are fp32, so what is lost is what rounding weights and outputs loses.

    The gradients of gates and sinks are sums in fp32, since they nearly cancel.
    """
    first = first_seen(1, T, window=50)
    inputs = drawn(torch.float16, n_head=2, gates=True, sinks=True)
    exact = results(by_definition, first, inputs, torch.float64)
    found = results(by_kernel, first, inputs)
    for name, a, b in zip(("out", *inputs), found, exact, strict=True):
        limit = (
            1e-5 if name in ("keys", "sinks") else 1e-3
        )  # the gates' gradients nearly cancel, and are summed in fp32
        assert (a.double() - b).norm() <= limit * b.norm(), name


def test_gates_of_a_long_text_keep_the_precision_of_near_keys():
    """Sums of thousands, whose neighbours differ by a thousandth: in fp32 alone their differences would be lost."""
    generator = torch.Generator().manual_seed(0)
    keys = 5000 + torch.rand(1, 1, T, dtype=torch.float64, generator=generator) / 1000
    q = k = torch.zeros(1, 1, T, 16)
    v = torch.randn(1, 1, T, 16, generator=generator).sign() * 1e3
    i = torch.arange(T, dtype=torch.int32)
    beta = torch.ones(1, 1, T, 1)
    last = torch.full_like(i, T - 1)
    out = kernels.path(q, k, v, F.normalize(v, dim=-1), beta, torch.zeros_like(i), last, scale=1.0, keys=keys)
    scores = (keys[:, :, None] - keys[..., None]).masked_fill(i > i[:, None], -torch.inf)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=2e-3)


ENCODINGS = {
    "path, grouped": {"n_kv_head": 1, "window": 40}, "path_fox": {"temperature": "ssmax"},
}  # fmt: skip


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("case", ENCODINGS)
def test_a_layer_with_kernels_is_the_layer_without(case, gaps, calls):
    length = 40
    pos = torch.arange(length)
    if gaps:
        pos = pos + pos // 3
    text_length = int(pos[-1]) + 1
    pe = build_pe(case.split(",")[0], n_head=2, **ENCODINGS[case])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, length, 16, generator=generator).requires_grad_() for n in (2, pe.n_kv_head, pe.n_kv_head)
    )
    x = torch.randn(1, length, 64, generator=generator).requires_grad_()
    inputs = [q, k, v, x, *pe.parameters()]
    grad = torch.randn(q.shape, generator=generator)
    both = []
    for with_kernels in (False, True):
        ctx = make_context(pe, pos, length, text_length, kernels=with_kernels)
        assert ctx.has_gaps == gaps
        out = attend(pe, q, k, v, pe.state(x), ctx)
        both.append([out, *torch.autograd.grad(out, inputs, grad)])
        assert len(calls) == with_kernels
    torch.testing.assert_close(both[1], both[0], rtol=1e-4, atol=2e-5)


def test_a_compiled_network_is_one_graph_with_kernels(calls):
    net = build_gpt("path_fox", train_len=20, sinks=True, n_layer=1, n_head=2, n_kv_head=1, dim=32).train()
    net.kernels = True
    idx = torch.arange(20).view(1, 20)
    parameters = list(net.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(idx, targets=idx), parameters) for f in (compiled, net))
    torch._dynamo.reset()
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_documents_taken_out_are_read_with_kernels(calls):
    """The convolution crosses documents in packed rows, so they are read one by one."""
    losses = []
    for with_kernels in (False, True):
        net = build_gpt("path_fox", train_len=40, n_layer=1, n_head=1, n_kv_head=1, dim=16).train()
        net.document_end, net.kernels = 49, with_kernels
        idx, targets = torch.randint(49, (2, 2, 40), generator=torch.Generator().manual_seed(0))
        idx[0, [6, 7, 30]] = idx[1, 20] = 49
        loss = net(idx, targets=targets, documents=net.documents(idx))
        losses.append((loss.detach(), torch.autograd.grad(loss, list(net.parameters()))))
    assert calls
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_the_check_at_the_start_of_a_run_finds_a_wrong_kernel(monkeypatch):
    monkeypatch.setattr(kernels, "tiles", lambda *_: reflections.Tiles(128, 1, 4, 4, 1))  # so that they are few
    assert max(kernels.errors("cpu", torch.float32).values()) < 1e-5
    monkeypatch.setattr(kernels, "LOG2E", kernels.tl.constexpr(1.44))
    assert min(kernels.errors("cpu", torch.float32).values()) > 1e-4


class Reversed(PaTH):
    """A user's own, which reflects by other vectors."""

    def reflections(self, k, state, past):
        return super().reflections(k, state | {"w": -state["w"].flip(-1)}, past)


class Gated(PaTH):
    """A user's own, with gates that grow with the strength of the reflections."""

    def log_gate_sums(self, state):
        return -state["beta"].cumsum(1)


def test_gates_of_a_subclass_are_seen(calls):
    pe = build_pe("path", n_head=2, n_kv_head=2)
    pe.__class__ = Gated
    pos = torch.arange(20)
    generator = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 1, 2, 20, 16, generator=generator).unbind()
    state = pe.state(torch.randn(1, 20, 64, generator=generator))
    found, expected = (
        attend(pe, q, k, v, state, make_context(pe, pos, 20, 20, kernels=with_kernels))
        for with_kernels in (True, False)
    )
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_where_no_kernel_serves_the_definition_does(calls):
    """One token of a cache, float64, heads whose matrices are too large for a GPU, and reflections of a user's own."""
    pos = torch.arange(20)
    pe = build_pe("path", n_head=2)
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    state = pe.state(torch.randn(1, 20, 64))
    attend(pe, q[:, :, -1:], k, v, state, make_context(pe, pos, 1, 20, kernels=True))
    mine = build_pe("path", n_head=2)
    mine.__class__ = Reversed
    ctx = make_context(mine, pos, 20, 20, kernels=True)
    attend(mine, q, k, v, state, ctx)
    exact = build_pe("path", n_head=2).double()
    state = exact.state(torch.randn(1, 20, 64, dtype=torch.float64))
    attend(exact, q.double(), k.double(), v.double(), state, make_context(exact, pos, 20, 20, kernels=True))
    wide = build_pe("path", n_head=1, head_dim=136)
    q, k, v = torch.randn(3, 1, 1, 20, 136).unbind()
    attend(wide, q, k, v, wide.state(torch.randn(1, 20, 64)), make_context(wide, pos, 20, 20, kernels=True))
    assert not calls


def kept(length):
    """Numbers that the backward pass keeps."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    with FakeTensorMode():
        q, k, v, w = (torch.empty(1, n, length, 16, requires_grad=True) for n in (4, 2, 2, 2))
        beta = torch.empty(1, 2, length, 1, requires_grad=True)
        keys = torch.empty(1, 4, length, requires_grad=True)
        rows = torch.empty(length, dtype=torch.int32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = kernels.path(q, k, v, w, beta, rows, rows, scale=1.0, keys=keys)
        inputs = (q, k, v, w, beta, keys)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in inputs]
    return sum(sizes)


def test_what_the_backward_pass_keeps_grows_with_the_length_and_not_its_square():
    assert kept(1024) == pytest.approx(4 * kept(256), rel=1e-2)
