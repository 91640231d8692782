"""Predictors of known behaviour in a network's place: every measure of text says of each what is true of it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.base import IGNORE_INDEX, EvalSet
from data.tasks.markov import Markov
from ropewalk.evaluation import statistics
from ropewalk.evaluation.measures import far_copies, lengths
from ropewalk.evaluation.scoring import Scorer
from ropewalk.evaluation.statistics import Sample

LENGTHS = (8, 16, 32, 64)
TRAIN_LEN = 16
TEXTS = 90
VOCAB = 200


class Planted(torch.nn.Module):
    """Reads text by `predict`: the tokens up to a place, and whatever lies before them is hidden -> probabilities."""

    def __init__(self, predict, sees=10**6):
        super().__init__()
        self.predict = predict
        self.sees = sees
        self.embedding = torch.nn.Embedding(1, 1)

    def in_pieces(self, function, hidden, targets):
        return [function(hidden, targets)]

    def hidden_states(self, x, reading, *, encodings):
        probabilities = []
        for text in x.tolist():
            for end in range(1, len(text) + 1):
                seen = text[max(0, end - self.sees) : end]
                probabilities.append(self.predict(seen))
        logits = np.log(probabilities).reshape(*x.shape, -1)
        return torch.tensor(logits, dtype=torch.float32)


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
        tokens[:, -4:] = tokens[:, 5:9]
        goes_on_otherwise = np.arange(TEXTS) % 3 > 0
        tokens[goes_on_otherwise, -1] = tokens[goes_on_otherwise, 20]
        rows = torch.from_numpy(tokens)

        def part(length):
            x = rows[:, -length - 1 : -1]
            y = rows[:, -length:].clone()
            y[:, :-target_tokens] = IGNORE_INDEX
            return EvalSet("text", length, TEXTS, lambda a, b: (x[a:b], y[a:b].clone()), f"{target_tokens}")

        return [part(length) for length in lengths]

    def fully_scored(self, length, sequences):
        return self.eval_sets([length], target_tokens=length, sequences=sequences)[0]

    def optimum(self, x, y):
        return None


def settings(target_tokens=1, sequences=TEXTS):
    return SimpleNamespace(lengths=LENGTHS, target_tokens=target_tokens, eval=SimpleNamespace(sequences=sequences))


def measured(net, data, target_tokens=1, sequences=TEXTS):
    """Samples of the measure of lengths, and the best possible losses of its texts, both by length and in nats."""
    samples = {}
    optima = {}
    for job in lengths._lengths(data, settings(target_tokens, sequences)).jobs:
        (result,) = job.run(Scorer(net))
        samples[result.length] = result.sample(result.nats, result.tokens)
        optima[result.length] = result.optimum_nats
    return samples, optima


def by_position(net):
    """Samples of the loss by position on texts of the far variant, by the first position of each bin, in nats."""
    (job,) = lengths._by_position(FAR, settings(sequences=180)).jobs
    results = job.run(Scorer(net))
    return {result.span[0]: result.sample(result.nats, result.tokens) for result in results}


@pytest.mark.parametrize(
    ("p", "words", "sees", "sign"),
    [(0.99, 1, 64, -1), (1 / 3, 3, 64, 1), (0.99, 1, TRAIN_LEN, 0), (1 / 3, 3, TRAIN_LEN, 0)],
    ids=["copies blindly", "copies as often as it is right", "blind and short-sighted", "short-sighted"],
)
def test_copiers(monkeypatch, p, words, sees, sign):
    monkeypatch.setattr(far_copies, "MATCH_BYTES", 3)
    net = Planted(copier(p, words), sees)
    losses, _ = measured(net, Recurring())
    gain = statistics.difference(losses[TRAIN_LEN], losses[64])
    assert np.sign(round(gain.value, 6)) == sign
    assert gain.separated == bool(sign)
    assert statistics.safe_length(losses, losses, TRAIN_LEN, 0.02) == (32 if sign < 0 else 64)
    # The words recur 57 tokens back: only the step to 64 can gain, and useful lengths end at the first that does not.
    assert statistics.useful_length(losses) == 8
    last_step = {32: losses[32], 64: losses[64]}
    assert (statistics.useful_length(last_step) == 64) == (sign > 0)
    if sign == 0:
        for length in (32, 64):
            assert statistics.difference(losses[TRAIN_LEN], losses[length])[:3] == (0, 0, 0)

    cfg = SimpleNamespace(lengths=[64], train_len=TRAIN_LEN, eval=SimpleNamespace(sequences=TEXTS))
    (job,) = far_copies.far_copies(Recurring(), cfg).jobs
    copies = {result.continuation: result for result in job.run(Scorer(net))}
    assert set(copies) == {"same", "other"}
    assert sum(copies["same"].tokens) + sum(copies["other"].tokens) == TEXTS
    gain_of_same = np.subtract(copies["same"].baseline_nats, copies["same"].nats).sum()
    gain_of_other = np.subtract(copies["other"].baseline_nats, copies["other"].nats).sum()
    assert np.sign(round(gain_of_same, 6)) == abs(sign)
    assert np.sign(round(gain_of_other, 6)) == -abs(sign)
    assert np.sign(round(gain_of_same + gain_of_other, 6)) == sign


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
    counting, best = measured(Planted(counter(FAR.lag)), FAR, 2, 180)
    for length in LENGTHS:
        np.testing.assert_allclose(counting[length].values[0], best[length], atol=1e-4)
    units = counting[64].units
    gained = Sample(counting[TRAIN_LEN].values - counting[64].values, units)
    possible = Sample(np.subtract(best[TRAIN_LEN], best[64])[None], units)
    assert statistics.share(gained, possible).value == pytest.approx(1, abs=1e-4)
    assert statistics.useful_length(counting) == 64

    copying, _ = measured(Planted(copier_from_far), FAR, 2, 180)
    assert statistics.difference(copying[8], copying[64]).low > 0  # more often there is something to copy
    assert statistics.estimate(copying[64]).value < math.log(FAR.symbols) - 0.3
    assert statistics.difference(copying[64], counting[64]).low > 0  # above the optimum
    assert statistics.safe_length(copying, copying, TRAIN_LEN, 0.1) == 64

    near, _ = measured(Planted(counter(1)), FAR, 2, 180)
    assert statistics.difference(near[64], counting[64]).low > 0.1  # it knows how frequent symbols are, and no more
    assert statistics.difference(near[64], copying[64]).low > 0

    short_sighted, _ = measured(Planted(counter(FAR.lag), sees=TRAIN_LEN), FAR)
    assert statistics.difference(short_sighted[TRAIN_LEN], short_sighted[64])[:3] == (0, 0, 0)
    assert statistics.safe_length(short_sighted, short_sighted, TRAIN_LEN, 0.02) == 64
    assert statistics.useful_length(short_sighted) <= TRAIN_LEN


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
