"""Additive biases, temperatures and sinks against their formulas, one pair of positions at a time in float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import attend, build_pe, context, normal, pe_options
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from model import position
from model.position.bias import ALiBi
from model.position.ops import without_low_bits

T = 150  # beyond T5's last bucket, and more than one block of queries


def alibi(pe, h, i, j):
    return -(2 ** (-8 * (h + 1) / 4)) * (i - j)


def t5(pe, h, i, j):
    distance = i - j
    half = len(pe.table) / 2
    if distance < half:
        bucket = distance
    else:
        share = math.log(distance / half) / math.log(pe.max_distance / half)
        bucket = min(int(half + share * half), len(pe.table) - 1)
    return pe.table[bucket, h].item()


def kerple(pe, h, i, j):
    p = max(pe.p[h].item(), 0.01)
    a = max(pe.a[h].item(), 0.01)
    return -p * math.log(1 + a * (i - j))


def fire(pe, h, i, j):
    c = abs(pe.c.item())
    longest = max(i, abs(pe.l_multiplier.item() * pe.init_l))
    x = math.log(1 + c * (i - j)) / (math.log(1 + c * longest) + 1e-6)
    out = pe.down_bias[h].item()
    for weight, bias, down in zip(pe.up_weight[:, 0], pe.up_bias, pe.down_weight[h], strict=True):
        out += (down * max(0.0, weight * x + bias)).item()
    return out


def fox(pe, h, i, j):
    return LOG_GATES[j + 1 : i + 1, h].sum()


def nope(pe, h, i, j):
    return 0.0


LOG_GATES = torch.randn(T, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).sigmoid().log()
STATE = {"log_gates": LOG_GATES.expand(2, -1, -1)}  # of FoX, [B, T, H]
FORMULAS = {f.__name__: f for f in (nope, alibi, t5, kerple, fire, fox)}
OPTIONS = {"fire": {"init_l": 40.0}}  # some queries before L, some after
FACTORS = {  # of q.k by n, the keys that a query sees, and the learned scalar of its head; 32 tokens of training
    "none": lambda n, s: 1.0,
    "log": lambda n, s: max(1.0, math.log(n) / math.log(32)),
    "llama4": lambda n, s: 1 + 0.1 * math.log(1 + n // 32),
    "ssmax": lambda n, s: s * math.log(n),
    "head": lambda n, s: s,
    1.2: lambda n, s: 1.2,
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("newest", [T, 50])
@pytest.mark.parametrize(
    ("name", "temperature"),
    [*itertools.product(FORMULAS, ["none"]), *itertools.product(["nope"], [*FACTORS][1:]), ("alibi", "log")],
)
def test_attention_adds_the_bias_to_the_scaled_scores(name, temperature, newest, window):
    """For a whole text, and for its newest tokens alone; with sinks and without."""
    options = OPTIONS.get(name, {})
    pe = build_pe(name, n_kv_head=2, window=window, temperature=temperature, **options).double()
    learned = [0.0] * 4
    for parameter in ("ssmax", "head_factor"):
        if hasattr(pe, parameter):
            learned = getattr(pe, parameter).flatten().tolist()
    q, k, v = normal((2, 4, T, 16), (2, 2, T, 16), (2, 2, T, 16), dtype=torch.float64)
    past = T - newest
    newest_q = q[:, :, past:]
    ctx = context(pe, T, newest)
    out = attend(pe, newest_q, k, v, STATE, ctx)
    with_sinks = attend(pe, newest_q, k, v, STATE, replace(ctx, sinks=SINKS))

    for h, i in [(0, past), (1, past + 1), (2, 110), (3, T - 1)]:
        first = 0
        if window is not None:
            first = max(0, i - window + 1)
        factor = FACTORS[temperature](i + 1 - first, learned[h]) / 4
        scores = []
        for j in range(first, i + 1):
            product = q[1, h, i] @ k[1, h // 2, j]
            scores.append(product * factor + FORMULAS[name](pe, h, i, j))
        scores = torch.stack(scores)
        expected = scores.softmax(0) @ v[1, h // 2, first : i + 1]
        torch.testing.assert_close(out[1, h, i - past], expected, rtol=1e-5, atol=1e-5)
        # A sink takes its share of the softmax and gives nothing.
        share = (scores.logsumexp(0) - SINKS[h]).sigmoid()
        torch.testing.assert_close(with_sinks[1, h, i - past], expected * share, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_alibi_keeps_its_precision_in_bf16():
    """Scores of zero: the weights are those of the bias alone, where m_h j reaches thousands."""
    length = 4096
    pe = build_pe("alibi")
    q = torch.zeros(1, 4, 1, 16).bfloat16()
    k = torch.zeros(1, 4, length, 16).bfloat16()
    v = normal((1, 4, length, 16))[0].bfloat16()
    out = pe.attend(q, k, v, {}, context(pe, length, 1))[0, :, 0].double()
    for h in range(4):
        bias = torch.tensor([alibi(pe, h, length - 1, j) for j in range(length)], dtype=torch.float64)
        expected = bias.softmax(0) @ v[0, h].double()
        assert (out[h] - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float32, torch.bfloat16), (torch.float32, torch.float16),
                                               (torch.float64, torch.float32)])  # fmt: skip
def test_numbers_without_their_low_bits_fit_a_narrower_dtype(dtype, narrow):
    (x,) = normal((1000,), dtype=dtype)
    high = without_low_bits(x, narrow)
    assert torch.equal(high.to(narrow).to(dtype), high)
    assert ((x - high).abs() < torch.finfo(narrow).eps * x.abs()).all()
    assert (high.abs() <= x.abs()).all()


def test_alibi_slopes_equal_bloom():
    for n_head in range(1, 34):
        shape = position.Shape(n_head, n_head, n_head, head_dim=1, train_len=8, n_layer=1)
        slopes = ALiBi(shape).slopes(torch.device("cpu"))
        bloom = build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)  # slope times position of the key
        torch.testing.assert_close(slopes, bloom[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 17), (2, 2), (8, 64), (64, 1000)])
def test_t5_buckets_equal_transformers(num_buckets, max_distance):
    distance = torch.arange(3 * max_distance)
    bucket = build_pe("t5", num_buckets=num_buckets, max_distance=max_distance).bucket(distance)
    expected = T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(bucket, expected)


def test_kerple_leaves_its_limit_when_pushed_up():
    pe = build_pe("kerple")
    with torch.no_grad():
        pe.p.fill_(-0.5)
        pe.a.fill_(-0.5)
    pe.at(torch.arange(5)).sum().backward()
    assert (pe.p.grad < 0).all()
    assert (pe.a.grad < 0).all()


RANGES = {("kerple", "p"): (0, 2), ("kerple", "a"): (0, 1), ("fire", "down_weight"): (-0.177, 0.177)}


@pytest.mark.parametrize(("name", "parameter"), RANGES)
def test_initial_values_are_uniform(name, parameter):
    shape = position.Shape(64, 64, 64, head_dim=1, train_len=32, n_layer=1)
    (pe,) = position.build_encodings(pe_options(name), shape)
    with torch.no_grad():
        pe.reset_parameters(torch.Generator().manual_seed(0))
    values = getattr(pe, parameter)
    low, high = RANGES[name, parameter]
    fifth = (high - low) / 5
    assert low <= values.min() <= low + fifth
    assert high - fifth <= values.max() <= high
