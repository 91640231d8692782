"""Far copies: the finder against brute force, and texts whose right answer is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.base import IGNORE_INDEX, EvalSet
from evaluation import retrieval
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
    assert retrieval.copy_distances(np.array(tokens, dtype=np.int64), n).tolist() == brute_force(tokens, n)


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


class Copier(torch.nn.Module):
    """Stands for a network that looks at its last `reach` tokens: it predicts what followed the last occurrence of the
    three newest tokens, with a loss of 1 nat if right and 9 otherwise, and 5 nats where there is none."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.embedding = torch.nn.Embedding(1, 1)

    def losses(self, x, y):
        losses, wrong = torch.zeros(y.shape), torch.zeros(y.shape, dtype=torch.bool)
        for row, (tokens, targets) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            for i, target in enumerate(targets):
                if target == IGNORE_INDEX:
                    continue
                first = max(0, i + 1 - self.reach)
                ends = [j for j in range(i - 1, first + 1, -1) if tokens[j - 2 : j + 1] == tokens[i - 2 : i + 1]]
                losses[row, i] = 5.0 if not ends else 1.0 if tokens[ends[0] + 1] == target else 9.0
                wrong[row, i] = losses[row, i] != 1
        return losses, wrong


@pytest.fixture
def measure(monkeypatch):
    def run(data: Texts, reach: int, limit: int | None = None) -> dict:
        net = Copier(reach)
        monkeypatch.setattr("evaluation.scoring.token_losses", lambda net, x, y: net.losses(x, y))
        cfg = SimpleNamespace(lengths={SHORT: 1.0, LENGTH: 4.0}, train_len=SHORT, eval=SimpleNamespace(sequences=8))
        plan = retrieval.far_copies(data, cfg)
        assert plan.eval["match"] == retrieval.MATCH_BYTES  # tokens stand for no bytes: one each
        (job,) = plan.jobs
        return {m.name: m for m in job.run(Scorer(net, limit=limit))}

    monkeypatch.setattr(retrieval, "MATCH_BYTES", 3)
    return run


def test_a_network_that_looks_far_gains_at_every_distance(measure):
    found = measure(Texts(10, 20, 40), LENGTH)
    assert list(found) == ["distance 8-15", "distance 16-31", "distance 32-63"]
    for text, m in enumerate(found.values()):
        assert m.tokens == [3 if i == text else 0 for i in range(3)]  # six tokens, the first three are the match
        assert m.nats[text] == 3.0
    near, *far = found.values()
    assert near.baseline_nats[0] < 15.0  # in sight of some windows
    assert [m.baseline_nats[i] for i, m in enumerate(far, 1)] == [15.0, 15.0]  # out of sight of all


def test_a_network_that_does_not_look_far_gains_nothing(measure):
    for m in measure(Texts(20, 40), SHORT).values():
        assert m.nats == m.baseline_nats


@pytest.mark.parametrize(("length", "short"), [(64, 16), (50, 16), (17, 16), (40, 7), (5, 2)])
def test_each_target_is_scored_once_with_at_least_half_of_the_context(length, short, monkeypatch):
    """The tokens are 0, 1, 0, 1, ..., all copies but the first, and the loss is the number of tokens that are read."""
    monkeypatch.setattr(retrieval, "MATCH_BYTES", 1)
    monkeypatch.setattr(retrieval, "MATCH_TOKENS", 1)
    data, seen = Texts(20), []
    tokens = torch.arange(length + 1)[None] % 2
    data.fully_scored = lambda *_: EvalSet("text", length, 1, lambda a, b: (tokens[a:b, :-1], tokens[a:b, 1:].clone()))

    def losses(net, x, y):
        context = torch.arange(1, x.size(1) + 1).expand_as(y) * (y != IGNORE_INDEX)
        seen.append(context[context > 0].tolist())
        return context.float(), torch.zeros(y.shape, dtype=torch.bool)

    monkeypatch.setattr("evaluation.scoring.token_losses", losses)
    cfg = SimpleNamespace(lengths={length: 1.0}, train_len=short, eval=SimpleNamespace(sequences=1))
    (job,) = retrieval.far_copies(data, cfg).jobs
    (m,) = job.run(Scorer(Copier(1)))
    whole, *windows = seen
    assert whole == list(range(short + 1, length + 1))
    assert (sum(map(sum, windows)), sum(whole)) == (m.baseline_nats[0], m.nats[0])
    assert sum(map(len, windows)) == m.tokens[0] == length - short
    assert all(short - short // 2 <= context <= short for window in windows for context in window)
