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
    turned,
)
from torch.nn.functional import normalize

from model.position.layer import make_context


def convolved(x, kernel):
    """PyTorch's own convolution, whose kernel is the other way round, and which pads both ends."""
    channels, width = kernel.shape
    padded = F.conv1d(x.mT, kernel[:, None], padding=width - 1, groups=channels)
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
    w = F.silu(convolved(low_rank(pe, x), pe.kernel)).unflatten(-1, (KV, D))
    mirrors = heads(normalised(w).transpose(1, 2)).split(1, dim=2)  # of each token [B, H, 1, D]
    strength = F.linear(x, pe.strength, pe.strength_bias).sigmoid()
    betas = heads(2 * strength.mT[..., None]).split(1, dim=2)  # [B, H, 1, 1]
    keys = k
    rows = []
    for t, query in enumerate(q.split(1, dim=2)):
        along = (keys * mirrors[t]).sum(-1, keepdim=True)
        reflected = keys - betas[t] * along * mirrors[t]
        keys = torch.cat((reflected[:, :, :t], keys[:, :, t:]), dim=2)
        rows.append(dot(query, keys))
    return torch.cat(rows, dim=2)


def path_fox(pe, q, k, v, x):
    """PaTH, and the forget gates of FoX."""
    return path(pe, q, k, v, x) + forgotten(pe, x) / math.sqrt(D)


def selective_rope(pe, q, k, v, x):
    """arXiv 2511.17388: the angle of a token sums what all tokens up to it say."""
    normed = normalised(x.unflatten(-1, (H, -1))).flatten(-2)
    phi = convolved(low_rank(pe, normed), pe.kernel)
    sums = phi.unflatten(-1, (KV, D // 2)).cumsum(1).transpose(1, 2)
    angle = heads(sums * frequencies(500_000.0))
    return dot(turned(q, angle), turned(k, angle))


def pope(pe, q, k, v, x):
    """arXiv 2509.10534: magnitudes of content alone, and phases of position alone."""
    frequency = 10_000.0 ** (-torch.arange(D, dtype=torch.float64) / D)
    (delta,) = heads(pe.delta[None]).clamp(-2 * math.pi, 0)  # [H, D]
    phase = DISTANCE[..., None] * frequency - delta[:, None, None]  # [H, T, T, D]
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
    angle = torch.arange(T)[:, None] * frequencies()
    q = turned(q, angle).unflatten(-1, (2, -1))  # [B, H, T, 2, pairs]
    k = turned(k, angle).unflatten(-1, (2, -1))
    return torch.einsum("bhicp,bhjcp,ijp->bhij", q, k, decay) / math.sqrt(D)


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
def test_scores_are_those_of_the_paper(formula, options, window):
    pe = build_pe(formula.__name__, n_kv_head=KV, window=window, **options)
    if formula is pope:
        pe.delta.data.sub_(2.0)  # away from its limits, where it has another gradient
    has_tables = formula in (pope, xpos)  # which are fp32

    assert_is_defined_by(formula, pe, tol=1e-5 if has_tables else 1e-8)


@torch.no_grad()
def test_a_phase_of_pope_beyond_its_limits_is_the_limit():
    q, k, v, _ = inputs()
    pe = build_pe("pope", n_kv_head=KV).double()
    limits = torch.tensor([-2 * math.pi, 0.0]).repeat(KV, D // 2)
    beyond = torch.tensor([-1.0, 1.0]).repeat(KV, D // 2)

    pe.delta.copy_(limits)
    expected = attend(pe, q, k, v)
    pe.delta.add_(beyond)

    assert torch.equal(attend(pe, q, k, v), expected)


def test_xpos_is_finite_up_to_its_limit_and_an_error_beyond():
    pe = build_pe("xpos", train_len=256)
    last = torch.tensor([0, pe.max_len - 1])

    for tables_of_queries_or_keys in make_context(pe, last, 1, pe.max_len).tables:
        for table in tables_of_queries_or_keys:
            assert table.isfinite().all()
            assert table.any()

    with pytest.raises(ValueError, match=r"pe\.scale_base"):
        make_context(pe, last + 1, 1, pe.max_len + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_len": 100_000}, "100000 tokens"),
        ({"values": True}, "xPos has another factor"),
    ],
)
def test_what_xpos_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_pe("xpos", **options)


@pytest.mark.parametrize("remainder", [True, False])
def test_stick_breaking_gives_each_key_its_share_of_what_is_left(remainder):
    """arXiv 2410.17980."""
    pe = build_pe("stick_breaking", n_kv_head=KV, remainder=remainder)
    q, k, v, _ = inputs()
    shares = dot(q, heads(k)).sigmoid()
    left = torch.ones(*q.shape[:3], 1)
    expected = torch.zeros_like(q)
    for distance in range(1, T):  # the nearest key takes its share first
        share = shares.diagonal(-distance, 2, 3)  # of the queries that have a key so far back
        share = F.pad(share, (distance, 0))[..., None]
        expected = expected + left * share * heads(v).roll(distance, 2)
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
        memory = memory + beta[t] * torch.outer(k[t], lacking)
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
    forget = F.linear(x, pe.gate, pe.gate_bias).sigmoid().mT
    beta = heads(F.linear(x, pe.strength, pe.strength_bias).sigmoid().mT)
    by_head = zip(
        normalize(q[0], dim=-1, eps=0) * pe.head_factor,
        heads(normalize(k, dim=-1, eps=0))[0],
        heads(v)[0],
        forget[0],
        beta[0],
        strict=True,
    )
    expected = torch.stack([delta_rule(*parts) for parts in by_head])[None]

    out = attend(pe, q, k, v, x)

    # A length of 1 has an epsilon.
    assert_same(
        out,
        expected,
        [q, k, v, x, *pe.parameters()],
        tol=1e-5,
    )
