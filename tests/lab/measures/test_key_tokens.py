"""Key tokens: planted judges and models, whose losses are known."""

from types import SimpleNamespace

import numpy as np
import pytest
from planted import NoEncoding, Planted, Texts, results_of

from lab.measures.key_tokens import Judge, KeyTokens, with_judge

LENGTH, SHORT, N = 64, 16, 5
CFG = SimpleNamespace(lengths=[SHORT, LENGTH], train_len=SHORT, eval=SimpleNamespace(sequences=N))
TOKENS = np.random.default_rng(0).integers(9, size=(N, LENGTH + 1))
WORTH = 3.0  # nats that far text saves on a token that needs it


def reader(*needy):
    """Loses the same on every token, but more on the tokens `needy` unless more than SHORT tokens are read for them."""

    def predict(seen):
        odds = np.full(10, np.exp(-3))
        if len(seen) <= SHORT:
            odds[[*needy]] *= np.exp(-WORTH)
        odds[9] = 1 - odds[:9].sum()  # no text has this token
        return odds

    return Planted(predict)


def measured(model, judge):
    """The tokens and the gain in nats, by group."""
    result = {}
    for m in results_of(with_judge(Texts(TOKENS), CFG, judge), model):
        result[m.difficulty] = (sum(m.tokens), np.subtract(m.baseline_nats, m.nats).sum())
    return result


@pytest.mark.parametrize("needy", [(), (3,), (5,), (3, 5)])
def test_the_judge_chooses_and_the_model_is_measured(needy):
    scored = TOKENS[:, 1 + SHORT :]
    n_key = (scored == 3).sum()
    found = measured(reader(*needy), Judge(reader(3), "j", 2.0))
    assert found["key"] == (n_key, pytest.approx(WORTH * n_key * (3 in needy), abs=1e-3))
    expected = WORTH * (scored == 5).sum() * (5 in needy)
    assert found["other"] == (scored.size - n_key, pytest.approx(expected, abs=1e-3))


def test_a_gain_below_the_threshold_is_not_key():
    with pytest.raises(ValueError, match=r"never worth 3\.01 nats to the judge: lower key_tokens\.threshold"):
        measured(reader(), Judge(reader(3), "j", WORTH + 0.01))
    assert "key" in measured(reader(), Judge(reader(3), "j", WORTH - 0.01))


def test_judges_that_choose_other_tokens_are_not_compared():
    judges = [Judge(reader(3), "a", 2.0), Judge(reader(3), "b", 2.0), Judge(reader(3), "a", 1.0)]
    plans = [with_judge(Texts(TOKENS), CFG, judge) for judge in judges]
    assert len({str(plan.eval) for plan in plans}) == 3


def test_a_judge_that_cannot_read_the_texts_is_refused():
    judge = reader(3)
    judge.encodings = [NoEncoding()]
    judge.encodings[0].max_len = 32
    with pytest.raises(ValueError, match="the judge reads at most 32 tokens, and texts have 64"):
        with_judge(Texts(TOKENS), CFG, Judge(judge, "j", 2.0))


def test_without_a_judge_the_measure_cannot_be_made():
    with pytest.raises(ValueError, match=r"key_tokens needs key_tokens\.judge=RUN"):
        KeyTokens().plan(Texts(TOKENS), CFG)
