"""Readings of a RoPE model: each equals RoPE with its published relative positions, pair by pair, in float64."""

import math

import pytest
import torch
from conftest import at_last_scale, build_gpt, build_pe, read_at, tokens
from definitions import D, T, assert_is_defined_by, frequencies

from model.position.network import for_length, scales_of

L = 32  # trained length
# Options; the near window and the group, slowdown, local or tail by which the references below count.
READINGS = {
    "rerope": ({}, L // 2, None),
    "leaky_rerope": ({"near_window": 5, "scale": 5.0}, 5, (5 * L - 5) / (L - 5)),
    "string": ({"near_window": 11, "local": 3}, 11, 3),
    "self_extend": ({"near_window": 8, "group": 7}, 8, 7),
    "lampe": ({"near_window": 5, "tail": 6, "capacity": 0.6}, 5, 6),
    "dca": ({}, None, None),
    "window": ({}, L, None),
    "sinks_window": ({}, L - 4, None),
}


def dual_chunk(i, j):
    """arXiv 2402.17463, as its released code has it: chunks of 3/4 of L less a local window of L/8."""
    size = L * 3 // 4
    chunk = size - L // 8
    within = i % chunk
    chunks_between = min(i // chunk - j // chunk, 2)
    # Within a chunk, to the one before it, and to all earlier ones.
    query = [
        within,
        min(within + chunk, size),
        min(2 * chunk - 1, size),
    ]
    return query[chunks_between] - j % chunk


def lampe(i, j, near, tail):
    """Beyond the near window: the positions between in whole numbers, or those of the tail."""
    room = int(0.6 * L / (1 + math.exp(-0.86 * (T / L - 2.87))))
    squeezed = [token * room // (T - 1) for token in range(T)]
    ahead = near - 1 - squeezed[near]
    oldest = T - 1 - tail
    if i - j > oldest:
        return i - j - (oldest - squeezed[oldest] - ahead)
    return squeezed[i] - squeezed[j] + ahead


def relative_position(name, i, j, near, factor):
    """r(i, j) as the papers and the released codes define it; None: not seen."""
    if name == "dca":
        return dual_chunk(i, j)
    if i - j < near:
        return i - j
    match name:
        case "window":
            return None
        # arXiv 2309.17453: positions count within what is kept.
        case "sinks_window":
            return min(i, L - 1) - j if j < 4 else None
        case "lampe":
            return lampe(i, j, near, factor)
        case "rerope":
            return near
        case "leaky_rerope":
            return near + (i - j - near) / factor
        case "string":
            return i - j - near + factor
    # arXiv 2401.01325: beyond the near window positions count groups.
    assert name == "self_extend"
    return i // factor + near - near // factor - j // factor


@pytest.mark.parametrize("name", READINGS)
def test_each_reading_is_rope_with_its_published_relative_positions(name):
    options, near, factor = READINGS[name]
    pe = at_last_scale(build_pe(name, train_len=L, n_kv_head=2, **options))
    relative = torch.full((T, T), torch.nan, dtype=torch.float64)
    for i in range(T):
        for j in range(i + 1):
            r = relative_position(name, i, j, near, factor)
            relative[i, j] = math.nan if r is None else r
    is_seen = relative.isfinite()

    def scores(pe, q, k, v, x):
        """Of a rotation by r as a multiplication of complex numbers by e^(i r theta)."""
        q = torch.complex(*q.chunk(2, dim=-1))
        k = torch.complex(*k.chunk(2, dim=-1))
        angle = relative.nan_to_num()[..., None] * frequencies()
        turn = torch.polar(torch.ones_like(angle), angle)
        products = torch.einsum("bhip,bhjp,ijp->bhij", q, k.conj(), turn).real
        return torch.where(is_seen, products / math.sqrt(D), -torch.inf)

    assert_is_defined_by(scores, pe, tol=1e-5)

    longest = relative[is_seen].max()
    if name == "string":
        assert longest == T - 1 - (near - factor)
    else:
        assert longest < L


@pytest.mark.parametrize("name", READINGS)
@torch.no_grad()
def test_readings_train_as_rope_and_leave_short_texts_alone(name):
    net = build_gpt(name, train_len=L)
    rope = build_gpt("rope", train_len=L)
    net.load_state_dict(rope.state_dict())
    trained, reading = scales_of(net.encodings)
    text = tokens(L)
    short = text[:, : L // 8]

    assert torch.equal(net(text), rope(text))
    torch.testing.assert_close(
        net(short, encodings=read_at(net, reading)),
        rope(short),
        rtol=0,
        atol=2e-5,
    )

    for length, scale in ((L, trained), (L + 1, reading)):
        scales = {pe.active_scale for pe in for_length(net.encodings, length, L)}
        assert scales == {scale}


@pytest.mark.parametrize("name", READINGS)
@torch.no_grad()
def test_a_fine_tuning_at_a_greater_length_trains_what_it_will_be(name):
    net = build_gpt(name, train_len=L)
    longer = build_gpt(name, train_len=4 * L, pe={"original_len": L})
    longer.load_state_dict(net.state_dict())
    text = tokens(4 * L)
    *_, reading = scales_of(net.encodings)

    assert scales_of(longer.encodings) == (reading,)
    assert torch.equal(net(text, encodings=read_at(net, reading)), longer(text))
