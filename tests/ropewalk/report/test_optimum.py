"""The optimum in results and reports, with predictors planted in a network's place whose numbers are known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from synthetic import PROVENANCE, write_run

from data.base import Data
from data.tasks.markov import Markov
from ropewalk.evaluation.measures import lengths
from ropewalk.evaluation.results import Evaluation, Variant
from ropewalk.evaluation.scoring import Scorer
from ropewalk.report import frame
from ropewalk.report.answer import answer
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results

LENGTHS, TRAIN_LEN, TARGETS, TEXTS = (8, 16, 32, 64), 16, 4, 200
DATA = Markov(symbols=4)


class Counter(torch.nn.Module):
    """Counts which symbol follows which among the last `sees` tokens; its logits are logarithms of probabilities."""

    def __init__(self, sees):
        super().__init__()
        self.sees, self.embedding = sees, torch.nn.Embedding(1, 1)

    def in_pieces(self, function, hidden, targets):
        return [function(hidden, targets)]

    def hidden_states(self, x, reading, *, encodings):
        logits = torch.zeros(*x.shape, DATA.symbols)
        for row, text in enumerate(x.tolist()):
            first = max(0, len(text) - self.sees)
            counts = np.full((DATA.symbols, DATA.symbols), DATA.alpha)
            for place in range(first, len(text)):
                if place > first:
                    counts[text[place - 1], text[place]] += 1
                of_row = counts[text[place]]
                logits[row, place] = torch.from_numpy(np.log(of_row / of_row.sum()))
        return logits


def plan():
    options = SimpleNamespace(lengths=LENGTHS, target_tokens=TARGETS, eval=SimpleNamespace(sequences=TEXTS))
    return lengths.lengths(DATA, options)


def save(folder, pe, measured):
    """A run of the encoding `pe` that measured this."""
    run = write_run(folder, pe, config={"train_len": TRAIN_LEN, "data": {"name": "markov"}}, finished=False)
    options = yaml.safe_load((run / "config.yaml").read_text())["pe"]
    Evaluation(
        kind="lengths", run=run.name, run_id=run.name, seed=0, train_len=TRAIN_LEN, task=None, step=1,
        variant=Variant(label=pe, pe=options, scale=1.0, zero_shot=False), eval=plan().eval,
        measured=measured, provenance=PROVENANCE,
    ).save(run / "evals")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for pe, sees in {"fox": 10**6, "rope": TRAIN_LEN}.items():
        save(folder, pe, [m for job in plan().jobs for m in job.run(Scorer(Counter(sees)))])
    return folder


def long_table(folder):
    """The rows over all seeds, by line and length."""
    return over_seeds(results(frame.load(folder))).set_index(["line", "length"]).sort_index()


@pytest.fixture(scope="module")
def table(folder):
    return long_table(folder)


def best(length):
    """The optimum in bits per token."""
    (part,) = DATA.eval_sets([length, max(LENGTHS)], target_tokens=TARGETS, sequences=TEXTS)[:1]
    return float(DATA.optimum(*part.batch(0, TEXTS)).sum()) / TEXTS / TARGETS / math.log(2)


def test_a_predictor_that_counts_has_all_of_the_possible_gain(table):
    assert set(table.unit) == {"bits per token"}
    for length in LENGTHS:
        assert table.value[BEST_POSSIBLE, length] == pytest.approx(best(length), abs=1e-5)
        row = table.loc[("fox", length)]
        assert abs(row.above) < 1e-5
        assert row.above_high - row.above_low < 2e-5  # paired by text, of which the losses themselves differ
        assert row.high - row.low > 0.1
    shares = table.loc["fox"].share.dropna()
    assert shares.to_dict() == pytest.approx({32: 1, 64: 1}, abs=1e-4)
    assert table.gain[BEST_POSSIBLE, 64] == pytest.approx(best(TRAIN_LEN) - best(64), abs=1e-5)


def test_a_model_that_sees_only_train_len_has_none_of_it(table):
    for length in LENGTHS:
        row = table.loc[("rope", length)]
        assert row.above == pytest.approx(best(min(length, TRAIN_LEN)) - best(length), abs=1e-5)
        assert row.gain == pytest.approx(0, abs=1e-5)
    assert table.share["rope", 64] == pytest.approx(0, abs=1e-4)


def test_the_answer_names_the_share(folder):
    possible = best(TRAIN_LEN) - best(64)
    sentences = answer(results(frame.load(folder)))
    assert f"The best possible predictor gains {possible:.3f}: fox has 100 ± 0 % of that." in sentences


@pytest.mark.parametrize("is_known", [True, False])
def test_nothing_is_said_where_longer_text_is_worth_nothing(tmp_path, monkeypatch, is_known):
    """Or where nobody knows the optimum."""
    if not is_known:
        monkeypatch.setattr(Markov, "optimum", Data.optimum)
    measured = [m for job in plan().jobs for m in job.run(Scorer(Counter(10**6)))]
    flat = [m.model_copy(update={"optimum_nats": measured[0].optimum_nats}) for m in measured]
    save(tmp_path, "fox", flat)
    table = long_table(tmp_path)
    assert table.share.isna().all()
    assert (BEST_POSSIBLE in table.index.levels[0]) == is_known
    assert not any("possible" in sentence for sentence in answer(results(frame.load(tmp_path))))
