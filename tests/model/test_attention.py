"""Attention against its definition in float64: windows, biases, sinks, grouped queries, cached keys."""

import pytest
import torch
from conftest import assert_same, at_last_scale, build_pe, context, normal, variables

from model.attention import BLOCK, Context, attention, fused

D = 16
SCALE = 0.3
WHOLE = 2 * BLOCK + 30
# Queries and keys: one block, several, a piece of a text, a single token.
LENGTHS = [
    (5, 5),
    (WHOLE, WHOLE),
    (BLOCK + 3, WHOLE),
    (1, BLOCK + 9),
]


def bias(q, ctx):
    """Of content and distance, [B, H, Tq, Tk]."""
    return 0.1 * q.sum(-1, keepdim=True) * ctx.distance


def by_definition(q, k, v, ctx, *, biased):
    """Two heads of queries share one of keys."""
    k = k.repeat_interleave(2, dim=1)
    v = v.repeat_interleave(2, dim=1)
    scores = SCALE * q @ k.mT
    if biased:
        scores = scores + bias(q, ctx)
    longest = ctx.window or ctx.length
    is_seen = (ctx.distance >= 0) & (ctx.distance < longest)
    weights = torch.where(is_seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if ctx.sinks is not None:
        total = total + ctx.sinks.exp()[:, None, None]
    return weights / total @ v


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40, BLOCK + 20])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_outputs_and_gradients_are_those_of_the_definition(queries, keys, window, biased, with_sinks):
    q, k, v, sinks = variables(
        (1, 4, queries, D),
        (1, 2, keys, D),
        (1, 2, keys, D),
        (4,),
    )
    pos = torch.arange(keys)
    ctx = Context(
        pos_q=pos[-queries:],
        pos_k=pos,
        length=keys,
        tables=None,
        scale=SCALE,
        window=window,
        sinks=sinks if with_sinks else None,
    )
    expected = by_definition(q, k, v, ctx, biased=biased)

    out = attention(q, k, v, ctx, bias=bias if biased else None)

    assert_same(out, expected, [q, k, v, sinks])

    # One kernel for a piece of a text, which a GPU takes, and a CPU can run.
    if window is None and not biased:
        assert_same(
            fused(q, k, v, ctx, causal=True),
            expected,
            [q, k, v, sinks],
        )


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "relative", "profiles", "rerope", "dca"])
def test_scores_are_not_rounded_to_16_bit(name):
    """Where they are as large as 30: in bf16 each would be off by up to 0.06, and its weight by 6 %."""
    n = 300
    zones = name in ("rerope", "dca")
    options = {"base": 1e300} if zones else {}  # nothing turns but the first pair, left empty here
    pe = at_last_scale(build_pe(name, train_len=64, **options))
    heads = (1, n, 4, D)
    *qkv, x = normal(heads, heads, heads, (1, n, 64))
    q, k, v = ((2.5 * tensor).bfloat16() for tensor in qkv)
    if zones:
        q[..., :: D // 2] = 0.0

    with torch.autocast("cpu", torch.bfloat16):
        state = pe.state(x)
        out = context(pe, n).attend(pe, q, k, v, state, layer="layer")

    state = {key: value.double() for key, value in state.items()}
    q, k, v = q.double(), k.double(), v.double()
    pe = pe.double()
    exact = context(pe, n).attend(pe, q, k, v, state, layer="layer")

    # Weights, their sums with values, and the result are of 16 bit.
    assert (out - exact).abs().max() < 3 * 2.0**-9 * v.abs().max()
