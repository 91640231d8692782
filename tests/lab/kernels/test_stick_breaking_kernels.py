"""The Triton kernels of stick-breaking attention against its definition, in Triton's interpreter, on a CPU."""

from functools import partial

import pytest
import torch
from conftest import build_gpt, build_pe
from seen_keys import first_seen, ranges, visible
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.zoo.stick_breaking import stick_breaking_attention
from model.position.layer import attend, make_context

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab.kernels import stick_breaking as kernels

T = 70  # some tiles, the last one not full
B = 2
SCALE = 0.25


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels."""
    calls = []
    whole = kernels.stick_breaking
    monkeypatch.setattr(
        kernels, "stick_breaking", lambda *args, **options: calls.append(args) or whole(*args, **options)
    )
    monkeypatch.setattr(kernels, "CHUNK", 32)  # the backward pass takes several
    return calls


def drawn(dtype, *, n_head=2, n_kv_head=1, head_dim=16, logit=0.0):
    """Queries, keys and values, rounded to 16 bit; `logit` is added to all scores."""
    generator = torch.Generator().manual_seed(0)
    sizes = (n_head, n_kv_head, n_kv_head)
    q, k, v = (torch.randn(B, n, T, head_dim, generator=generator).half().to(dtype) for n in sizes)
    q[..., 0] = 1.0
    k[..., 0] = logit / SCALE
    return [q, k, v]


def results(attention, inputs, dtype=None):
    """Output and gradients of all inputs, in `dtype` or the inputs' own."""
    leaves = [x.to(dtype or x.dtype).requires_grad_() for x in inputs]
    out = attention(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).half().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def relative_errors(found, exact):
    """How far each tensor is off as a whole, as a share of its norm."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def all_errors(inputs, *, remainder=True, **seen):
    """Errors against the definition in float64: of the kernels, and of the definition in the dtype of the inputs."""
    first = first_seen(B, T, **seen)
    i = torch.arange(T)
    past = visible(first)[:, None] & (i < i[:, None])
    definition = partial(stick_breaking_attention, scale=SCALE, past=past, remainder=remainder)
    kernel = partial(kernels.stick_breaking, scale=SCALE, remainder=remainder, **ranges(first))
    exact = results(definition, inputs, torch.float64)
    return relative_errors(results(kernel, inputs), exact), relative_errors(results(definition, inputs), exact)


INPUTS = {
    "near keys take all": {}, "far keys get their share": {"logit": -4.0, "n_head": 4, "n_kv_head": 2},
    "next to nothing is taken": {"logit": -12.0}, "each takes nearly all": {"logit": 8.0},
    "24 channels": {"head_dim": 24},
}  # fmt: skip
SEEN = {
    "all keys": {}, "no remainder": {"remainder": False}, "a window": {"window": 30}, "one other key": {"window": 2},
    "documents": {"documents": [[37, 50], [1]]}, "documents and a window": {"documents": [[], [33]], "window": 20},
}  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "seen"),
    [*((name, "all keys") for name in INPUTS), *(("far keys get their share", name) for name in SEEN)],
)
def test_output_and_all_gradients_are_those_of_the_definition_in_float64(inputs, seen):
    """Where keys take nearly all, a gradient is what is left of a difference, in the definition as well."""
    found, usual = all_errors(drawn(torch.float32, **INPUTS[inputs]), **SEEN[seen])
    for error, limit in zip(found, usual, strict=True):
        assert error <= 2 * limit + 1e-6, (found, usual)


def test_16_bit_is_rounded_as_16_bit():
    """Scores and sums are fp32, so what is lost is what rounding weights and outputs loses."""
    found, _ = all_errors(drawn(torch.float16, logit=-3.0), window=50)
    assert max(found) <= 1e-3


def test_small_shares_of_a_long_text_add_up():
    """In fp32 a share of 1e-8 less than 1 is 1; 4,000 of them leave 4e-5 less."""
    length = 4000
    q = torch.ones(1, 1, length, 16)
    k = torch.full_like(q, -18.5 / 4)
    v = torch.zeros_like(q)
    v[:, :, -1] = 1.0
    i = torch.arange(length, dtype=torch.int32)
    # Of all keys only the last few blocks of queries are asked for, which is what the interpreter has time for.
    first = torch.where(i < length - 32, i, 0)
    out = kernels.stick_breaking(q, k, v, first, torch.full_like(i, length - 1), scale=1 / 4, remainder=True)
    taken = -torch.expm1(-(length - 1) * torch.log1p(torch.exp(torch.tensor(-18.5, dtype=torch.float64))))
    torch.testing.assert_close(1 - out[0, 0, -1, 0].double(), taken, rtol=2e-3, atol=0)


def test_old_keys_are_left_out_where_nothing_is_left_for_them():
    """What newer keys leave underflows after a few, so NaN in the oldest tile changes nothing for the last queries."""
    q, k, v = drawn(torch.float32, logit=40.0)
    kernel = partial(kernels.stick_breaking, scale=SCALE, remainder=True, **ranges(first_seen(B, T)))
    clean = kernel(q, k, v)
    assert clean.isfinite().all()
    v[:, :, :16] = torch.nan
    assert torch.equal(kernel(q, k, v)[:, :, 64:], clean[:, :, 64:])


ENCODINGS = {
    "as it is": {}, "grouped": {"n_kv_head": 1}, "lost": {"remainder": False}, "window": {"window": 40},
    "tempered": {"temperature": "ssmax"},
}  # fmt: skip


@pytest.mark.parametrize("case", ENCODINGS)
def test_a_layer_with_kernels_is_the_layer_without(case, calls):
    pe = build_pe("stick_breaking", n_head=2, **ENCODINGS[case])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, n, T, 16, generator=generator).requires_grad_() for n in (2, pe.n_kv_head, pe.n_kv_head))
    inputs = [q, k, v, *pe.parameters()]
    grad = torch.randn(q.shape, generator=generator)
    both = []
    for with_kernels in (False, True):
        ctx = make_context(pe, torch.arange(T), T, T, kernels=with_kernels)
        out = attend(pe, q, k, v, {}, ctx)
        both.append([out, *torch.autograd.grad(out, inputs, grad)])
        assert len(calls) == with_kernels
    torch.testing.assert_close(both[1], both[0], rtol=1e-4, atol=2e-6)


def test_a_compiled_network_is_one_graph_with_kernels(calls):
    net = build_gpt("stick_breaking", train_len=40, n_layer=1).train()
    net.kernels = True
    idx = torch.arange(80).view(2, 40) % 50
    parameters = list(net.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(idx, targets=idx), parameters) for f in (compiled, net))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_check_at_the_start_of_a_run_finds_a_wrong_kernel(monkeypatch):
    assert max(kernels.errors("cpu", torch.float32).values()) < 1e-5
    monkeypatch.setattr(kernels, "LOG2E", kernels.tl.constexpr(1.44))
    assert min(kernels.errors("cpu", torch.float32).values()) > 1e-4


def test_where_no_kernel_serves_the_definition_does(calls):
    """One token of a cache, and float64."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    pos = torch.arange(20)
    pe = build_pe("stick_breaking", n_head=2)
    attend(pe, q[:, :, -1:], k, v, {}, make_context(pe, pos, 1, 20, kernels=True))
    attend(pe, q.double(), k.double(), v.double(), {}, make_context(pe, pos, 20, 20, kernels=True))
    assert not calls


def kept(length):
    """Numbers that the backward pass keeps."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    with FakeTensorMode():
        q, k, v = (torch.empty(1, n, length, 16, requires_grad=True) for n in (4, 2, 2))
        rows = torch.empty(length, dtype=torch.int32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = kernels.stick_breaking(q, k, v, rows, rows, scale=1.0, remainder=True)
        grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    return sum(sizes)


def test_what_the_backward_pass_keeps_grows_with_the_length_and_not_its_square():
    assert kept(1024) == 4 * kept(256)
