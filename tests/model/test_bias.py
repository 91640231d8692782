"""Additive biases, temperatures and sinks against their formulas, one pair of positions at a time in float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import attend, build_pe, context, normal
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

T = 150  # beyond T5's last bucket, and more than one block of queries
TRAIN_LEN = 32


def alibi(pe, h, i, j):
    """arXiv 2108.12409: -m_h (i - j), the slopes m_h a geometric series."""
    slope = 2 ** (-8 * (h + 1) / 4)
    return -slope * (i - j)


def t5(pe, h, i, j):
    """arXiv 1910.10683: half of the buckets hold one distance each, the others grow with the logarithm."""
    distance = i - j
    half = len(pe.table) / 2
    if distance < half:
        bucket = distance
    else:
        share = math.log(distance / half) / math.log(pe.max_distance / half)
        bucket = min(int(half + share * half), len(pe.table) - 1)
    return pe.table[bucket, h].item()


def kerple(pe, h, i, j):
    """arXiv 2205.09921, the logarithmic kernel: -p ln(1 + a (i - j)), both at least 0.01."""
    p = max(pe.p[h].item(), 0.01)
    a = max(pe.a[h].item(), 0.01)
    return -p * math.log(1 + a * (i - j))


def fire(pe, h, i, j):
    """arXiv 2310.04418: a network of ln(1 + c (i - j)) / ln(1 + c max(i, L))."""
    c = abs(pe.c.item())
    longest = max(i, abs(pe.l_multiplier.item() * pe.init_l))
    x = math.log(1 + c * (i - j)) / (math.log(1 + c * longest) + 1e-6)
    out = pe.down_bias[h].item()
    for weight, bias, down in zip(pe.up_weight[:, 0], pe.up_bias, pe.down_weight[h], strict=True):
        out += (down * max(0.0, weight * x + bias)).item()
    return out


def fox(pe, h, i, j):
    """arXiv 2503.02130: the sum of the logarithms of the forget gates between the two."""
    return LOG_GATES[j + 1 : i + 1, h].sum()


def nope(pe, h, i, j):
    return 0.0


LOG_GATES = torch.randn(T, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).sigmoid().log()
STATE = {"log_gates": LOG_GATES.expand(2, -1, -1)}  # of FoX, [B, T, H]
FORMULAS = {f.__name__: f for f in (nope, alibi, t5, kerple, fire, fox)}
OPTIONS = {"fire": {"init_l": 40.0}}  # some queries before L, some after
# What q.k is multiplied by, of n, the keys that a query sees, and the learned scalar of its head.
FACTORS = {
    "none": lambda n, s: 1.0,
    "log": lambda n, s: max(1.0, math.log(n) / math.log(TRAIN_LEN)),
    "llama4": lambda n, s: 1 + 0.1 * math.log(1 + n // TRAIN_LEN),
    "ssmax": lambda n, s: s * math.log(n),
    "head": lambda n, s: s,
    1.2: lambda n, s: 1.2,
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
CASES = [
    *itertools.product(FORMULAS, ["none"]),
    *itertools.product(["nope"], [*FACTORS][1:]),
    ("alibi", "log"),
]


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("newest", [T, 50])
@pytest.mark.parametrize(("name", "temperature"), CASES)
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


# PyTorch's cache does not know for which instructions of the processor its code was written.
COMPILED = {"dynamic": False, "options": {"fx_graph_cache": False}}


@torch.no_grad()
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_alibi_keeps_its_precision_in_bf16(is_compiled):
    """Scores of zero: the weights are those of the bias alone, where m_h j reaches thousands."""
    length = 4096
    pe = build_pe("alibi")
    q = torch.zeros(1, 4, 1, 16).bfloat16()
    k = torch.zeros(1, 4, length, 16).bfloat16()
    v = normal((1, 4, length, 16))[0].bfloat16()
    attend = torch.compile(pe.attend, **COMPILED) if is_compiled else pe.attend
    out = attend(q, k, v, {}, context(pe, length, 1))[0, :, 0].double()

    for h in range(4):
        bias = torch.tensor([alibi(pe, h, length - 1, j) for j in range(length)], dtype=torch.float64)
        expected = bias.softmax(0) @ v[0, h].double()
        assert (out[h] - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("n_head", [1, 2, 3, 8, 12, 33])
def test_alibi_slopes_equal_bloom(n_head):
    slopes = build_pe("alibi", n_head=n_head).slopes(torch.device("cpu"))
    bloom = build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)  # slope times position of the key
    torch.testing.assert_close(slopes, bloom[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 17), (2, 2), (8, 64), (64, 1000)])
def test_t5_buckets_equal_transformers(num_buckets, max_distance):
    options = {"num_buckets": num_buckets, "max_distance": max_distance}
    distance = torch.arange(3 * max_distance)
    bucket = build_pe("t5", **options).bucket(distance)
    expected = T5Attention._relative_position_bucket(-distance, bidirectional=False, **options)

    assert torch.equal(bucket, expected)


def test_kerple_leaves_its_limit_when_pushed_up():
    pe = build_pe("kerple")
    with torch.no_grad():
        pe.p.fill_(-0.5)
        pe.a.fill_(-0.5)
    pe.at(torch.arange(5)).sum().backward()

    assert (pe.p.grad < 0).all()
    assert (pe.a.grad < 0).all()


@pytest.mark.parametrize(
    ("name", "parameter", "low", "high"),
    [
        ("kerple", "p", 0, 2),
        ("kerple", "a", 0, 1),
        ("fire", "down_weight", -0.177, 0.177),
    ],
)
@torch.no_grad()
def test_initial_values_are_uniform(name, parameter, low, high):
    pe = build_pe(name, n_head=64)
    pe.reset_parameters(torch.Generator().manual_seed(0))
    values = getattr(pe, parameter)
    fifth = (high - low) / 5

    assert low <= values.min() <= low + fifth
    assert high - fifth <= values.max() <= high
