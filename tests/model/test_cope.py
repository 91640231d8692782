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


def rotated(x):
    """RoPE of x [B, H, T, D]: multiplication by e^(i angle), in float64."""
    frequencies = 10000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.arange(x.size(2))[:, None] * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def qkv(kv_heads=4, length=T):
    keys_shape = (2, kv_heads, length, D)
    return variables((2, 4, length, D), keys_shape, keys_shape)


def attend(pe, q, k, v, x=None):
    return attend_layer(pe, q, k, v, pe.state(x), context(pe, q.size(2)))


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
def test_outputs_and_gradients_are_those_of_the_loops(options, kv_heads):
    options = {"npos_max": 3} | options
    pe = build_pe("cope", n_kv_head=kv_heads, **options).double()
    q, k, v = qkv(kv_heads)
    (x,) = variables((2, T, 64))
    out = attend(pe, q, k, v, x)

    table = pe.table * SCALE if pe.scaling == "code" else pe.table
    gate_k = {"keys": k, "values": v}.get(pe.gates)
    if gate_k is None:
        gate_k = torch.einsum("hdc,btc->bhtd", pe.gate_projection, x)
    k_of_head, v_of_head, gate_k_of_head = (y.repeat_interleave(4 // kv_heads, dim=1) for y in (k, v, gate_k))
    expected = by_loops(q, k_of_head, v_of_head, table, gate_k=gate_k_of_head)
    assert_same(out, expected, [q, k, v, *pe.parameters()])


@pytest.mark.parametrize("gates", ["keys", "values"])
def test_only_the_scores_and_gates_made_of_them_see_a_rotation(gates):
    pe = build_pe("cope_rope", gates=gates, npos_max=3).double()
    q, k, v = qkv()
    out = attend(pe, q, k, v)
    gate_q, gate_k = (rotated(q), rotated(k)) if gates == "keys" else (q, v)
    expected = by_loops(rotated(q), rotated(k), v, pe.table, position_q=q, gate_q=gate_q, gate_k=gate_k)
    assert_same(out, expected, [q, k, v, pe.table], tol=1e-5)  # cosines are rounded to fp32


def test_no_gate_sees_a_relative_embedding():
    pe = build_pe("cope_relative", npos_max=3, max_distance=4).double()
    q, k, v = qkv()
    out = attend(pe, q, k, v)
    distance = (torch.arange(T)[:, None] - torch.arange(T)[None, :]).clamp(0, 4)
    bias = SCALE * torch.einsum("bhid,dij->bhij", q, pe.distances[:, distance])
    expected = by_loops(q, k, v, pe.table, bias=bias)
    assert_same(out, expected, [q, k, v, pe.table, pe.distances])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("gates", ["keys", "values"])
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


FORMS = [
    pytest.param(torch.bfloat16, False, id="bf16-true"),
    pytest.param(torch.bfloat16, True, id="bf16-mixed"),
    pytest.param(torch.float16, True, id="16-mixed"),
]
KINDS = [("cope_rope", {}), ("cope", {"gates": "projection"}), ("cope", {"temperature": "head"})]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "autocast"), FORMS)
@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_in_16_bit_positions_are_fp32(name, options, dtype, autocast):
    """Against the loops in float64, on the same inputs of 16 bit, within the error that sums in fp32 can have."""
    n = 5
    steep = 2.0
    pe = build_pe(name, npos_max=n + 1, **options)
    pe.table[:] = steep * (torch.arange(n + 1) % 2)  # up and down: positions matter everywhere, and no key wins alone
    if pe.gates == "projection":
        pe.gate_projection *= 4.0
    q, k, v, x = normal(*[(1, 4, n, D)] * 3, (1, n, 64), dtype=torch.float64)
    for y in (q, k, x):
        y[..., 0] = y[..., 0].sign() + y[..., 0].clamp(-1, 1)  # 1 to 2: none has a much smaller error than the bound
        y[..., 1:] = 0.0  # one channel, so that little is added up
    q, k, x = (y.to(dtype) for y in (q, k, x))
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = attend(pe if autocast else pe.to(dtype), q, k, v.float(), x)  # values of fp32: nor is the result rounded

    pe = pe.double()
    q, k, x = (y.double() for y in (q, k, x))
    if pe.temperature == "head":
        q = q * pe.head_factor
    turned_q = q
    if name == "cope_rope":
        turned_q, k = rotated(q), rotated(k)
    gate_k = k
    if pe.gates == "projection":
        gate_k = torch.einsum("hdc,btc->bhtd", pe.gate_projection, x)
    expected = by_loops(turned_q, k, v, pe.table, position_q=q, gate_k=gate_k)

    # An operation in fp32 is off by 2^-24 of its result, or of the magnitudes that it adds up. A logit takes at most
    # 12 of them, of two channels. A sigmoid is at most 1/4 as steep as its logit, and a position sums up n of them.
    rounding = 2.0**-24
    largest_q = q.abs().max().item()
    largest_k = max(k.abs().max().item(), gate_k.abs().max().item())
    logit = 12 * rounding * 2 * SCALE * largest_q * largest_k
    position = n * (logit / 4 + 4 * rounding) + n * n * rounding
    score = logit + largest_q * steep * (position + 4 * rounding)
    weights = math.expm1(2 * score) + 2 * n * rounding  # off by this share, with those of n keys in the sum
    error = (out.double() - expected).abs().max().item()
    assert error < weights * v.abs().max().item()


@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_gradients_in_16_bit_are_those_of_fp32(name, options):
    """Of the same inputs, to the bit: another rounding of a position may be another slope of the table."""
    pe = build_pe(name, npos_max=5, **options)
    rounded = [y.bfloat16() for y in normal(*[(2, 4, T, D)] * 3, (2, T, 64), (2, 4, T, D))]

    def gradients(q, k, v, x, weights, autocast):
        of = [y.requires_grad_() for y in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = attend(pe, q, k, v, x)
        return torch.autograd.grad((out * weights).sum(), [*of, *pe.parameters()])

    expected = gradients(*[y.float() for y in rounded], autocast=False)
    found = gradients(*rounded, autocast=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize(("name", "gates"), [("cope", "keys"), ("cope_rope", "values")])
def test_the_clamped_share_is_that_of_all_pairs_in_evaluations(name, gates):
    length = 32
    npos_max = 4
    pe = build_pe(name, npos_max=npos_max, gates=gates).eval()
    q, k, v = (y.float() for y in qkv(length=length))
    attend(pe, q[:, :, :1], k[:, :, :1], v[:, :, :1])  # decoding
    attend(pe.train(), q * 0, k, v)
    assert pe.metrics() == {}

    pe.eval()
    attend(pe, q, k, v)
    attend(pe, q * 0, k, v)  # all gates 1/2
    gate = torch.sigmoid(SCALE * q @ (k if gates == "keys" else v).mT)
    gates_of_both = torch.stack((gate, torch.full_like(gate, 0.5))).tril()
    positions = gates_of_both.flip(-1).cumsum(-1).flip(-1)  # the sum over all keys from j on
    is_pair = torch.ones_like(positions, dtype=torch.bool).tril()
    share = (positions[is_pair] >= npos_max - 1).float().mean().item()
    assert 0.2 < share < 0.9
    assert pe.metrics()["clamped_share"].item() == pytest.approx(share, rel=1e-6)
