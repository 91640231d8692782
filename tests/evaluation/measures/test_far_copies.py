"""Far copies: the finder against brute force, and texts whose right answer is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.base import IGNORE_INDEX, EvalSet
from evaluation.measures import far_copies
from evaluation.scoring import Scorer


def brute_force(tokens: list[int], n: int) -> list[int]:
    """By definition: for each token, walk back to the nearest place where the same n + 1 tokens end."""
    found = []
    for i in range(len(tokens)):
        earlier = (i - j for j in range(i - 1, n - 1, -1) if tokens[j - n : j + 1] == tokens[i - n : i + 1])
        found.append(next(earlier, 0))
    return found


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_the_finder_equals_brute_force(tokens, n):
    assert far_copies.copy_distances(np.array(tokens, dtype=np.int64), n).tolist() == brute_force(tokens, n)


LENGTH, SHORT, VOCAB = 64, 16, 200


class Texts:
    """Random tokens without repetition, but for planted copies: a sequence of 6 tokens again after `distance`."""

    task, token_bytes = None, None

    def __init__(self, *distances: int) -> None:
        rng = np.random.default_rng(0)
        self.tokens = np.stack([rng.permutation(VOCAB)[: LENGTH + 1] for _ in distances])
        for row, distance in zip(self.tokens, distances, strict=True):
            row[LENGTH - 5 :] = row[LENGTH - 5 - distance : LENGTH + 1 - distance]  # six tokens

    def fully_scored(self, length: int, sequences: int) -> EvalSet:
        tokens = torch.from_numpy(self.tokens[:, : length + 1])
        return EvalSet("text", length, len(tokens), lambda a, b: (tokens[a:b, :-1], tokens[a:b, 1:].clone()), "t")


@pytest.fixture
def measure(monkeypatch):
    """`measure(data)` are the far copies, where the loss of a target is the number of tokens that are read for it."""
    seen = []  # numbers of tokens, for each batch

    def losses(net, x, y):
        context = torch.arange(1, x.size(1) + 1).expand_as(y) * (y != IGNORE_INDEX)
        seen.append(context[context > 0].tolist())
        return context.float(), torch.zeros(y.shape, dtype=torch.bool)

    def run(data, length=LENGTH, short=SHORT, match=3):
        monkeypatch.setattr(far_copies, "MATCH_BYTES", match)
        monkeypatch.setattr(far_copies, "MATCH_TOKENS", min(match, far_copies.MATCH_TOKENS))
        cfg = SimpleNamespace(lengths=[length], train_len=short, eval=SimpleNamespace(sequences=8))
        plan = far_copies.far_copies(data, cfg)
        assert plan.eval["match"] == match  # tokens stand for no bytes: one each
        (job,) = plan.jobs
        return job.run(Scorer(torch.nn.ModuleDict({"embedding": torch.nn.Embedding(1, 1)}))), seen

    monkeypatch.setattr("evaluation.scoring.token_losses", losses)
    return run


def test_copies_are_sorted_by_their_distance(measure):
    found, _ = measure(Texts(10, 20, 40))
    assert [m.span for m in found] == [(8, 15), (16, 31), (32, 63)]
    for text, m in enumerate(found):
        assert m.tokens == [3 if i == text else 0 for i in range(3)]  # six tokens, the first three are the match
        assert m.nats[text] == 62 + 63 + 64
        assert 3 * SHORT / 2 <= m.baseline_nats[text] <= 3 * SHORT


@pytest.mark.parametrize(("length", "short"), [(64, 16), (50, 16), (17, 16), (40, 7), (5, 2)])
def test_each_target_is_scored_once_with_at_least_half_of_the_context(length, short, measure):
    """The tokens are 0, 1, 0, 1, ..., all copies but the first."""
    data, tokens = Texts(20), torch.arange(length + 1)[None] % 2
    data.fully_scored = lambda *_: EvalSet("text", length, 1, lambda a, b: (tokens[a:b, :-1], tokens[a:b, 1:].clone()))
    (m,), (whole, *windows) = measure(data, length, short, match=1)
    assert whole == list(range(short + 1, length + 1))
    assert (sum(map(sum, windows)), sum(whole)) == (m.baseline_nats[0], m.nats[0])
    assert sum(map(len, windows)) == m.tokens[0] == length - short
    assert all(short - short // 2 <= context <= short for window in windows for context in window)
