"""What a GPU is asked for, on tensors without values that call themselves a GPU's: launches, graphs, and waits."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ENCODINGS, at_last_scale, build_gpt, build_pe, pe_options
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from conf.schema import Optim
from model.attention import BLOCK
from model.position.layer import attend, make_context
from model.position.windowed import TrainingFree
from ropewalk.training.hardware import Hardware
from train import Training

NO_KERNEL = {"_unsafe_view", "detach", "alias", "lift_fresh", "_local_scalar_dense", "promote_types"}
ALONE = [name for name in ENCODINGS if "pattern" not in pe_options(name)]


class Launches(TorchDispatchMode):
    """The number of operations that would launch a kernel, or more."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.number += func.namespace == "aten" and not (func.is_view or "empty" in name or name in NO_KERNEL)
        return func(*args, **(kwargs or {}))


def flash_takes(q, k, v, attn_mask):
    """Whether PyTorch's flash kernel serves these, and no slower one: the rules of its sdp_utils.cpp."""
    sixteen_bit = all(x.dtype == torch.bfloat16 for x in (q, k, v))
    sizes = q.shape == k.shape == v.shape and q.size(3) % 8 == 0 and q.size(3) <= 256
    return attn_mask is None and sixteen_bit and sizes and all(x.stride(3) == 1 for x in (q, k, v))


def fused(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Attention as a GPU has it: one kernel. A CPU's would be counted by its parts."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    mask = torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:-1], k.size(-2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, is_causal, scale=scale)[0]


@pytest.fixture
def gpu(monkeypatch):
    """Tensors without values of the CPU that say they are a GPU's. To read a value is an error, as it would wait."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)


def without_values(module):
    """Replace all tensors of a module by fake ones, in place; return their mode."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for part in module.modules():
        for key, p in part._parameters.items():
            part._parameters[key] = None if p is None else mode.from_tensor(p)
        for key, value in vars(part).items():  # the sums of CoPE's metrics
            if isinstance(value, torch.Tensor):
                setattr(part, key, mode.from_tensor(value))
    return mode


def launches(name, length, *, kernels=False, **options):
    """Of one layer's attention in bf16, forward and backward; readings of a RoPE model are active."""
    sizes = {"dim": 64, "n_head": 4, "n_kv_head": 4, "head_dim": 16}
    pe = build_pe(name, **sizes, train_len=length, **options)
    if isinstance(pe, TrainingFree):
        pe = at_last_scale(build_pe(name, **sizes, train_len=length // 4, **options))
    mode = without_values(pe)
    with mode:
        q, k, v = (torch.empty(1, 4, length, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        x = torch.empty(1, length, 64, dtype=torch.bfloat16, requires_grad=True)
        inputs = tuple(t for t in (q, k, v, x, *pe.parameters()))
        with Launches() as counted:
            with torch.autocast("cpu", torch.bfloat16):
                ctx = make_context(pe, torch.arange(length), length, length, kernels=kernels)
                out = attend(pe, q, k, v, pe.state(x), ctx)
            # What `torch.autograd.grad` calls; that would be counted without the modes above.
            _engine_run_backward((out,), (torch.empty_like(out),), False, False, inputs, True, False)
    return counted.number


# How many operators a layer has at any length, with kernels where there are some; not one may be added unseen. PyTorch
# 2.13 counts these.
OPERATORS = {
    "abf": 55, "alibi": 27, "cope": 16, "cope_rope": 68, "dca": 244, "dynamic_ntk": 55, "fire": 66, "fox": 36,
    "fox_rope": 88, "kerple": 38, "lampe": 273, "leaky_rerope": 165, "learned": 3, "linear": 55, "llama3": 55,
    "longrope": 55, "nape": 23, "nope": 3, "ntk": 55, "ntk_by_parts": 55, "p_rope": 59, "path": 54, "path_fox": 76,
    "pope": 75, "profiles": 28, "relative": 18, "relative_capped": 18, "rerope": 165, "rope": 55, "rope_id": 63,
    "selective_rope": 113, "self_extend": 165, "sinks_window": 167, "sinusoidal": 3, "stick_breaking": 8,
    "string": 164, "t5": 33, "window": 88, "xpos": 67, "yarn": 55,
}  # fmt: skip
FOR_A_WINDOW = 10  # more, at most
# Without kernels too they are one call of PyTorch's flash attention: what changes q and k, or adds channels to them.
FUSED = {"alibi": 37, "nape": 33}
FUSED |= {
    name: OPERATORS[name]
    for name in (
        "abf", "dynamic_ntk", "learned", "linear", "llama3", "longrope", "nope", "ntk", "ntk_by_parts", "p_rope",
        "pope", "rope", "rope_id", "selective_rope", "sinusoidal", "xpos", "yarn",
    )
}  # fmt: skip
# Without kernels they hold the scores of a block of queries at a time. How many operators a block has, of two passes.
IN_BLOCKS = {
    "cope": 82, "cope_relative": 99, "cope_rope": 82, "fire": 113, "fox": 20, "fox_rope": 20, "kerple": 47, "t5": 47,
    "relative": 57, "relative_capped": 57, "profiles": 61, "stick_breaking": 82,
}  # fmt: skip


def test_every_encoding_is_counted():
    without_kernels = {"cope_relative"}
    assert {*OPERATORS} | without_kernels == {*ALONE}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_layer_launches_little_whatever_the_length(gpu, name):
    assert launches(name, 2 * BLOCK) == launches(name, 6 * BLOCK) <= FUSED[name]


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_layer_is_one_call_of_flash_attention(gpu, name, monkeypatch):
    """No shape, type or stride keeps PyTorch from its fastest kernels."""
    taken = []

    def called(q, k, v, attn_mask=None, **options):
        taken.append(flash_takes(q, k, v, attn_mask))
        return fused(q, k, v, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", called)
    launches(name, 2 * BLOCK)
    assert taken == [True]


@pytest.mark.parametrize("window", [None, BLOCK])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_layer_with_kernels_launches_little_whatever_the_length(gpu, name, window):
    pytest.importorskip("triton", reason="Triton is not installed")
    options = {"window": window} if window else {}
    few = launches(name, 2 * BLOCK, kernels=True, **options)
    most = OPERATORS[name] + (FOR_A_WINDOW if window else 0)
    assert few == launches(name, 6 * BLOCK, kernels=True, **options) <= most


@pytest.mark.parametrize(
    "name", ["gemma3", "fox_rope", "kerple", "cope", "stick_breaking", "rerope", "fire", "path", "relative"]
)
def test_graphs_with_kernels_are_as_large_at_any_length(name):
    """One for each kind of layer, forward and backward, of seven layers."""
    pytest.importorskip("triton", reason="Triton is not installed")
    sizes = []

    def size_of(graph, inputs):
        sizes[-1].append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=size_of, bw_compiler=size_of)
    for length in (256, 1024):
        sizes.append([])
        torch._dynamo.reset()
        net = build_gpt(name, train_len=length // 4, n_layer=7).train()
        net.kernels = True
        for block in net.blocks:
            block.compile(dynamic=False, backend=backend, fullgraph=True)
        with without_values(net), net.at_scale(max(net.scales)):
            for _ in range(2):  # steps
                idx = torch.zeros(2, length, dtype=torch.long)
                net(idx, targets=idx).backward()
    torch._dynamo.reset()
    kinds = 2 if name == "gemma3" else 1
    assert len(sizes[0]) == 2 * kinds
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_a_layer_in_blocks_launches_a_few_for_each(gpu, name):
    two_more = launches(name, 5 * BLOCK) - launches(name, 3 * BLOCK)
    assert two_more <= 2 * IN_BLOCKS[name]


@pytest.mark.parametrize("name", ["rope", "cope", "fox", "t5"])
def test_a_training_step_never_waits_for_the_device(gpu, name):
    """Forward, backward, clipping and AdamW, with accumulation: no value is read, so the CPU runs ahead of a GPU."""
    net = build_gpt(name, train_len=32, n_layer=1, n_kv_head=4, sinks=True).train()
    mode = without_values(net)
    trainer = SimpleNamespace(
        grad_accum_steps=2, max_steps=9, strategy="auto", positions="consecutive", max_position=None,
        checkpointing=False, context_parallel=1,
    )  # fmt: skip
    optim = Optim(lr=1e-3, min_lr_ratio=0.1, warmup_steps=2, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)
    hardware = Hardware("cpu", "bf16-mixed", compile=False)
    fabric = SimpleNamespace(
        device=torch.device("cpu"), global_rank=0, world_size=1,
        setup_module=lambda net: net,
        no_backward_sync=lambda net, enabled: nullcontext(),
        all_reduce=lambda x, reduce_op: x,
        to_device=lambda batch: batch,
        backward=lambda loss: loss.backward(),
    )  # fmt: skip
    with mode:
        batches = [torch.zeros(2, 4, 300, dtype=torch.long).unbind() for _ in range(2)]
        cfg = SimpleNamespace(trainer=trainer, optim=optim, seed=0)
        training = Training(fabric, cfg, hardware, SimpleNamespace(document_end=None), net)
        with hardware.autocast():
            totals, norm = training.step(1, iter(batches))
    assert (totals.shape, norm.shape) == ((2,), ())
    with pytest.raises(DataDependentOutputException):  # what a wait is
        norm.item()
