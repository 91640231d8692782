"""What the compiler's own code computes. It keeps numbers in fp32 where a program rounds them to 16 bit and back."""

import pytest
import torch
from conftest import build_gpt, gradients_of, tokens

# Scalings compute as RoPE does.
NAMES = [
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
    "cope",
    "stick_breaking",
    "path",
    "rerope",
    "dca",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_gradients_are_those_in_float64(name):
    """Within what sums over all numbers of the activations can lose in fp32."""
    torch._dynamo.reset()
    net = build_gpt(name, train_len=64, n_layer=1, n_kv_head=2, init_std=0.06).train()
    idx = tokens(150)
    # PyTorch's cache does not know for which instructions of the processor its code was written.
    loss = torch.compile(net, dynamic=False, options={"fx_graph_cache": False})(
        idx,
        targets=idx,
    )
    found = gradients_of(loss, net)
    net.double()
    expected = gradients_of(net(idx, targets=idx), net)
    limit = idx.numel() * net.cfg.dim * 2.0**-24

    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < limit * b.norm()
