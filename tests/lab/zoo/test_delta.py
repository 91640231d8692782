"""The gated delta rule against its recurrence, token by token in float64."""

import pytest
import torch
from conftest import assert_same, attend, build_pe, context, variables
from torch.nn.functional import normalize

from model.attention import BLOCK


def by_recurrence(q, k, v, log_f, beta):
    """q, k, v [T, D] and the gates [T] of one head; what it reads, [T, D]."""
    memory = q.new_zeros(q.size(1), v.size(1))
    out = []
    for t in range(q.size(0)):
        memory = memory * log_f[t].exp()
        wrong = v[t] - k[t] @ memory  # what the memory lacks at this key
        memory = memory + beta[t] * torch.outer(k[t], wrong)
        out.append(q[t] @ memory / q.size(1) ** 0.5)
    return torch.stack(out)


@pytest.mark.parametrize("length", [7, 2 * BLOCK + 3])
def test_blocks_equal_the_recurrence(length):
    """Outputs and gradients, with two heads of queries for each of keys, and a factor for each head."""
    pe = build_pe("gated_delta", n_kv_head=2, temperature="head").double()
    q, k, v, x = variables((1, 4, length, 16), (1, 2, length, 16), (1, 2, length, 16), (1, length, 64))
    out = attend(pe, q, k, v, pe.state(x), context(pe, length))

    heads = []
    for h in range(4):
        q_head = normalize(q[0, h], dim=-1, eps=0) * pe.head_factor[h]
        k_head = normalize(k[0, h // 2], dim=-1, eps=0)
        log_f = (x[0] @ pe.gate[h] + pe.gate_bias[h]).sigmoid().log()
        beta = (x[0] @ pe.strength[h // 2] + pe.strength_bias[h // 2]).sigmoid()
        heads.append(by_recurrence(q_head, k_head, v[0, h // 2], log_f, beta))
    assert_same(out, torch.stack(heads)[None], [q, k, v, x, *pe.parameters()], tol=1e-5)  # a length of 1 has an epsilon
