"""Readings of a RoPE model: each equals RoPE with its published relative positions, pair by pair, in float64."""

import math

import pytest
import torch
from conftest import at_last_scale, build_gpt, build_pe, pe_options, read_at, tokens
from definitions import D, T, assert_is_defined_by, frequencies

from model.position.network import scales_of

L = 32  # trained length
UNSEEN = math.nan


def rerope(i, j):
    return min(i - j, L // 2)


def leaky_rerope(i, j):
    """Beyond 5 tokens distances grow more slowly: at 5 L, the target, the farthest key is at distance L."""
    slowdown = (5 * L - 5) / (L - 5)
    beyond = i - j - 5
    return min(i - j, 5 + beyond / slowdown)


def string(i, j):
    """Beyond 11 tokens distances go back to 3, and grow on from there."""
    distance = i - j
    return distance if distance < 11 else distance - 11 + 3


def self_extend(i, j):
    """arXiv 2401.01325: beyond the near window of 8 tokens positions count groups of 7."""
    if i - j < 8:
        return i - j
    shift = 8 - 8 // 7
    return i // 7 - j // 7 + shift


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


def lampe(i, j):
    """Beyond 5 tokens: the positions between in whole numbers, or those of the tail of 6."""
    growth = T / L
    share = 0.6 / (1 + math.exp(-0.86 * (growth - 2.87)))
    room = int(share * L)
    squeezed = [token * room // (T - 1) for token in range(T)]
    ahead = 5 - 1 - squeezed[5]
    oldest = T - 1 - 6
    if i - j < 5:
        return i - j
    if i - j <= oldest:
        return squeezed[i] - squeezed[j] + ahead
    return i - j - oldest + squeezed[oldest] + ahead


def sinks_window(i, j):
    """arXiv 2309.17453: positions count within what is kept."""
    if i - j < L - 4:
        return i - j
    if j < 4:
        return min(i, L - 1) - j
    return UNSEEN


def window(i, j):
    return i - j if i - j < L else UNSEEN


# Options, and r(i, j) as the papers and the released codes define it.
READINGS = {
    "rerope": ({}, rerope),
    "leaky_rerope": ({"near_window": 5, "scale": 5.0}, leaky_rerope),
    "string": ({"near_window": 11, "local": 3}, string),
    "self_extend": ({"near_window": 8, "group": 7}, self_extend),
    "lampe": ({"near_window": 5, "tail": 6, "capacity": 0.6}, lampe),
    "dca": ({}, dual_chunk),
    "window": ({}, window),
    "sinks_window": ({}, sinks_window),
}


@pytest.mark.parametrize("name", READINGS)
def test_each_reading_is_rope_with_its_published_relative_positions(name):
    options, relative_position = READINGS[name]
    pe = at_last_scale(build_pe(name, train_len=L, n_kv_head=2, **options))
    relative = torch.full((T, T), UNSEEN, dtype=torch.float64)
    for i in range(T):
        for j in range(i + 1):
            relative[i, j] = relative_position(i, j)
    is_seen = relative.isfinite()

    def scores(pe, q, k, v, x):
        """Of a rotation by r as a multiplication of complex numbers by e^(i r theta)."""
        q = torch.complex(*q.chunk(2, dim=-1))
        k = torch.complex(*k.chunk(2, dim=-1))
        angle = relative.nan_to_num()[..., None] * frequencies()
        turn = torch.polar(torch.ones_like(angle), angle)
        products = torch.einsum(
            "bhip,bhjp,ijp->bhij",
            q,
            k.conj(),
            turn,
        )
        return torch.where(
            is_seen,
            products.real / math.sqrt(D),
            -torch.inf,
        )

    assert_is_defined_by(scores, pe, tol=1e-5)


@pytest.mark.parametrize("name", READINGS)
@torch.no_grad()
def test_readings_train_as_rope_and_leave_short_texts_alone(name):
    net = build_gpt(name, train_len=L)
    rope = build_gpt("rope", train_len=L)
    net.load_state_dict(rope.state_dict())
    _, reading = scales_of(net.encodings)
    assert reading == pe_options(name).get("scale", math.inf)
    text = tokens(L)
    short = text[:, : L // 8]

    assert torch.equal(net(text), rope(text))
    torch.testing.assert_close(
        net(short, encodings=read_at(net, reading)),
        rope(short),
        rtol=0,
        atol=2e-5,
    )


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
