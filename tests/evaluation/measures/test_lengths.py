"""The measure: independent of batches and ranks, the same as the training's, and complete for every variant."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import build_gpt, pe_options
from synthetic import PROVENANCE

from conf.schema import Config
from data.base import IGNORE_INDEX, EvalSet
from evaluation import scoring
from evaluation.measures import lengths
from evaluation.scoring import Scorer
from model import gpt

TOKEN_BYTES = torch.arange(50) % 4
TRAIN_LEN = 32


def make_set(n: int, length: int, scored: int, vocab_size: int = 50) -> EvalSet:
    """Random tokens of which the last `scored` targets count: the same at every length."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, (n, 4 * TRAIN_LEN + 1)))
    x, y = tokens[:, -length - 1 : -1], tokens[:, -length:].clone()
    y[:, : length - scored] = IGNORE_INDEX
    return EvalSet("text", length, n, lambda start, stop: (x[start:stop], y[start:stop].clone()), f"{n} {scored}")


class Texts:
    task, token_bytes = None, TOKEN_BYTES

    def eval_sets(self, lengths, *, target_tokens, sequences):
        return [make_set(sequences, length, target_tokens) for length in lengths]

    def fully_scored(self, length, sequences):
        return make_set(sequences, length, length)

    def validation(self, length, tokens):
        return make_set(tokens // length, length, length)

    def optimum(self, x, y):
        return None


def config(**evaluation) -> SimpleNamespace:
    options = dict(lengths=[1, 2, 4], sequences=5, by_position=False, far_copies=False, variants=[]) | evaluation
    return SimpleNamespace(
        pe=pe_options("rope"), seed=0, train_len=TRAIN_LEN, target_tokens=8, eval=SimpleNamespace(**options),
        lengths=[TRAIN_LEN, 2 * TRAIN_LEN, 4 * TRAIN_LEN], trainer=SimpleNamespace(val_tokens=96),
    )  # fmt: skip


def evaluate(net, cfg, **options):
    about = dict(run="run", run_id="id", step=7, provenance=PROVENANCE)
    return [*lengths.evaluate(net, Texts(), cfg, about, **options)]


def brute_force(net, part: EvalSet):
    """Sums over the scored targets of each text, one at a time, from float64 logits of each sequence alone."""
    x, y = part.batch(0, part.n)
    net, sums = net.double().requires_grad_(False), np.zeros((4, part.n))
    for i in range(part.n):
        logits = net(x[i : i + 1])[0]
        for t in range(part.length):
            if y[i, t] != IGNORE_INDEX and TOKEN_BYTES[y[i, t]]:
                probabilities = logits[t, : net.vocab_size].softmax(-1)
                own = probabilities[y[i, t]]
                sums[:, i] += -math.log(own), 1, TOKEN_BYTES[y[i, t]], bool(own < probabilities.max())
    return sums


@pytest.mark.parametrize("encoding", ["rope", "cope", "stick_breaking"])
def test_sums_equal_brute_force(encoding):
    part = make_set(n=3, length=24, scored=7)
    found = Scorer(build_gpt(encoding), TOKEN_BYTES)(part)
    nats, *counts = brute_force(build_gpt(encoding), part)
    np.testing.assert_allclose(found.nats[:, 0], nats, rtol=1e-5)
    np.testing.assert_array_equal(np.stack([found.tokens, found.bytes, found.errors])[..., 0], counts)


@pytest.mark.parametrize("budget", [1, 70, 4096])
def test_batches_and_pieces_of_logits_change_nothing(monkeypatch, budget):
    net, part = build_gpt("rope"), make_set(n=5, length=32, scored=20)
    whole = Scorer(net, TOKEN_BYTES)(part)
    monkeypatch.setattr(gpt, "LOGITS", 400)
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", budget)
    np.testing.assert_allclose(Scorer(net, TOKEN_BYTES)(part).nats, whole.nats, rtol=1e-6)


def test_texts_grouped_in_two_ways_are_read_once(monkeypatch):
    net, part, read = build_gpt("rope"), make_set(n=5, length=32, scored=32), []
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", 70)
    thirds, some = torch.arange(32) // 12, torch.arange(32) % 3 - 1
    expected = [Scorer(net, TOKEN_BYTES)(part, g.expand(5, 32), 3) for g in (thirds, some)]
    losses = scoring.token_losses
    monkeypatch.setattr(scoring, "token_losses", lambda net, x, y: (read.append(len(x)), losses(net, x, y))[1])
    score = Scorer(net, TOKEN_BYTES)
    for group, sums in zip((thirds, some), expected, strict=True):
        np.testing.assert_allclose(score(part, group.expand(5, 32), 3), sums, rtol=1e-6)
    assert sum(read) == 5


def test_dropout_is_off_and_the_mode_kept():
    net, part = build_gpt("rope", dropout=0.5).train(), make_set(n=2, length=16, scored=16)
    np.testing.assert_array_equal(Scorer(net)(part).nats, Scorer(net)(part).nats)
    assert net.training


def test_validation_leaves_tokens_without_bytes_out_of_the_bits():
    net, cfg = build_gpt("rope"), config()
    found = lengths.validate(net, Texts(), cfg)
    x, y = Texts().validation(TRAIN_LEN, 96).batch(0, 3)
    with torch.no_grad():
        losses = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none").double()
    size = TOKEN_BYTES[y]
    assert (found.tokens, found.length, found.error) == (96, TRAIN_LEN, None)
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(float(losses[size > 0].sum()) / math.log(2) / int(size.sum()), rel=1e-6)


def test_loss_by_position_keeps_texts_apart(monkeypatch):
    net, cfg = build_gpt("rope"), config(by_position=True)
    monkeypatch.setattr(lengths, "BINS", 8)
    _, found = evaluate(net, cfg)
    assert [m.span for m in found.measured] == [(i, i + 15) for i in range(0, 128, 16)]
    x, y = make_set(5, 128, 128).batch(0, 5)
    with torch.no_grad():
        losses = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none")
    for i, m in enumerate(found.measured):
        assert m.tokens == [16] * 5
        np.testing.assert_allclose(m.nats, losses[:, 16 * i : 16 * i + 16].sum(1), rtol=1e-5)


@pytest.mark.parametrize("sees", [TRAIN_LEN, 4 * TRAIN_LEN])
def test_rows_have_their_context(monkeypatch, sees):
    """A predictor whose loss falls with the tokens that it sees: what it gains is what a row has before its targets."""
    options = SimpleNamespace(target_tokens=None)
    lengths_of = [TRAIN_LEN // 2, TRAIN_LEN, 2 * TRAIN_LEN, 4 * TRAIN_LEN]
    target_tokens = Config.target_tokens.fget(SimpleNamespace(eval=options, lengths=lengths_of))
    assert 1 <= target_tokens <= min(lengths_of) / 4

    def losses(net, x, y):
        context = torch.arange(1, x.size(1) + 1).expand_as(y).clamp(max=sees)
        return torch.where(y != IGNORE_INDEX, -torch.log2(context), 0.0), torch.zeros(y.shape, dtype=torch.bool)

    monkeypatch.setattr(scoring, "token_losses", losses)
    score = Scorer(build_gpt("rope"))
    means = []
    for part in Texts().eval_sets(lengths_of, target_tokens=target_tokens, sequences=3):
        sums = score(part)
        means.append(sums.nats.sum() / sums.tokens.sum())
    for length, mean in zip(lengths_of, means, strict=True):
        least, most = length - target_tokens + 1, length  # tokens read, as the table's heading states
        assert -math.log2(min(most, sees)) <= mean <= -math.log2(min(least, sees))
    beyond = means[1] - means[-1]  # gained beyond train_len
    assert beyond == pytest.approx(0.0 if sees == TRAIN_LEN else 2.0, abs=0.1)


def test_every_variant_on_the_same_texts():
    """RoPE's weights as trained and as YaRN, whose file says that it was not trained so."""
    yarn = pe_options("yarn", scale=4.0)
    net, other = build_gpt("rope", init_std=0.3), build_gpt("yarn", pe={"scale": 4.0}, init_std=0.3)
    found = evaluate(net, config(variants=[yarn, pe_options("rope"), pe_options("rerope")]))
    assert [(e.variant.label, e.variant.scale, e.variant.zero_shot) for e in found] == [
        ("rope", 1.0, False), ("yarn at scale 4", 4.0, True), ("rerope", math.inf, True),
    ]  # fmt: skip
    assert all((e.eval, e.step, e.seed, e.kind) == (found[0].eval, 7, 0, "lengths") for e in found)
    with other.at_scale(4.0):
        expected = Scorer(other, TOKEN_BYTES)(make_set(5, 128, 8)).nats[:, 0]
    np.testing.assert_allclose(found[1].measured[-1].nats, expected, atol=1e-4)
    assert not np.allclose(found[0].measured[-1].nats, expected, rtol=1e-2)


def test_own_scales_and_lengths_without_a_position():
    cfg = config()
    cfg.pe = pe_options("learned", scale=2.0)
    found = evaluate(build_gpt("learned", pe={"scale": 2.0}), cfg)
    assert [(e.variant.label, e.variant.zero_shot, e.skipped) for e in found] == [
        ("learned at scale 1", False, [64, 128]), ("learned at scale 2", True, [128]),
    ]  # fmt: skip
    assert [[m.length for m in e.measured] for e in found] == [[32], [32, 64]]


def test_what_exists_is_not_measured_again(monkeypatch):
    net, cfg = build_gpt("rope"), config()
    first = evaluate(net, cfg)
    yarn = [pe_options("yarn", scale=4.0)]
    monkeypatch.setattr(net, "hidden_states", None)  # it would fail
    again = evaluate(net, config(variants=yarn), existing=first)
    assert again[0] == first[0]
    assert [e.variant.label for e in again] == ["rope", "yarn at scale 4"]
