"""CoPE's Triton kernels against its definition, in Triton's interpreter, on a CPU."""

import itertools

import pytest
import torch
from conftest import build_gpt, build_pe
from torch._subclasses.fake_tensor import FakeTensorMode

from model.position.cope import contextual_positions, cope_attention
from model.position.layer import attend, make_context

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab.kernels import cope as cope_kernels

T = 70  # some tiles, the last one not full
B = 2
SCALE = 0.25


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels."""
    calls = []
    cope = cope_kernels.cope
    monkeypatch.setattr(cope_kernels, "cope", lambda *args, **options: calls.append(args) or cope(*args, **options))
    monkeypatch.setattr(cope_kernels, "CHUNK", 32)  # the backward pass takes several
    return calls


def drawn(seed, dtype, *, n_head=2, n_kv_head=1, head_dim=16, npos_max=6, closed=0.0, own_gates=False, rotated=False,
          sinks=False, **_):  # fmt: skip
    """Inputs of attention by name, rounded to 16 bit. The more `closed`, the nearer to 0 are all gates."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator).half().to(dtype)

    def logits_of_gates():
        q = random(B, n_head, T, head_dim)
        k = random(B, n_kv_head, T, head_dim)
        if closed:
            q, k = q.abs(), -closed * k.abs()
        return q, k

    q, k = logits_of_gates()
    position_q, gate_keys = logits_of_gates()
    inputs = {"q": q, "k": k, "v": random(B, n_kv_head, T, head_dim), "table": random(head_dim, npos_max)}
    if own_gates or rotated:
        inputs["position_q"] = position_q
    if own_gates:
        inputs["gate_keys"] = gate_keys
    if sinks:
        inputs["sinks"] = random(n_head)
    return inputs


def seen(*, window=None, documents=None, **_):
    """The first key that each query sees, [B, T]; `documents` are where those after the first begin, in each row."""
    i = torch.arange(T)
    first = torch.zeros(B, T, dtype=torch.long)
    if documents:
        for row, begins in zip(first, documents, strict=True):
            for begin in begins:
                row[begin:] = begin
    if window:
        first = torch.maximum(first, i - window + 1)
    return first


def visible(first):
    i = torch.arange(T)
    return (i <= i[:, None]) & (i >= first[:, :, None])  # [B, T, T]


def is_smooth(inputs, first):
    """Whether no position is so near to an integer, where gradients jump, that rounding could move it across."""
    inputs = {name: x.double() for name, x in inputs.items()}
    q, k = inputs["q"], inputs["k"]
    if "gate_keys" in inputs:
        q, k = inputs["position_q"], inputs["gate_keys"]
    groups = q.size(1) // k.size(1)
    logits = SCALE * q @ k.repeat_interleave(groups, dim=1).mT
    seen = visible(first)[:, None].expand_as(logits)
    position = contextual_positions(logits, seen)[seen]
    position = position[(position > 0.5) & (position < inputs["table"].size(1) - 0.5)]
    return bool(((position - position.round()).abs() > 1e-5).all())


def smooth(first, dtype, **options):
    """The first inputs drawn that are smooth."""
    for seed in itertools.count():
        inputs = drawn(seed, dtype, **options)
        if is_smooth(inputs, first):
            return inputs


def by_definition(first, **inputs):
    """The definition, text by text, since it takes one mask for all."""
    out = []
    for row in range(B):
        own = {name: x if name in ("table", "sinks") else x[row : row + 1] for name, x in inputs.items()}
        out.append(cope_attention(**own, scale=SCALE, visible=visible(first)[row]))
    return torch.cat(out)


def by_kernel(first, **inputs):
    i = torch.arange(T).expand(B, T).contiguous()
    last = torch.searchsorted(first, i, right=True) - 1
    return cope_kernels.cope(**inputs, first=first.int(), last=last.int(), scale=SCALE)


def results(attention, first, inputs, dtype=None):
    """Output and gradients of all inputs, in `dtype` or the inputs' own."""
    leaves = {name: x.to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    out = attention(first, **leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).half().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)]


CASES = {
    "few positions": {},
    "never at the last position": {"npos_max": 30, "closed": 0.6},
    "two positions, grouped heads": {"npos_max": 2, "n_head": 4, "n_kv_head": 2, "closed": 0.3},
    "gates of their own": {"own_gates": True, "n_head": 4, "n_kv_head": 2, "closed": 0.2},
    "rotated, 24 channels": {"rotated": True, "head_dim": 24},
    "window, documents, sinks": {"window": 30, "documents": [[37, 50], [1]], "sinks": True, "closed": 0.3},
    "gates of their own, documents, sinks": {"own_gates": True, "documents": [[], [33]], "sinks": True},
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_all_gradients_are_those_of_the_definition(case):
    """As near to float64 as the definition in fp32 is."""
    options = CASES[case]
    first = seen(**options)
    inputs = smooth(first, torch.float32, **options)
    exact = results(by_definition, first, inputs, torch.float64)
    usual = results(by_definition, first, inputs)
    found = results(by_kernel, first, inputs)
    for name, a, b, c in zip(("out", *inputs), found, usual, exact, strict=True):
        error = (a.double() - c).norm() / c.norm()
        limit = (b.double() - c).norm() / c.norm()
        assert error <= 2 * limit + 5e-6, (name, float(error), float(limit))


def test_one_position_changes_nothing_but_by_its_table():
    """Then there is nothing to count, and the gates get no gradient."""
    inputs = drawn(0, torch.float32, npos_max=1, rotated=True, closed=0.3)
    first = seen()
    exact = results(by_definition, first, inputs, torch.float64)
    for a, b in zip(results(by_kernel, first, inputs), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_16_bit_is_rounded_as_16_bit():
    """Scores, positions and sums are fp32, so what is lost is what rounding weights and outputs loses."""
    first = seen()
    inputs = smooth(first, torch.float16)
    inputs["table"] = inputs["table"].float()
    exact = results(by_definition, first, inputs, torch.float64)
    found = results(by_kernel, first, inputs)
    for name, a, b in zip(("out", *inputs), found, exact, strict=True):
        assert (a.double() - b).norm() <= 2e-3 * b.norm(), name


ENCODINGS = {
    "cope": {}, "cope, grouped": {"n_kv_head": 1}, "cope, as released": {"scaling": "code"},
    "cope, values": {"gates": "values"}, "cope, projection": {"gates": "projection", "n_kv_head": 1},
    "cope_rope": {"window": 40}, "cope_rope, values": {"gates": "values", "temperature": "ssmax"},
}  # fmt: skip


@pytest.mark.parametrize("case", ENCODINGS)
def test_a_layer_with_kernels_is_the_layer_without(case, calls):
    """As near to float64, of fp32 inputs. Along a straight table gradients do not jump, wherever the positions are."""
    pe = build_pe(case.split(",")[0], n_head=2, npos_max=T, **ENCODINGS[case])
    with torch.no_grad():
        pe.table[:] = pe.table[:, :1] + 0.1 * torch.arange(T) * pe.table[:, 1:2]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(B, n, T, 16, generator=generator) for n in (2, pe.n_kv_head, pe.n_kv_head, 2)]
    x = torch.randn(B, T, 64, generator=generator)

    def results(dtype, kernels):
        layer = pe.to(dtype)
        q, k, v, grad = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        own_x = x.to(dtype).requires_grad_()
        ctx = make_context(layer, torch.arange(T), T, T, kernels=kernels)
        out = attend(layer, q, k, v, layer.state(own_x), ctx)
        grads = torch.autograd.grad(out, [q, k, v, own_x, *layer.parameters()], grad, allow_unused=True)
        return [out.detach(), *(grad for grad in grads if grad is not None)]

    found = results(torch.float32, True)
    assert len(calls) == 1
    usual = results(torch.float32, False)
    exact = results(torch.float64, False)
    assert len(calls) == 1
    for a, b, c in zip(found, usual, exact, strict=True):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm() + 1e-5 * c.norm()


def test_a_compiled_network_is_one_graph_with_kernels(calls):
    net = build_gpt("cope", train_len=40, sinks=True, n_layer=1).train()
    net.kernels = True
    idx = torch.arange(80).view(2, 40) % 50
    parameters = list(net.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(idx, targets=idx), parameters) for f in (compiled, net))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_check_at_the_start_of_a_run_finds_a_wrong_kernel(monkeypatch):
    assert max(cope_kernels.errors("cpu", torch.float32).values()) < 1e-5
    monkeypatch.setattr(cope_kernels, "LOG2E", cope_kernels.tl.constexpr(1.44))
    assert min(cope_kernels.errors("cpu", torch.float32).values()) > 1e-4


def test_where_no_kernel_serves_the_definition_does(calls):
    """One token of a cache, float64, and the bias of CoPE with relative embeddings."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    pos = torch.arange(20)
    pe = build_pe("cope", n_head=2)
    attend(pe, q[:, :, -1:], k, v, {}, make_context(pe, pos, 1, 20, kernels=True))
    relative = build_pe("cope_relative", n_head=2)
    attend(relative, q, k, v, {}, make_context(relative, pos, 20, 20, kernels=True))
    double = pe.double()
    attend(double, q.double(), k.double(), v.double(), {}, make_context(double, pos, 20, 20, kernels=True))
    assert not calls


def kept(length):
    """Numbers that the backward pass keeps, without the table."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    with FakeTensorMode():
        q, k, v = (torch.empty(1, n, length, 16, requires_grad=True) for n in (4, 2, 2))
        table = torch.empty(16, 64, requires_grad=True)
        rows = torch.empty(length, dtype=torch.int32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = cope_kernels.cope(q, k, v, table, rows, rows, scale=1.0)
        grads = torch.autograd.grad(out.sum(), [q, k, v, table])
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v, table)]
    return sum(sizes) - table.numel()


def test_what_the_backward_pass_keeps_grows_with_the_length_and_not_its_square():
    assert kept(1024) == 4 * kept(256)
