"""A piece of a text: fewer queries than keys, as with a cache. A GPU takes one kernel for it, which a CPU can run."""

import pytest
import torch

from model.attention import Context, attention, fused

HEADS = 4
KEYS = 300


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("queries", [2, 37, 299])
def test_one_kernel_reads_a_piece_as_blocks_do(queries, with_sinks):
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, queries, 16, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, HEADS // 2, KEYS, 16, dtype=torch.float64, requires_grad=True)
    v = torch.randn_like(k, requires_grad=True)
    sinks = torch.randn(HEADS, dtype=torch.float64) if with_sinks else None
    pos = torch.arange(KEYS)
    ctx = Context(pos[-queries:], pos, KEYS, None, 0.25, sinks=sinks)

    in_blocks = attention(q, k, v, ctx)
    in_one = fused(q, k, v, ctx, causal=True)

    torch.testing.assert_close(in_one, in_blocks)
    weights = torch.randn_like(in_one)
    gradients = torch.autograd.grad((in_one * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((in_blocks * weights).sum(), (q, k, v))
    torch.testing.assert_close(gradients, expected)
