"""What the compiler's own code computes. It keeps numbers in fp32 where a program rounds them to 16 bit and back."""

import pytest
import torch
from conftest import build_gpt, build_pe, normal, tokens

# Scalings compute as RoPE does.
NAMES = ["rope", "xpos", "selective_rope", "pope", "alibi", "fox", "fox_rope", "kerple", "t5", "fire", "relative"]
NAMES += ["profiles", "cope", "stick_breaking", "path", "rerope", "dca"]
# PyTorch's cache does not know for which instructions of the processor its code was written.
OPTIONS = {"fx_graph_cache": False}


@pytest.mark.long
def test_a_bias_in_three_channels_of_bf16_is_whole_again():
    torch._dynamo.reset()
    bias = 30 * normal((1, 4, 200))[0]
    pe = build_pe("fox", n_head=4)
    k = torch.zeros(1, 4, 200, 16, dtype=torch.bfloat16)
    split = torch.compile(lambda bias: pe._channels(bias, k, 1.0), dynamic=False, options=OPTIONS)
    of_keys, of_queries = split(bias)
    whole = (of_keys.double() * of_queries[:, None].double()).sum(-1)
    assert torch.equal(whole, bias.double())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_gradients_are_those_in_float64(name):
    """Within what sums over all numbers of the activations can lose in fp32."""
    torch._dynamo.reset()
    net = build_gpt(name, train_len=64, n_layer=1, n_kv_head=2, init_std=0.06).train()
    idx = tokens(150)
    loss = torch.compile(net, dynamic=False, options=OPTIONS)(idx, targets=idx)
    found = torch.autograd.grad(loss, list(net.parameters()))
    net.double()
    expected = torch.autograd.grad(net(idx, targets=idx), list(net.parameters()))
    limit = idx.numel() * net.cfg.dim * 2.0**-24
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < limit * b.norm()
