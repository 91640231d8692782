"""Relative embeddings against Shaw's formula, with a vector for every pair of positions, in float64."""

import pytest
import torch
from conftest import assert_same, build_pe

from model.position.layer import make_context

T, TRAIN_LEN = 21, 8


def by_definition(q, k, v, embeddings, cap, beyond):
    """softmax(q_i.(k_j + r_[i-j]) / sqrt(D)) v, from [T, T, D] vectors; q, k, v [B, H, T, D], embeddings [D, R]."""
    n = q.size(2)
    if beyond == "zero":
        embeddings = torch.cat((embeddings, torch.zeros_like(embeddings[:, :1])), dim=1)
        cap += 1
    rows = []
    for i in range(n):
        distances = [min(max(i - j, 0), cap) for j in range(n)]
        rows.append(torch.stack([embeddings[:, distance] for distance in distances]))
    r = torch.stack(rows)  # [T, T, D]
    scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + r) / q.size(-1) ** 0.5
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("max_distance", "cap", "beyond"), [(None, TRAIN_LEN - 1, "last"), (3, 3, "zero"), (0, 0, "last")]
)
def test_output_and_gradients(max_distance, cap, beyond, kv_heads):
    options = {"max_distance": max_distance, "beyond": beyond}
    pe = build_pe("relative", train_len=TRAIN_LEN, n_kv_head=kv_heads, **options).double()
    assert pe.distances.shape == (16, cap + 1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, T, 16) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)
    out = pe.attend(q, k, v, {}, make_context(pe, torch.arange(T), T, T))
    repeated = [x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v)]
    expected = by_definition(q, *repeated, pe.distances, cap, beyond)
    assert_same(out, expected, (q, k, v, pe.distances))
