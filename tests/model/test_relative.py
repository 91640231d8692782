"""Relative embeddings against Shaw's formula, with a vector for every pair of positions, in float64."""

import pytest
import torch
from conftest import assert_same, build_pe, context, variables

T, TRAIN_LEN = 21, 8


def by_definition(q, k, v, embeddings, cap, beyond):
    """softmax(q_i.(k_j + r_[i-j]) / sqrt(D)) v, one pair after the other; q, k, v [B, H, T, D], embeddings [D, R].

    As arXiv 1803.02155 defines it, with no embeddings of values.
    """
    n = q.size(2)
    if beyond == "zero":
        embeddings = torch.cat((embeddings, torch.zeros_like(embeddings[:, :1])), dim=1)
        cap += 1
    out = []
    for i in range(n):
        query = q[:, :, i]
        scores = []
        for j in range(i + 1):
            r = embeddings[:, min(i - j, cap)]
            product = (query * (k[:, :, j] + r)).sum(-1)
            scores.append(product / q.size(-1) ** 0.5)
        weights = torch.stack(scores, dim=-1).softmax(-1)  # [B, H, keys seen]
        out.append((weights[..., None] * v[:, :, : i + 1]).sum(2))
    return torch.stack(out, dim=2)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("max_distance", "cap", "beyond"),
    [(None, TRAIN_LEN - 1, "last"), (3, 3, "zero"), (0, 0, "last")],
)
def test_output_and_gradients(max_distance, cap, beyond, kv_heads):
    options = {"max_distance": max_distance, "beyond": beyond}
    pe = build_pe("relative", train_len=TRAIN_LEN, n_kv_head=kv_heads, **options).double()

    assert pe.distances.shape == (16, cap + 1)
    q, k, v = variables((2, 4, T, 16), (2, kv_heads, T, 16), (2, kv_heads, T, 16))
    out = pe.attend(q, k, v, {}, context(pe, T))
    keys, values = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
    expected = by_definition(q, keys, values, pe.distances, cap, beyond)
    assert_same(out, expected, (q, k, v, pe.distances))
