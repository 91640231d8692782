"""Sums of losses: those of brute force, whatever batches, pieces, groups and kept losses they are made of."""

import math

import numpy as np
import pytest
import torch
from conftest import build_gpt
from planted import DATA, TOKEN_BYTES, Planted, Texts

from data.base import IGNORE_INDEX
from model import gpt
from ropewalk.evaluation import scoring
from ropewalk.evaluation.scoring import Scorer
from ropewalk.training.ranks import evaluating


def brute_force(net, part):
    """[nats, tokens, bytes, errors] of each text over its scored targets with bytes, each read alone in float64."""
    net = net.double().requires_grad_(False)
    sums = np.zeros((4, part.n))
    for i in range(part.n):
        x, y = part.batch(i, i + 1)
        probabilities = net(x)[0, :, : net.vocab_size].softmax(-1)
        for p, target in zip(probabilities, y[0].tolist(), strict=True):
            if target != IGNORE_INDEX and TOKEN_BYTES[target]:
                nats = -math.log(p[target])
                size = int(TOKEN_BYTES[target])
                is_wrong = bool(p[target] < p.max())
                sums[:, i] += (nats, 1, size, is_wrong)
    return sums


@pytest.mark.parametrize("encoding", ["rope", "cope", "fox"])
def test_sums_equal_brute_force(encoding):
    """Over the tokens with bytes, which are in group 0."""
    part = DATA.part(24, 7)
    sums = Scorer(build_gpt(encoding), token_bytes=TOKEN_BYTES)(part)
    nats, *counts = brute_force(build_gpt(encoding), part)
    np.testing.assert_allclose(sums.nats[:, 0], nats, rtol=1e-5)
    np.testing.assert_array_equal([of_groups[:, 0] for of_groups in sums[1:]], counts)


@pytest.mark.parametrize("budget", [1, 70, 4096])
def test_batches_and_pieces_of_logits_change_nothing(monkeypatch, budget):
    """Batches of one text of 32 tokens, of two, of all; and logits of 400 numbers, eight tokens, at a time."""
    net = build_gpt("rope")
    part = DATA.part(32, 20)
    whole = Scorer(net, token_bytes=TOKEN_BYTES)(part)
    monkeypatch.setattr(gpt, "MAX_LOGITS", 400)
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", budget)
    in_pieces = Scorer(net, token_bytes=TOKEN_BYTES)(part)

    np.testing.assert_allclose(in_pieces.nats, whole.nats, rtol=1e-6)


@pytest.mark.parametrize(("token", "name"), [(50, "an input"), (-1, "a target")])
def test_tokens_outside_of_the_vocabulary_are_an_error(token, name):
    """Whose embedding may have rows for them."""
    net = build_gpt("rope", vocab_multiple=64)
    tokens = DATA.tokens.clone()
    tokens[3, -2 if name == "an input" else -1] = token
    with pytest.raises(ValueError, match=f"{name} of the data is token {token}, but `vocab_size` is 50"):
        Scorer(net)(Texts(tokens).part(24, 7))


def test_texts_grouped_in_two_ways_are_read_once():
    net = Planted(lambda seen: np.full(50, 1 / 50))
    part = DATA.part(32, 32)
    scorer = Scorer(net, token_bytes=TOKEN_BYTES)
    position = torch.arange(32)
    thirds = position % 3 - 1  # -1 is not scored
    twelves = position // 12  # they need losses that the thirds did not
    for groups, sizes in ((thirds, [11, 10]), (twelves, [12, 12, 8])):
        sums = scorer(part, groups.expand(5, 32), len(sizes))
        assert sums.tokens.tolist() == [sizes] * 5
        np.testing.assert_allclose(sums.nats, math.log(50) * sums.tokens, rtol=1e-5)

    assert len(net.read) == 5


def test_dropout_is_off_and_the_mode_kept():
    """Scoring between two steps must not change how the next one trains."""
    net = build_gpt("rope", dropout=0.5).train()
    part = DATA.part(16, 16)
    scorer = Scorer(net)
    with evaluating(net):
        np.testing.assert_array_equal(scorer(part).nats, scorer(part).nats)
    assert net.training
