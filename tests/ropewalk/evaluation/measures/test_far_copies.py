"""Far copies: the finder against brute force, and texts whose right answer is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.base import IGNORE_INDEX, EvalSet
from ropewalk.evaluation.measures import far_copies
from ropewalk.evaluation.scoring import Scorer


class NoNetwork(torch.nn.Module):
    """What a scorer asks a network for, where its losses are made up."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1, 1)


def brute_force(tokens: list[int], n: int) -> list[tuple[int, bool]]:
    """By definition: for each token, walk back to the nearest place where the same n tokens came before."""
    found = []
    for i in range(len(tokens)):
        nearest = (0, False)
        for j in range(n, i):
            if tokens[j - n : j] == tokens[i - n : i]:
                nearest = (i - j, tokens[j] == tokens[i])
        found.append(nearest)
    return found


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_the_finder_equals_brute_force(tokens, n):
    distances, same = far_copies.repeats(np.array(tokens, dtype=np.int64), n)
    assert [*zip(distances.tolist(), same.tolist(), strict=True)] == brute_force(tokens, n)


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

    def losses(net, x, y, **options):
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
        return job.run(Scorer(NoNetwork())), seen

    monkeypatch.setattr("ropewalk.evaluation.scoring.token_losses", losses)
    return run


def test_copies_are_sorted_by_their_distance(measure):
    found, _ = measure(Texts(10, 20, 40))
    assert [m.span for m in found] == [(8, 15), (16, 31), (32, 63)]
    assert [m.continuation for m in found] == ["same"] * 3
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


class Recurring:
    """Texts of distinct tokens, but for three words that recur far back, in a third of the texts with the same token
    after them."""

    task, token_bytes = None, None
    texts = 60

    def fully_scored(self, length: int, sequences: int) -> EvalSet:
        rng = np.random.default_rng(1)
        tokens = np.stack([rng.permutation(VOCAB)[: length + 1] for _ in range(self.texts)])
        for i, row in enumerate(tokens):
            words = row[5:9] if i % 3 == 0 else [*row[5:8], row[20]]
            row[-4:] = words
        rows = torch.from_numpy(tokens)
        return EvalSet("text", length, self.texts, lambda a, b: (rows[a:b, :-1], rows[a:b, 1:].clone()), "r")


def copier(p: float, words: int, sees: int):
    """Losses of a predictor: with probability p the token that followed the same last `words` tokens, if they occur
    among the last `sees` tokens; else any token alike."""

    def losses(net, x, y, **options):
        result = torch.full(y.shape, np.log(VOCAB))
        for row, (ids, targets) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            for t in range(words, len(ids)):
                last = ids[t - words + 1 : t + 1]
                first = max(words - 1, t - sees + words)
                earlier = [j for j in range(first, t) if ids[j - words + 1 : j + 1] == last]
                if earlier:
                    likely = p + (1 - p) / VOCAB if ids[earlier[-1] + 1] == targets[t] else (1 - p) / VOCAB
                    result[row, t] = -np.log(likely)
        return result * (y != IGNORE_INDEX), torch.zeros(y.shape, dtype=torch.bool)

    return losses


@pytest.mark.parametrize(
    ("p", "words", "sees", "sign"),
    [(0.99, 1, LENGTH, -1), (1 / 3, 3, LENGTH, 1), (1 / 3, 3, SHORT, 0), (0.99, 1, SHORT, 0)],
)
def test_who_copies_blindly_is_harmed_and_who_sees_no_further_gains_nothing(monkeypatch, p, words, sees, sign):
    """Planted predictors, of which the first copies after one equal word with near certainty."""
    monkeypatch.setattr(far_copies, "MATCH_BYTES", 3)
    monkeypatch.setattr("ropewalk.evaluation.scoring.token_losses", copier(p, words, sees))
    cfg = SimpleNamespace(lengths=[LENGTH], train_len=SHORT, eval=SimpleNamespace(sequences=8))
    (job,) = far_copies.far_copies(Recurring(), cfg).jobs
    found = job.run(Scorer(NoNetwork()))
    assert {m.continuation for m in found} == {"same", "other"}
    assert sum(sum(m.tokens) for m in found) == Recurring.texts
    gain = {m.continuation: np.subtract(m.baseline_nats, m.nats).sum() for m in found}
    assert np.sign(np.round(gain["same"], 3)) == abs(sign)
    assert np.sign(np.round(gain["other"], 3)) == -abs(sign)
    assert np.sign(np.round(gain["same"] + gain["other"], 3)) == sign
