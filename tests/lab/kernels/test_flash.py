"""The Triton kernels against the attention that is their specification, in Triton's interpreter, on a CPU."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, build_gpt, build_pe, pe_options, randomise
from torch._subclasses.fake_tensor import FakeTensorMode

from model import attention, position
from model.attention import run_of_keys
from model.position.bias import DistanceBias
from model.position.layer import attend, make_context
from ropewalk.training.positions import draw_positions

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from lab.kernels import flash as kernels
from lab.kernels import stick_breaking as breaking

T = 100  # some tiles, the last one not full


class Mine(DistanceBias):
    """A user's own bias, which knows nothing of kernels."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.slope = torch.nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator):
        torch.nn.init.ones_(self.slope)

    def at(self, distance):
        return -self.slope[:, None] * distance.float().sqrt()


OF_PATH = ("lab.kernels.path.", "lab.kernels.reflections.")
CASES = {
    "alibi": {}, "nape": {"n_head": 4}, "fox": {}, "kerple": {}, "t5": {"n_kv_head": 2}, "mine": {},
    "rope, window": {"window": 40}, "rope, sinks": {"window": 90, "sinks": True},
    "fox, both": {"window": 70, "sinks": True},
    "t5, both": {"window": 1, "sinks": True}, "nope, 24 channels": {"head_dim": 24, "window": 64},
    "fox_rope, tempered": {"sinks": True, "temperature": "ssmax"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels."""
    calls = []
    flash = kernels.flash
    monkeypatch.setattr(kernels, "flash", lambda *args, **options: calls.append(args) or flash(*args, **options))
    return calls


WITH_GAPS = {
    "rope, window": {"window": 90}, "alibi, sinks": {"sinks": True}, "fox, window": {"window": 150}, "mine": {},
    "kerple, both": {"window": 200, "sinks": True}, "t5": {"n_kv_head": 2}, "stick_breaking": {"window": 120},
}  # fmt: skip


def results(case, kernel, dtype, *, sinks=False, n_head=2, n_kv_head=1, head_dim=16, pos=None, **options):
    """Output and gradients of a layer's attention, the inputs rounded to 16 bit and computed in `dtype`.

    With `pos` the tokens are some of a text of 3 T.
    """
    if case == "mine":
        pe = randomise(Mine(position.Shape(64, n_head, n_kv_head, head_dim, T, 1)))
    else:
        pe = build_pe(case.split(",")[0], n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim, **options)
    if dtype == torch.float64:
        pe = pe.double()
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator).half().to(dtype)

    q = random(2, n_head, T, head_dim)
    k = random(2, n_kv_head, T, head_dim)
    v = random(2, n_kv_head, T, head_dim)
    x = random(2, T, 64)
    sink_logits = random(n_head)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, x, sink_logits, *pe.parameters())]
    where = (torch.arange(T), T, T) if pos is None else (pos, T, 3 * T)
    ctx = make_context(pe, *where, kernels=kernel)
    out = attend(pe, q, k, v, pe.state(x), replace(ctx, sinks=sink_logits if sinks else None))
    grads = torch.autograd.grad(out, inputs, random(*q.shape), allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def relative_errors(found, exact):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.float16) for case in ("fox", "kerple", "t5, both"))],
)
def test_outputs_and_all_gradients_are_those_of_the_specification(case, dtype, calls):
    """As near to float64 as the specification in the same dtype; the terms of a gate's gradient cancel, hence 3e-5."""
    exact = results(case, False, torch.float64, **CASES[case])
    usual = relative_errors(results(case, False, dtype, **CASES[case]), exact)
    assert not calls
    found = relative_errors(results(case, True, dtype, **CASES[case]), exact)
    assert len(calls) == 1
    for error, limit in zip(found, usual, strict=True):
        assert error <= 2 * limit + 3e-5, (found, usual)


@pytest.mark.parametrize(
    ("case", "kind", "dtype"),
    [
        *((case, "random", torch.float32) for case in WITH_GAPS),
        ("kerple, both", "pose", torch.float32),
        ("kerple, both", "random", torch.float16),
    ],
)
def test_distances_with_gaps_are_those_of_positions(case, kind, dtype, calls, monkeypatch):
    """Windows and biases of tokens that a longer text has others between. A gate's gradient cancels as above."""
    stick_breaking = breaking.stick_breaking
    monkeypatch.setattr(
        breaking, "stick_breaking", lambda *args, **options: calls.append(args) or stick_breaking(*args, **options)
    )
    torch.manual_seed(0)
    pos, _ = draw_positions(kind, T, 3 * T, torch.device("cpu"))
    options = WITH_GAPS[case] | {"pos": pos}
    exact = results(case, False, torch.float64, **options)
    usual = relative_errors(results(case, False, dtype, **options), exact)
    assert not calls
    found = relative_errors(results(case, True, dtype, **options), exact)
    assert len(calls) == 1
    for error, limit in zip(found, usual, strict=True):
        assert error <= 2 * limit + 5e-5, (found, usual)


@pytest.mark.parametrize("window", [None, 1, 2, 50, 299, 1000])
@pytest.mark.parametrize("kind", ["random", "pose"])
def test_windows_with_gaps_are_those_that_the_context_shows(kind, window):
    pos, length = draw_positions(kind, T, 3 * T, torch.device("cpu"))
    ctx = attention.Context(pos, pos, length, None, 1.0, window=window, has_gaps=True, kernels=True)
    q = torch.empty(1, 1, T, 16)
    assert attention.has_kernel(q, ctx, gaps=True)
    assert not attention.has_kernel(q, ctx)
    first, last = attention.seen_keys(q, ctx)
    i = torch.arange(T)
    assert torch.equal(ctx.visible(), (i <= i[:, None]) & (i >= first[:, None]))
    assert torch.equal(ctx.visible(), (i <= i[:, None]) & (i[:, None] <= last))
    assert first.dtype == last.dtype == torch.int32


def ends_of_runs(case):
    """The first and the newest key that each query sees, int64 [2, T] each, ascending; some queries see none."""
    draws = torch.rand(2, 2, T, generator=torch.Generator().manual_seed(0))
    i = torch.arange(T)
    if case == "some of them none":  # and not up to their own key
        first, newest = (draws * (i + 1)).long().cummax(-1).values
        return first, newest - 3
    if case == "a whole tile none":
        return (i - 60).clamp(min=0).expand(2, -1), (i - 40).expand(2, -1)
    return torch.zeros(2, T, dtype=torch.long), torch.full((2, T), -1)


@pytest.mark.parametrize(
    ("case", "added", "dtype"),
    [
        ("some of them none", "nothing", torch.float32),
        ("some of them none", "keys and sinks", torch.float32),
        ("some of them none", "row", torch.float16),
        ("a whole tile none", "nothing", torch.float16),
        ("a whole tile none", "row", torch.float32),
        ("all of them none", "nothing", torch.float32),
    ],
)
def test_runs_of_keys_may_end_anywhere_and_be_empty(case, added, dtype):
    first, newest = ends_of_runs(case)
    i = torch.arange(T)
    runs = [run_of_keys(*ends, None) for ends in zip(first, newest, strict=True)]
    first, last, newest, oldest = (torch.stack(rows) for rows in zip(*runs, strict=True))
    seen = (i >= first[..., None]) & (i <= newest[..., None])  # [2, T, T]
    assert (case != "all of them none") == bool(seen.any())
    assert not seen.any(-1).all()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, T, 16, generator=generator).to(dtype) for n in (2, 1, 1))
    names = {"nothing": (), "keys and sinks": ("keys", "sinks"), "row": ("row",)}[added]
    sizes = {"keys": (2, 2, T), "sinks": (2,), "row": (2, T)}
    inputs = [q, k, v, *(torch.randn(sizes[name], generator=generator) for name in names)]
    grad = torch.randn(q.shape, generator=generator).to(dtype)

    def kernel(q, k, v, *bias):
        bias = dict(zip(names, bias, strict=True))
        return kernels.flash(q, k, v, first, last, newest=newest, oldest=oldest, scale=0.25, **bias)

    def exact(q, k, v, *bias):
        bias = dict(zip(names, bias, strict=True))
        scores = q @ k.mT / 4
        if "keys" in bias:
            scores = scores + bias["keys"][:, :, None] - bias["keys"][..., None]
        if "row" in bias:
            scores = scores + bias["row"][:, (i[:, None] - i).clamp(min=0)]
        shares = scores.exp() * seen[:, None]  # a softmax would be NaN where nothing is seen
        total = shares.sum(-1, keepdim=True)
        if "sinks" in bias:
            total = total + bias["sinks"][:, None, None].exp()
        return shares / total.clamp(min=1e-30) @ v

    both = []
    for function, as_dtype in ((kernel, None), (exact, torch.float64)):
        leaves = [x.to(as_dtype or x.dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        both.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    for a, b in zip(*both, strict=True):
        assert (a.double() - b).norm() <= (2e-6 if dtype == torch.float32 else 2e-3) * b.norm()


@pytest.mark.parametrize("name", ["t5", "fox"])
def test_a_network_learns_the_same_from_documents(name, calls):
    """Forward and backward of two layers, one of them with a window."""
    pattern = {"pattern": ["a", "b"], "a": pe_options(name, window=9), "b": pe_options(name)}
    losses = []
    for kernel in (False, True):
        net = build_gpt("nope", train_len=40, pe=pattern, sinks=True).train()
        net.document_end, net.kernels = 49, kernel
        idx, targets = torch.randint(49, (2, 2, 40), generator=torch.Generator().manual_seed(0))
        idx[0, [6, 7, 30]] = idx[1, 20] = 49
        loss = net(idx, targets=targets, documents=net.documents(idx))
        losses.append((loss.detach(), torch.autograd.grad(loss, list(net.parameters()))))
    assert calls
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_a_compiled_network_is_one_graph_with_kernels():
    pattern = {"pattern": ["a", "b"], "a": pe_options("t5", window=9), "b": pe_options("fox")}
    net = build_gpt("nope", train_len=40, pe=pattern, sinks=True).train()
    net.kernels = True
    idx = torch.arange(80).view(2, 40) % 50
    parameters = list(net.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(idx, targets=idx), parameters) for f in (compiled, net))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_gates_of_a_long_text_keep_the_precision_of_near_keys():
    """Sums of thousands, whose neighbours differ by a thousandth: in fp32 alone their differences would be lost."""
    length = 70
    keys = 5000 + torch.rand(1, 1, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 1000
    q = k = torch.zeros(1, 1, length, 16)
    v = torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(0)).sign() * 1e3
    i = torch.arange(length, dtype=torch.int32)
    out = kernels.flash(q, k, v, torch.zeros_like(i), torch.full_like(i, length - 1), scale=1.0, keys=keys)
    exact = (keys[:, :, None] - keys[..., None]).masked_fill(i > i[:, None], -torch.inf).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3)


def test_documents_and_windows_are_two_rows_of_integers():
    """Each query sees the keys from `first` on, here of documents of 1, 69 and 30 tokens, with a window of 50."""
    generator = torch.Generator().manual_seed(0)
    i = torch.arange(T)
    starts = torch.tensor([0, 1, 70])[torch.bucketize(i, torch.tensor([1, 70]), right=True)]
    first = torch.maximum(starts, i - 49)
    last = torch.searchsorted(first, i, right=True) - 1
    inputs = [torch.randn(1, 2, T, 16, generator=generator).requires_grad_() for _ in range(3)]
    row = torch.randn(2, T, generator=generator).requires_grad_()
    q, k, v = inputs
    out = kernels.flash(q, k, v, first.int(), last.int(), scale=0.25, row=row)
    scores = q @ k.mT / 4 + row[:, (i[:, None] - i).clamp(min=0)]
    hidden = (i > i[:, None]) | (i < first[:, None])
    exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, exact)
    grad = torch.randn(out.shape, generator=generator)
    found, expected = (torch.autograd.grad(x, [*inputs, row], grad) for x in (out, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_check_at_the_start_of_a_run_finds_a_wrong_kernel(monkeypatch):
    assert max(kernels.errors("cpu", torch.float32).values()) < 1e-5
    monkeypatch.setattr(kernels, "LOG2E", kernels.tl.constexpr(1.44))
    assert min(kernels.errors("cpu", torch.float32).values()) > 1e-4


def test_where_no_kernel_serves_the_specification_does(calls):
    """One token of a cache, float64, a bias of its own that is not of the distance alone, with gaps and without."""
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    pe = build_pe("kerple", n_head=2)
    pos = torch.arange(20)
    attend(pe, q[:, :, -1:], k, v, {}, make_context(pe, pos, 1, 20, kernels=True))
    double = build_pe("kerple", n_head=2).double()
    attend(double, q.double(), k.double(), v.double(), {}, make_context(double, pos, 20, 20, kernels=True))
    other = build_pe("kerple", n_head=2)
    other.__class__ = type("Other", (type(other),), {"bias": lambda self, q, ctx: torch.zeros(2, 20, 20)})
    attend(other, q, k, v, {}, make_context(other, pos, 20, 20, kernels=True))
    attend(other, q, k, v, {}, make_context(other, 2 * pos, 20, 40, kernels=True))
    relative = build_pe("relative", n_head=2)
    attend(relative, q, k, v, {}, make_context(relative, 2 * pos, 20, 40, kernels=True))
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dims"),
    [(80, "bf16", "64,128"), (90, "bf16", "64,128"), (100, "bf16", "64,128"), (120, "bf16", "64,128"),
     (86, "bf16", "256"),
     (86, "fp32", "64,128"), (86, "fp32", "256")],
)  # fmt: skip
def test_kernels_compile_for_gpus_that_are_not_here(capability, dtype, head_dims):
    """They fit into shared memory, the least of which is that of 8.6, 8.9 and 12.0; hardly a register is spilled."""
    program = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program, str(capability), dtype, head_dims]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    every_kernel = set()
    for path in Path(kernels.__file__).parent.glob("*.py"):
        names = re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
        every_kernel.update(f"model.kernels.{path.stem}.{name}" for name in names)
    if head_dims == "256":  # PaTH takes fewer
        every_kernel = {name for name in every_kernel if not name.startswith(OF_PATH)}
    assert {row["kernel"] for row in rows} == every_kernel
    # Compiled for 9.0 and 10.0 they take more memory, for more loads in advance; those GPUs have it.
    memory = (227 if capability in (90, 100) else 99) * 1024
    for row in rows:
        assert row["shared"] <= memory, row
        if head_dims == "64,128" and dtype == "bf16":
            assert row["spilled"] <= (452 if capability == 120 else 400), row


def test_fake_tensors_have_the_shapes_of_real_ones():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 30, 24, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        ctx = attention.Context(torch.arange(30), torch.arange(30), 30, None, 1.0, window=7, kernels=True)
        row = torch.empty(4, 30, requires_grad=True)
        out = attention.attention(q, k, v, ctx, bias=None, row=lambda: row)
        grads = torch.autograd.grad(out.float().sum(), [q, k, v, row])
        ctx = replace(ctx, length=60, has_gaps=True)
        long_row = torch.empty(4, 60, requires_grad=True)
        with_gaps = attention.flash(q, k, v, ctx, row=long_row)
        (row_grad,) = torch.autograd.grad(with_gaps.float().sum(), long_row)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in (q, k, v, row)]
    assert (out.shape, out.dtype) == (with_gaps.shape, with_gaps.dtype) == (q.shape, q.dtype)
    assert row_grad.shape == long_row.shape


def test_tensors_that_are_not_contiguous_are_refused():
    q = torch.randn(1, 20, 2, 16).transpose(1, 2)
    first, last = attention.seen_range(20, None, "cpu")
    with pytest.raises(AssertionError, match="contiguous"):
        torch.ops.ropewalk.flash(q, q, q, first, last, *[None] * 7, 1.0)
