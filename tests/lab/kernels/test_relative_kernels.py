"""The Triton kernels of relative embeddings against the layers without, in Triton's interpreter, on a CPU."""

from dataclasses import replace

import pytest
import torch
from conftest import build_gpt, build_pe
from seen_keys import first_seen, ranges, visible
from torch._subclasses.fake_tensor import FakeTensorMode

from model.position.layer import attend, make_context
from model.position.relative import Relative

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab.kernels import relative as kernels

T = 70  # in fp32 three tiles, in fp16 two; the last one is not full
B = 2


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels."""
    calls = []
    whole = kernels.relative
    monkeypatch.setattr(kernels, "relative", lambda *args, **options: calls.append(args) or whole(*args, **options))
    return calls


def relative_errors(found, exact):
    """How far each tensor is off as a whole, as a share of its norm."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


# By where the bank ends: never, within a tile (so that far tiles follow), at a tile's border, with the first row.
LAYERS = {
    "relative": {}, "relative, 24 channels": {"head_dim": 24, "window": 40},
    "relative, 64 rows, zero beyond": {"max_distance": 63, "beyond": "zero", "n_kv_head": 2, "sinks": True},
    "relative, 34 rows": {"max_distance": 33, "sinks": True, "window": 60, "temperature": "ssmax"},
    "relative_capped": {"n_kv_head": 2}, "relative, one row": {"max_distance": 0},
    "relative, one more": {"max_distance": T - 2},
    "profiles": {"n_kv_head": 2}, "profiles, few": {"max_distance": 9, "rank": 5, "sinks": True, "window": 50},
    "profiles, never beyond": {"max_distance": 200, "beyond": "last"},
}  # fmt: skip


def results(case, kernel, dtype, *, sinks=False, n_kv_head=1, head_dim=16, **options):
    """Output and gradients of a layer's attention, the inputs rounded to 16 bit and computed in `dtype`."""
    name = case.split(",")[0]
    pe = build_pe(name, n_head=2, n_kv_head=n_kv_head, head_dim=head_dim, train_len=T, **options)
    if dtype == torch.float64:
        pe = pe.double()
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator).half().to(dtype)

    q, k, v = (random(1, heads, T, head_dim) for heads in (2, n_kv_head, n_kv_head))
    x = random(1, T, 64)
    sink_logits = random(2)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, x, sink_logits, *pe.parameters())]
    ctx = make_context(pe, torch.arange(T), T, T, kernels=kernel)
    # Autocast as on a GPU: parameters are fp32, and what is projected has the dtype of the queries.
    with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float16):
        out = attend(pe, q, k, v, pe.state(x), replace(ctx, sinks=sink_logits if sinks else None))
    grads = torch.autograd.grad(out, inputs, random(*q.shape).to(out.dtype), allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in LAYERS), *((case, torch.float16) for case in ("relative", "profiles, few"))],
)
def test_outputs_and_all_gradients_are_those_of_the_layer_without(case, dtype, calls):
    """As near to float64 as the specification in the same dtype; kernels round the embeddings to it, too."""
    exact = results(case, False, torch.float64, **LAYERS[case])
    usual = relative_errors(results(case, False, dtype, **LAYERS[case]), exact)
    assert not calls
    found = relative_errors(results(case, True, dtype, **LAYERS[case]), exact)
    assert len(calls) == 1
    small = max(1e-6, torch.finfo(dtype).eps)
    for error, limit in zip(found, usual, strict=True):
        assert error <= 2 * limit + small, (found, usual)


def by_formula(q, k, v, bank, sinks, first, scale, position_q=None):
    """softmax(scale q.k + position_q.bank[i - j]) v of the keys from `first` [B, T] on."""
    i = torch.arange(q.size(2))
    place = (i[:, None] - i).clamp(0, bank.size(0) - 1)
    terms = (scale * q if position_q is None else position_q) @ bank.mT  # [B, H, T, L]
    groups = q.size(1) // k.size(1)
    scores = scale * q @ k.repeat_interleave(groups, 1).mT + terms.gather(3, place.expand(*q.shape[:2], -1, -1))
    scores = scores.masked_fill(~visible(first)[:, None], -torch.inf)
    scores = torch.cat((scores, sinks[:, None, None].expand(q.size(0), -1, q.size(2), 1)), -1)
    return scores.softmax(-1)[..., :-1] @ v.repeat_interleave(groups, 1)


SEEN = {
    "documents": {"documents": [[37, 50, 51], [1]]},
    "documents and a window": {"documents": [[], [33]], "window": 20},
    "documents of whole tiles": {"documents": [[64], [32]]},
}


@pytest.mark.parametrize(
    ("case", "rows"),
    [("documents", 20), ("documents", T), ("documents and a window", 12), ("documents of whole tiles", 3)],
)
def test_documents_are_two_rows_of_integers(case, rows):
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (B, 2, T, 16), "k": (B, 1, T, 16), "v": (B, 1, T, 16), "bank": (rows, 16), "sinks": (2,)}
    inputs = {name: torch.randn(size, generator=generator).double() for name, size in sizes.items()}
    grad = torch.randn(sizes["q"], generator=generator).double()
    first = first_seen(B, T, **SEEN[case])

    def results(attention, dtype, **options):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        out = attention(**leaves, scale=0.25, **options)
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))]

    exact = results(by_formula, torch.float64, first=first)
    usual = relative_errors(results(by_formula, torch.float32, first=first), exact)
    found = relative_errors(results(kernels.relative, torch.float32, **ranges(first)), exact)
    for error, limit in zip(found, usual, strict=True):
        assert error <= 2 * limit + 1e-6, (found, usual)


def test_rounded_outputs_do_not_drown_the_gradient_of_the_last_row():
    """It is a sum over nearly all keys, whose terms nearly cancel. In fp16, with large outputs: 8 on average."""
    length = 200  # four tiles in fp16: near ones and far ones
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (1, 2, length, 16), "k": (1, 2, length, 16), "v": (1, 2, length, 16), "bank": (3, 16)}
    inputs = {name: torch.randn(size, generator=generator).half() for name, size in sizes.items()}
    inputs["v"] += 8
    grad = torch.randn(sizes["q"], generator=generator).half()
    first = first_seen(1, length)

    def results(attention, dtype, **options):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        leaves["bank"] = inputs["bank"].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        out = attention(**leaves, scale=0.25, **options)
        *rest, of_bank = torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))
        return [*rest, of_bank[:-1], of_bank[-1]]

    no_sinks = torch.full((2,), -torch.inf)
    exact = results(by_formula, torch.float64, first=first, sinks=no_sinks)
    *_, last_row = relative_errors(results(kernels.relative, torch.float16, **ranges(first)), exact)
    assert last_row < 2e-3


def test_a_compiled_network_is_one_graph_with_kernels():
    shape = {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "dim": 32}
    net = build_gpt("profiles", train_len=35, sinks=True, pe={"max_distance": 5}, **shape).train()
    net.kernels = True
    idx = torch.arange(70).view(2, 35) % 50
    parameters = list(net.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(idx, targets=idx), parameters) for f in (compiled, net))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_check_at_the_start_of_a_run_finds_a_wrong_kernel(monkeypatch):
    errors = kernels.errors("cpu", torch.float32)
    assert max(errors.values()) < 1e-5
    assert set(kernels.EXACT) <= set(errors)
    monkeypatch.setattr(kernels, "LOG2E", kernels.tl.constexpr(1.44))
    assert min(kernels.errors("cpu", torch.float32).values()) > 1e-4


class Squared(Relative):
    """A user's own: relative embeddings of squared distances."""

    def tables(self, pos, length):
        distance = (pos.flip(0) - pos[0]) ** 2
        return self.bank[:, distance.clamp(max=self.bank.size(1) - 1)]


class Doubled(Relative):
    """A user's own: the bias twice."""

    def bias(self, q, ctx):
        return 2 * super().bias(q, ctx)


def test_where_no_kernel_serves_the_specification_does(calls):
    """One token of a cache, gaps, float64, CoPE with relative embeddings, and subclasses with terms of their own."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    x = torch.randn(1, 20, 64)
    pos = torch.arange(20)
    for name in ("relative", "profiles"):
        pe = build_pe(name, n_head=2)
        attend(pe, q[:, :, -1:], k, v, pe.state(x), make_context(pe, pos, 1, 20, kernels=True))
        attend(pe, q, k, v, pe.state(x), make_context(pe, 2 * pos, 20, 40, kernels=True))
        pe = pe.double()
        inputs = [tensor.double() for tensor in (q, k, v)]
        attend(pe, *inputs, pe.state(x.double()), make_context(pe, pos, 20, 20, kernels=True))
    cope = build_pe("cope_relative", n_head=2)
    assert not cope.in_place
    attend(cope, q, k, v, {}, make_context(cope, pos, 20, 20, kernels=True))
    pe = build_pe("relative", n_head=2)
    for subclass in (Squared, Doubled):
        pe.__class__ = subclass
        assert not pe.in_place
        attend(pe, q, k, v, {}, make_context(pe, pos, 20, 20, kernels=True))
    assert not calls


def kept(length, rows=17):
    """Numbers that the backward pass keeps, without the bank."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    with FakeTensorMode():
        q, k, v, r = (
            torch.empty(1, heads, length, width, dtype=torch.bfloat16, requires_grad=True)
            for heads, width in ((4, 24), (2, 24), (2, 24), (4, 5))
        )
        bank = torch.empty(rows, 5, requires_grad=True)
        first = torch.empty(length, dtype=torch.int32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = kernels.relative(q, k, v, bank, first, first, scale=1.0, position_q=r)
        grads = torch.autograd.grad(out.float().sum(), [q, k, v, r, bank])
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(x.shape, x.dtype) for x in (q, k, v, r, bank)]
    return sum(sizes) - rows * 16


def test_fake_tensors_have_the_shapes_of_real_ones_and_what_is_kept_grows_with_the_length():
    assert kept(1024) == 4 * kept(256)
