"""Predictors of known behaviour in a network's place: every measure of text says of each what is true of it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.base import IGNORE_INDEX, EvalSet
from data.tasks.markov import Markov
from evaluation import statistics
from evaluation.measures import far_copies, lengths
from evaluation.scoring import Scorer
from evaluation.statistics import Sample

LENGTHS, TRAIN_LEN, TEXTS, VOCAB = (8, 16, 32, 64), 16, 90, 200


class Planted(torch.nn.Module):
    """Reads text by `predict`: the tokens up to a place, and whatever lies before them is hidden -> probabilities."""

    context_parallel = None

    def __init__(self, predict, sees=10**6):
        super().__init__()
        self.predict, self.sees, self.embedding = predict, sees, torch.nn.Embedding(1, 1)

    def documents(self, x):
        return None

    def in_pieces(self, function, hidden, targets):
        return [function(hidden, targets)]

    def hidden_states(self, x, documents):
        logits = []
        for text in x.tolist():
            seen = [text[max(0, place + 1 - self.sees) : place + 1] for place in range(len(text))]
            logits.append(np.log([self.predict(tokens) for tokens in seen]))
        return torch.tensor(np.array(logits), dtype=torch.float32)


def copier(p, words):
    """With probability p the token that followed the last `words` tokens where they occurred before."""

    def predict(tokens):
        odds = np.full(VOCAB, 1 / VOCAB)
        for place in range(len(tokens) - 2, words - 2, -1):
            if tokens[place + 1 - words : place + 1] == tokens[-words:]:
                odds *= 1 - p
                odds[tokens[place + 1]] += p
                break
        return odds

    return predict


class Recurring:
    """Texts of distinct tokens, but that three words recur far back: in a third of the texts with the same token after
    them. That token is the last target."""

    task = token_bytes = None

    def eval_sets(self, lengths, *, target_tokens, sequences):
        rng = np.random.default_rng(1)
        tokens = np.stack([rng.permutation(VOCAB)[: max(LENGTHS) + 1] for _ in range(TEXTS)])
        for i, row in enumerate(tokens):
            row[-4:] = row[5:9] if i % 3 == 0 else [*row[5:8], row[20]]
        rows = torch.from_numpy(tokens)

        def part(length):
            y = rows[:, -length:].clone()
            y[:, :-target_tokens] = IGNORE_INDEX
            return EvalSet(
                "text", length, TEXTS, lambda a, b: (rows[a:b, -length - 1 : -1], y[a:b].clone()), f"{target_tokens}"
            )

        return [part(length) for length in lengths]

    def fully_scored(self, length, sequences):
        return self.eval_sets([length], target_tokens=length, sequences=sequences)[0]

    def optimum(self, x, y):
        return None


def settings(target_tokens=1, sequences=TEXTS):
    return SimpleNamespace(lengths=LENGTHS, target_tokens=target_tokens, eval=SimpleNamespace(sequences=sequences))


def measured(net, data, target_tokens=1, sequences=TEXTS):
    """Samples of the measure of lengths, by length, in nats."""
    plan = lengths._lengths(data, settings(target_tokens, sequences))
    found = [m for job in plan.jobs for m in job.run(Scorer(net))]
    return {m.length: m.sample(m.nats, m.tokens) for m in found}, {m.length: m.optimum_nats for m in found}


def by_position(net):
    """Samples of the loss by position on texts of the far variant, by the first position of each bin, in nats."""
    (job,) = lengths._by_position(FAR, settings(sequences=180)).jobs
    found = job.run(Scorer(net))
    return {m.span[0]: m.sample(m.nats, m.tokens) for m in found}


@pytest.mark.parametrize(
    ("p", "words", "sees", "sign"),
    [(0.99, 1, 64, -1), (1 / 3, 3, 64, 1), (0.99, 1, TRAIN_LEN, 0), (1 / 3, 3, TRAIN_LEN, 0)],
    ids=["copies blindly", "copies as often as it is right", "blind and short-sighted", "short-sighted"],
)
def test_copiers(monkeypatch, p, words, sees, sign):
    monkeypatch.setattr(far_copies, "MATCH_BYTES", 3)
    net = Planted(copier(p, words), sees)
    own, _ = measured(net, Recurring())
    gain = statistics.difference(own[TRAIN_LEN], own[64])
    assert np.sign(round(gain.value, 6)) == sign
    assert gain.separated == bool(sign)
    assert statistics.safe_length(own, own, TRAIN_LEN, 0.02) == (32 if sign < 0 else 64)
    # The words recur 57 tokens back: only the step to 64 can gain, and useful lengths end at the first that does not.
    assert statistics.useful_length(own) == 8
    assert (statistics.useful_length({n: own[n] for n in (32, 64)}) == 64) == (sign > 0)
    if not sign:
        for length in (32, 64):
            assert statistics.difference(own[TRAIN_LEN], own[length])[:3] == (0, 0, 0)

    cfg = SimpleNamespace(lengths=[64], train_len=TRAIN_LEN, eval=SimpleNamespace(sequences=TEXTS))
    (job,) = far_copies.far_copies(Recurring(), cfg).jobs
    found = job.run(Scorer(net))
    gains = {m.continuation: np.subtract(m.baseline_nats, m.nats).sum() for m in found}
    assert sum(sum(m.tokens) for m in found) == TEXTS
    assert np.sign(round(gains["same"], 6)) == abs(sign)
    assert np.sign(round(gains["other"], 6)) == -abs(sign)
    assert np.sign(round(sum(gains.values()), 6)) == sign


FAR = Markov(symbols=4, lag=5, alpha=0.1)


def counter(lag):
    """Counts which symbol came `lag` places after which."""

    def predict(tokens):
        counts = np.full(FAR.symbols, FAR.alpha)
        if len(tokens) >= lag:
            for place in range(lag, len(tokens)):
                counts[tokens[place]] += tokens[place - lag] == tokens[-lag]
        return counts / counts.sum()

    return predict


def copier_from_far(tokens):
    """With probability 0.6 what followed, five places later, the symbol that now is five places back."""
    odds = np.full(FAR.symbols, 1 / FAR.symbols)
    for place in range(len(tokens) - 1, FAR.lag - 1, -1):
        if tokens[place - FAR.lag] == tokens[-FAR.lag]:
            odds *= 0.4
            odds[tokens[place]] += 0.6
            break
    return odds


def test_texts_that_are_decided_far_back():
    """Who looks five places back has all or some of what is possible, who looks one place back less."""
    own, best = measured(Planted(counter(FAR.lag)), FAR, 2, 180)
    for length in LENGTHS:
        np.testing.assert_allclose(own[length].values[0], best[length], atol=1e-4)
    possible = Sample(np.array([best[TRAIN_LEN]]) - np.array([best[64]]), own[64].units)
    all_of_it = statistics.share(Sample(own[TRAIN_LEN].values - own[64].values, own[64].units), possible)
    assert all_of_it.value == pytest.approx(1, abs=1e-4)
    assert statistics.useful_length(own) == 64

    copying, _ = measured(Planted(copier_from_far), FAR, 2, 180)
    assert statistics.difference(copying[8], copying[64]).low > 0  # more often there is something to copy
    assert statistics.estimate(copying[64]).value < math.log(FAR.symbols) - 0.3
    assert statistics.difference(copying[64], own[64]).low > 0  # above the optimum
    assert statistics.safe_length(copying, copying, TRAIN_LEN, 0.1) == 64

    near, _ = measured(Planted(counter(1)), FAR, 2, 180)
    assert statistics.difference(near[64], own[64]).low > 0.1  # it knows how frequent symbols are, and no more
    assert statistics.difference(near[64], copying[64]).low > 0
    short, _ = measured(Planted(counter(FAR.lag), sees=TRAIN_LEN), FAR)
    assert statistics.difference(short[TRAIN_LEN], short[64])[:3] == (0, 0, 0)
    assert statistics.safe_length(short, short, TRAIN_LEN, 0.02) == 64
    assert statistics.useful_length(short) <= TRAIN_LEN


def test_the_loss_by_position_falls_as_far_as_a_predictor_sees():
    whole = by_position(Planted(counter(FAR.lag)))
    short = by_position(Planted(counter(FAR.lag), sees=TRAIN_LEN))
    blind = by_position(Planted(lambda tokens: np.full(FAR.symbols, 1 / FAR.symbols)))
    assert list(whole) == list(range(0, 64, 2))
    for start, sample in whole.items():
        if start + 2 <= TRAIN_LEN:  # the bin's tokens have at most this many before them
            assert statistics.difference(sample, short[start])[:3] == (0, 0, 0)
        assert statistics.estimate(blind[start]).value == pytest.approx(math.log(FAR.symbols))
    assert statistics.difference(whole[14], whole[62]).low > 0
    assert statistics.difference(short[62], whole[62]).low > 0
    # Who sees 16 tokens gains nothing after them.
    assert not statistics.difference(short[16], short[62]).separated
