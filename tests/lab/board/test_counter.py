"""The counter of pairs against its definition, and against the best possible predictor where it is that."""

import math

import pytest
import torch

from data.tasks.markov import Markov
from lab.board import counter

DECAY = 0.8


def by_hand(chains, text, place):
    """Nats of the token at a place: each earlier pair counts decay^(its age), and each symbol alpha more."""
    before = range(chains.lag, place)
    context = text[place - chains.lag]
    ages = {p: place - 1 - p for p in before if text[p - chains.lag] == context}
    of_pair = sum(DECAY**age for p, age in ages.items() if text[p] == text[place])
    of_context = sum(DECAY**age for age in ages.values())
    return -math.log((of_pair + chains.alpha) / (of_context + chains.symbols * chains.alpha))


@pytest.mark.parametrize("lag", [1, 3])
def test_pairs_count_less_the_older_they_are(lag):
    chains = Markov(symbols=3, lag=lag, switch=0.1)
    x, y = chains.train_batch(range(4), 20, seed=0)
    found = counter.losses(chains, x, y, DECAY)
    text = [*x[2].tolist(), int(y[2, -1])]

    for place in range(lag, 21):
        assert float(found[2, place - 1]) == pytest.approx(by_hand(chains, text, place), rel=1e-12)


def test_where_nothing_changes_it_forgets_nothing_and_is_the_best_possible():
    chains = Markov()
    x, y = chains.train_batch(range(8), 128, seed=0)

    torch.testing.assert_close(counter.losses(chains, x, y, 1.0), chains.optimum(x, y))
    assert counter.best_decay(chains, 256, texts=64) == 1.0
    assert counter.best_decay(Markov(switch=0.05), 256, texts=64) < 0.99
