"""Zones of training-free extensions in Triton, against the extensions without kernels, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from conftest import at_last_scale, build_gpt, build_pe
from torch._subclasses.fake_tensor import FakeTensorMode

from model.attention import run_of_keys
from model.position.base import Shape
from model.position.layer import attend, make_context
from model.position.windowed import NearWindow, ReRoPE

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab.kernels import zones as kernels

L, T = 24, 70  # trained length, and a text of some tiles, the last one not full
CASES = {
    "rerope": {}, "leaky_rerope": {"near_window": 5, "scale": 3.0}, "string": {"n_head": 4, "n_kv_head": 2},
    "self_extend, window": {"group": 3, "window": 40}, "lampe": {"near_window": 5, "tail": 6, "capacity": 0.5},
    "dca, sinks": {"sinks": True, "texts": 2},
    "dca, window and sinks": {"window": 9, "sinks": True, "temperature": "ssmax"},
    "window": {"sinks": True}, "sinks_window, 24 channels": {"head_dim": 24}, "sinks_window, window": {"window": 50},
}  # fmt: skip
IN_16_BIT = ("rerope", "dca, window and sinks")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels."""
    calls = []
    whole = kernels.zones
    monkeypatch.setattr(kernels, "zones", lambda *args, **options: calls.append(args) or whole(*args, **options))
    return calls


def active(case, **options):
    """The encoding of a case, as it reads beyond the trained length."""
    return at_last_scale(build_pe(case.split(",")[0], train_len=L, **{"n_head": 2, "n_kv_head": 1} | options))


def results(case, kernel, dtype, *, sinks=False, texts=1, **options):
    """Output and gradients of a layer's attention, the inputs rounded to 16 bit and computed in `dtype`."""
    pe = active(case, **options).to(torch.float64 if dtype == torch.float64 else torch.float32)
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator).half().to(dtype)

    q = random(texts, pe.n_head, T, pe.head_dim)
    k, v = random(2, texts, pe.n_kv_head, T, pe.head_dim).unbind()
    logits = random(pe.n_head)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, *pe.parameters())]
    ctx = make_context(pe, torch.arange(T), T, T, kernels=kernel)
    if sinks:
        inputs.append(logits.requires_grad_())
        ctx = replace(ctx, sinks=logits)
    out = attend(pe, q, k, v, {}, ctx)
    return [out.detach(), *torch.autograd.grad(out, inputs, random(*q.shape))]


def relative_errors(found, exact):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in CASES), *((case, torch.float16) for case in IN_16_BIT)]
)
def test_outputs_and_all_gradients_are_those_of_the_specification(case, dtype, calls):
    """As near to float64 as the specification in the same dtype."""
    exact = results(case, False, torch.float64, **CASES[case])
    usual = relative_errors(results(case, False, dtype, **CASES[case]), exact)
    assert not calls
    found = relative_errors(results(case, True, dtype, **CASES[case]), exact)
    assert len(calls) == 1
    for error, limit in zip(found, usual, strict=True):
        assert error <= 2 * limit + 1e-6, (found, usual)


@torch.no_grad()
def test_an_evaluation_takes_the_kernels_too(calls):
    pe = active("self_extend")
    q, k, v = torch.randn(3, 1, 2, T, 16, generator=torch.Generator().manual_seed(4)).unbind()
    usual, found = (
        attend(pe, q, k[:, :1], v[:, :1], {}, make_context(pe, torch.arange(T), T, T, kernels=with_kernels))
        for with_kernels in (False, True)
    )
    assert len(calls) == 1
    torch.testing.assert_close(found, usual, rtol=1e-5, atol=2e-6)


def test_a_compiled_network_is_one_graph_with_kernels(calls):
    """A fine-tuning beyond the trained length, where the extension is active."""
    net = build_gpt("dca", train_len=40, n_layer=1, sinks=True, pe={"original_len": 16}).train()
    net.kernels = True
    idx = torch.arange(40)[None]
    parameters = list(net.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(idx, targets=idx), parameters) for f in (compiled, net))
    torch._dynamo.reset()
    assert calls
    net.kernels = False
    usual = torch.autograd.grad(net(idx, targets=idx), parameters)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-6)


def test_the_check_at_the_start_of_a_run_finds_a_wrong_kernel(monkeypatch):
    assert active("rerope").kernels == kernels.__name__
    assert max(kernels.errors("cpu", torch.float32).values()) < 1e-5
    monkeypatch.setattr(kernels, "LOG2E", kernels.LOG2E.__class__(1.4))
    assert min(kernels.errors("cpu", torch.float32).values()) > 1e-4


class Mine(NearWindow):
    """A user's own zones, which says nothing of runs."""

    positions = ReRoPE.positions

    def zone(self, i, j, length):
        return ((i - j) // 3 % 2).long()


class Mixin:
    """Zones for a reading that has runs of others."""

    zone = Mine.zone


class Mixed(Mixin, ReRoPE):
    """A user's own zones by way of a mixin."""


def test_where_no_kernel_serves_the_specification_does(calls):
    """The newest tokens of a cache, gaps, float64, RoPE at scale 1, and a user's own zones."""
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind()
    pos = torch.arange(40)
    pe = active("rerope", n_kv_head=2)
    attend(pe, q[:, :, -2:], k, v, {}, make_context(pe, pos, 2, 40, kernels=True))
    attend(pe, q, k, v, {}, make_context(pe, 2 * pos, 40, 80, kernels=True))
    attend(pe, q.double(), k.double(), v.double(), {}, make_context(pe, pos, 40, 40, kernels=True))
    unscaled = build_pe("rerope", n_head=2, train_len=L)
    attend(unscaled, q, k, v, {}, make_context(unscaled, pos, 40, 40, kernels=True))
    found = []
    for own in (Mine, Mixed):
        mine = at_last_scale(own(Shape(64, 2, 2, 16, L, n_layer=1)))
        ctx = make_context(mine, pos, 40, 40, kernels=True)
        found.append(attend(mine, q, k, v, {}, ctx))
        torch.testing.assert_close(found[-1], attend(mine, q, k, v, {}, replace(ctx, kernels=False)))
    assert not calls
    torch.testing.assert_close(found[0], found[1])


def kept(length):
    """Numbers that the backward pass keeps."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    with FakeTensorMode():
        q, k, v = (torch.empty(1, n, length, 24, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
        sinks = torch.empty(4, requires_grad=True)
        i = torch.arange(length)
        runs = [run_of_keys(i - 7, i, None), run_of_keys(0 * i, i - 8, None)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = kernels.zones([q, q], [k, k], v, runs, scale=1.0, sinks=sinks)
        grads = torch.autograd.grad(out.float().sum(), [q, k, v, sinks])
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in (q, k, v, sinks)]
    return sum(sizes) - sinks.numel()


def test_what_the_backward_pass_keeps_grows_with_the_length_and_not_its_square():
    assert kept(1024) == 4 * kept(256)
