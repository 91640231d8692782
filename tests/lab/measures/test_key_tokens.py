"""Key tokens: planted judges and models, whose losses are known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.base import IGNORE_INDEX, EvalSet
from lab.measures.key_tokens import Judge, with_judge
from ropewalk.evaluation.scoring import Scorer

LENGTH, SHORT, N = 64, 16, 5
CFG = SimpleNamespace(lengths=[SHORT, LENGTH], train_len=SHORT, eval=SimpleNamespace(sequences=N))


class Texts:
    """Random tokens."""

    task = token_bytes = None

    def __init__(self):
        self.tokens = torch.randint(9, (N, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def fully_scored(self, length, sequences):
        return EvalSet("text", length, N, lambda a, b: (self.tokens[a:b, :-1], self.tokens[a:b, 1:].clone()), "t")


class Planted(torch.nn.Module):
    """Loses 1 nat, but 4 for the tokens `needy` unless more than `SHORT` tokens are read for them."""

    context_parallel = max_len = None

    def __init__(self, *needy):
        super().__init__()
        self.embedding = torch.nn.Embedding(1, 1)
        self.needy = torch.tensor(needy, dtype=torch.int64)

    def scale_for(self, length):
        return 1.0

    def at_scale(self, scale):
        return torch.no_grad()

    def losses(self, x, y):
        reads = torch.arange(1, x.size(1) + 1)
        is_short_of_text = torch.isin(y, self.needy) & (reads <= SHORT)
        losses = torch.where(is_short_of_text, 4.0, 1.0)
        return losses * (y != IGNORE_INDEX), torch.zeros(y.shape, dtype=torch.bool)


@pytest.fixture(autouse=True)
def planted_losses(monkeypatch):
    for module in ("ropewalk.evaluation.scoring", "lab.measures.key_tokens"):
        monkeypatch.setattr(f"{module}.token_losses", lambda net, x, y: net.losses(x, y))


def measured(data, model, judge):
    """The tokens and the gain in nats, by group."""
    (job,) = with_judge(data, CFG, judge).jobs
    result = {}
    for m in job.run(Scorer(model)):
        result[m.difficulty] = (sum(m.tokens), np.subtract(m.baseline_nats, m.nats).sum())
    return result


@pytest.mark.parametrize("needy", [(), (3,), (5,), (3, 5)])
def test_the_judge_chooses_and_the_model_is_measured(needy):
    data = Texts()
    scored = data.tokens[:, 1 + SHORT :]
    n = {token: int((scored == token).sum()) for token in range(9)}
    found = measured(data, Planted(*needy), Judge(Planted(3), "j", 2.0))
    assert found["key"] == (n[3], 3.0 * n[3] * (3 in needy))
    assert found["other"] == (scored.numel() - n[3], 3.0 * n[5] * (5 in needy))


def test_a_gain_at_the_threshold_is_not_key():
    data = Texts()
    with pytest.raises(ValueError, match=r"never worth 3 nats to the judge: lower key_tokens\.threshold"):
        measured(data, Planted(), Judge(Planted(3), "j", 3.0))
    assert "key" in measured(data, Planted(), Judge(Planted(3), "j", 2.999))


def test_judges_that_choose_other_tokens_are_not_compared():
    judges = [Judge(Planted(3), "a", 2.0), Judge(Planted(3), "b", 2.0), Judge(Planted(3), "a", 1.0)]
    assert len({str(with_judge(Texts(), CFG, judge).eval) for judge in judges}) == 3


def test_a_judge_that_cannot_read_the_texts_is_refused():
    judge = Planted(3)
    judge.max_len = 32
    with pytest.raises(ValueError, match="the judge reads at most 32 tokens, and texts have 64"):
        with_judge(Texts(), CFG, Judge(judge, "j", 2.0))
    data = Texts()
    data.fully_scored = lambda length, sequences: None
    assert with_judge(data, CFG, Judge(judge, "j", 2.0)) is None  # a task
