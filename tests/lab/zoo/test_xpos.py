"""xPos against its definition, pair by pair of channels."""

import cmath
import itertools

import pytest
import torch
from conftest import build_pe

from model.position.layer import make_context


def test_xpos_scores_equal_loops():
    head_dim = 8
    length = 12
    gamma = 0.3
    scale_base = 5.0
    pe = build_pe("xpos", head_dim=head_dim, gamma=gamma, scale_base=scale_base)
    q, k = torch.randn(2, 1, 1, length, head_dim).unbind(0)
    rotated_q, rotated_k = pe.rotate(q, k, make_context(pe, torch.arange(length), length, length))
    scores = (rotated_q @ rotated_k.mT)[0, 0]

    pairs = head_dim // 2
    queries = torch.complex(q[0, 0, :, :pairs], q[0, 0, :, pairs:]).tolist()
    keys = torch.complex(k[0, 0, :, :pairs], k[0, 0, :, pairs:]).tolist()
    for i, j in itertools.product(range(length), range(length)):
        expected = 0.0
        for pair in range(pairs):
            zeta = (2 * pair + gamma * head_dim) / ((1 + gamma) * head_dim)
            angle = (i - j) * 10_000.0 ** (-2 * pair / head_dim)
            turned = queries[i][pair] * cmath.rect(1, angle) * keys[j][pair].conjugate()
            expected += turned.real * zeta ** ((i - j) / scale_base)
        assert scores[i, j].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_xpos_is_finite_up_to_its_limit_and_an_error_beyond():
    pe = build_pe("xpos", train_len=256)
    last = torch.tensor([0, pe.max_len - 1])
    for tables_of_queries_or_keys in make_context(pe, last, 1, pe.max_len).tables:
        for table in tables_of_queries_or_keys:
            assert table.isfinite().all()
            assert (table != 0).any()
    with pytest.raises(ValueError, match=r"pe\.scale_base"):
        make_context(pe, last + 1, 1, pe.max_len + 1)
    with pytest.raises(ValueError, match="100000 tokens"):
        build_pe("xpos", train_len=100_000)


def test_values_cannot_be_turned():
    with pytest.raises(ValueError, match="xPos has another factor"):
        build_pe("xpos", values=True)
