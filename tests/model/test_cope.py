"""CoPE against its definition: sums and interpolations written as loops over single numbers, in float64."""

import itertools
import math

import pytest
import torch
from conftest import assert_same, build_pe

from model.attention import BLOCK
from model.position.cope import cope_attention
from model.position.layer import make_context

T = 7
D = 16
SCALE = 1 / math.sqrt(D)


def by_loops(q, k, v, table, *, position_q=None, gate_q=None, gate_k=None, bias=None):
    """Causal attention of q over k, v [B, H, T, D] with contextual positions in the `table` [D, P]."""
    position_q = q if position_q is None else position_q
    gate_q = q if gate_q is None else gate_q
    gate_k = k if gate_k is None else gate_k
    last = table.size(1) - 1
    rows = []
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        scores = []
        position = 0.0
        for j in range(i, -1, -1):
            # The position of key j is the number of gates that are open from there to the query.
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


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def qkv(kv_heads=4, length=T):
    keys_shape = (2, kv_heads, length, D)
    return tensors((2, 4, length, D), keys_shape, keys_shape)


def attention(pe, q, k, v, x=None):
    n = q.size(2)
    return pe.attend(q, k, v, pe.state(x), make_context(pe, torch.arange(n), n, n))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("gates", ["keys", "values"])
@pytest.mark.parametrize("gate", [-6.0, 0.0, 6.0])  # closed, half open, open: how far back a query must count
def test_blocks_equal_the_definition(gate, gates, window):
    """In blocks of queries, by the gradient written by hand, without the gates that cannot matter."""
    length = 2 * BLOCK + 70
    pe = build_pe("cope", gates=gates, npos_max=5, window=window).double()
    q, k, v = tensors(*[(1, 4, length, D)] * 3)
    gate_k = k if gates == "keys" else v
    with torch.no_grad():
        q[..., 0] = 4.0
        gate_k[..., 0] = gate
    visible = make_context(pe, torch.arange(length), length, length).visible()
    expected = cope_attention(q, k, v, pe.table, scale=SCALE, visible=visible, gate_keys=gate_k)
    assert_same(attention(pe, q, k, v), expected, [q, k, v, pe.table])


def test_gradient_at_integer_positions():
    """Keys of zero make every gate 1/2 and every second position an integer. The table is flat but from 1 to 2, so
    that in row 2 only key 0 at 3/2 and key 1 at 1 feel their position: with ceil, key 1 would not."""
    q, v = tensors((1, 1, 3, 4), (1, 1, 3, 4))
    k = torch.zeros(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
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


@torch.no_grad()
def test_bf16_counts_in_fp32():
    """Zero keys: positions are half the distance, up to 256. A bf16 sum would stop counting at 128."""
    pe = build_pe("cope", npos_max=300).bfloat16()
    q, v = tensors((1, 4, 512, D), (1, 4, 512, D))
    q = q.bfloat16()
    v = v.bfloat16()
    k = torch.zeros_like(q)
    out = attention(pe, q, k, v)
    visible = torch.ones(512, 512, dtype=torch.bool).tril()
    expected = cope_attention(q.double(), k.double(), v.double(), pe.table.double(), scale=SCALE, visible=visible)
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": "code"},
        {"gates": "values"},
        {"gates": "projection"},
        {"npos_max": 1},
        {"npos_max": 2},
        {"npos_max": 20},
    ],
    ids=str,
)
def test_output_and_gradients(options, kv_heads):
    options = {"npos_max": 3} | options
    pe = build_pe("cope", n_kv_head=kv_heads, **options).double()
    q, k, v = qkv(kv_heads)
    x = torch.randn(2, T, 64, dtype=torch.float64)
    inputs = [q, k, v, *pe.parameters()]
    out = attention(pe, q, k, v, x)

    if pe.gates == "projection":
        gate_k = torch.einsum("hdc,btc->bhtd", pe.gate_projection, x)
    else:
        gate_k = k if pe.gates == "keys" else v
    heads_of_a_key = 4 // kv_heads
    expected = by_loops(
        q,
        k.repeat_interleave(heads_of_a_key, dim=1),
        v.repeat_interleave(heads_of_a_key, dim=1),
        pe.table * SCALE if pe.scaling == "code" else pe.table,
        gate_k=gate_k.repeat_interleave(heads_of_a_key, dim=1),
    )
    assert_same(out, expected, inputs)


@pytest.mark.parametrize("gates", ["keys", "values"])
def test_with_rope(gates):
    """Only q.k, and gates made of it, see the rotation."""
    pe = build_pe("cope_rope", gates=gates, npos_max=3).double()
    q, k, v = qkv()
    out = attention(pe, q, k, v)

    # Rotation as multiplication by e^(i angle), in float64.
    frequencies = 10000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.arange(T)[:, None] * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(x):
        turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    gate_q, gate_k = (rotated(q), rotated(k)) if gates == "keys" else (q, v)
    expected = by_loops(rotated(q), rotated(k), v, pe.table, position_q=q, gate_q=gate_q, gate_k=gate_k)
    assert_same(out, expected, [q, k, v, pe.table], tol=1e-5)


def test_with_relative():
    pe = build_pe("cope_relative", npos_max=3, max_distance=4).double()
    q, k, v = qkv()
    out = attention(pe, q, k, v)
    distance = (torch.arange(T)[:, None] - torch.arange(T)[None, :]).clamp(0, 4)
    bias = SCALE * torch.einsum("bhid,dij->bhij", q, pe.distances[:, distance])
    expected = by_loops(q, k, v, pe.table, bias=bias)
    assert_same(out, expected, [q, k, v, pe.table, pe.distances])


@pytest.mark.parametrize("gates", ["keys", "values"])
def test_clamped_share(gates):
    length = 32
    npos_max = 4
    pe = build_pe("cope", npos_max=npos_max, gates=gates).eval()
    q, k, v = (tensor.float() for tensor in qkv(length=length))

    # Decoding and training do not count.
    attention(pe, q[:, :, :1], k[:, :, :1], v[:, :, :1])
    attention(pe.train(), q * 0, k, v)
    assert pe.metrics() == {}

    pe.eval()
    attention(pe, q, k, v)
    attention(pe, q * 0, k, v)  # all gates 1/2
    gate = torch.sigmoid(SCALE * q @ (k if gates == "keys" else v).mT)
    shares = []
    for each_gate in (gate, torch.full_like(gate, 0.5)):
        causal = each_gate.tril()
        positions = causal.flip(-1).cumsum(-1).flip(-1)  # the sum over all keys from j on
        is_pair = torch.ones_like(positions, dtype=torch.bool).tril()
        shares.append((positions[is_pair] >= npos_max - 1).float().mean().item())
    assert 0.2 < shares[0] < 0.9
    assert pe.metrics()["clamped_share"].item() == pytest.approx(sum(shares) / 2, rel=1e-6)
