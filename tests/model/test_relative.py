"""Relative embeddings against Shaw's formula, with a vector for every pair of positions, in float64."""

import pytest
import torch
from conftest import build_pe

T, TRAIN_LEN = 21, 8


def by_definition(q, k, v, embeddings, cap):
    """softmax(q_i.(k_j + r_[i-j]) / sqrt(D)) v, from [T, T, D] vectors; q, k, v [B, H, T, D], embeddings [D, R]."""
    n = q.size(2)
    r = torch.stack([torch.stack([embeddings[:, min(max(i - j, 0), cap)] for j in range(n)]) for i in range(n)])
    scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + r) / q.size(-1) ** 0.5
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def qkv(heads=4, kv_heads=4):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, h, T, 16, dtype=torch.float64, generator=generator, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]


def attention(pe, q, k, v, first=0):
    pos = torch.arange(T)
    return pe.attention(q[:, :, first:], k, v, pe.context(pos[first:], pos, T, whole=first == 0))


CAPS = [
    ("relative", {}, TRAIN_LEN - 1),
    ("relative_capped", {"max_distance": 3}, 3),
    ("relative", {"max_distance": 0}, 0),
]


@pytest.mark.parametrize(("name", "options", "cap"), CAPS)
def test_output_and_gradients(name, options, cap):
    pe = build_pe(name, train_len=TRAIN_LEN, **options).double()
    assert pe.distances.shape == (16, cap + 1)
    inputs = [*qkv(), pe.distances]
    out, expected = attention(pe, *inputs[:3]), by_definition(*inputs, cap)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, wanted = (torch.autograd.grad((o * weight).sum(), inputs) for o in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_grouped_queries():
    pe = build_pe("relative", train_len=TRAIN_LEN).double()
    q, k, v = qkv(4, 2)
    expected = by_definition(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), pe.distances, TRAIN_LEN - 1)
    torch.testing.assert_close(attention(pe, q, k, v), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first", [T - 1, 5])
def test_a_chunk_equals_the_whole(first):
    pe = build_pe("relative", train_len=TRAIN_LEN).double()
    inputs = qkv()
    torch.testing.assert_close(attention(pe, *inputs, first), attention(pe, *inputs)[:, :, first:], rtol=0, atol=1e-12)


def test_embeddings_that_training_never_reaches_are_announced():
    assert build_pe("relative", train_len=TRAIN_LEN).describe() == []
    assert build_pe("relative", train_len=TRAIN_LEN, max_distance=7).describe() == []
    (line,) = build_pe("relative", train_len=TRAIN_LEN, max_distance=9).describe()
    assert "distances 8 to 9" in line


def test_negative_cap_is_refused():
    with pytest.raises(ValueError, match=r"pe\.max_distance=-1"):
        build_pe("relative", max_distance=-1)
