"""Encodings of the zoo against their definitions, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, attend, build_pe, context, variables
from definitions import (
    DIM,
    DISTANCE,
    KV,
    PAST,
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
from torch import nn
from torch.nn.functional import normalize

from model.position.layer import make_context


def convolved(x, kernel):
    """PyTorch's own convolution, which pads both ends."""
    channels, width = kernel.shape
    conv = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=False)
    padded = torch.func.functional_call(conv, {"weight": kernel[:, None]}, (x.mT,))
    return padded[..., :T].mT


def normalised(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def low_rank(pe, x):
    return x @ pe.down.T @ pe.up.T


def nape(pe, q, k, v, x):
    slope = torch.tensor([1, 1 / 2, 0, 0])[:, None, None]
    return dot(q, k) - slope * PAST


def path(pe, q, k, v, x):
    """Each token reflects all keys before it."""
    w = F.silu(convolved(low_rank(pe, x), pe.kernel)).unflatten(-1, (KV, D)).transpose(1, 2)
    mirrors = heads(normalised(w))  # [B, H, T, D]
    beta = heads(2 * (x @ pe.strength.T + pe.strength_bias).sigmoid().mT)  # [B, H, T]
    keys = k
    rows = []
    for t in range(T):
        mirror = mirrors[:, :, t : t + 1]
        is_before = (torch.arange(T) < t)[:, None]
        projection = (keys * mirror).sum(-1, keepdim=True) * mirror
        keys = keys - is_before * beta[:, :, t, None, None] * projection
        rows.append(dot(q[:, :, t : t + 1], keys))
    return torch.cat(rows, dim=2)


def path_fox(pe, q, k, v, x):
    return path(pe, q, k, v, x) + forgotten(pe, x) / math.sqrt(D)


def selective_rope(pe, q, k, v, x):
    normed = normalised(x.unflatten(-1, (H, -1))).flatten(-2)
    phi = convolved(low_rank(pe, normed), pe.kernel).unflatten(-1, (KV, D // 2))
    angle = heads(phi.cumsum(1).transpose(1, 2) * frequencies(500_000.0))
    return dot(turned(q, angle), turned(k, angle))


def pope(pe, q, k, v, x):
    magnitude = F.softplus(q)[:, :, :, None] * F.softplus(k)[:, :, None]  # [B, H, T, T, D]
    frequency = 10_000.0 ** (-torch.arange(D, dtype=torch.float64) / D)
    delta = heads(pe.delta[None]).clamp(-2 * math.pi, 0)[0, :, None, None]
    phase = DISTANCE[..., None] * frequency - delta
    return (magnitude * phase.cos()).sum(-1) / math.sqrt(D)


def lerope(pe, q, k, v, x):
    angle = torch.arange(T)[:, None] * frequencies() * pe.alpha.exp()
    log_pos = torch.arange(1, T + 1).double().log()[:, None]
    factor = pe.scale_by_head[:, None, None] * log_pos + pe.offset[:, None, None]
    return dot(turned(factor * q, angle), turned(k, angle))


def profiles(pe, q, k, v, x):
    profile = torch.einsum("btc,hrc,rd->bhtd", x, pe.mix, pe.distances)
    of_pairs = profile.gather(-1, PAST.clamp(max=pe.max_distance).expand(*profile.shape[:2], T, T))
    return dot(q, k) + of_pairs * (pe.max_distance >= PAST)


def scale_invariant(pe, q, k, v, x):
    """Of p-RoPE that keeps no pair here, so that nothing is rotated; alpha = beta = e^0.5."""
    a = (2 * ((PAST / 3 + 1).log() - 0.5 + 1)).sqrt()
    return a * dot(q, k) - a**2 + 1


def xpos(pe, q, k, v, x):
    zeta = (torch.arange(0, D, 2) + 0.3 * D) / (1.3 * D)
    decay = zeta.double() ** (PAST[..., None] / 50)  # [T, T, pairs]
    angle = torch.arange(T)[:, None] * frequencies()
    q_pairs, k_pairs = (turned(x, angle).unflatten(-1, (2, -1)) for x in (q, k))
    return torch.einsum("bhicp,bhjcp,ijp->bhij", q_pairs, k_pairs, decay) / math.sqrt(D)


CASES = [
    (nape, {}),
    (path, {}),
    (path_fox, {}),
    (selective_rope, {}),
    (pope, {}),
    (lerope, {}),
    (profiles, {}),
    (scale_invariant, {"proportion": 0.01, "tau": 3.0}),
    (xpos, {"gamma": 0.3, "scale_base": 50.0}),
]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("formula", "options"), CASES)
def test_scores_are_those_of_the_paper(formula, options, window):
    pe = build_pe(formula.__name__, n_kv_head=KV, window=window, **options)
    if formula is pope:
        pe.delta.data.sub_(2.0)  # away from its limits, where it has another gradient
    has_tables = formula in (pope, scale_invariant, xpos)  # which are fp32
    assert_is_defined_by(formula, pe, tol=1e-5 if has_tables else 1e-8)


@torch.no_grad()
def test_a_phase_of_pope_beyond_its_limits_is_the_limit():
    q, k, v, _ = (x.float() for x in inputs())
    pe = build_pe("pope", n_kv_head=KV)
    limits = torch.tensor([-2 * math.pi, 0.0]).repeat(KV, D // 2)
    pe.delta.copy_(limits)
    expected = attend(pe, q, k, v, {}, context(pe, T))
    pe.delta.add_(torch.tensor([-1.0, 1.0]).repeat(KV, D // 2))

    assert torch.equal(attend(pe, q, k, v, {}, context(pe, T)), expected)


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
    [({"train_len": 100_000}, "100000 tokens"), ({"values": True}, "xPos has another factor")],
)
def test_what_xpos_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_pe("xpos", **options)


@pytest.mark.parametrize("remainder", [True, False])
def test_stick_breaking_gives_each_key_its_share_of_what_is_left(remainder):
    pe = build_pe("stick_breaking", n_kv_head=KV, remainder=remainder)
    q, k, v, _ = inputs()
    shares = dot(q, heads(k)).sigmoid()
    left = torch.ones(*q.shape[:3])
    expected = torch.zeros_like(q)
    for distance in range(1, T):  # the nearest key takes its share first
        share = shares.diagonal(-distance, 2, 3)  # of the queries that have a key so far back
        share = F.pad(share, (distance, 0))
        expected = expected + (left * share)[..., None] * heads(v).roll(distance, 2)
        left = left * (1 - share)
    if remainder:
        expected = expected + left[..., None] * heads(v)

    out = attend(pe, q, k, v, {}, context(pe, T))

    assert_same(out, expected, [q, k, v])


def delta_rule(q, k, v, f, beta):
    """What one head reads, [T, D], with q, k, v [T, D] and the gates f and beta [T]."""
    memory = torch.zeros(D, D, dtype=torch.float64)
    out = []
    for t in range(len(q)):
        memory = f[t] * memory
        lacking = v[t] - k[t] @ memory  # at this key
        memory = memory + beta[t] * torch.outer(k[t], lacking)
        out.append(q[t] @ memory / math.sqrt(D))
    return torch.stack(out)


@pytest.mark.parametrize("length", [7, 259])  # less than a block, and more than two
def test_the_gated_delta_rule_is_its_recurrence(length):
    pe = build_pe("gated_delta", n_kv_head=KV, temperature="head").double()
    q, k, v, x = variables((1, H, length, D), (1, KV, length, D), (1, KV, length, D), (1, length, DIM))
    unit_q = normalize(q, dim=-1, eps=0) * pe.head_factor
    unit_k = heads(normalize(k, dim=-1, eps=0))
    f = (x @ pe.gate.T + pe.gate_bias).sigmoid().mT
    beta = heads((x @ pe.strength.T + pe.strength_bias).sigmoid().mT)
    by_head = [delta_rule(*parts) for parts in zip(unit_q[0], unit_k[0], heads(v)[0], f[0], beta[0], strict=True)]

    out = attend(pe, q, k, v, pe.state(x), context(pe, length))
    expected = torch.stack(by_head)[None]

    assert_same(out, expected, [q, k, v, x, *pe.parameters()], tol=1e-5)  # a length of 1 has an epsilon
