"""CoPE against its definition, in float64."""

import copy
import math

import pytest
import torch
from conftest import attend, build_pe, layer_gradients, normal, variables
from definitions import PAST, D, T, assert_is_defined_by, dot, frequencies, inputs, turned

from model.position.cope import cope_attention


def cope(pe, q, k, v, x):
    """arXiv 2405.18719: the position of a key counts the gates, a sigmoid each, from it to the query.

    Only scores, and gates made of them, see a rotation; no gate sees a relative embedding.
    """
    plain_q = q
    if "RoPE" in pe.family:
        angle = torch.arange(T)[:, None] * frequencies()
        q = turned(q, angle)
        k = turned(k, angle)
    if pe.gates == "keys":
        gate_logits = dot(q, k)
    elif pe.gates == "values":
        gate_logits = dot(plain_q, v)
    else:
        projected = torch.einsum("hdc,btc->bhtd", pe.gate_projection, x)
        gate_logits = dot(plain_q, projected.repeat_interleave(2, dim=1))

    is_seen = ((pe.window or T) > PAST).tril()
    gates = gate_logits.sigmoid() * is_seen
    last = pe.npos_max - 1
    position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)

    # The table is linear between its entries.
    at_table = plain_q @ pe.table
    if pe.scaling == "code":
        at_table = at_table / math.sqrt(D)
    below = position.floor().long()
    above = (below + 1).clamp(max=last)
    at_below = at_table.gather(-1, below)
    at_above = at_table.gather(-1, above)
    share = position - below
    at_position = at_below + share * (at_above - at_below)
    scores = dot(q, k) + at_position
    if hasattr(pe, "distances"):
        distance = PAST.clamp(max=pe.max_distance)
        of_pairs = pe.distances[:, distance]  # [D, T, T]
        relative = torch.einsum("bhid,dij->bhij", plain_q, of_pairs)
        scores = scores + relative / math.sqrt(D)
    return scores


CASES = [
    ("cope", {}),
    ("cope", {"scaling": "code"}),
    ("cope", {"gates": "values"}),
    ("cope", {"gates": "projection"}),
    ("cope", {"npos_max": 1}),
    ("cope", {"npos_max": 2}),
    ("cope", {"npos_max": 100}),
    ("cope", {"window": 50}),
    ("cope_rope", {}),
    ("cope_rope", {"gates": "values"}),
    ("cope_relative", {"max_distance": 4}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_outputs_and_gradients_are_those_of_the_paper(name, options):
    pe = build_pe(name, n_kv_head=2, **{"npos_max": 5} | options)
    tolerance = 1e-4 if name == "cope_rope" else 1e-9  # cosines are rounded to fp32

    assert_is_defined_by(cope, pe, tol=tolerance)


@pytest.mark.parametrize("gates", ["keys", "values"])
@pytest.mark.parametrize("logit", [-6.0, 0.0, 6.0])  # closed, half open, open: how far back a query must count
def test_gates_that_cannot_matter_are_left_out_without_a_difference(logit, gates):
    pe = build_pe("cope", n_kv_head=2, gates=gates, npos_max=5)
    q, k, v, x = inputs()
    with torch.no_grad():
        q[..., 0] = 4.0
        (k if gates == "keys" else v)[..., 0] = logit

    assert_is_defined_by(cope, pe, (q, k, v, x), tol=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cope_rope", {}),
        ("cope", {"gates": "projection"}),
        ("cope", {"temperature": "head"}),
    ],
)
def test_in_16_bit_positions_and_gradients_are_those_of_fp32(name, options, precision):
    """Of the same inputs, to the bit: another rounding of a position may be another slope of the table."""
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    exact = build_pe(name, npos_max=5, **options).to(dtype).float()  # the weights are rounded alike
    pe = copy.deepcopy(exact)
    autocast = dtype
    if precision == "bf16-true":
        pe.to(dtype)
        autocast = None
    heads = (2, 4, 7, D)
    inputs = normal(heads, heads, heads, (2, 7, 64), heads, dtype=dtype)

    expected = layer_gradients(exact, *[tensor.float() for tensor in inputs])
    found = layer_gradients(pe, *inputs, autocast=autocast)

    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient.to(found[key].dtype)), key


def test_a_gate_gets_a_gradient_at_a_whole_position():
    """Keys of zero make every gate 1/2 and every second position an integer. The table is flat but from 1 to 2, so
    that in row 2 only key 0 at 3/2 and key 1 at 1 feel their position: with ceil, key 1 would not."""
    q, v = variables((1, 1, 3, 4), (1, 1, 3, 4))
    k = torch.zeros_like(q, requires_grad=True)
    table = torch.zeros(4, 5, dtype=torch.float64)
    table[:, 2:] = 1.0
    visible = torch.ones(3, 3, dtype=torch.bool).tril()

    def loss(k):
        out = cope_attention(q, k, v, table, scale=1.0, visible=visible, position_q=q)
        return (out[0, 0, 2] ** 3).sum()

    (grad,) = torch.autograd.grad(loss(k), k)
    towards = q[:, :, 2:].detach().expand_as(k)  # raises every gate of row 2: the slope to the right of the integer
    slope = (loss(k + 1e-6 * towards) - loss(k)) / 1e-6

    torch.testing.assert_close((grad * towards).sum(), slope, rtol=1e-4, atol=0)


def test_the_share_of_clamped_positions_is_that_of_evaluations():
    pe = build_pe("cope", npos_max=5)
    q = torch.zeros(1, 4, 64, 16)
    k, v = normal((1, 4, 64, 16), (1, 4, 64, 16))
    attend(pe.train(), q, k, v)
    assert pe.metrics() == {}

    attend(pe.eval(), q, k, v)

    # All gates are 1/2, so that 8 keys make the last position: it is that of the pairs at a distance of 7 or more.
    assert float(pe.metrics()["clamped_share"]) == pytest.approx(math.comb(58, 2) / math.comb(65, 2))
