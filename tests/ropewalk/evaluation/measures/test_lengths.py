"""The measure: independent of batches and ranks, the same as the training's, and complete for every variant."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import build_gpt, pe_options, read_at
from synthetic import PROVENANCE

from conf.schema import Config
from data.base import IGNORE_INDEX, EvalSet
from model import gpt
from ropewalk.evaluation import scoring
from ropewalk.evaluation.measures import lengths
from ropewalk.evaluation.scoring import Scorer

TOKEN_BYTES = torch.arange(50) % 4
TRAIN_LEN = 32


def make_set(n: int, length: int, scored: int, vocab_size: int = 50) -> EvalSet:
    """Random tokens of which the last `scored` targets count: the same at every length."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, (n, 4 * TRAIN_LEN + 1)))
    x = tokens[:, -length - 1 : -1]
    y = tokens[:, -length:].clone()
    y[:, : length - scored] = IGNORE_INDEX
    return EvalSet("text", length, n, lambda start, stop: (x[start:stop], y[start:stop].clone()), f"{n} {scored}")


class Texts:
    task = None
    token_bytes = TOKEN_BYTES

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
        seed=0,
        pe=pe_options("rope"),
        train_len=TRAIN_LEN,
        lengths=[TRAIN_LEN, 2 * TRAIN_LEN, 4 * TRAIN_LEN],
        target_tokens=8,
        trainer=SimpleNamespace(val_tokens=96),
        eval=SimpleNamespace(**options),
    )


def evaluate(net, cfg, **options):
    about = dict(run="run", run_id="id", step=7, provenance=PROVENANCE)
    return list(lengths.evaluate(net, Texts(), cfg, about, **options))


def brute_force(net, part: EvalSet):
    """Sums over the scored targets of each text, one at a time, from float64 logits of each sequence alone."""
    x, y = part.batch(0, part.n)
    net = net.double().requires_grad_(False)
    nats = np.zeros(part.n)
    tokens = np.zeros(part.n)
    in_bytes = np.zeros(part.n)
    errors = np.zeros(part.n)
    for i in range(part.n):
        logits = net(x[i : i + 1])[0]
        for t, target in enumerate(y[i].tolist()):
            if target != IGNORE_INDEX and TOKEN_BYTES[target]:
                probabilities = logits[t, : net.vocab_size].softmax(-1)
                nats[i] -= math.log(probabilities[target])
                tokens[i] += 1
                in_bytes[i] += TOKEN_BYTES[target]
                errors[i] += bool(probabilities[target] < probabilities.max())
    return nats, tokens, in_bytes, errors


@pytest.mark.parametrize("encoding", ["rope", "cope", "stick_breaking"])
def test_sums_equal_brute_force(encoding):
    part = make_set(n=3, length=24, scored=7)
    sums = Scorer(build_gpt(encoding), token_bytes=TOKEN_BYTES)(part)
    nats, tokens, in_bytes, errors = brute_force(build_gpt(encoding), part)
    np.testing.assert_allclose(sums.nats[:, 0], nats, rtol=1e-5)
    np.testing.assert_array_equal(sums.tokens[:, 0], tokens)
    np.testing.assert_array_equal(sums.bytes[:, 0], in_bytes)
    np.testing.assert_array_equal(sums.errors[:, 0], errors)


@pytest.mark.parametrize("budget", [1, 70, 4096])
def test_batches_and_pieces_of_logits_change_nothing(monkeypatch, budget):
    net = build_gpt("rope")
    part = make_set(n=5, length=32, scored=20)
    whole = Scorer(net, token_bytes=TOKEN_BYTES)(part)
    monkeypatch.setattr(gpt, "MAX_LOGITS", 400)
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", budget)
    in_pieces = Scorer(net, token_bytes=TOKEN_BYTES)(part)
    np.testing.assert_allclose(in_pieces.nats, whole.nats, rtol=1e-6)


def test_texts_grouped_in_two_ways_are_read_once(monkeypatch):
    net = build_gpt("rope")
    part = make_set(n=5, length=32, scored=32)
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", 70)
    thirds = (torch.arange(32) // 12).expand(5, 32)
    some = (torch.arange(32) % 3 - 1).expand(5, 32)
    sums_of_thirds = Scorer(net, token_bytes=TOKEN_BYTES)(part, thirds, 3)
    sums_of_some = Scorer(net, token_bytes=TOKEN_BYTES)(part, some, 3)

    token_losses = scoring.token_losses
    texts_read = []

    def counting(net, x, y, **options):
        texts_read.append(len(x))
        return token_losses(net, x, y, **options)

    monkeypatch.setattr(scoring, "token_losses", counting)
    score = Scorer(net, token_bytes=TOKEN_BYTES)
    np.testing.assert_allclose(score(part, thirds, 3), sums_of_thirds, rtol=1e-6)
    np.testing.assert_allclose(score(part, some, 3), sums_of_some, rtol=1e-6)
    assert sum(texts_read) == 5


def test_dropout_is_off_and_the_mode_kept():
    net = build_gpt("rope", dropout=0.5).train()
    part = make_set(n=2, length=16, scored=16)
    np.testing.assert_array_equal(Scorer(net)(part).nats, Scorer(net)(part).nats)
    assert net.training


def test_validation_leaves_tokens_without_bytes_out_of_the_bits():
    net = build_gpt("rope")
    validation = lengths.validate(net, Texts(), config())

    x, y = Texts().validation(TRAIN_LEN, 96).batch(0, 3)
    with torch.no_grad():
        losses = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none").double()
    bytes_of_target = TOKEN_BYTES[y]
    bits = losses[bytes_of_target > 0].sum() / math.log(2)
    bits_per_byte = bits / bytes_of_target.sum()
    assert validation.loss == pytest.approx(losses.mean().item(), rel=1e-6)
    assert validation.bits_per_byte == pytest.approx(bits_per_byte.item(), rel=1e-6)
    assert validation.tokens == 96
    assert validation.length == TRAIN_LEN
    assert validation.error is None


def test_loss_by_position_keeps_texts_apart(monkeypatch):
    net = build_gpt("rope")
    monkeypatch.setattr(lengths, "BINS", 8)
    _, by_position = evaluate(net, config(by_position=True))

    x, y = make_set(5, 128, 128).batch(0, 5)
    with torch.no_grad():
        losses = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none")
    for start, measured in zip(range(0, 128, 16), by_position.measured, strict=True):
        assert measured.span == (start, start + 15)
        assert measured.tokens == [16] * 5
        np.testing.assert_allclose(measured.nats, losses[:, start : start + 16].sum(1), rtol=1e-5)


@pytest.mark.parametrize("sees", [TRAIN_LEN, 4 * TRAIN_LEN])
def test_rows_have_their_context(monkeypatch, sees):
    """A predictor whose loss falls with the tokens that it sees: what it gains is what a row has before its targets."""
    options = SimpleNamespace(target_tokens=None)
    lengths_of = [TRAIN_LEN // 2, TRAIN_LEN, 2 * TRAIN_LEN, 4 * TRAIN_LEN]
    target_tokens = Config.target_tokens.fget(SimpleNamespace(eval=options, lengths=lengths_of))
    assert 1 <= target_tokens <= min(lengths_of) / 4

    def losses(net, x, y, **options):
        context = torch.arange(1, x.size(1) + 1).expand_as(y).clamp(max=sees)
        loss = torch.where(y != IGNORE_INDEX, -torch.log2(context), 0.0)
        is_wrong = torch.zeros(y.shape, dtype=torch.bool)
        return loss, is_wrong

    monkeypatch.setattr(scoring, "token_losses", losses)
    score = Scorer(build_gpt("rope"))
    means = []
    for part in Texts().eval_sets(lengths_of, target_tokens=target_tokens, sequences=3):
        sums = score(part)
        means.append(sums.nats.sum() / sums.tokens.sum())
    for length, mean in zip(lengths_of, means, strict=True):
        fewest_read = length - target_tokens + 1  # as the table's heading states
        assert mean <= -math.log2(min(fewest_read, sees))
        assert mean >= -math.log2(min(length, sees))
    gained_beyond_train_len = means[1] - means[-1]
    assert gained_beyond_train_len == pytest.approx(0.0 if sees == TRAIN_LEN else 2.0, abs=0.1)


def test_every_variant_on_the_same_texts():
    """RoPE's weights as trained and as YaRN, whose file says that it was not trained so."""
    yarn = pe_options("yarn", scale=4.0)
    net = build_gpt("rope", init_std=0.3)
    evaluations = evaluate(net, config(variants=[yarn, pe_options("rope"), pe_options("rerope")]))
    assert [(e.variant.label, e.variant.scale, e.variant.zero_shot) for e in evaluations] == [
        ("rope", 1.0, False),
        ("yarn at scale 4", 4.0, True),
        ("rerope", math.inf, True),
    ]
    as_rope, as_yarn, _ = evaluations
    for evaluation in evaluations:
        assert (evaluation.kind, evaluation.step, evaluation.seed) == ("lengths", 7, 0)
        assert evaluation.eval == as_rope.eval

    same_weights = build_gpt("yarn", pe={"scale": 4.0}, init_std=0.3)
    expected = Scorer(same_weights, read_at(same_weights, 4.0), token_bytes=TOKEN_BYTES)(make_set(5, 128, 8)).nats[:, 0]
    np.testing.assert_allclose(as_yarn.measured[-1].nats, expected, atol=1e-4)
    assert not np.allclose(as_rope.measured[-1].nats, expected, rtol=1e-2)


def test_own_scales_and_lengths_without_a_position():
    cfg = config()
    cfg.pe = pe_options("learned", scale=2.0)
    evaluations = evaluate(build_gpt("learned", pe={"scale": 2.0}), cfg)
    assert [(e.variant.label, e.variant.zero_shot, e.skipped) for e in evaluations] == [
        ("learned at scale 1", False, [64, 128]),
        ("learned at scale 2", True, [128]),
    ]
    unscaled, scaled = evaluations
    assert [m.length for m in unscaled.measured] == [32]
    assert [m.length for m in scaled.measured] == [32, 64]


def test_what_exists_is_not_measured_again(monkeypatch):
    net = build_gpt("rope")
    first = evaluate(net, config())
    monkeypatch.setattr(net, "hidden_states", None)  # it would fail
    yarn = pe_options("yarn", scale=4.0)
    again = evaluate(net, config(variants=[yarn]), existing=first)
    assert again[0] == first[0]
    assert [evaluation.variant.label for evaluation in again] == ["rope", "yarn at scale 4"]
