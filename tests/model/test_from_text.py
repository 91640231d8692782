"""Encodings that the text itself moves, and PoPE, against their definitions in float64, one step after the other."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import build_pe
from torch import nn

from model.position.layer import make_context

B, H, KV, D, DIM = 2, 4, 2, 8, 64
T = 150  # more than one block of queries


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, KV, T, D), (B, KV, T, D), (B, T, DIM)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def attend(pe, q, k, v, x, newest=T):
    return pe.attend(q[:, :, T - newest :], k, v, pe.state(x), make_context(pe, torch.arange(T), newest, T))


def heads(x):
    return x.repeat_interleave(H // KV, dim=1)


def convolved(x, kernel):
    """PyTorch's own convolution, which pads both ends."""
    channels, width = kernel.shape
    conv = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=False)
    conv.weight = nn.Parameter(kernel.double()[:, None])
    return conv(x.mT)[..., :T].mT


def forgotten(pe, x):
    """Of keys by queries, the logarithms of all gates after the key up to the query: [B, H, T, T]."""
    log_gates = F.logsigmoid(x @ pe.gate.double().T + pe.gate_bias).transpose(1, 2)
    out = torch.zeros(B, H, T, T, dtype=torch.float64)
    for j in range(T):
        out[..., j + 1 :, j] = log_gates[..., j + 1 :].cumsum(-1)
    return out


def fox(pe, q, k, x):
    return q @ heads(k).mT / math.sqrt(D) + forgotten(pe, x)


def path(pe, q, k, x):
    w = F.silu(convolved(x @ pe.down.double().T @ pe.up.double().T, pe.kernel)).unflatten(-1, (KV, D)).transpose(1, 2)
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = 2 * (x @ pe.strength.double().T + pe.strength_bias).sigmoid().mT
    keys, scores = heads(k).clone(), torch.full((B, H, T, T), -torch.inf, dtype=torch.float64)
    for t in range(T):  # each token reflects all keys before it
        old, mirror = keys[:, :, :t], heads(w)[:, :, t, None]
        keys[:, :, :t] = old - heads(beta)[:, :, t, None, None] * (old * mirror).sum(-1, keepdim=True) * mirror
        scores[:, :, t, : t + 1] = (q[:, :, t, None] * keys[:, :, : t + 1]).sum(-1)
    return scores / math.sqrt(D)


def path_fox(pe, q, k, x):
    return path(pe, q, k, x) + forgotten(pe, x) / math.sqrt(D)


def selective_rope(pe, q, k, x):
    normed = x.unflatten(-1, (H, -1))
    normed = (normed / (normed.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)
    phi = convolved(normed @ pe.down.double().T @ pe.up.double().T, pe.kernel).unflatten(-1, (KV, D // 2))
    angle = phi.cumsum(1).transpose(1, 2) * 500_000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    as_complex = [torch.complex(*z.chunk(2, dim=-1)) for z in (q, heads(k))]
    a, b = (z * torch.polar(torch.ones_like(heads(angle)), heads(angle)) for z in as_complex)
    return (a @ b.mH).real / math.sqrt(D)


def pope(pe, q, k, x):
    distance = (torch.arange(T)[:, None] - torch.arange(T))[..., None]
    delta = heads(pe.delta.double().clamp(-2 * math.pi, 0)[None])[0]
    what = F.softplus(q)[:, :, :, None] * F.softplus(heads(k))[:, :, None]  # [B, H, T, T, D]
    where = distance * 10_000.0 ** (-torch.arange(D, dtype=torch.float64) / D) - delta[:, None, None]
    return (what * where.cos()).sum(-1) / math.sqrt(D)


def profiles(pe, q, k, x):
    profile = torch.einsum("btc,hrc,rd->bhtd", x, pe.mix.double(), pe.distances.double())
    scores = q @ heads(k).mT / math.sqrt(D)
    for i in range(T):
        for j in range(max(0, i - pe.max_distance), i + 1):
            scores[:, :, i, j] += profile[:, :, i, i - j]
    return scores


FORMULAS = {f.__name__: f for f in (fox, path, path_fox, selective_rope, pope, profiles)}


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", FORMULAS)
def test_scores_equal_the_definition(name, window):
    """For a whole text, and for its newest tokens alone."""
    pe = build_pe(name, n_head=H, n_kv_head=KV, head_dim=D, window=window)
    q, k, v, x = tensors()
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (distance < 0) | (distance >= (window or T))
    expected = FORMULAS[name](pe, q, k, x).masked_fill(hidden, -torch.inf).softmax(-1) @ heads(v)
    for newest in (T, 20, 1):
        found = attend(pe, *tensors(torch.float32), newest).double()
        torch.testing.assert_close(found, expected[:, :, T - newest :], rtol=0, atol=5e-5)


@torch.no_grad()
@pytest.mark.parametrize("remainder", [True, False])
def test_stick_breaking_gives_each_key_its_share_of_what_is_left(remainder):
    pe = build_pe("stick_breaking", n_head=H, n_kv_head=KV, head_dim=D, remainder=remainder)
    q, k, v, _ = tensors()
    share = (q @ heads(k).mT / math.sqrt(D)).sigmoid()
    expected = torch.zeros_like(q)
    for i in range(T):
        left = torch.ones(B, H, 1, dtype=torch.float64)
        for j in range(i - 1, -1, -1):  # the nearest key takes its share first
            expected[:, :, i] += left * share[:, :, i, j, None] * heads(v)[:, :, j]
            left = left * (1 - share[:, :, i, j, None])
        expected[:, :, i] += remainder * left * heads(v)[:, :, i]
    torch.testing.assert_close(attend(pe, *tensors(torch.float32)).double(), expected, rtol=0, atol=2e-6)
