"""Additive biases, relative embeddings and temperatures against their formulas, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import build_pe, context, normal
from definitions import PAST, D, T, assert_is_defined_by, dot, forgotten, limited
from torch.testing import assert_close
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

TRAIN_LEN = 32
SLOPES = 0.25 ** torch.arange(1, 5)  # of ALiBi with four heads


def nope(pe, q, k, v, x):
    return dot(q, k)


def alibi(pe, q, k, v, x):
    """arXiv 2108.12409: -m_h (i - j), the slopes m_h a geometric series, or learned from there on."""
    slopes = SLOPES if pe.log_factor is None else SLOPES * pe.log_factor.exp()
    bias = -slopes[:, None, None] * PAST
    return dot(q, k) + bias


def t5(pe, q, k, v, x):
    """arXiv 1910.10683: half of the buckets hold one distance each, the others grow with the logarithm."""
    half = len(pe.table) // 2
    buckets = list(range(half))
    for distance in range(half, T):
        share = math.log(distance / half, pe.max_distance / half)
        bucket = int(half + share * half)
        buckets.append(min(bucket, 2 * half - 1))
    of_distance = pe.table[buckets].T  # [H, T]
    return dot(q, k) + of_distance[:, PAST]


def kerple(pe, q, k, v, x):
    """arXiv 2205.09921, the logarithmic kernel: -p ln(1 + a (i - j)), both at least 0.01."""
    p = limited(pe.p, 0.01)[:, None, None]
    a = limited(pe.a, 0.01)[:, None, None]
    bias = -p * torch.log(1 + a * PAST)
    return dot(q, k) + bias


def fire(pe, q, k, v, x):
    """arXiv 2310.04418: a network of ln(1 + c (i - j)) / ln(1 + c max(i, L))."""
    c = pe.c.abs()
    limit = (pe.l_multiplier * pe.init_l).abs()
    i = torch.arange(T)[:, None]
    longest = torch.log(1 + c * i.maximum(limit)) + 1e-6
    relative = torch.log(1 + c * PAST) / longest
    hidden = F.linear(relative[..., None], pe.up_weight, pe.up_bias).relu()  # [T, T, width]
    bias = F.linear(hidden, pe.down_weight, pe.down_bias)  # [T, T, H]
    return dot(q, k) + bias.permute(2, 0, 1)


def fox(pe, q, k, v, x):
    """arXiv 2503.02130: the sum of the logarithms of the forget gates between the two."""
    if pe.gate is None:  # a gate for each head: the sum has as many terms as the distance is long
        log_gates = F.logsigmoid(pe.gate_bias)
        return dot(q, k) + log_gates[:, None, None] * PAST
    return dot(q, k) + forgotten(pe, x)


def relative(pe, q, k, v, x):
    """arXiv 1803.02155, with no embeddings of values: q_i.(k_j + r_[i-j]) / sqrt(D)."""
    embeddings = pe.distances
    if pe.beyond == "zero":
        embeddings = F.pad(embeddings, (0, 1))
    last = embeddings.size(1) - 1
    of_pairs = embeddings[:, PAST.clamp(max=last)]  # [D, T, T]
    relative = torch.einsum("bhid,dij->bhij", q, of_pairs)
    return dot(q, k) + relative / math.sqrt(D)


CASES = [
    (nope, {}),
    (alibi, {}),
    (alibi, {"learned": True}),
    (t5, {}),
    (kerple, {}),
    (fire, {"init_l": 40.0}),  # some queries before L, some after
    (fox, {}),
    (fox, {"constant_gates": True, "decay_times": [0.5, 64.0]}),
    (relative, {}),
    (relative, {"max_distance": 3, "beyond": "zero"}),
    (relative, {"max_distance": 1}),
]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("formula", "options"), CASES)
def test_scores_are_those_of_the_paper(formula, options, window):
    pe = build_pe(
        formula.__name__,
        n_kv_head=2,
        train_len=TRAIN_LEN,
        window=window,
        **options,
    )
    if formula is kerple:
        pe.p.data[0] = -0.5  # beyond their limit
        pe.a.data[1] = -0.5

    assert_is_defined_by(formula, pe, tol=1e-8)


# What q.k is multiplied by: of n, the keys that a query sees, and the encoding, which may learn a scalar for each head.
FACTORS = {
    "log": lambda n, pe: (n.log() / math.log(TRAIN_LEN)).clamp(min=1),
    "llama4": lambda n, pe: 1 + 0.1 * torch.log(1 + n // TRAIN_LEN),
    "ssmax": lambda n, pe: pe.ssmax * n.log(),
    "head": lambda n, pe: pe.head_factor,
    1.2: lambda n, pe: 1.2,
}


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("formula", [nope, alibi])
@pytest.mark.parametrize("temperature", FACTORS)
def test_a_temperature_multiplies_the_scores_and_not_the_bias(formula, temperature, window):
    options = {"window": window, "temperature": temperature}
    pe = build_pe(formula.__name__, n_kv_head=2, train_len=TRAIN_LEN, **options)

    def scores(pe, q, k, v, x):
        n = torch.arange(1.0, T + 1)[:, None]
        n = n.clamp(max=window or T)
        factor = FACTORS[temperature](n, pe)
        return formula(pe, factor * q, k, v, x)

    assert_is_defined_by(scores, pe, tol=1e-6)  # factors are fp32


# PyTorch's cache does not know for which instructions of the processor its code was written.
COMPILED = {"dynamic": False, "options": {"fx_graph_cache": False}}


@torch.no_grad()
@pytest.mark.parametrize(
    "is_compiled",
    [False, pytest.param(True, marks=pytest.mark.long)],
)
def test_alibi_keeps_its_precision_in_bf16(is_compiled):
    """Scores of zero: the weights are those of the bias alone, where m_h j reaches thousands."""
    length = 4096
    pe = build_pe("alibi")
    attend = torch.compile(pe.attend, **COMPILED) if is_compiled else pe.attend
    q = torch.zeros(1, 4, 1, 16).bfloat16()
    k = torch.zeros(1, 4, length, 16).bfloat16()
    (v,) = normal((1, 4, length, 16), dtype=torch.bfloat16)

    out = attend(q, k, v, {}, context(pe, length, 1))

    bias = SLOPES[:, None] * torch.arange(length, dtype=torch.float64)
    weights = bias.softmax(-1)
    expected = torch.einsum("hj,bhjd->bhd", weights, v.double())
    error = (out[:, :, 0] - expected).norm(dim=-1)

    assert (error < 0.01 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("n_head", [1, 2, 3, 8, 12, 33])
def test_alibi_slopes_equal_bloom(n_head):
    slopes = build_pe("alibi", n_head=n_head).slopes(torch.device("cpu"))
    bloom = build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)  # slope times position of the key

    assert_close(slopes, bloom[:, 0, 1], rtol=1e-6, atol=0)
