"""What any encoding may have: a logit temperature and attention sinks, against explicit scores in float64."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import ENCODINGS, build_gpt, build_pe, pe_options

from model.attention import for_heads_of
from model.position.bias import alibi_slopes

T, L = 150, 32  # tokens, more than a block of queries; of training
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FACTORS = {  # by n, the keys that a query sees, and the learned scalar of a head
    "none": lambda n, s: 1.0,
    "log": lambda n, s: max(1.0, math.log(n) / math.log(L)),
    "llama4": lambda n, s: 1 + 0.1 * math.log(1 + n // L),
    "ssmax": lambda n, s: s * math.log(n),
}


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("name", ["nope", "alibi", "pope"])
@pytest.mark.parametrize("temperature", FACTORS)
@torch.no_grad()
def test_temperature_and_sinks_are_as_defined(temperature, name, window):
    """With grouped heads, read at once and from the cache."""
    pe, generator = build_pe(name, n_kv_head=2, train_len=L, window=window, temperature=temperature), torch.Generator()
    q, k, v = (torch.randn(2, heads, T, 16, generator=generator.manual_seed(heads)) for heads in (4, 2, 3))
    v, learned = v[:, :2], pe.ssmax.flatten().tolist() if temperature == "ssmax" else [0.0] * 4
    keys, distance = for_heads_of(q, k).double(), (torch.arange(T)[:, None] - torch.arange(T)).double()
    if name == "pope":
        angle = distance[..., None] * 10_000 ** (-torch.arange(16) / 16)
        delta = pe.delta.double().clamp(-2 * math.pi, 0).repeat_interleave(2, 0)[:, None, None]
        a, b = (torch.nn.functional.softplus(x.double()) for x in (q, keys))
        scores = torch.einsum("bhic,bhjc,hijc->bhij", a, b, (angle - delta).cos()) / 4
    else:
        scores = q.double() @ keys.mT / 4
    seen = [min(i + 1, window or T) for i in range(T)]
    scores = scores * torch.tensor([[FACTORS[temperature](n, s) for n in seen] for s in learned])[..., None]
    if name == "alibi":
        scores = scores - alibi_slopes(4)[:, None, None] * distance
    scores = scores.masked_fill((distance < 0) | (distance >= (window or T)), -torch.inf)
    share = (scores.logsumexp(-1) - SINKS[:, None]).sigmoid()[..., None]
    expected = scores.softmax(-1) @ for_heads_of(q, v).double()
    for new in (T, 3, 1):
        ctx = pe.context(torch.arange(T), new, T)
        for sinks, rows in ((None, expected), (SINKS, share * expected)):
            out = pe(q[:, :, T - new :], k, v, {}, replace(ctx, sinks=sinks)).double()
            torch.testing.assert_close(out, rows[:, :, T - new :], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in ENCODINGS if "pattern" not in pe_options(name)])
@torch.no_grad()
def test_sinks_take_part_in_the_softmax_of_every_encoding(name):
    """Values of one come out as sigmoid(logsumexp - sink), so the logits of what comes out differ as the sinks do."""
    if name == "stick_breaking":
        with pytest.raises(ValueError, match="in a softmax, which StickBreaking lacks"):
            build_gpt(name, sinks=True)
        return
    pe, generator = build_pe(name, n_kv_head=2, train_len=16), torch.Generator().manual_seed(0)
    q, k, x = (torch.randn(2, *size, generator=generator) for size in ([4, 40, 16], [2, 40, 16], [40, 64]))
    for scale in pe.scales:
        pe.active_scale = scale
        n = min(40, pe.max_len or 40)
        q, k, ctx = q[:, :, :n], k[:, :, :n], pe.context(torch.arange(n), n, n)
        a, b = (
            pe(q, k, torch.ones_like(k), pe.state(x[:, :n]), replace(ctx, sinks=sinks)).double()
            for sinks in (SINKS, torch.zeros(4))
        )
        expected = (a.logit() + SINKS[:, None, None]).sigmoid()
        torch.testing.assert_close(b, expected, rtol=0, atol=1e-4)
        assert b.max() - b.min() > 0.1
