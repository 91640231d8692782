"""CoPE against its definition: sums and interpolations written as loops over single numbers, in float64."""

import itertools
import math

import pytest
import torch
from conftest import assert_same, build_pe, context, normal, variables
from conftest import attend as attend_layer

from model.attention import BLOCK
from model.position.cope import cope_attention

T = 7
D = 16
SCALE = 1 / math.sqrt(D)


def by_loops(q, k, v, table, *, position_q, gate_q, gate_k, bias):
    """Causal attention of q over k, v [B, H, T, D] with contextual positions in the `table` [D, P].

    As arXiv 2405.18719 defines it: the position of a key counts the gates, a sigmoid each, from it to the query.
    """
    last = table.size(1) - 1
    rows = []
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        scores = []
        position = 0.0
        for j in range(i, -1, -1):
            position = position + torch.sigmoid(SCALE * gate_q[b, h, i] @ gate_k[b, h, j])
            below = min(math.floor(position.item()), last)
            term = position_q[b, h, i] @ table[:, below]
            if below < last:
                term_above = position_q[b, h, i] @ table[:, below + 1]
                term = term + (position - below) * (term_above - term)
            score = SCALE * q[b, h, i] @ k[b, h, j] + term
            if bias is not None:
                score = score + bias[b, h, i, j]
            scores.append(score)
        weights = torch.stack(scores[::-1]).softmax(0)
        rows.append(weights @ v[b, h, : i + 1])
    return torch.stack(rows).unflatten(0, q.shape[:3])


def rotated(x):
    """RoPE of x [B, H, T, D]: multiplication by e^(i angle), in float64."""
    frequencies = 10000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.arange(x.size(2))[:, None] * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def attend(pe, q, k, v, x=None):
    return attend_layer(pe, q, k, v, pe.state(x), context(pe, q.size(2)))


@pytest.mark.parametrize(
    ("name", "options", "kv_heads"),
    [
        ("cope", {}, 4),
        ("cope", {"scaling": "code"}, 4),
        ("cope", {"gates": "values"}, 2),
        ("cope", {"gates": "projection"}, 2),
        ("cope", {"npos_max": 1}, 4),
        ("cope", {"npos_max": 2}, 2),
        ("cope", {"npos_max": 20}, 2),
        ("cope_rope", {}, 4),
        ("cope_rope", {"gates": "values"}, 4),
        ("cope_relative", {"max_distance": 4}, 4),
    ],
)
def test_outputs_and_gradients_are_those_of_the_loops(name, options, kv_heads):
    """Only scores, and gates made of them, see a rotation; no gate sees a relative embedding."""
    pe = build_pe(name, n_kv_head=kv_heads, **{"npos_max": 3} | options).double()
    shapes = [(2, heads, T, D) for heads in (4, kv_heads, kv_heads)]
    *inputs, x = variables(*shapes, (2, T, 64))
    out = attend(pe, *inputs, x)

    q, k, v = (y.repeat_interleave(4 // y.size(1), dim=1) for y in inputs)
    turned_q, turned_k = (rotated(q), rotated(k)) if name == "cope_rope" else (q, k)
    if pe.gates == "keys":
        gate_q, gate_k = turned_q, turned_k
    elif pe.gates == "values":
        gate_q, gate_k = q, v
    else:
        projected = torch.einsum("hdc,btc->bhtd", pe.gate_projection, x)
        gate_q, gate_k = q, projected.repeat_interleave(4 // kv_heads, dim=1)
    table = pe.table * SCALE if pe.scaling == "code" else pe.table
    bias = None
    if name == "cope_relative":
        distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(0, 4)
        bias = SCALE * torch.einsum("bhid,dij->bhij", q, pe.distances[:, distance])
    expected = by_loops(turned_q, turned_k, v, table, position_q=q, gate_q=gate_q, gate_k=gate_k, bias=bias)
    tolerance = 1e-5 if name == "cope_rope" else 1e-10  # cosines are rounded to fp32
    assert_same(out, expected, [*inputs, *pe.parameters()], tol=tolerance)


@pytest.mark.parametrize(("gates", "window"), [("keys", None), ("values", None), ("keys", 50)])
@pytest.mark.parametrize("gate", [-6.0, 0.0, 6.0])  # closed, half open, open: how far back a query must count
def test_blocks_without_the_gates_that_cannot_matter_equal_the_definition(gate, gates, window):
    """Their gradient is written by hand, that of the definition is not."""
    length = 2 * BLOCK + 70
    pe = build_pe("cope", gates=gates, npos_max=5, window=window).double()
    q, k, v = variables(*[(1, 4, length, D)] * 3)
    gate_k = k if gates == "keys" else v
    with torch.no_grad():
        q[..., 0] = 4.0
        gate_k[..., 0] = gate
    visible = context(pe, length).visible()
    expected = cope_attention(q, k, v, pe.table, scale=SCALE, visible=visible, gate_keys=gate_k)

    assert_same(attend(pe, q, k, v), expected, [q, k, v, pe.table])


def test_a_gate_gets_a_gradient_at_a_whole_position():
    """Keys of zero make every gate 1/2 and every second position an integer. The table is flat but from 1 to 2, so
    that in row 2 only key 0 at 3/2 and key 1 at 1 feel their position: with ceil, key 1 would not."""
    q, v = variables((1, 1, 3, 4), (1, 1, 3, 4))
    k = torch.zeros_like(q, requires_grad=True)
    table = torch.zeros(4, 5, dtype=torch.float64)
    table[:, 2:] = 1.0
    visible = torch.ones(3, 3, dtype=torch.bool).tril()

    def loss(k):
        out = cope_attention(q, k, v, table, scale=1.0, visible=visible)
        return (out[0, 0, 2] ** 3).sum()

    (grad,) = torch.autograd.grad(loss(k), k)
    towards = q[:, :, 2:].detach().expand_as(k)  # raises every gate of row 2: the slope to the right of the integer
    slope = (loss(k + 1e-6 * towards) - loss(k)) / 1e-6

    torch.testing.assert_close((grad * towards).sum(), slope, rtol=1e-4, atol=0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("cope_rope", {}), ("cope", {"gates": "projection"}), ("cope", {"temperature": "head"})],
)
def test_in_16_bit_positions_and_gradients_are_those_of_fp32(name, options, precision):
    """Of the same inputs, to the bit: another rounding of a position may be another slope of the table."""
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    pe = build_pe(name, npos_max=5, **options).to(dtype)  # the weights are rounded alike
    rounded = [x.to(dtype) for x in normal(*[(2, 4, T, D)] * 3, (2, T, 64), (2, 4, T, D))]

    def outputs(pe, q, k, v, x, weights, autocast):
        inputs = [y.requires_grad_() for y in (q, k, v)]
        with torch.autocast("cpu", dtype, enabled=autocast):
            out = attend(pe, q, k, v, x)
        return [out, *torch.autograd.grad((out * weights).sum(), [*inputs, *pe.parameters()])]

    found = outputs(pe if precision == "bf16-true" else pe.float(), *rounded, autocast=precision != "bf16-true")
    expected = outputs(pe.float(), *[y.float() for y in rounded], autocast=False)

    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize(("name", "gates"), [("cope", "keys"), ("cope_rope", "values")])
def test_the_clamped_share_is_that_of_all_pairs_in_evaluations(name, gates):
    """All products of q with the keys of the gates are equal: counting is then a multiplication."""
    length = 32
    npos_max = 4
    pe = build_pe(name, npos_max=npos_max, gates=gates)
    q, k = normal(*[(1, 4, length, D)] * 2)
    ones = torch.ones_like(q)
    keys = {"keys": k, "values": k, gates: ones / (SCALE * D)}

    def attend_with(logit, length=length):
        inputs = [x[:, :, :length] for x in (logit * ones, keys["keys"], keys["values"])]
        attend(pe, *inputs)

    attend_with(2.0)  # training
    pe.eval()
    attend_with(2.0, length=1)  # decoding

    assert pe.metrics() == {}

    shares = []
    for logit in (0.0, 2.0):
        attend_with(logit)
        gate = 1 / (1 + math.exp(-logit))
        counted = [gate * (i - j + 1) for i in range(length) for j in range(i + 1)]
        shares.append(sum(position >= npos_max - 1 for position in counted) / len(counted))
    assert shares[0] != shares[1]
    assert pe.metrics()["clamped_share"].item() == pytest.approx(sum(shares) / 2, rel=1e-6)
