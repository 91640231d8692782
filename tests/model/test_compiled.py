"""What the compiler's own code computes. It keeps numbers in fp32 where a program rounds them to 16 bit and back."""

from collections.abc import Iterator

import pytest
import torch
from conftest import build_gpt, build_pe
from torch import Tensor

from model.gpt import GPT

# Scalings compute as RoPE does.
NAMES = ["rope", "xpos", "selective_rope", "pope", "alibi", "fox", "fox_rope", "kerple", "t5", "fire", "relative"]
NAMES += ["profiles", "cope", "stick_breaking", "path", "rerope", "dca"]


@pytest.mark.long
def test_a_bias_in_three_channels_of_bf16_is_whole_again():
    torch._dynamo.reset()
    bias = 30 * torch.randn(1, 4, 200, generator=torch.Generator().manual_seed(0))
    pe = build_pe("fox", n_head=4)
    k = torch.zeros(1, 4, 200, 16, dtype=torch.bfloat16)
    split = torch.compile(lambda bias: pe._channels(bias, k, 1.0), dynamic=False)
    of_keys, of_queries = split(bias)
    whole = (of_keys.double() * of_queries[:, None].double()).sum(-1)
    assert torch.equal(whole, bias.double())


def gradients(net: GPT, precision: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Those of all parameters by name, of a text of 150 tokens."""
    idx = torch.randint(50, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = net(idx, targets=idx)
    names = [name.removeprefix("_orig_mod.") for name, _ in net.named_parameters()]
    values = torch.autograd.grad(loss, list(net.parameters()))
    return zip(names, values, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_as_exact_as_without_the_compiler(name, precision):
    torch._dynamo.reset()
    net = build_gpt(name, train_len=64, n_layer=1, n_kv_head=2, init_std=0.06).train()
    eager = dict(gradients(net, precision))
    compiled = dict(gradients(torch.compile(net, dynamic=False), precision))
    exact = dict(gradients(net.double(), torch.float64))
    for name, expected in exact.items():
        errors = [((found[name] - expected).norm() / expected.norm()).item() for found in (compiled, eager)]
        # Chance makes the error of a gradient that is a single number: that of n numbers has it divided by the root.
        chance = 0.1 / expected.numel() ** 0.5 if precision == torch.bfloat16 else 0.0
        assert errors[0] < 2 * errors[1] + chance + 1e-5, name
