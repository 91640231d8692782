"""Markov texts: their law and their best loss by enumeration, and predictors that reach it or stay above it."""

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


def inputs_and_targets(tokens):
    """x and y [B, T] of tokens [B, T + 1]."""
    tokens = torch.from_numpy(tokens)
    return tokens[:, :-1], tokens[:, 1:].clone()


def name_of(options):
    return " ".join(f"{key}={value}" for key, value in options.items()) or "plain"


every_variant = pytest.mark.parametrize("options", VARIANTS, ids=name_of)


def pieces_of(places, cuts):
    """The places of a text, cut in two before each place after the first whose cut is True."""
    pieces = [[places[0]]]
    for place, cut in zip(places[1:], cuts, strict=True):
        if cut:
            pieces.append([])
        pieces[-1].append(place)
    return pieces


def dirichlet_multinomial(counts, alpha):
    """The logarithm of the probability of a sequence of symbols that has these counts.

    The Dirichlet-multinomial distribution of a sequence: the integral of the product of its symbols' probabilities.
    """
    counts = np.array(counts)
    n = len(counts)
    log_p = gammaln(n * alpha) - gammaln(n * alpha + counts.sum())
    return log_p + (gammaln(alpha + counts) - gammaln(alpha)).sum()


def log_probability_of_piece(tokens, piece, data):
    """Of the symbols at the places of a piece, which has one chain: every context has an urn of its own."""
    followers = {}
    for place in piece:
        context = tuple(tokens[place - data.lag - i] for i in range(data.order))
        counts = followers.setdefault(context, [0] * data.symbols)
        counts[tokens[place]] += 1
    return sum(dirichlet_multinomial(counts, data.alpha) for counts in followers.values())


def log_probability(tokens, data):
    """Of a text, in closed form: summed over all ways to cut the text into pieces that have a chain of their own."""
    first = data.lag + data.order - 1  # the first place with a context; those before are uniform
    uniform = -min(first, len(tokens)) * math.log(data.symbols)
    places = range(first, len(tokens))
    if not places:
        return uniform
    total = 0.0
    for cuts in itertools.product((False, True), repeat=len(places) - 1):
        p_of_cuts = math.prod(data.switch if cut else 1 - data.switch for cut in cuts)
        pieces = pieces_of(places, cuts)
        log_p = sum(log_probability_of_piece(tokens, piece, data) for piece in pieces)
        total += p_of_cuts * math.exp(log_p)
    return math.log(total) + uniform


@every_variant
def test_the_optimum_of_each_token_is_that_of_enumeration(options):
    data = Markov(symbols=3, alpha=0.4, **options)
    tokens = data.draw("any", range(3), 8)
    x, y = inputs_and_targets(tokens)
    losses = data.optimum(x, y)

    assert losses.dtype == torch.float64

    for text, losses_of_text in zip(tokens.tolist(), losses, strict=True):
        logs = [log_probability(text[:n], data) for n in range(1, len(text) + 1)]
        np.testing.assert_allclose(losses_of_text, -np.diff(logs), rtol=1e-10)

    # What is not scored is 0, and changes no other loss.
    is_scored = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0])
    y[:, is_scored == 0] = IGNORE_INDEX

    torch.testing.assert_close(data.optimum(x, y), losses * is_scored)


@pytest.mark.long
@every_variant
def test_texts_are_distributed_as_if_their_chain_was_drawn_first(options):
    data = Markov(symbols=2, alpha=0.3, **options)
    length = 6
    tokens = data.draw("law", range(20_000), length)
    texts = list(itertools.product((0, 1), repeat=length + 1))
    number_of_text = tokens @ 2 ** np.arange(length, -1, -1)
    counts = np.bincount(number_of_text, minlength=len(texts))
    expected = np.array([math.exp(log_probability(text, data)) for text in texts])

    assert expected.sum() == pytest.approx(1)
    assert chisquare(counts, expected * len(tokens)).pvalue > 1 / 3000


@every_variant
def test_a_text_depends_on_its_index_and_split_alone(options):
    data = Markov(**options)
    batches = [data.train_batch(range(60), 32, seed) for seed in (0, 1)]
    for part in (data.validation(32, 60 * 32), *data.eval_sets([32], target_tokens=1, sequences=60)):
        batches.append(part.batch(0, 60))
    x, y = batches[0]
    alone, _ = data.train_batch([17], 32, seed=0)
    shorter, _ = data.train_batch(range(60), 16, seed=0)

    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(alone, x[17:18])
    assert torch.equal(shorter, x[:, :16])

    every_text = torch.cat([x for x, _ in batches])

    assert every_text.unique(dim=0).shape == (240, 32)

    alone.zero_()  # a batch is the caller's own

    assert torch.equal(data.train_batch([17], 32, seed=0)[0], x[17:18])


@pytest.mark.parametrize(
    ("options", "symbols"),
    [
        ({}, "0453804073739999"),
        ({"order": 2}, "0453805083549987"),
        ({"lag": 3}, "0453805070549987"),
        ({"switch": 0.15}, "0453805073739999"),
    ],
)
def test_texts_are_those_of_this_version(options, symbols):
    """Whoever changes them raises `version`: a run would not continue, nor be evaluated, on what it began with."""
    assert Markov.version == 1
    x, _ = Markov(**options).train_batch([3], 16, 0)
    assert "".join(map(str, x[0].tolist())) == symbols


def test_a_text_that_is_too_short_or_a_law_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match=r"data\.symbols=26 must be at most 25 with data\.order=2"):
        Markov(symbols=26, order=2)

    data = Markov(lag=15, order=2)

    with pytest.raises(ValueError, match=r"more than 16 tokens .*, not 16: choose train_len and eval\.lengths"):
        data.train_batch([0], 16, 0)
    assert data.train_batch([0], 17, 0)[0].shape == (1, 17)
