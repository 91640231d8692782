"""Predictors of known behaviour in a network's place: every measure of text says of each what is true of it."""

from types import SimpleNamespace

import numpy as np
import pytest
from planted import Planted, Texts, results_of

from data.tasks.markov import Markov
from lab.board.judge import difference
from ropewalk.evaluation import statistics
from ropewalk.evaluation.measures import far_copies, lengths
from ropewalk.evaluation.statistics import Sample

LENGTHS = [8, 16, 32, 64]
TRAIN_LEN = 16
TEXTS = 90
VOCAB = 200


def copier(p, words):
    """With probability p the token that followed the last `words` tokens where they occurred before."""

    def predict(tokens):
        odds = np.full(VOCAB, 1 / VOCAB)
        for end in range(len(tokens) - 1, words - 1, -1):
            if tokens[end - words : end] == tokens[-words:]:
                odds *= 1 - p
                odds[tokens[end]] += p
                break
        return odds

    return predict


def recurring():
    """Texts of distinct tokens, but that three words recur far back: in a third of the texts with the same token after
    them. That token is the last target."""
    rng = np.random.default_rng(1)
    permutations = rng.permuted([range(VOCAB)] * TEXTS, axis=1)
    tokens = permutations[:, : max(LENGTHS) + 1]
    tokens[:, -4:] = tokens[:, 5:9]
    goes_on_otherwise = np.arange(TEXTS) % 3 > 0
    tokens[goes_on_otherwise, -1] = tokens[goes_on_otherwise, 20]
    return Texts(tokens)


def settings(target_tokens, sequences=TEXTS):
    evaluation = SimpleNamespace(sequences=sequences)
    return SimpleNamespace(lengths=LENGTHS, target_tokens=target_tokens, train_len=TRAIN_LEN, eval=evaluation)


def by_length(net, data, target_tokens=1, sequences=TEXTS):
    """The measure of lengths: samples in nats, and the best possible losses of the texts, by length."""
    results = results_of(lengths.lengths(data, settings(target_tokens, sequences)), net)
    samples = {}
    optima = {}
    for result in results:
        samples[result.length] = result.sample(result.nats, result.tokens)
        optima[result.length] = result.optimum_nats
    return samples, optima


def sign_of(gain):
    return np.sign(round(gain, 6))


# Probability of a copy, words that must be the same, tokens that are seen; and the sign of what far text gains.
COPIERS = [
    pytest.param(0.99, 1, 64, -1, id="copies blindly"),
    pytest.param(1 / 3, 3, 64, 1, id="copies as often as it is right"),
    pytest.param(0.99, 1, TRAIN_LEN, 0, id="blind and short-sighted"),
    pytest.param(1 / 3, 3, TRAIN_LEN, 0, id="short-sighted"),
]


@pytest.mark.parametrize(("p", "words", "sees", "sign"), COPIERS)
def test_who_copies_well_gains_by_length_and_who_copies_blindly_loses(p, words, sees, sign):
    """The text cut to the training length does not have the words that recur."""
    losses, _ = by_length(Planted(copier(p, words), sees), recurring())
    gain = difference(losses[TRAIN_LEN], losses[64])
    assert sign_of(gain.value) == sign
    assert gain.separated == bool(sign)


@pytest.mark.parametrize(("p", "words", "sees", "sign"), COPIERS)
def test_far_copies_tell_gains_of_the_same_token_from_losses_of_another(monkeypatch, p, words, sees, sign):
    """Of all texts the last target is scored, and counts to one of the two."""
    monkeypatch.setattr(far_copies, "MATCH_BYTES", 3)
    plan = far_copies.far_copies(recurring(), settings(1))
    gains = {"same": 0.0, "other": 0.0}
    n_tokens = 0
    for result in results_of(plan, Planted(copier(p, words), sees)):
        gains[result.continuation] += sum(result.baseline_nats) - sum(result.nats)
        n_tokens += sum(result.tokens)

    assert n_tokens == TEXTS
    assert sign_of(gains["same"]) == abs(sign)
    assert sign_of(gains["other"]) == -abs(sign)
    assert sign_of(gains["same"] + gains["other"]) == sign


FAR = Markov(symbols=4, lag=5, alpha=0.1)


def count(tokens):
    """Odds of the next symbol: how often each came FAR.lag places after the one that is so far back."""
    counts = np.full(FAR.symbols, FAR.alpha)
    for before, token in zip(tokens, tokens[FAR.lag :], strict=False):
        if before == tokens[-FAR.lag]:
            counts[token] += 1
    return counts / counts.sum()


def test_who_looks_as_far_back_as_the_texts_are_decided_reaches_the_optimum():
    """At every length, and so gains all that longer text can give."""
    losses, best = by_length(Planted(count), FAR, 2, 180)

    for length in LENGTHS:
        np.testing.assert_allclose(losses[length].values, [best[length]], atol=1e-4)

    units = losses[64].units
    gained = losses[TRAIN_LEN].values - losses[64].values
    possible = np.subtract([best[TRAIN_LEN]], [best[64]])
    share = statistics.share(Sample(gained, units), Sample(possible, units))

    assert share.value == pytest.approx(1, abs=1e-4)
