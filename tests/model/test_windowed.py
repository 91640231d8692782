"""Readings of a RoPE model: each equals RoPE with its published relative positions, pair by pair, in float64."""

import math

import pytest
import torch
from conftest import ENCODINGS, at_last_scale, build_gpt, build_pe, pe_options
from hypothesis import given
from hypothesis import strategies as st

from model import position
from model.attention import run_of_keys
from model.position.base import Shape
from model.position.layer import make_context
from model.position.windowed import ReRoPE, TrainingFree

L, LENGTH, D = 32, 140, 16  # trained length, text (more than a block of queries), channels of a head
READINGS = {  # name and options: (near window, group, slowdown, local or tail) by which the references below count
    "rerope": ({}, L // 2, None),
    "leaky_rerope": ({"near_window": 5, "scale": 5.0}, 5, (5 * L - 5) / (L - 5)),
    "string": ({"near_window": 11, "local": 3}, 11, 3),
    "self_extend": ({"near_window": 8, "group": 7}, 8, 7),
    "lampe": ({"near_window": 5, "tail": 6, "capacity": 0.6}, 5, 6),
    "dca": ({}, None, None),
    "window": ({}, L, None),
    "sinks_window": ({}, L - 4, None),
}


def relative_position(name, i, j, near, factor):
    """r(i, j) as the papers and the released codes define it; None: not seen."""
    if name == "dca":
        size = L * 3 // 4
        chunk = size - L // 8
        # Within a chunk, to the one before it, and to all earlier ones.
        query = [i % chunk, min(i % chunk + chunk, size), min(2 * chunk - 1, size)]
        chunks_between = i // chunk - j // chunk
        return query[min(chunks_between, 2)] - j % chunk
    if i - j < near:
        return i - j
    if name == "sinks_window":  # positions count within what is kept
        return min(i, L - 1) - j if j < 4 else None
    if name == "lampe":
        room = int(0.6 * L / (1 + math.exp(-0.86 * (LENGTH / L - 2.87))))
        at = [token * room // (LENGTH - 1) for token in range(LENGTH)]  # whole numbers
        ahead = near - 1 - at[near]
        oldest = LENGTH - 1 - factor
        return i - j - (oldest - at[oldest] - ahead) if i - j > oldest else at[i] - at[j] + ahead
    return {
        "rerope": lambda: near,
        "leaky_rerope": lambda: near + (i - j - near) / factor,
        "string": lambda: i - j - near + factor,
        "self_extend": lambda: i // factor + near - near // factor - j // factor,
        "window": lambda: None,
    }[name]()


@pytest.mark.parametrize("name", READINGS)
def test_each_is_rope_with_its_relative_positions(name):
    """At once, and of the newest queries alone."""
    options, near, factor = READINGS[name]
    pe = at_last_scale(build_pe(name, train_len=L, n_kv_head=2, head_dim=D, **options))
    q = torch.randn(1, 4, LENGTH, D)
    k, v = torch.randn(2, 1, 2, LENGTH, D)

    # All pairs that are seen, as three lists: query, key, relative position.
    i = []
    j = []
    relative = []
    for query in range(LENGTH):
        for key in range(query + 1):
            r = relative_position(name, query, key, near, factor)
            if r is not None:
                i.append(query)
                j.append(key)
                relative.append(r)

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
        ctx = make_context(pe, torch.arange(LENGTH), new, LENGTH)
        out = pe.attend(q[:, :, -new:], k, v, {}, ctx)
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
    text = torch.randint(0, 50, (2, L))
    net.load_state_dict(rope.state_dict())
    assert torch.equal(net(text), rope(text))
    assert len(net.scales) == 2
    assert net.scale_for(L) == net.scales[0]
    assert net.scale_for(L + 1) == net.scales[1]
    longer = build_gpt(name, train_len=4 * L, pe={"original_len": L})
    assert longer.scales == net.scales[1:]  # a fine-tuning at a greater length trains what it will be
    longer.load_state_dict(rope.state_dict())
    with net.at_scale(net.scales[1]):
        assert torch.equal(net(text), longer(text))
        short = text[:, : L // 8]
        torch.testing.assert_close(net(short), rope(short), rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["rerope", "leaky_rerope", "self_extend"])
def test_an_evaluation_scores_no_pair_in_two_zones(name, monkeypatch):
    pe = at_last_scale(build_pe(name, train_len=L))
    monkeypatch.setattr("model.position.windowed.products", None)  # where all pairs have scores in every zone
    q, k, v = torch.randn(3, 1, 4, LENGTH, D)
    pe.attend(q, k, v, {}, make_context(pe, torch.arange(LENGTH), LENGTH, LENGTH))


class Nearer(ReRoPE):
    """A user's own zones and runs, which meet at distance 5."""

    def zone(self, i, j, length):
        return (i - j >= 5).long()

    def runs(self, i, length):
        return [(i - 4, i), (torch.zeros_like(i), i - 5)]


class OtherRuns:
    """A mixin without zones."""

    runs = Nearer.runs


class Mixed(OtherRuns, ReRoPE):
    pass


def test_zones_of_your_own_are_evaluated_as_they_are_trained():
    pe = at_last_scale(Nearer(Shape(64, 4, 4, D, L, n_layer=1), near_window=16))
    assert pe.has_runs
    assert not Mixed(Shape(64, 4, 4, D, L, n_layer=1)).has_runs
    q, k, v = torch.randn(3, 1, 4, LENGTH, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ctx = make_context(pe, torch.arange(LENGTH), LENGTH, LENGTH)
    trained = pe.attend(q, k, v, {}, ctx)
    with torch.no_grad():
        torch.testing.assert_close(pe.attend(q, k, v, {}, ctx), trained, rtol=0, atol=2e-5)


def test_all_extensions_say_their_runs():
    extensions = set()
    for name in ENCODINGS:
        options = pe_options(name)
        if "pattern" in options:
            continue
        encoding = position.resolve(options["_target_"])
        if issubclass(encoding, TrainingFree):
            assert build_pe(name).has_runs
            extensions.add(name)
    assert extensions == set(READINGS)


@pytest.mark.parametrize("name", READINGS)
@given(st.integers(8, 40), st.integers(1, 90), st.sampled_from([None, 1, 5, 30, 99]), st.integers(1, 12))
def test_the_runs_of_keys_are_those_of_the_zones(name, original_len, length, window, size):
    """Both ways: the keys that each query sees in a zone, and the queries that see each key."""
    options = {}
    if name not in ("dca", "lampe"):
        options["near_window"] = min(size, original_len - 1)
    if name == "sinks_window":
        options["sinks"] = size
    if name == "string":
        options["local"] = 1
    if name == "self_extend":
        options["group"] = 3
    if name == "lampe":
        options["capacity"] = 0.5
    pe = build_pe(name, train_len=original_len, **options)
    if name == "lampe":
        pe.near_window = pe.tail = size  # also where the zones between and of the tail are empty
    t = torch.arange(length)
    zone = pe.zone(t[:, None], t, length)
    seen = (t[:, None] >= t) & (t[:, None] - t < (window or length))
    runs = [run_of_keys(first, newest, window) for first, newest in pe.runs(t, length)]
    for n, run in enumerate(runs):
        expected = seen & (zone == n)
        assert torch.equal(expected, (t >= run.first[:, None]) & (t <= run.newest[:, None]))
        assert torch.equal(expected, (t[:, None] >= run.oldest) & (t[:, None] <= run.last))
        for row in run:
            assert row.dtype == torch.int32
            assert (row.diff() >= 0).all()
    assert zone[seen].max() < len(runs)
