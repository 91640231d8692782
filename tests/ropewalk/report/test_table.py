"""Runs as one long table: what shares a line, what is compared with what, its numbers by hand, and what is left out."""

import gzip
import json
import math
import os

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import pe_options
from scipy import stats
from synthetic import TEXTS, edited, evaluate, write_run

from ropewalk.report import frame, page
from ropewalk.report.answer import answer
from ropewalk.report.table import over_seeds, results


def measured(folder, what="lengths/loss"):
    """The rows over all seeds of one quantity of a measure, by line, part and length."""
    rows = over_seeds(results(frame.load(folder)))
    is_asked = rows.measure + "/" + rows.quantity == what
    return rows[is_asked].set_index(["line", "part", "length"]).sort_index()


def analysis(values, units):
    """A ratio of sums with its 95 % interval, by the textbook: values [seeds, documents], units [documents]."""
    n_seeds, n = values.shape
    ratio = values.sum() / (n_seeds * units.sum())
    residuals = (values - ratio * units) * n / units.sum()  # of mean 0
    sum_of_documents = n_seeds * (residuals.mean(axis=0) ** 2).sum()
    sum_of_seeds = n * (residuals.mean(axis=1) ** 2).sum()
    sum_of_noise = (residuals**2).sum() - sum_of_documents - sum_of_seeds
    documents = sum_of_documents / (n - 1)
    seeds = sum_of_seeds / (n_seeds - 1)
    noise = sum_of_noise / (n - 1) / (n_seeds - 1)

    # What seeds add counts as far as it is more than noise, with the confidence that it is.
    weight = stats.f.cdf(seeds / noise, n_seeds - 1, (n - 1) * (n_seeds - 1))
    variance = documents + max(0, weight * (seeds - noise))
    spread = documents**2 / (n - 1) + (weight * seeds) ** 2 / (n_seeds - 1)
    freedom = max(n_seeds - 1, variance**2 / spread)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(variance / n / n_seeds)
    return ratio, ratio - half, ratio + half


def sums_of(folder):
    """The sums over the texts of each document, by encoding, length and seed."""
    sums = {}
    for path in folder.glob("*/evals/*.json"):
        values = json.loads(path.read_text())
        for part in values["measured"]:
            key = values["variant"]["pe"]["name"], part["length"], values["seed"]
            texts = pd.DataFrame({name: part[name] for name in ("documents", "bytes", "nats", "optimum_nats")})
            sums[key] = texts.groupby("documents").sum()
    return sums


def test_numbers_and_intervals_follow_from_the_texts_alone(tmp_path):
    """Of a line with a seed that the reference does not have, and of the reference in another reading."""
    falls = 0.06
    for seed in (0, 1, 4):
        write_run(tmp_path, "rope", seed, variants=["yarn"], noise=0.03, falls=falls)
    for seed in (1, 4, 5):
        write_run(tmp_path, "fox", seed, noise=0.03, falls=falls)
    sums = sums_of(tmp_path)

    def bits(encoding, length, *seeds, column="nats"):
        """[seeds, documents]"""
        return np.array([sums[encoding, length, seed][column] for seed in seeds]) / math.log(2)

    fox = bits("fox", 2048, 1, 4, 5)
    yarn = bits("yarn", 2048, 0, 1, 4)
    rope_cut = bits("rope", 256, 0, 1, 4)
    expected = {
        ("fox", "value"): fox,
        ("fox", "gain"): bits("fox", 256, 1, 4, 5) - fox,
        ("fox", "above"): fox - bits("fox", 2048, 1, 4, 5, column="optimum_nats"),
        ("fox", "lead"): bits("rope", 256, 1, 4) - bits("fox", 2048, 1, 4),
        ("fox", "difference"): bits("fox", 2048, 1, 4) - bits("rope", 2048, 1, 4),
        ("rope read as yarn at scale 8", "gain"): rope_cut - yarn,
        ("rope read as yarn at scale 8", "lead"): rope_cut - yarn,
    }
    at_end = measured(tmp_path).xs(("text", 2048), level=("part", "length"))
    units = sums["fox", 2048, 1].bytes.to_numpy()
    for (line, name), values in expected.items():
        prefix = "" if name == "value" else f"{name}_"
        found = at_end.loc[line, [name, f"{prefix}low", f"{prefix}high"]]
        assert found.tolist() == pytest.approx(analysis(values, units), rel=1e-9), (line, name)

    # At three doublings beyond the training length.
    assert at_end.share["fox"] == pytest.approx(at_end.gain["fox"] / (3 * falls))


def seeds_of_lines(folder):
    rows = measured(folder).reset_index()
    return rows.groupby("line").seeds.first().to_dict()


def test_readings_of_other_settings_are_other_lines(tmp_path):
    write_run(tmp_path, "rope", 0, variants=[("yarn", {"beta_fast": 2.0})])
    write_run(tmp_path, "rope", 1, variants=[("yarn", {"beta_fast": 32.0})])
    write_run(tmp_path, "rope", 2, settings={"texts": "others"})
    assert seeds_of_lines(tmp_path) == {
        "rope": 2,
        "rope read as yarn at scale 8 (beta_fast 2.0)": 1,
        "rope read as yarn at scale 8 (beta_fast 32.0)": 1,
    }


def test_of_several_lines_the_reference_is_that_of_the_most_usual_settings(tmp_path):
    write_run(tmp_path, "rope", config={"optim.lr": 0.1}, name="a")
    write_run(tmp_path, "rope", name="b")
    write_run(tmp_path, "fox")

    (reference,) = set(measured(tmp_path).reference)
    assert reference.startswith("rope (optim.lr ")
    assert reference != "rope (optim.lr 0.1)"


def test_seeds_of_other_settings_are_other_lines(tmp_path):
    """Named by what differs, and by the run if that is much; two runs may have one name."""
    longer = write_run(tmp_path, "rope", name="longer", config={"trainer.max_steps": 900})
    evaluate(longer, yaml.safe_load((longer / "config.yaml").read_text()), step=200)
    write_run(tmp_path, "rope", 1)
    tuned = {"optim.lr": 0.1, "model.n_layer": 2}
    write_run(tmp_path / "a", "yarn", name="tuned", config=tuned)
    write_run(tmp_path / "b", "yarn", name="tuned", config=tuned | {"optim.lr": 0.2})
    write_run(tmp_path, "yarn", 1)
    # Of other weights; and of weights of their own, which are named by the seed.
    write_run(tmp_path, "alibi", 0, config={"init_from": "x"})
    write_run(tmp_path, "alibi", 1, config={"init_from": "y"})
    for seed, base in enumerate(("runs/rope", "runs/rope-s1")):
        of_its_base = {"init_from": base, "data.tokenizer": f"{base}/tokenizer/bpe.tiktoken"}
        write_run(tmp_path, "cope", seed, config=of_its_base)
    assert seeds_of_lines(tmp_path) == {
        "rope (max_steps 600)": 1,
        "rope (max_steps 900)": 1,
        "rope (max_steps 900) at step 200": 1,
        "yarn-code": 1,
        "tuned": 1,
        "tuned [2]": 1,
        "alibi (init_from x)": 1,
        "alibi (init_from y)": 1,
        "cope": 2,
    }
    rows = measured(tmp_path).reset_index()
    assert rows.base.equals(rows.line)  # each is compared with itself on the cut text


def test_what_only_watches_makes_no_line_and_a_copy_no_seed(tmp_path):
    write_run(tmp_path / "a", "rope", 0, finished=False)
    write_run(tmp_path / "b", "rope", 0)
    write_run(tmp_path / "c", "rope", 0)
    write_run(tmp_path, "rope", 1, config={"trainer.log_every": 1, "trainer.devices": 2, "runs_dir": "elsewhere"})
    assert seeds_of_lines(tmp_path) == {"rope": 2}
    *_, (path, reason) = frame.load(tmp_path).left_out
    assert path == f"{tmp_path}/c/rope-code"
    assert "has the same settings and seed" in reason


def test_sections_share_data_and_texts_or_training_lengths(tmp_path):
    write_run(tmp_path, "rope", name="other data", identity="b")
    write_run(tmp_path, "rope", name="short")
    write_run(tmp_path, "rope", name="long, same texts", config={"train_len": 512})
    write_run(tmp_path, "alibi", name="unmeasured", config={"train_len": 512}, finished=False)
    write_run(tmp_path, "rope", name="other length", config={"train_len": 1024}, finished=False)
    runs = frame.load(tmp_path).runs
    sections = sorted(sorted(names) for _, names in runs.groupby("section").name)
    assert sections == [["long, same texts", "short", "unmeasured"], ["other data"], ["other length"]]


def test_a_task_is_told_by_the_seeds_that_learned_it(tmp_path):
    """In percent of wrong answers; a seed that guesses is not averaged with one that knows."""
    percent = {
        ("fox", 0, "dense"): 0,
        ("fox", 0, "sparse"): 5,
        ("fox", 1, "dense"): 50,
        ("fox", 1, "sparse"): 50,
        ("rope", 0, "dense"): 25,
        ("rope", 0, "sparse"): 60,
    }
    for pe, seed in (("fox", 0), ("fox", 1), ("rope", 0)):
        with edited(write_run(tmp_path, pe, seed, task="recall")) as values:
            for part in values["measured"]:
                wrong = percent[pe, seed, part["difficulty"]]
                part |= {"tokens": [100] * TEXTS, "errors": [wrong] * TEXTS}
    table = measured(tmp_path, "lengths/error")
    assert table.loc[("fox", "sparse", 256), ["value", "learned", "seeds"]].tolist() == [5, 1, 2]
    assert table.loc[("rope", "sparse", 256), ["value", "learned", "seeds"]].tolist() == [60, 0, 1]
    assert table[["difference", "low"]].isna().all(axis=None)  # errors are bounded, and seeds are few
    assert "in sparse, the difficulty that is worst there, fox has" in answer(table.reset_index())[0]


def test_far_text_is_pooled_over_what_is_far(tmp_path):
    write_run(tmp_path, "cope", kinds=["far_copies", "ruler"])
    assert measured(tmp_path, "far_copies/gain").value["cope", "far", 2048] == pytest.approx(0.6, abs=0.05)
    assert measured(tmp_path, "ruler/found").value["cope", "far", 2048] == 62.5  # 15 of 24 texts


def test_a_run_that_starts_from_a_model_is_compared_with_it(tmp_path):
    """As the model reads, and read by the run's own encoding; what is gained is over the model on its cut text."""
    run = write_run(tmp_path, "fox", config={"train_len": 1024, "init_from": "hf:rope"})
    config = yaml.safe_load((run / "config.yaml").read_text())
    for pe in ("fox", "rope"):
        evaluate(run, config | {"train_len": 256, "pe": pe_options(pe)}, step=0)
    table = measured(tmp_path)
    assert table.reading.groupby("line").first().to_dict() == {
        "fox": "after training",
        "model before fox": "before training",
        "model before fox read as fox": "before training read as fox",
    }
    before = table.value["model before fox", "text"]
    after = table.loc["fox", "text"]
    assert set(table.reference) == {"model before fox"}
    assert after.difference.tolist() == pytest.approx((after.value - before).tolist())
    assert after.gain[2048] == pytest.approx(before[256] - after.value[2048])
    assert "over the model before this training on the text cut to 256 tokens" in answer(table.reset_index())[0]


def test_a_line_that_diverged_is_last_and_tied_with_none(tmp_path):
    for pe in ("cope", "fox", "nope", "alibi"):
        run = write_run(tmp_path, pe, noise=0.3)
    with edited(run) as values:
        for part in values["measured"]:
            part["nats"] = [math.nan] * TEXTS
    rows = measured(tmp_path).loc[:, "text", 256]
    assert rows.tied.to_dict() == {"cope": True, "fox": True, "nope": False, "alibi": False}
    assert rows["rank"]["alibi"] == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"bytes": [1] * TEXTS},
        {"documents": [n // 2 for n in range(TEXTS)]},
        {"nats": None},
    ],
)
def test_a_broken_run_breaks_no_report(tmp_path, changed):
    """Damaged, or measured on other texts than the others with these settings; whatever its name is."""
    for pe in ("alibi", "fox", "rope"):
        run = write_run(tmp_path, pe)
        with edited(run) as values:
            first = values["measured"][0]
            first |= {"bytes": [64] * TEXTS, "documents": [n % 12 for n in range(TEXTS)]}
            if pe == "rope":
                first |= changed
    run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff<b>"))
    runs = frame.load(tmp_path)
    assert [reason.startswith("broken:") for _, reason in runs.left_out] == [True]
    assert set(results(runs).line) == {"alibi", "fox"}
    page.html(runs).encode()  # a name that is not UTF-8 can be written


def test_results_in_one_file_are_compared_like_their_runs(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a", "rope", seed, variants=["yarn"])
        write_run(tmp_path / "a", "alibi", seed, config={"runs_dir": "/secret"})
        write_run(tmp_path / "b", "fox", seed)
    file = tmp_path / "a.jsonl.gz"
    frame.save(file, [tmp_path / "a"])
    own = results(frame.load(tmp_path))
    theirs = results(frame.load([file, tmp_path / "b"]))
    numbers = ["value", "low", "high", "gain", "difference", "behind"]
    assert own.line.tolist() == theirs.line.tolist()
    np.testing.assert_allclose(own[numbers], theirs[numbers], atol=2e-4)
    assert "secret" not in gzip.decompress(file.read_bytes()).decode()
