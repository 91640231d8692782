"""Far copies: the finder against brute force, and which targets are scored with how much text before them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Planted, Texts, results_of

from ropewalk.evaluation.measures import far_copies
from ropewalk.evaluation.measures.far_copies import windows

LENGTH = 64
SHORT = 16
VOCAB = 100


def brute_force(tokens, n):
    """By definition: for each token, walk back to the nearest place where the same n tokens came before."""
    for i in range(len(tokens)):
        nearest = (0, False)
        for j in range(n, i):
            if tokens[j - n : j] == tokens[i - n : i]:
                nearest = (i - j, tokens[j] == tokens[i])
        yield nearest


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4))
def test_the_finder_equals_brute_force(tokens, n):
    distances, same = far_copies.repeats(np.array(tokens, dtype=np.int64), n)
    assert list(zip(distances, same, strict=True)) == list(brute_force(tokens, n))


def by_tokens_read(seen):
    """Odds with which the loss of each token is the number of tokens that are read, in hundredths, and log(100)."""
    odds = [np.exp(-len(seen) / 100) / 100] * VOCAB
    rest = 1 - sum(odds)  # of a token that no text has
    return [*odds, rest]


def tokens_read(nats):
    """How many tokens were read for three targets, as their losses tell."""
    return 100 * (nats - 3 * np.log(100))


def test_copies_are_sorted_by_their_distance(monkeypatch):
    """Random tokens without repetition, but for a sequence of 6 tokens again after 10, 20 and 40 tokens.

    The first three are the match, and the others are scored: with the whole text before them, and with the windows of
    a text that is cut.
    """
    monkeypatch.setattr(far_copies, "MATCH_BYTES", 3)
    rng = np.random.default_rng(0)
    permutations = rng.permuted([range(VOCAB)] * 3, axis=1)
    tokens = permutations[:, : LENGTH + 1]
    for row, distance in zip(tokens, (10, 20, 40), strict=True):
        row[-6:] = row[-6 - distance : -distance]
    cfg = SimpleNamespace(lengths=[LENGTH], train_len=SHORT, eval=SimpleNamespace(sequences=9))
    results = results_of(far_copies.far_copies(Texts(tokens), cfg), Planted(by_tokens_read))

    assert [m.span for m in results] == [(8, 15), (16, 31), (32, 63)]
    assert {m.continuation for m in results} == {"same"}
    for text, m in enumerate(results):
        assert m.tokens[text] == sum(m.tokens) == 3
        assert tokens_read(m.nats[text]) == pytest.approx(62 + 63 + 64, abs=0.01)
        cut = tokens_read(m.baseline_nats[text])
        assert 3 * SHORT / 2 <= cut <= 3 * SHORT + 0.01


@pytest.mark.parametrize(
    ("bytes_per_token", "n"),
    [
        (None, 8),
        (1, 8),
        (2, 4),
        (9, 3),
    ],
)
def test_a_match_has_about_eight_bytes_and_at_least_three_tokens(bytes_per_token, n):
    """So that copies mean the same whatever the tokenizer; None: it knows no bytes."""
    texts = Texts(np.zeros((2, LENGTH + 1), dtype=np.int64))
    if bytes_per_token:
        texts.token_bytes = torch.tensor([bytes_per_token])
    assert far_copies.match_tokens(texts, texts.part(LENGTH, LENGTH)) == n


@given(short=st.integers(2, 20), more=st.integers(1, 60))
def test_windows_score_each_target_once_with_at_least_half_of_the_context(short, more):
    """Earlier targets have no more text before them than a window has."""
    scored = []
    for window, n_scored in windows(short + more, short):
        assert window.stop - window.start == short
        assert n_scored + 1 >= short / 2
        scored += range(window.start + n_scored, window.stop)
    assert sorted(scored) == list(range(short, short + more))
