"""Readings of a RoPE model: each equals RoPE with its published relative positions, pair by pair, in float64."""

import math

import pytest
import torch
from conftest import at_last_scale, build_gpt, build_pe, context, normal, read_at, tokens

from model.position.network import for_length, scales_of

L = 32  # trained length
LENGTH = 140  # of the text: more than a block of queries
D = 16  # channels of a head
READINGS = {  # options, and (near window, group, slowdown, local or tail) by which the references below count
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
    # Within a chunk, to the one before it, and to all earlier ones.
    query = [i % chunk, min(i % chunk + chunk, size), min(2 * chunk - 1, size)]
    chunks_between = i // chunk - j // chunk
    return query[min(chunks_between, 2)] - j % chunk


def lampe(i, j, near, tail):
    """Beyond the near window: the positions between in whole numbers, or those of the tail."""
    room = int(0.6 * L / (1 + math.exp(-0.86 * (LENGTH / L - 2.87))))
    squeezed = [token * room // (LENGTH - 1) for token in range(LENGTH)]
    ahead = near - 1 - squeezed[near]
    oldest = LENGTH - 1 - tail
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
def test_each_is_rope_with_its_relative_positions(name):
    """At once, and of the newest queries alone."""
    options, near, factor = READINGS[name]
    pe = at_last_scale(build_pe(name, train_len=L, n_kv_head=2, head_dim=D, **options))
    q, k, v = normal((1, 4, LENGTH, D), (1, 2, LENGTH, D), (1, 2, LENGTH, D))

    seen = []  # (query, key, relative position)
    for i in range(LENGTH):
        for j in range(i + 1):
            seen.append((i, j, relative_position(name, i, j, near, factor)))
    i, j, relative = zip(*[pair for pair in seen if pair[2] is not None], strict=True)

    # A rotation by r as a multiplication of complex numbers by e^(i r theta).
    theta = 10_000.0 ** (-torch.arange(0, D, 2) / D)
    angle = torch.tensor(relative, dtype=torch.float64)[:, None] * theta
    rotation = torch.polar(torch.ones_like(angle), angle)
    keys = k.double().repeat_interleave(2, dim=1)
    values = v.double().repeat_interleave(2, dim=1)
    complex_q = torch.complex(*q.double().chunk(2, dim=-1))
    complex_k = torch.complex(*keys.chunk(2, dim=-1))
    products = complex_q[:, :, i] * complex_k[:, :, j].conj() * rotation
    logits = torch.full((1, 4, LENGTH, LENGTH), -torch.inf, dtype=torch.float64)
    logits[:, :, i, j] = products.real.sum(-1) / D**0.5
    expected = logits.softmax(-1) @ values

    for new in (LENGTH, 3):
        out = pe.attend(q[:, :, -new:], k, v, {}, context(pe, LENGTH, new))
        torch.testing.assert_close(out.double(), expected[:, :, -new:], rtol=0, atol=2e-6)
    if name == "string":
        assert max(relative) == LENGTH - 1 - (near - factor)
    else:
        assert max(relative) < L


@pytest.mark.parametrize("name", READINGS)
@torch.no_grad()
def test_they_train_as_rope_and_leave_short_texts_alone(name):
    net = build_gpt(name, train_len=L)
    rope = build_gpt("rope", train_len=L)
    net.load_state_dict(rope.state_dict())
    text = tokens(L)

    assert torch.equal(net(text), rope(text))
    trained, reading = scales_of(net.encodings)
    for length, scale in ((L, trained), (L + 1, reading)):
        scales = {pe.active_scale for pe in for_length(net.encodings, length, L)}
        assert scales == {scale}
    short = text[:, : L // 8]
    torch.testing.assert_close(net(short, encodings=read_at(net, reading)), rope(short), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", READINGS)
@torch.no_grad()
def test_a_fine_tuning_at_a_greater_length_trains_what_it_will_be(name):
    net = build_gpt(name, train_len=L)
    longer = build_gpt(name, train_len=4 * L, pe={"original_len": L})
    longer.load_state_dict(net.state_dict())
    reading = scales_of(net.encodings)[-1]

    assert scales_of(longer.encodings) == (reading,)
    text = tokens(4 * L)
    assert torch.equal(net(text, encodings=read_at(net, reading)), longer(text))
