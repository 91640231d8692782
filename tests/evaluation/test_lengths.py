"""The measure: independent of batches and chunks, and the same as the training's."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import build_gpt

from data.base import IGNORE, Slice
from evaluation import lengths
from evaluation.results import Results


def make_slice(n: int, length: int, scored: int, vocab_size: int = 50) -> Slice:
    """Random tokens of which the last `scored` targets count."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, (n, length + 1)))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[:, : length - scored] = IGNORE
    return Slice("text", length, n, lambda start, stop: (x[start:stop], y[start:stop]))


TOKEN_BYTES = torch.arange(50) % 4


def brute_force(net, part: Slice) -> tuple[float, int, int, list]:
    """Sums over the scored targets, and the wrong ones, one at a time, from float64 logits of each sequence alone."""
    nats, tokens, n_bytes, mistakes = 0.0, 0, 0, []
    x, y = part.batch(0, part.n)
    net = net.double().requires_grad_(False)
    for i in range(part.n):
        logits = net(x[i : i + 1])[0]
        for t in range(part.length):
            if y[i, t] != IGNORE:
                probabilities = logits[t, : net.vocab_size].softmax(-1)
                probability = probabilities[y[i, t]]
                if probability < probabilities.max():
                    mistakes.append((i, t))
                nats, tokens, n_bytes = nats - math.log(probability), tokens + 1, n_bytes + int(TOKEN_BYTES[y[i, t]])
    return nats, tokens, n_bytes, mistakes


def test_score_equals_brute_force(encoding):
    part = make_slice(n=3, length=24, scored=7)
    found = lengths.score(build_gpt(encoding), part, TOKEN_BYTES)
    nats, tokens, n_bytes, mistakes = brute_force(build_gpt(encoding), part)
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert (found.tokens, found.bytes, found.sequences) == (tokens, n_bytes, 3)
    assert (found.wrong, found.wrong_sequences) == (len(mistakes), len({i for i, _ in mistakes}))


@pytest.mark.parametrize("name", ["rope", "cope", "alibi", "learned", "relative"])
def test_chunks_and_batches_change_nothing(name, monkeypatch):
    net, part = build_gpt(name), make_slice(n=5, length=32, scored=20)
    whole = lengths.score(net, part, TOKEN_BYTES)
    for chunk, batch_tokens in ((7, 4096), (32, 40), (5, 1)):
        monkeypatch.setattr(lengths, "CHUNK", chunk)
        monkeypatch.setattr(lengths, "BATCH_TOKENS", batch_tokens)
        assert lengths.score(net, part, TOKEN_BYTES).nats == pytest.approx(whole.nats, rel=1e-6)


def test_the_measure_is_the_loss_of_the_training():
    """Evaluated at 1x, the tokens cost what the training's own loss says of them."""
    net, part = build_gpt("yarn"), make_slice(n=4, length=32, scored=8)
    found = lengths.score(net, part, None)
    with torch.no_grad():
        loss = net.loss(*part.batch(0, part.n)).item()
    assert found.nats / found.tokens == pytest.approx(loss, rel=1e-6)


def test_dropout_is_off_and_the_mode_kept():
    net, part = build_gpt("rope", dropout=0.5).train(), make_slice(n=2, length=16, scored=16)
    assert lengths.score(net, part, None) == lengths.score(net, part, None)
    assert net.training


def test_loss_by_position(monkeypatch):
    net, part = build_gpt("rope"), make_slice(n=6, length=40, scored=40)
    monkeypatch.setattr(lengths, "BINS", 8)
    bins = lengths.by_position(net, part, "as trained")
    assert [(b.start, b.stop) for b in bins] == [(i, i + 5) for i in range(0, 40, 5)]
    x, y = part.batch(0, 6)
    with torch.no_grad():
        losses = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none")
    for b in bins:
        assert b.tokens == 6 * 5
        assert b.loss == pytest.approx(losses[:, b.start : b.stop].mean().item(), rel=1e-5)


@pytest.mark.parametrize(("length", "stride"), [(40, 40), (16, 5), (16, 16), (40, 3), (7, 1), (13, 9)])
def test_sliding_windows_score_each_token_once(length, stride):
    """Against the definition: token t of a text belongs to the first window that reads it."""
    part = make_slice(n=3, length=40, scored=40)
    windows = lengths.sliding(part, length, stride)
    x, y = part.batch(0, 3)
    starts = list(range(0, 40 - length + stride, stride))
    starts[-1] = 40 - length
    assert windows.n == 3 * len(starts)
    read = set()
    for first in range(0, windows.n, 2):  # in batches that do not end where texts do
        last = min(windows.n, first + 2)
        for i, (xs, ys) in enumerate(zip(*windows.batch(first, last), strict=True), start=first):
            text, start = i // len(starts), starts[i % len(starts)]
            assert torch.equal(xs, x[text, start : start + length])
            new = {(text, t) for t in range(start, start + length)} - read
            assert {(text, start + int(t)) for t in (ys != IGNORE).nonzero()} == new
            assert all(ys[t - start] == y[text, t] for _, t in new)
            read |= new
    assert len(read) == 3 * 40


def test_sliding_windows_on_request(train):
    outcome = train("pe=alibi", "eval.stride=8", "eval.lengths=[1,4]")
    assert outcome.code == 0, outcome.err
    rows = Results.load(train.runs / "alibi-text" / "results.json").lengths
    whole = [row for row in rows if row.slice == "sliding window, stride 8"]
    assert [(row.length, row.tokens, row.sequences) for row in whole] == [(16, 2 * 64, 2 * 7), (64, 2 * 64, 2)]
    assert "sliding window, stride 8" in outcome.out
    refused = train("pe=alibi", "eval.stride=17", "eval.lengths=[1]", "name=wide")
    assert refused.code == 2
    assert "eval.stride=17 is longer than a window of 16 tokens" in refused.err
    assert not (train.runs / "wide").exists()


def test_untrained_model_costs_the_logarithm_of_the_vocabulary():
    net = build_gpt("nope")
    torch.nn.init.zeros_(net.head.weight)
    found = lengths.score(net, make_slice(n=2, length=16, scored=16), None)
    assert found.nats / found.tokens == pytest.approx(math.log(50), rel=1e-6)
