"""Attention as papers define it: the scores of all pairs of tokens, written out in float64."""

import math

import torch
import torch.nn.functional as F
from conftest import assert_same, attend, variables

B = 1
H = 4
KV = 2  # heads of keys and values
D = 16  # channels of a head
DIM = 64
T = 150  # tokens: more than one block of queries, and beyond T5's last bucket
PLACE = torch.arange(T)
DISTANCE = PLACE[:, None] - PLACE  # [query, key]
PAST = DISTANCE.clamp(min=0)


def inputs():
    """q, k, v and the layer's input x."""
    of_queries = (B, H, T, D)
    of_keys = (B, KV, T, D)
    return variables(of_queries, of_keys, of_keys, (B, T, DIM))


def heads(x):
    """Repeat what heads of keys have, for each head of queries."""
    return x.repeat_interleave(H // x.size(1), dim=1)


def dot(q, k):
    return q @ k.mT / math.sqrt(D)


def turned(x, angle):
    """x [..., D] times e^(i angle), the channels i and i + D / 2 as one complex number."""
    real, imaginary = x.chunk(2, dim=-1)
    turn = torch.polar(torch.ones_like(angle), angle)
    product = torch.complex(real, imaginary) * turn
    return torch.cat((product.real, product.imag), dim=-1)


def frequencies(base=10_000.0):
    """Of RoPE, a number for each pair of channels."""
    return base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)


def limited(x, low, high=None):
    """x within limits, with the gradient of x itself, so that what is pushed beyond a limit can come back."""
    return x + (x.clamp(low, high) - x).detach()


def forgotten(pe, x):
    """The sum of the logarithms of all forget gates after the key up to the query: [B, H, T, T]."""
    log_gates = F.logsigmoid(x @ pe.gate.T + pe.gate_bias)
    sums = log_gates.cumsum(1).mT
    return sums[..., :, None] - sums[..., None, :]


def assert_is_defined_by(scores_of, pe, tensors=None, tol=1e-10):
    """Outputs and gradients are those of softmax(scores) v: for a whole text, and for its newest tokens alone.

    scores_of(pe, q, k, v, x) has the scores of all pairs of q, k, v [B, H, T, D]; -inf where a key is not seen.
    """
    pe = pe.double()
    q, k, v, x = tensors or inputs()
    is_hidden = (DISTANCE < 0) | ((pe.window or T) <= DISTANCE)
    scores = scores_of(pe, q, heads(k), heads(v), x)
    expected = scores.masked_fill(is_hidden, -torch.inf).softmax(-1) @ heads(v)
    differentiable = [q, k, v, x, *pe.parameters()]
    for newest in (T, 20):
        queries = q[:, :, -newest:]
        out = attend(pe, queries, k, v, x)
        assert_same(out, expected[:, :, -newest:], differentiable, tol)
