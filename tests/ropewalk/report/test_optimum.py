"""The optimum in results and reports, with predictors planted in a network's place whose numbers are known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from synthetic import PROVENANCE, write_run

import ropewalk
from data.base import Data
from data.tasks.markov import Markov
from ropewalk.evaluation.measures import lengths
from ropewalk.evaluation.results import Evaluation, Variant
from ropewalk.evaluation.scoring import Scorer
from ropewalk.report import answer, comparison, frame, grids, markdown, page
from ropewalk.report.comparison import BEST_POSSIBLE, Key

LENGTHS, TRAIN_LEN, TARGETS, TEXTS = (8, 16, 32, 64), 16, 4, 200
DATA = Markov(symbols=4)


class Counter(torch.nn.Module):
    """Counts which symbol follows which among the last `sees` tokens; its logits are logarithms of probabilities."""

    context_parallel = None

    def __init__(self, sees):
        super().__init__()
        self.sees, self.embedding = sees, torch.nn.Embedding(1, 1)

    def documents(self, x):
        return None

    def in_pieces(self, function, hidden, targets):
        return [function(hidden, targets)]

    def hidden_states(self, x, documents):
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


@pytest.fixture(scope="module")
def table(folder):
    runs = frame.load(folder)
    (table,) = comparison.tables(runs)
    return table


def best(length):
    """The optimum in bits per token."""
    (part,) = DATA.eval_sets([length, max(LENGTHS)], target_tokens=TARGETS, sequences=TEXTS)[:1]
    return float(DATA.optimum(*part.batch(0, TEXTS)).sum()) / TEXTS / TARGETS / math.log(2)


def test_a_predictor_that_counts_has_all_of_the_possible_gain(table):
    assert table.unit == "bits per token"
    for length in LENGTHS:
        assert table.means[Key(BEST_POSSIBLE, "text", length)].value == pytest.approx(best(length), abs=1e-5)
        excess = table.excess[Key("fox", "text", length)]
        assert abs(excess.value) < 1e-5
        assert excess.half < 1e-5  # paired by text, of which the losses themselves differ
        assert table.means[Key("fox", "text", length)].half > 0.05
    for length in (32, 64):
        share = table.shares[Key("fox", "text", length)]
        assert share.value == pytest.approx(1, abs=1e-4)
        assert share.half < 1e-3
    assert {key.length for key in table.shares} == {32, 64}


def test_a_model_that_sees_only_train_len_has_none_of_it(table):
    for length in LENGTHS:
        excess = table.excess[Key("rope", "text", length)]
        assert excess.value == pytest.approx(best(min(length, TRAIN_LEN)) - best(length), abs=1e-5)
        assert table.gains[Key("rope", "text", length)].value == pytest.approx(0, abs=1e-5)
    assert table.shares[Key("rope", "text", 64)].value == pytest.approx(0, abs=1e-4)


def test_what_the_report_says(folder, table):
    possible = best(TRAIN_LEN) - best(64)
    (sentence,) = answer.possible(table)
    assert markdown.to_plain(sentence).startswith(f"fox gains {possible:.3f} ± ")
    assert f"of the {possible:.3f} bits per token that 64 tokens make possible over 16 (100 %)" in sentence
    assert sentence.endswith("rope 0.000 ± 0.000 (0 %).")
    means, gains, excess, shares, *_ = grids.numbers(table)
    assert list(means.frame.index) == ["rope cut to 16", "best possible", "fox", "rope"]
    assert list(gains.frame.index) == ["best possible", "fox", "rope"]
    assert excess.frame.loc["rope"].iloc[-1].startswith(f"+{possible:.3f} ± ")
    assert list(shares.frame.loc["fox"]) == ["100 ± 0", "100 ± 0"]
    (section, _) = page.sections(frame.load(folder))
    assert section.words["Possible"] == [sentence]
    gain, loss = section.figures[0].panels
    for panel in (gain, loss):
        of_best = {point.x: point.y for point in panel.points if point.line == BEST_POSSIBLE}
        assert set(of_best) == set(LENGTHS)
    assert of_best[64] == pytest.approx(best(64), abs=1e-5)
    assert section.styles[BEST_POSSIBLE] != section.styles["rope cut to 16"]
    assert "above the optimum" in page.csv(frame.load(folder))


@pytest.mark.filterwarnings("ignore:runs left out")
def test_the_long_table_has_the_optimum(folder):
    rows = ropewalk.runs(folder)
    assert len(rows) == 2 * len(LENGTHS)
    for row in rows.itertuples():
        assert row.optimum == pytest.approx(best(row.length), abs=1e-5)


def test_nothing_is_said_where_longer_text_is_worth_nothing(tmp_path, monkeypatch):
    """Or where nobody knows the optimum."""
    measured = [m for job in plan().jobs for m in job.run(Scorer(Counter(10**6)))]
    flat = [m.model_copy(update={"optimum_nats": measured[0].optimum_nats}) for m in measured]
    save(tmp_path / "flat", "fox", flat)
    (table,) = comparison.tables(frame.load(tmp_path / "flat"))
    assert not table.shares
    assert "not separated from 0: +0.000" in answer.possible(table)[0]
    monkeypatch.setattr(Markov, "optimum", Data.optimum)
    unknown = [m for job in plan().jobs for m in job.run(Scorer(Counter(10**6)))]
    assert {m.optimum_nats for m in unknown} == {None}
    save(tmp_path / "unknown", "fox", unknown)
    (table,) = comparison.tables(frame.load(tmp_path / "unknown"))
    assert not table.excess
    assert not table.shares
    assert not answer.possible(table)
    assert BEST_POSSIBLE not in table.rows
