"""The Triton kernels of FIRE against its definition in float64, in Triton's interpreter, on a CPU."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import build_gpt, build_pe
from seen_keys import first_seen, ranges, visible
from torch._subclasses.fake_tensor import FakeTensorMode

from model import position
from model.attention import attention
from model.position.bias import FIRE
from model.position.layer import attend, make_context

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab.kernels import fire as kernels

T = 70  # some tiles, the last one not full
B = 2
FP32 = 2**-19  # of what is summed in fp32, whose numbers are off by 2^-24: 32 such roundings beside each other
SMALL = {"n_layer": 1, "n_head": 2, "n_kv_head": 1}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels."""
    calls = []
    whole = kernels.fire
    monkeypatch.setattr(kernels, "fire", lambda *args, **options: calls.append(args) or whole(*args, **options))
    return calls


def network(x, up_weight, up_bias, down_weight, down_bias):
    """FIRE's network f of the numbers x [..], as it is written: [H, ..]."""
    hidden = (x[..., None] * up_weight[:, 0] + up_bias).relu()
    return (hidden @ down_weight.T + down_bias).movedim(-1, 0)


def bias_of(x, pe):
    """FIRE's bias, from its formula, of parameters `x` by their names: [H, T, T]."""
    i = torch.arange(T)
    c = x["c"].abs()
    longest = torch.maximum(i, (x["l_multiplier"] * pe.init_l).abs())
    reach = torch.log(1 + c * longest) + 1e-6
    place = torch.log(1 + c * (i[:, None] - i).clamp(min=0)) / reach[:, None]
    return network(place, x["up_weight"], x["up_bias"], x["down_weight"], x["down_bias"])


def definition(x, pe):
    """Softmax attention from its formula, of inputs `x` by their names: "bias" [B, H, T, T], "sinks" [B, H, T, 1]."""
    i = torch.arange(T)
    q = x["q"] * math.sqrt(1 / pe.head_dim)
    if "ssmax" in x:
        seen = (i + 1).clamp(max=pe.window or T)
        q = q * x["ssmax"] * seen.double().log()[:, None]
    k, v = (x[name].repeat_interleave(pe.n_head // pe.n_kv_head, 1) for name in ("k", "v"))
    scores = (q @ k.mT + x["bias"]).masked_fill(~visible(first_seen(1, T, window=pe.window)), -torch.inf)
    return torch.cat((scores, x["sinks"]), -1).softmax(-1)[..., :-1] @ v


def random(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def exact_results(x, pe, names, out_grad):
    """In float64 from the formulas: the output and the gradients of `names`, and the size of the terms of each.

    A parameter's gradient is a sum over all pairs of tokens, which may nearly cancel. The more they do, the larger is
    any rounding beside the sum, and how much is luck. Beside the root of the sum of the squared terms it is not: terms
    that are rounded one by one to a precision of e add up to an error of about e times that.
    """
    leaves = {name: tensor.double().requires_grad_() for name, tensor in x.items()}
    by_pair = {"bias": bias_of(leaves, pe).expand(B, -1, -1, -1)}
    by_pair["sinks"] = leaves["sinks"][:, None, None].expand(B, -1, T, 1)
    out = definition(leaves | by_pair, pe)
    grads = torch.autograd.grad(out, [leaves[name] for name in names], out_grad.double(), retain_graph=True)
    results = {"out": out.detach(), **dict(zip(names, grads, strict=True))}

    sizes = {name: result.norm() for name, result in results.items()}
    of_bias, of_sinks = torch.autograd.grad(out, [*by_pair.values()], out_grad.double())
    constants = {name: leaf.detach() for name, leaf in leaves.items()}
    for name in names:
        if name == "sinks":
            sizes[name] = of_sinks.norm()
        elif name not in ("q", "k", "v", "ssmax"):
            by_parameter = torch.func.jacfwd(lambda p, name=name: bias_of(constants | {name: p}, pe))
            slopes = by_parameter(constants[name]).flatten(3)  # [H, T, T, n]
            sizes[name] = (of_bias[..., None] * slopes).norm()
    return results, sizes


def all_errors(dtype, *, sinks=True, n_head=2, n_kv_head=1, head_dim=16, change=None, **options):
    """Errors beside `exact_results` and their sizes, by name: of a layer with kernels, and of one without."""
    pe = build_pe("fire", n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim, train_len=T, **options)
    if change:
        with torch.no_grad():
            change(pe)
    # What is rounded to 16 bit once is exact in all of them.
    heads = {"q": n_head, "k": n_kv_head, "v": n_kv_head}
    inputs = {name: random(B, n, T, head_dim, seed=n).half().to(dtype) for name, n in heads.items()}
    inputs["sinks"] = random(n_head).half().to(dtype)
    inputs |= {name: p.detach() for name, p in pe.named_parameters()}
    # What is added to all scores changes nothing if there is no sink.
    unused = set() if sinks else {"sinks", "down_bias"}
    names = [name for name in inputs if name not in unused]
    out_grad = random(B, n_head, T, head_dim, seed=9).half().to(dtype)

    def results(function, leaves):
        out = function(leaves)
        return [out.detach(), *torch.autograd.grad(out, [leaves[name] for name in names], out_grad.to(out.dtype))]

    def layer(leaves, kernels):
        q, k, v, logits = (leaves[name] for name in ("q", "k", "v", "sinks"))
        ctx = make_context(pe, torch.arange(T), T, T, kernels=kernels)
        return attend(pe, q, k, v, {}, replace(ctx, sinks=logits if sinks else None))

    logits = inputs["sinks"] if sinks else torch.full((n_head,), -torch.inf)
    exact, sizes = exact_results(inputs | {"sinks": logits}, pe, names, out_grad)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()} | dict(pe.named_parameters())
    errors = []
    for with_kernels in (True, False):
        found = results(partial(layer, kernels=with_kernels), leaves)
        pairs = zip(exact.items(), found, strict=True)
        errors.append({name: float((b.double() - a).norm() / sizes[name]) for (name, a), b in pairs})
    return errors


def unusual_units(pe):
    """Units without a kink, with kinks at 0, at the same place, beyond 1 and very near to each other; a steep one."""
    pe.up_weight[:10, 0] = torch.tensor([0.0, 0.0, -0.0, -0.0, -1.0, 1.0, -2.0, 1.0, 0.5, 80.0])
    pe.up_bias[:10] = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, -0.5, 1.0, -0.500001, -1.0, -24.0])


def always_on(pe):
    pe.up_weight.abs_()
    pe.up_bias.abs_()


def negative_c(pe):
    pe.c.neg_()


CASES = {
    "queries beyond L": {"init_l": 20.0},
    "window": {"init_l": 30.0, "window": 25},
    "24 channels, tempered": {"head_dim": 24, "sinks": False, "window": 40, "temperature": "ssmax"},
    "unusual units": {"init_l": 20.0, "change": unusual_units},
    "queries within L, one unit": {"width": 1, "init_c": 5.0, "sinks": False, "change": negative_c},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_output_and_all_gradients_are_those_of_the_definition_in_float64(case, calls):
    found, usual = all_errors(torch.float32, **CASES[case])
    assert len(calls) == 1
    assert max(found.values()) <= FP32, found
    assert max(usual.values()) <= FP32, usual  # the layer without kernels


def test_16_bit_is_rounded_as_16_bit_and_what_the_bias_learns_is_not():
    found, usual = all_errors(torch.float16, init_l=20.0, n_head=4, n_kv_head=2)
    for name, error in found.items():
        limit = FP32
        if name in ("out", "q", "k", "v"):
            limit = 2 * usual[name]
        elif name == "sinks":  # few numbers: `usual` may be small by luck. Outputs are rounded to fp16 in their terms
            limit = torch.finfo(torch.float16).eps
        assert error <= limit, (name, found, usual)


def test_tiles_find_all_their_segments():
    """Many segments, with a reach that is another one for each query and text."""
    q, k, v = random(3, B, 1, T, 16)
    kinks = torch.linspace(0, 1, 33)
    slopes = 30 * random(1, 33)
    intercepts = -F.pad(slopes.diff(dim=1) * kinks[1:], (1, 0)).cumsum(1)
    inverse_reach = 0.1 + 0.4 * torch.rand(B, T, generator=torch.Generator().manual_seed(0))
    first = first_seen(B, T, documents=[[], [50]])
    c = torch.tensor([0.1])
    segments = {"kinks": kinks, "slopes": slopes, "intercepts": intercepts}
    out = kernels.fire(q, k, v, **ranges(first), scale=0.25, inverse_reach=inverse_reach, c=c, **segments)

    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    place = torch.log1p(c * distance) * inverse_reach[..., None]  # [B, T, T]
    segment = torch.searchsorted(kinks, place, right=True) - 1
    bias = slopes[:, segment] * place + intercepts[:, segment]  # [1, B, T, T]
    scores = (q @ k.mT / 4 + bias.transpose(0, 1)).masked_fill(~visible(first)[:, None], -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-4)


def test_segments_are_the_network_and_have_its_gradients():
    """Also of units without a kink, with one at 0, at the same place, or beyond 1."""
    for change in (lambda pe: None, unusual_units, always_on):
        pe = build_pe("fire", width=12)
        with torch.no_grad():
            change(pe)
        x = torch.linspace(1e-6, 1, 1000)
        kinks, slopes, intercepts, *_ = pe.tables(torch.arange(9), 9)
        assert kinks.shape == (13,)
        assert (kinks[1:] >= kinks[:-1]).all()
        assert not kinks.requires_grad
        segment = torch.searchsorted(kinks, x, right=True) - 1
        found = slopes[:, segment] * x + intercepts[:, segment]
        weights = [pe.up_weight, pe.up_bias, pe.down_weight, pe.down_bias]
        expected = network(x, *weights)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        grad = random(*found.shape)
        gradients = [torch.autograd.grad(f, weights, grad) for f in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


def test_a_network_learns_the_same_from_documents(calls):
    """Documents in place; their queries know how far they are from the start of their own."""
    losses = []
    for with_kernels in (False, True):
        net = build_gpt("fire", train_len=40, pe={"init_l": 10.0, "window": 9}, sinks=True, **SMALL).train()
        net.document_end, net.kernels = 49, with_kernels
        idx, targets = torch.randint(49, (2, 2, 40), generator=torch.Generator().manual_seed(0))
        idx[0, [6, 7]] = idx[1, 20] = 49
        loss = net(idx, targets=targets, documents=net.documents(idx))
        losses.append((loss.detach(), torch.autograd.grad(loss, list(net.parameters()))))
    assert len(calls) == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_a_compiled_network_is_one_graph_with_kernels():
    net = build_gpt("fire", train_len=20, pe={"init_l": 10.0}, **SMALL).train()
    net.kernels = True
    idx = torch.arange(20).view(1, 20)
    parameters = list(net.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(idx, targets=idx), parameters) for f in (compiled, net))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_check_at_the_start_of_a_run_finds_a_wrong_kernel(monkeypatch):
    def exact_errors():
        errors = kernels.errors("cpu", torch.float16)
        assert set(kernels.EXACT) < set(errors)
        return [errors[name] for name in kernels.EXACT], max(errors.values())

    exact, rounded = exact_errors()
    assert max(exact) < 1e-5
    assert rounded < 1e-3
    monkeypatch.setattr(kernels, "LOG2E", kernels.tl.constexpr(1.44))
    exact, _ = exact_errors()
    assert min(exact) > 1e-4


def test_where_no_kernel_serves_the_specification_does(calls):
    """One token of a cache, gaps, float64, and classes of a user's own with another bias or network."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    pos = torch.arange(20)
    pe = build_pe("fire", n_head=2)
    attend(pe, q[:, :, -1:], k, v, {}, make_context(pe, pos, 1, 20, kernels=True))
    attend(pe, q, k, v, {}, make_context(pe, 2 * pos, 20, 40, kernels=True))
    attend(pe, q.double(), k.double(), v.double(), {}, make_context(pe, pos, 20, 20, kernels=True))
    plain = attention(q, k, v, make_context(pe, pos, 20, 20))
    overrides = [
        {"bias": lambda self, q, ctx: torch.zeros(2, 20, 20)},
        {"_network": lambda self, x: torch.zeros(2, x.numel())},
        {"bias": lambda self, q, ctx: torch.zeros(2, 20, 20), "tables": lambda self, pos, length: None},
    ]
    for override in overrides:
        mine = type("Mine", (FIRE,), override)(position.Shape(64, 2, 2, 16, 32, 1))
        assert not mine.in_place
        found = attend(mine, q, k, v, {}, make_context(mine, pos, 20, 20, kernels=True))
        torch.testing.assert_close(found, plain)
    assert not calls


def kept(length):
    """Numbers that the backward pass keeps, in bf16; the shapes and dtypes of gradients are checked."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    pe = build_pe("fire", n_head=4, n_kv_head=2, head_dim=24)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(2, n, length, 24, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            ctx = replace(make_context(pe, torch.arange(length), length, length, kernels=True), sinks=torch.ones(4))
            out = attend(pe, q, k, v, {}, ctx)
        inputs = [q, k, v, *pe.parameters()]
        grads = torch.autograd.grad(out.float().sum(), inputs)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in inputs]
    return sum(sizes)


def test_fake_tensors_have_the_shapes_of_real_ones_and_memory_is_linear():
    assert kept(1024) < 4.01 * kept(256)
