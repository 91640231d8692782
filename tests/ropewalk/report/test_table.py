"""Runs as one long table: what shares a line, what is compared with what, its numbers by hand, and what is left out."""

import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import pe_options
from scipy import stats
from synthetic import TEXTS, edited, evaluate, usual_values, write_run, write_runs

from ropewalk.evaluation import archive
from ropewalk.report import frame
from ropewalk.report.answer import answer
from ropewalk.report.table import over_seeds, results


def measured(folder, measure="lengths", quantity="loss"):
    """The rows over all seeds of one quantity of a measure, by line, part and length."""
    rows = over_seeds(results(frame.load(folder)))
    asked = rows.query("measure == @measure and quantity == @quantity")
    return asked.set_index(["line", "part", "length"]).sort_index()


def of_lines(table, column):
    """A column that is the same in all rows of a line."""
    return table[column].groupby("line").first().to_dict()


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
    """The sums over the texts of each document, by encoding, length, seed and document."""
    files = [json.loads(path.read_text()) for path in folder.glob("*/evals/*.json")]
    parts = pd.json_normalize(files, "measured", ["seed", ["variant", "pe", "name"]])
    texts = parts.explode(["documents", "bytes", "nats", "optimum_nats"])
    by_document = texts.groupby(["variant.pe.name", "length", "seed", "documents"])
    return by_document[["bytes", "nats", "optimum_nats"]].sum().astype(float)


def test_numbers_and_intervals_follow_from_the_texts_alone(tmp_path):
    """Of a line with a seed that the reference does not have, and of the reference in another reading."""
    write_runs(tmp_path, "rope", seeds=(0, 1, 4), variants=["yarn"], noise=0.03, falls=0.06)
    write_runs(tmp_path, "fox", seeds=(1, 4, 5), noise=0.03, falls=0.06)
    sums = sums_of(tmp_path)

    def bits(encoding, length, *seeds, column="nats"):
        """[seeds, documents]"""
        nats = [sums[column][encoding, length, seed] for seed in seeds]
        return np.array(nats) / math.log(2)

    fox = bits("fox", 2048, 1, 4, 5)
    yarn = bits("rope", 256, 0, 1, 4) - bits("yarn", 2048, 0, 1, 4)
    expected = {
        ("fox", "value"): fox,
        ("fox", "gain"): bits("fox", 256, 1, 4, 5) - fox,
        ("fox", "above"): fox - bits("fox", 2048, 1, 4, 5, column="optimum_nats"),
        ("fox", "lead"): bits("rope", 256, 1, 4) - bits("fox", 2048, 1, 4),
        ("fox", "difference"): bits("fox", 2048, 1, 4) - bits("rope", 2048, 1, 4),
        ("rope read as yarn at scale 8", "gain"): yarn,
        ("rope read as yarn at scale 8", "lead"): yarn,
    }
    at_end = measured(tmp_path).xs(("text", 2048), level=("part", "length"))
    units = sums.bytes["fox", 2048, 1].to_numpy()
    for (line, name), values in expected.items():
        prefix = "" if name == "value" else f"{name}_"
        found = at_end.loc[line, [name, f"{prefix}low", f"{prefix}high"]]
        assert found.tolist() == pytest.approx(analysis(values, units), rel=1e-9), (line, name)

    # At three doublings beyond the training length.
    assert at_end.share["fox"] == pytest.approx(at_end.gain["fox"] / (3 * 0.06))


TUNED = {"optim.lr": 0.1, "model.n_layer": 2}


@pytest.mark.parametrize(
    ("runs", "seeds"),
    [
        pytest.param(
            [
                {"variants": [("yarn", {"beta_fast": 2.0})]},
                {"variants": [("yarn", {"beta_fast": 32.0})], "seed": 1},
            ],
            {
                "rope": 2,
                "rope read as yarn at scale 8 (beta_fast 2.0)": 1,
                "rope read as yarn at scale 8 (beta_fast 32.0)": 1,
            },
            id="read otherwise",
        ),
        pytest.param(
            [
                {"config": {"trainer.max_steps": 900}},
                {"seed": 1},
            ],
            {
                "rope (max_steps 600)": 1,
                "rope (max_steps 900)": 1,
            },
            id="another option",
        ),
        pytest.param(
            [
                {"name": "tuned", "config": TUNED},
                {"name": "tuned", "config": TUNED | {"optim.lr": 0.2}},
                {"seed": 1},
            ],
            {
                "rope-code": 1,
                "tuned": 1,
                "tuned [2]": 1,
            },
            id="several options: by the run, and two runs may have one name",
        ),
        pytest.param(
            [
                {"config": {"init_from": "x"}},
                {"config": {"init_from": "y"}, "seed": 1},
            ],
            {
                "rope (init_from x)": 1,
                "rope (init_from y)": 1,
            },
            id="weights of another training",
        ),
        pytest.param(
            [
                {"config": {"init_from": "runs/a", "data.tokenizer": "runs/a/tokenizer/bpe.tiktoken"}},
                {"config": {"init_from": "runs/a-s1", "data.tokenizer": "runs/a-s1/tokenizer/bpe.tiktoken"}, "seed": 1},
            ],
            {"rope": 2},
            id="weights of its own seed",
        ),
        pytest.param(
            [
                {"config": {"init_from": "v-0/a"}},
                {"config": {"init_from": "v-0/a-s1"}, "seed": 1},
            ],
            {"rope": 2},
            id="weights of its own seed, in a folder with a number",
        ),
        pytest.param(
            [
                {},
                {"config": {"trainer.log_every": 1, "trainer.devices": 2, "runs_dir": "elsewhere"}, "seed": 1},
            ],
            {"rope": 2},
            id="what only watches",
        ),
        pytest.param(
            [
                {},
                {"settings": {"texts": "others"}, "seed": 1},
            ],
            {"rope": 1},
            id="measured on other texts: a measure of its own",
        ),
    ],
)
def test_runs_that_differ_in_the_seed_alone_are_one_line(tmp_path, runs, seeds):
    for number, run in enumerate(runs):
        write_run(tmp_path / f"{number}", **run)
    assert of_lines(measured(tmp_path), "seeds") == seeds


@pytest.mark.parametrize(
    ("schedule", "decay_share", "is_other"),
    [
        ("cosine", 0.2, True),
        ("wsd", 0.0, False),
        ("wsd", 0.5, True),
        ("wsd", 0.1, False),  # it did not decay until step 250 of 300
    ],
)
def test_a_run_at_other_rates_before_it_was_extended_is_no_seed(tmp_path, schedule, decay_share, is_other):
    optim = usual_values()["optim"] | {"schedule": schedule, "decay_share": decay_share}
    write_run(tmp_path, config={"optim": optim})
    extended = write_run(tmp_path, seed=1, config={"optim": optim})
    (extended / "data.json").write_text('{"sha256": "a", "earlier_max_steps": [[300, 250]]}')
    seeds = {"rope": 1, "rope (earlier_max_steps 300)": 1} if is_other else {"rope": 2}
    assert of_lines(measured(tmp_path), "seeds") == seeds


@pytest.mark.parametrize(
    ("init_from", "expected"),
    [
        ("runs/stem", {"rope (init_from runs/stem (abcdef))": 1, "rope (init_from runs/stem (123456))": 2}),
        ("hf:model", {"rope": 2}),  # whose files were copied
    ],
)
def test_runs_from_a_model_before_and_after_it_was_trained_on_are_two_lines(tmp_path, init_from, expected):
    """Of seed 1 there are both."""
    for name, seed, weights in [("early", 1, "abcdef1"), ("late", 1, "123456a"), ("late-s2", 2, "123456a")]:
        run = write_run(tmp_path, seed=seed, name=name, config={"init_from": init_from})
        (run / "data.json").write_text(json.dumps({"sha256": "a", "made_of": weights}))
    assert of_lines(measured(tmp_path), "seeds") == expected

    runs = frame.load(tmp_path)
    archive.write(tmp_path / "all.parquet", runs.runs, runs.results)
    assert of_lines(measured(tmp_path / "all.parquet"), "seeds") == expected


def test_an_earlier_step_is_a_line_of_its_own_and_compared_with_itself(tmp_path):
    evaluate(write_run(tmp_path), step=200)
    bases = of_lines(measured(tmp_path), "base")
    assert bases == {"rope": "rope", "rope at step 200": "rope at step 200"}


def test_a_run_that_was_stopped_is_no_seed_of_those_that_ended(tmp_path):
    write_run(tmp_path)
    for seed, step in {1: 200, 2: 0}.items():
        evaluate(write_run(tmp_path, seed=seed, finished=False), step=step)
    lines = of_lines(measured(tmp_path), "seeds")
    assert lines == {"rope": 1, "rope at step 200": 1, "model before rope": 1}


def test_of_several_lines_the_reference_is_that_of_the_most_usual_settings(tmp_path):
    settings = {
        "odd": {"optim.lr": 0.1},
        "usual": {"optim.lr": 0.2},
        "deep": {"optim.lr": 0.2, "model.n_layer": 2},
    }
    for name, config in settings.items():
        write_run(tmp_path, "rope", name=name, config=config)
    assert set(measured(tmp_path).reference) == {"usual"}


def test_of_copies_one_counts_and_it_is_finished(tmp_path):
    for folder, finished in {"a": False, "b": True, "c": True}.items():
        write_run(tmp_path / folder, finished=finished)
    runs = frame.load(tmp_path)
    assert list(runs.runs.index) == [f"{tmp_path}/b/rope-code"]
    copies = [path for path, reason in runs.left_out if "has the same settings and seed" in reason]
    assert copies == [f"{tmp_path}/a/rope-code", f"{tmp_path}/c/rope-code"]


def test_of_equal_runs_the_one_with_results_counts(tmp_path):
    shutil.rmtree(write_run(tmp_path / "a") / "evals")
    write_run(tmp_path / "b")
    runs = frame.load(tmp_path)
    assert list(runs.runs.index) == [f"{tmp_path}/b/rope-code"]
    assert set(results(runs).line) == {"rope"}


def test_a_curve_that_cannot_be_read_is_missing_with_its_reason(tmp_path):
    row = '{"step": 1, "tokens": 9}\n'
    for pe, text in {"rope": row, "fox": row + "{\n"}.items():
        (write_run(tmp_path, pe) / "metrics.jsonl").write_text(text)
    runs = frame.load(tmp_path)
    assert set(frame.curves(runs).label) == {"rope"}
    ((path, reason),) = runs.left_out
    assert path == f"{tmp_path}/fox-code/metrics.jsonl"
    assert "line 2, is damaged" in reason
    assert set(results(runs).line) == {"rope", "fox"}


def test_sections_share_data_and_texts_or_training_lengths(tmp_path):
    runs = {
        "other data": {"identity": "b"},
        "short": {},
        "long, same texts": {"config": {"train_len": 512}},
        "unmeasured": {"config": {"train_len": 512}, "seed": 1, "finished": False},
        "other length": {"config": {"train_len": 1024}, "finished": False},
    }
    for name, options in runs.items():
        write_run(tmp_path, name=name, **options)
    (tmp_path / "short" / "data.json").write_text('{"sha256": "a", "made_of": "weights of another model"}')
    by_section = frame.load(tmp_path).runs.groupby("section").name
    sections = sorted(sorted(names) for _, names in by_section)
    assert sections == [
        ["long, same texts", "short", "unmeasured"],
        ["other data"],
        ["other length"],
    ]


def test_what_wandb_keeps_in_a_run_is_no_run(tmp_path):
    files = write_run(tmp_path) / "wandb" / "run-1" / "files"
    files.mkdir(parents=True)
    (files / "config.yaml").write_text("wandb_version: 1\n")
    assert not frame.load(tmp_path).left_out


def test_a_task_is_told_by_the_seeds_that_learned_it(tmp_path):
    """In percent of wrong answers; a seed that guesses is not averaged with one that knows."""
    percent = {
        ("fox", 0): {"dense": 0, "sparse": 5},
        ("fox", 1): {"dense": 50, "sparse": 50},
        ("rope", 0): {"dense": 25, "sparse": 60},
    }
    for (pe, seed), wrong in percent.items():
        with edited(write_run(tmp_path, pe, seed, task="recall")) as values:
            for part in values["measured"]:
                part["tokens"] = [100] * TEXTS
                part["errors"] = [wrong[part["difficulty"]]] * TEXTS
    table = measured(tmp_path, quantity="error")
    sparse = table.xs(("sparse", 256), level=("part", "length"))
    assert sparse[["value", "learned", "seeds"]].to_dict("index") == {
        "fox": {"value": 5, "learned": 1, "seeds": 2},
        "rope": {"value": 60, "learned": 0, "seeds": 1},
    }
    assert table[["difference", "low"]].isna().all(axis=None)  # of one seed there is no range
    first = answer(table.reset_index())[0]
    assert "in sparse, the difficulty that is worst there, fox is best, 5.0 % errors" in first


def test_far_text_is_pooled_over_what_is_far(tmp_path):
    write_run(tmp_path, "cope", kinds=["far_copies", "ruler"])
    assert measured(tmp_path, "far_copies", "gain").value["cope", "far", 2048] == pytest.approx(0.6, abs=0.05)
    assert measured(tmp_path, "ruler", "found").value["cope", "far", 2048] == 62.5  # 15 of 24 texts


def test_far_text_of_a_line_that_ends_early_is_not_compared(tmp_path):
    """Its mean would be over shorter texts."""
    write_run(tmp_path, "cope", kinds=["ruler"])
    with edited(write_run(tmp_path, "rope", kinds=["ruler"])) as values:
        values["measured"] = [part for part in values["measured"] if part["length"] < 2048]
    found = measured(tmp_path, "ruler", "found").xs("far", level="part")
    assert found.index.get_level_values("line").tolist() == ["cope"]


def test_a_line_is_level_by_the_tolerance_of_its_own_runs(tmp_path):
    write_run(tmp_path, "alibi", config={"eval": usual_values()["eval"] | {"tolerance": 99.0}})
    write_run(tmp_path, "rope")
    assert measured(tmp_path).verdict.xs(2048, level="length").to_dict() == {
        ("alibi", "text"): "level",
        ("rope", "text"): "worse",
    }


def test_a_run_that_starts_from_a_model_is_compared_with_it(tmp_path):
    """As the model reads, and read by the run's own encoding; what is gained is over the model on its cut text."""
    run = write_run(tmp_path, "fox", config={"train_len": 1024, "init_from": "hf:rope"})
    for pe in ("fox", "rope"):
        evaluate(run, {"train_len": 256, "pe": pe_options(pe)}, step=0)
    table = measured(tmp_path)
    assert of_lines(table, "reading") == {
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
    write_runs(tmp_path, "cope", "fox", "nope", noise=0.3)
    with edited(write_run(tmp_path, "alibi")) as values:
        for part in values["measured"]:
            part["nats"] = [math.nan] * TEXTS
    rows = measured(tmp_path).loc[:, "text", 256]
    assert rows.tied.to_dict() == {
        "cope": True,
        "fox": True,
        "nope": False,
        "alibi": False,
    }
    assert rows["rank"]["alibi"] == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"bytes": [1] * TEXTS},
        {"documents": [n // 2 for n in range(TEXTS)]},
        {"nats": None},
    ],
)
def test_a_damaged_run_or_one_of_other_texts_is_left_out(tmp_path, changed):
    """Most are right, not the first by name."""
    sound = {"bytes": [64] * TEXTS, "documents": [n % 12 for n in range(TEXTS)]}
    for pe, part in {"alibi": sound | changed, "fox": sound, "rope": sound}.items():
        with edited(write_run(tmp_path, pe)) as values:
            values["measured"][0] |= part
    runs = frame.load(tmp_path)
    ((path, reason),) = runs.left_out
    assert path.startswith(f"{tmp_path}/alibi-code/evals/lengths-alibi")
    assert reason.startswith("broken: ")
    assert set(results(runs).line) == {"fox", "rope"}


def test_a_folder_of_results_that_cannot_be_read_is_named(tmp_path):
    write_run(tmp_path, "fox")
    run = write_run(tmp_path, "rope")
    shutil.rmtree(run / "evals")
    (run / "evals").write_text("")
    runs = frame.load(tmp_path)
    assert [(path, reason.startswith("broken: ")) for path, reason in runs.left_out] == [(str(run), True)]


def test_a_measure_that_cannot_be_compared_is_left_out_alone(tmp_path):
    write_run(tmp_path, "rope", kinds=["lengths", "ruler"])
    runs = frame.load(tmp_path)
    runs.results.loc[runs.results.kind == "ruler", "sample"] = None
    assert set(results(runs).measure) == {"lengths"}
    assert {what for what, _ in runs.left_out} == {"ruler of code, trained at 256 tokens"}


def test_results_in_one_file_are_compared_like_their_runs(tmp_path):
    write_runs(
        tmp_path / "a",
        "rope",
        "alibi",
        seeds=(0, 1),
        variants=["yarn"],
        config={"runs_dir": "/secret"},
    )
    write_runs(tmp_path / "b", "fox", seeds=(0, 1))
    write_runs(tmp_path / "c", "rope", config={"optim.lr": 0.5}, falls=0.06)  # a name that is in `a`, too
    file = tmp_path / "a.parquet"
    runs = frame.load([tmp_path / "a", tmp_path / "c"])
    archive.write(file, runs.runs, runs.results)
    own = results(frame.load(tmp_path))
    theirs = results(frame.load([file, tmp_path / "b"]))
    columns = ["line", "seed", "length", "value", "low", "high", "gain", "difference", "behind"]
    pd.testing.assert_frame_equal(own[columns], theirs[columns], atol=2e-4)
    assert b"secret" not in file.read_bytes()
    assert not any("secret" in config for config in pd.read_parquet(file).run_config)


def test_a_damaged_archive_is_left_out_and_makes_no_other_number(tmp_path):
    """Any byte of it: each page of the file has a checksum."""
    write_runs(tmp_path / "a", "rope", "fox")
    write_run(tmp_path / "b", "alibi")
    runs = frame.load(tmp_path / "a")
    file = tmp_path / "a.parquet"
    archive.write(file, runs.runs, runs.results)
    sound = file.read_bytes()
    expected = [table.to_dict("list") for table in archive.read(file)]
    rng = np.random.default_rng(0)
    for place in rng.integers(len(sound), size=300):
        damaged = bytearray(sound)
        damaged[place] ^= rng.integers(1, 256)
        file.write_bytes(damaged)
        try:
            found = [table.to_dict("list") for table in archive.read(file)]
        except ValueError:
            continue
        np.testing.assert_equal(found, expected)
    file.write_bytes(sound[:-100])
    (left_out,) = frame.load([file, tmp_path / "b"]).left_out
    assert left_out[0] == str(file)


def test_an_archive_of_no_complete_run_is_refused(tmp_path):
    write_run(tmp_path, finished=False)
    runs = frame.load(tmp_path)
    with pytest.raises(ValueError, match="no run is complete and measured"):
        archive.write(tmp_path / "a.parquet", runs.runs, runs.results)
