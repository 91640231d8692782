"""Markov texts: their law and their best loss by enumeration. What holds for every task, too: see test_tasks.py."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import gammaln
from scipy.stats import chisquare

from data.base import IGNORE_INDEX
from data.tasks.markov import Markov

VARIANTS = [
    {},
    {"order": 2},
    {"lag": 3},
    {"switch": 0.15},
    {"order": 2, "lag": 2},
    {"lag": 2, "switch": 0.4},
    {"order": 2, "switch": 0.05},
]


every_variant = pytest.mark.parametrize("options", VARIANTS, ids=str)


def dirichlet_multinomial(counts, alpha):
    """The logarithm of the probability of a sequence of symbols that has these counts.

    The Dirichlet-multinomial distribution of a sequence: the integral of the product of its symbols' probabilities.
    """
    counts = np.array(counts)
    total_alpha = alpha * len(counts)
    of_all = gammaln(total_alpha) - gammaln(total_alpha + counts.sum())
    of_each = gammaln(alpha + counts) - gammaln(alpha)
    return of_all + of_each.sum()


def log_probability_of_piece(tokens, piece, data):
    """Of the symbols at the places of a piece, which has one chain: every context has an urn of its own."""
    followers = {}
    for place in piece:
        end = place - data.lag + 1
        context = tuple(tokens[end - data.order : end])
        counts = followers.setdefault(context, [0] * data.symbols)
        counts[tokens[place]] += 1
    return sum(dirichlet_multinomial(counts, data.alpha) for counts in followers.values())


def log_probability(tokens, data):
    """Of a text, in closed form: summed over all ways to cut the text into pieces that have a chain of their own."""
    first = data.lag + data.order - 1  # the first place with a context; those before are uniform
    uniform = -min(first, len(tokens)) * math.log(data.symbols)
    places = np.arange(first, len(tokens))
    if not len(places):
        return uniform
    total = 0.0
    for cuts in itertools.product((False, True), repeat=len(places) - 1):
        p_of_cuts = math.prod(data.switch if cut else 1 - data.switch for cut in cuts)
        pieces = np.split(places, np.flatnonzero(cuts) + 1)
        log_p = sum(log_probability_of_piece(tokens, piece, data) for piece in pieces)
        total += p_of_cuts * math.exp(log_p)
    return math.log(total) + uniform


@every_variant
def test_the_optimum_of_each_token_is_that_of_enumeration(options):
    data = Markov(symbols=3, alpha=0.4, **options)
    x, y = data.train_batch(range(3), 8, 0)
    texts = torch.cat((x, y[:, -1:]), dim=1)

    losses = data.optimum(x, y)

    assert losses.dtype == torch.float64

    for text, losses_of_text in zip(texts.tolist(), losses, strict=True):
        logs = [log_probability(text[:n], data) for n in range(1, 10)]
        np.testing.assert_allclose(losses_of_text, -np.diff(logs), rtol=1e-10)

    # What is not scored is 0, and changes no other loss.
    is_scored = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0])
    y[:, is_scored == 0] = IGNORE_INDEX

    torch.testing.assert_close(
        data.optimum(x, y),
        losses * is_scored,
    )


@pytest.mark.long
@every_variant
def test_texts_are_distributed_as_if_their_chain_was_drawn_first(options):
    data = Markov(symbols=2, alpha=0.3, **options)
    n = 20_000
    texts = list(itertools.product((0, 1), repeat=7))
    binary_digits = 2 ** np.arange(6, -1, -1)

    number_of_text = data.draw("law", range(n), 6) @ binary_digits

    counts = np.bincount(number_of_text, minlength=len(texts))
    expected = np.array([math.exp(log_probability(text, data)) for text in texts])

    assert expected.sum() == pytest.approx(1)
    assert chisquare(counts, n * expected).pvalue > 1 / 3000


def test_a_text_that_is_too_short_is_refused():
    data = Markov(lag=15, order=2)

    with pytest.raises(ValueError, match=r"more than 16 tokens .*, not 16: choose train_len and eval\.lengths"):
        data.train_batch([0], 16, 0)

    data.train_batch([0], 17, 0)
