"""What the compiler's own code computes. It keeps numbers in fp32 where a program rounds them to 16 bit and back."""

import pytest
import torch
from conftest import build_gpt, build_pe

from lab.benchmarks.exactness import gradients, worst_errors
from lab.kernels.ops import high_and_low
from ropewalk.training.hardware import Hardware

# Scalings compute as RoPE does.
ALL = (
    "rope",
    "xpos",
    "selective_rope",
    "pope",
    "alibi",
    "fox",
    "fox_rope",
    "kerple",
    "t5",
    "fire",
    "relative",
    "profiles",
)
ALL += ("cope", "stick_breaking", "path", "rerope", "dca")


def test_numbers_that_are_split_are_whole_again():
    """A key's bias in three channels of bf16, and a sum of gates in two fp32 tensors."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    bias = 30 * torch.randn(1, 4, 200, generator=generator)
    pe = build_pe("fox", n_head=4)
    k = torch.zeros(1, 4, 200, 16, dtype=torch.bfloat16)

    @torch.compile(dynamic=False)
    def split(bias, sums):
        return *pe._channels(bias, k, 1.0), *high_and_low(sums)

    sums = 300 * torch.randn(1, 4, 200, generator=generator, dtype=torch.float64)
    k_channels, q_channels, high, low = split(bias, sums)
    whole = (k_channels.double() * q_channels[:, None].double()).sum(-1)
    torch.testing.assert_close(whole, bias.double(), rtol=0, atol=0)
    torch.testing.assert_close(high.double() + low.double(), sums, rtol=1e-14, atol=0)
    assert low.abs().max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_as_exact_as_without_the_compiler(name):
    net = build_gpt(name, train_len=64, n_layer=1, n_kv_head=2, init_std=0.06).train()
    exact = gradients(net, Hardware("cpu", "64", compile=False), 150)
    for precision in ("bf16-mixed", "32-true"):
        worst = worst_errors(net, exact, Hardware("cpu", precision, compile=True), 150)
        assert worst.is_right, (precision, str(worst))
