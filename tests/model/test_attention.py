"""Attention against loops over single numbers in float64: windows, biases, grouped queries, cached keys."""

import pytest
import torch

from model.attention import BLOCK, Context, attention, in_blocks

D, SCALE = 8, 0.3
LENGTHS = [(5, 5), (2 * BLOCK + 30, 2 * BLOCK + 30), (BLOCK + 3, 2 * BLOCK + 30), (1, BLOCK + 9)]  # queries, keys


def inputs(queries, keys, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    tensors = [torch.randn(2, h, n, D, dtype=torch.float64, generator=generator) for h, n in shapes]
    pos = torch.arange(keys)
    return [x.requires_grad_() for x in tensors], Context(pos[-queries:], pos, keys, None, SCALE)


def bias(q, ctx):
    """Of content and distance, [B, H, Tq, Tk]."""
    return 0.1 * q.sum(-1, keepdim=True) * ctx.distance


def by_loops(q, k, v, *, window=None, biased=False):
    """Attention of one query after the other; the queries are the newest tokens."""
    past, groups = k.size(2) - q.size(2), q.size(1) // k.size(1)
    rows = []
    for n in range(q.size(2)):
        i = past + n
        seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
        keys, values = (x[:, :, seen].repeat_interleave(groups, dim=1) for x in (k, v))
        scores = SCALE * (q[:, :, n, None] * keys).sum(-1)  # [B, H, keys seen]
        if biased:
            scores = scores + 0.1 * q[:, :, n].sum(-1, keepdim=True) * (i - torch.arange(i + 1)[seen])
        rows.append((scores.softmax(-1)[..., None] * values).sum(-2))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40, BLOCK + 20])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_outputs_and_gradients(queries, keys, window, biased):
    (q, k, v), ctx = inputs(queries, keys)
    out = attention(q, k, v, ctx, bias=bias if biased else None, window=window)
    expected = by_loops(q, k, v, window=window, biased=biased)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, wanted = (torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_blocks_equal_one_block(window, recompute):
    """Whatever the function, which sees each block's own queries, the keys in their reach and their positions."""
    (q, k, v), ctx = inputs(2 * BLOCK + 30, 2 * BLOCK + 30, kv_heads=4)

    def function(q, extra, k, v, ctx):
        weights = (q @ k.mT + extra * ctx.distance).tanh() * ctx.visible(window)
        return weights @ v

    extra = q.sum(-1, keepdim=True)
    out = in_blocks(function, (q, extra), (k, v), ctx, window=window, recompute=recompute)
    expected = function(q, extra, k, v, ctx)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    got, wanted = (torch.autograd.grad(o.square().sum(), (q, k, v), retain_graph=True) for o in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_keys_beyond_the_window_have_no_influence():
    window, n = 40, 2 * BLOCK
    (q, k, v), ctx = inputs(n, n)
    before = attention(q, k, v, ctx, window=window)
    k[:, :, 9], v[:, :, 9] = 50.0, 1e6
    changed = (attention(q, k, v, ctx, window=window) != before).any(-1).any(1).all(0)  # [T]
    assert changed.nonzero().flatten().tolist() == list(range(9, 9 + window))


@torch.no_grad()
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_a_window_as_long_as_the_text_is_full_attention_bit_for_bit(queries, keys):
    (q, k, v), ctx = inputs(queries, keys)
    for with_bias in (None, bias):
        full = attention(q, k, v, ctx, bias=with_bias)
        for window in (keys, keys + 1):
            assert torch.equal(full, attention(q, k, v, ctx, bias=with_bias, window=window))
