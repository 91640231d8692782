"""Scale-invariant attention against its formula, pair by pair in float64."""

import math

import torch
from conftest import assert_same, attend, build_pe, context, variables


def test_scores_are_those_of_the_paper():
    """Of p-RoPE that keeps no pair here, so that nothing is rotated."""
    n = 12
    pe = build_pe("scale_invariant", proportion=0.01, tau=3.0).double()
    q, k, v = variables(*[(1, 4, n, 16)] * 3)
    out = attend(pe, q, k, v, {}, context(pe, n))
    rows = []
    for i in range(n):
        scores = []
        for j in range(i + 1):
            a = math.sqrt(2 * (math.log((i - j) / 3 + 1) - 0.5 + 1))  # alpha = beta = e^0.5
            scores.append(a * (q[0, :, i] * k[0, :, j]).sum(-1) / 4 - a**2 + 1)
        weights = torch.stack(scores, dim=-1).softmax(-1)  # [H, i + 1]
        rows.append(torch.einsum("hj,hjd->hd", weights, v[0, :, : i + 1]))
    assert_same(out, torch.stack(rows, dim=1)[None], [q, k, v])
