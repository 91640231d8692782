"""Encodings of the zoo against their definitions in float64, a step at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import build_pe
from torch import nn

from model.position.layer import make_context

B = 2
H = 4
KV = 2  # heads of keys and values
D = 8
DIM = 64
T = 150  # more than one block of queries


def tensors(dtype=torch.float64):
    """q, k, v and the layer's input x."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, T, D), (B, KV, T, D), (B, KV, T, D), (B, T, DIM))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def attend(pe, q, k, v, x, newest=T):
    ctx = make_context(pe, torch.arange(T), newest, T)
    return pe.attend(q[:, :, T - newest :], k, v, pe.state(x), ctx)


def heads(x):
    """Repeat what heads of keys have, for each head of queries."""
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


def nape(pe, q, k, x):
    slope = torch.tensor([1, 1 / 2, 0, 0])[:, None, None]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return q @ heads(k).mT / math.sqrt(D) - slope * distance


def normalised(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def path(pe, q, k, x):
    low_rank = x @ pe.down.double().T @ pe.up.double().T
    w = F.silu(convolved(low_rank, pe.kernel)).unflatten(-1, (KV, D)).transpose(1, 2)
    mirrors = heads(normalised(w))  # [B, H, T, D]
    beta = 2 * (x @ pe.strength.double().T + pe.strength_bias).sigmoid()
    beta = heads(beta.mT)[..., None]  # [B, H, T, 1]
    keys = heads(k).clone()
    scores = torch.full((B, H, T, T), -torch.inf, dtype=torch.float64)
    for t in range(T):
        # Each token reflects all keys before it.
        old = keys[:, :, :t]
        mirror = mirrors[:, :, t : t + 1]
        projection = (old * mirror).sum(-1, keepdim=True) * mirror
        keys[:, :, :t] = old - beta[:, :, t : t + 1] * projection
        query = q[:, :, t : t + 1]
        scores[:, :, t, : t + 1] = (query * keys[:, :, : t + 1]).sum(-1)
    return scores / math.sqrt(D)


def path_fox(pe, q, k, x):
    return path(pe, q, k, x) + forgotten(pe, x) / math.sqrt(D)


def selective_rope(pe, q, k, x):
    normed = normalised(x.unflatten(-1, (H, -1))).flatten(-2)
    low_rank = normed @ pe.down.double().T @ pe.up.double().T
    phi = convolved(low_rank, pe.kernel).unflatten(-1, (KV, D // 2))
    temperature = 500_000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    angle = heads(phi.cumsum(1).transpose(1, 2) * temperature)
    turn = torch.polar(torch.ones_like(angle), angle)
    queries = torch.complex(*q.chunk(2, dim=-1)) * turn
    keys = torch.complex(*heads(k).chunk(2, dim=-1)) * turn
    return (queries @ keys.mH).real / math.sqrt(D)


def pope(pe, q, k, x):
    queries = F.softplus(q)[:, :, :, None]
    keys = F.softplus(heads(k))[:, :, None]
    magnitude = queries * keys  # [B, H, T, T, D]

    distance = (torch.arange(T)[:, None] - torch.arange(T))[..., None]
    frequency = 10_000.0 ** (-torch.arange(D, dtype=torch.float64) / D)
    delta = pe.delta.double().clamp(-2 * math.pi, 0)
    phase = distance * frequency - heads(delta[None])[0][:, None, None]
    return (magnitude * phase.cos()).sum(-1) / math.sqrt(D)


def lerope(pe, q, k, x):
    frequency = 10_000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D) * pe.alpha.double().exp()
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)
    log_pos = torch.arange(1, T + 1, dtype=torch.float64).log()
    factor = pe.scale_by_head.double()[:, None] * log_pos + pe.offset.double()[:, None]  # [H, T]
    queries = torch.complex(*(q * factor[..., None]).chunk(2, dim=-1)) * turn
    keys = torch.complex(*heads(k).chunk(2, dim=-1)) * turn
    return (queries @ keys.mH).real / math.sqrt(D)


def profiles(pe, q, k, x):
    profile = torch.einsum("btc,hrc,rd->bhtd", x, pe.mix.double(), pe.distances.double())
    scores = q @ heads(k).mT / math.sqrt(D)
    for i in range(T):
        for j in range(max(0, i - pe.max_distance), i + 1):
            scores[:, :, i, j] += profile[:, :, i, i - j]
    return scores


FORMULAS = {f.__name__: f for f in (nape, path, path_fox, selective_rope, pope, lerope, profiles)}


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", FORMULAS)
def test_scores_equal_the_definition(name, window):
    """For a whole text, and for its newest tokens alone."""
    pe = build_pe(name, n_head=H, n_kv_head=KV, head_dim=D, window=window)
    q, k, v, x = tensors()
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (distance < 0) | (distance >= (window or T))
    scores = FORMULAS[name](pe, q, k, x).masked_fill(hidden, -torch.inf)
    expected = scores.softmax(-1) @ heads(v)
    for newest in (T, 20, 1):
        out = attend(pe, *tensors(torch.float32), newest)
        torch.testing.assert_close(out.double(), expected[:, :, T - newest :], rtol=0, atol=5e-5)


@torch.no_grad()
@pytest.mark.parametrize("remainder", [True, False])
def test_stick_breaking_gives_each_key_its_share_of_what_is_left(remainder):
    pe = build_pe("stick_breaking", n_head=H, n_kv_head=KV, head_dim=D, remainder=remainder)
    q, k, v, _ = tensors()
    shares = (q @ heads(k).mT / math.sqrt(D)).sigmoid()
    values = heads(v)
    expected = torch.zeros_like(q)
    for i in range(T):
        left = torch.ones(B, H, 1, dtype=torch.float64)
        for j in range(i - 1, -1, -1):  # the nearest key takes its share first
            share = shares[:, :, i, j, None]
            expected[:, :, i] += left * share * values[:, :, j]
            left = left * (1 - share)
        if remainder:
            expected[:, :, i] += left * values[:, :, i]
    out = attend(pe, *tensors(torch.float32))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
