"""Encodings of the zoo against their definitions, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, attend, build_pe, variables
from definitions import (
    DIM,
    DISTANCE,
    KV,
    PAST,
    PLACE,
    B,
    D,
    H,
    T,
    assert_is_defined_by,
    dot,
    forgotten,
    frequencies,
    heads,
    inputs,
    limited,
    turned,
)
from torch.nn.functional import normalize

from model.position.layer import make_context


def convolved(x, kernel):
    """PyTorch's own convolution, whose kernel is the other way round, and which pads both ends."""
    channels, width = kernel.shape
    padded = F.conv1d(
        x.mT,
        kernel[:, None],
        padding=width - 1,
        groups=channels,
    )
    return padded[..., :T].mT


def normalised(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def low_rank(pe, x):
    return x @ pe.down.T @ pe.up.T


def nape(pe, q, k, v, x):
    """arXiv 2506.16640: ALiBi in half of the heads, of which the first has a slope of 1; none in the others."""
    slope = torch.tensor([1, 1 / 2, 0, 0])[:, None, None]
    return dot(q, k) - slope * PAST


def path(pe, q, k, v, x):
    """arXiv 2505.16381: each token reflects all keys before it at a plane of its own."""
    w = F.silu(convolved(low_rank(pe, x), pe.kernel))
    w = w.unflatten(-1, (KV, D)).transpose(1, 2)  # [B, KV, T, D]
    mirrors = heads(normalised(w))
    strength = F.linear(x, pe.strength, pe.strength_bias).sigmoid()
    beta = heads(2 * strength.mT[..., None])  # [B, H, T, 1]
    keys = k
    rows = []
    for t in range(T):
        # Token t reflects the keys before it, and reads them.
        mirror = mirrors[:, :, t : t + 1]
        along = (keys * mirror).sum(-1, keepdim=True)
        is_before = (t > PLACE)[:, None]
        keys = keys - is_before * beta[:, :, t : t + 1] * along * mirror
        query = q[:, :, t : t + 1]
        rows.append(dot(query, keys))
    return torch.cat(rows, dim=2)


def path_fox(pe, q, k, v, x):
    """PaTH, and the forget gates of FoX."""
    of_gates = forgotten(pe, x) / math.sqrt(D)
    return path(pe, q, k, v, x) + of_gates


def selective_rope(pe, q, k, v, x):
    """arXiv 2511.17388: the angle of a token sums what all tokens up to it say."""
    in_parts = x.unflatten(-1, (H, -1))
    normed = normalised(in_parts).flatten(-2)
    phi = convolved(low_rank(pe, normed), pe.kernel)
    sums = phi.unflatten(-1, (KV, D // 2)).cumsum(1)
    # A head of keys serves two of queries.
    angle = heads(sums.transpose(1, 2) * frequencies(500_000.0))
    return dot(turned(q, angle), turned(k, angle))


def pope(pe, q, k, v, x):
    """arXiv 2509.10534: magnitudes of content alone, and phases of position alone."""
    exponent = -torch.arange(D, dtype=torch.float64) / D
    (delta,) = heads(pe.delta[None])
    delta = limited(delta, -2 * math.pi, 0)  # [H, D]
    angle = DISTANCE[..., None] * 10_000.0**exponent
    phase = angle - delta[:, None, None]  # [H, T, T, D]
    products = torch.einsum(
        "bhid,bhjd,hijd->bhij",
        F.softplus(q),
        F.softplus(k),
        phase.cos(),
    )
    return products / math.sqrt(D)


def profiles(pe, q, k, v, x):
    """A term for each distance, of which the layer's input makes the profile."""
    profile = torch.einsum("btc,hrc,rd->bhtd", x, pe.mix, pe.distances)
    distance = PAST.clamp(max=pe.max_distance).expand(B, H, T, T)
    is_near = pe.max_distance >= PAST
    return dot(q, k) + profile.gather(-1, distance) * is_near


def xpos(pe, q, k, v, x):
    """arXiv 2212.10554: RoPE whose pairs fade with the distance, the slow ones least."""
    zeta = (torch.arange(0, D, 2) + 0.3 * D) / (1.3 * D)
    decay = zeta.double() ** (PAST[..., None] / 50)  # [T, T, pairs]
    angle = PLACE[:, None] * frequencies()
    # Of each pair both channels fade alike.
    q = turned(q, angle).unflatten(-1, (2, -1))  # [B, H, T, 2, pairs]
    k = turned(k, angle).unflatten(-1, (2, -1))
    products = torch.einsum(
        "bhicp,bhjcp,ijp->bhij",
        q,
        k,
        decay,
    )
    return products / math.sqrt(D)


CASES = [
    (nape, {}),
    (path, {}),
    (path_fox, {}),
    (selective_rope, {}),
    (pope, {}),
    (profiles, {}),
    (xpos, {"gamma": 0.3, "scale_base": 50.0}),
]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("formula", "options"), CASES)
def test_outputs_and_gradients_are_those_of_the_paper(formula, options, window):
    pe = build_pe(formula.__name__, n_kv_head=KV, window=window, **options)
    if formula is pope:
        pe.delta.data.mul_(20.0)  # beyond both limits, too
    has_tables = formula in (pope, xpos)  # which are fp32

    assert_is_defined_by(formula, pe, tol=1e-5 if has_tables else 1e-8)


def test_xpos_is_finite_up_to_its_limit_and_an_error_beyond():
    pe = build_pe("xpos", train_len=256)
    last = torch.tensor([0, pe.max_len - 1])

    of_queries, of_keys = make_context(pe, last, 1, pe.max_len).tables

    for table in (*of_queries, *of_keys):
        assert table.isfinite().all()
        assert table.any()

    with pytest.raises(ValueError, match=r"pe\.scale_base"):
        make_context(pe, last + 1, 1, pe.max_len + 1)


@pytest.mark.parametrize("remainder", [True, False])
def test_stick_breaking_gives_each_key_its_share_of_what_is_left(remainder):
    """arXiv 2410.17980."""
    pe = build_pe("stick_breaking", n_kv_head=KV, remainder=remainder)
    q, k, v, _ = inputs()
    shares = dot(q, heads(k)).sigmoid()
    left = torch.ones(*q.shape[:3], 1)
    expected = torch.zeros_like(q)
    # The nearest key takes its share first.
    for distance in range(1, T):
        share = shares.diagonal(-distance, 2, 3)
        share = F.pad(share, (distance, 0))[..., None]  # none for queries without a key so far back
        value = heads(v).roll(distance, 2)
        expected = expected + left * share * value
        left = left * (1 - share)
    if remainder:
        expected = expected + left * heads(v)

    out = attend(pe, q, k, v)

    assert_same(out, expected, [q, k, v])


def delta_rule(q, k, v, forget, beta):
    """arXiv 2412.06464: what one head reads, [T, D], with q, k, v [T, D] and the gates forget and beta [T]."""
    memory = torch.zeros(D, D, dtype=torch.float64)
    out = []
    for t in range(len(q)):
        memory = forget[t] * memory
        lacking = v[t] - k[t] @ memory  # at this key
        written = torch.outer(k[t], lacking)
        memory = memory + beta[t] * written
        out.append(q[t] @ memory / math.sqrt(D))
    return torch.stack(out)


@pytest.mark.parametrize("length", [7, 259])  # less than a block, and more than two
def test_the_gated_delta_rule_is_its_recurrence(length):
    pe = build_pe("gated_delta", n_kv_head=KV, temperature="head").double()
    q, k, v, x = variables(
        (1, H, length, D),
        (1, KV, length, D),
        (1, KV, length, D),
        (1, length, DIM),
    )
    forget = F.linear(x, pe.gate, pe.gate_bias).sigmoid()
    beta = F.linear(x, pe.strength, pe.strength_bias).sigmoid()
    parts = (
        normalize(q, dim=-1, eps=0) * pe.head_factor,
        heads(normalize(k, dim=-1, eps=0)),
        heads(v),
        forget.mT,
        heads(beta.mT),
    )
    of_heads = []
    for head in range(H):
        own = [part[0, head] for part in parts]
        of_heads.append(delta_rule(*own))
    expected = torch.stack(of_heads)[None]

    out = attend(pe, q, k, v, x)

    # A length of 1 has an epsilon.
    assert_same(
        out,
        expected,
        [q, k, v, x, *pe.parameters()],
        tol=1e-5,
    )
