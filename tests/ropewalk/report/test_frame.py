"""Runs as one long table: what shares a line, what is compared with what, and what is left out."""

import gzip
import math
import os

import pytest
import yaml
from conftest import pe_options
from synthetic import DOCUMENTS, TEXTS, edited, evaluate, write_run

from ropewalk.report import frame, page
from ropewalk.report.answer import answer
from ropewalk.report.table import over_seeds, results


def measured(folder, what="lengths/loss"):
    """The rows over all seeds of one quantity of a measure, by line, part and length."""
    rows = over_seeds(results(frame.load(folder)))
    is_asked = rows.measure + "/" + rows.quantity == what
    return rows[is_asked].set_index(["line", "part", "length"]).sort_index()


def seeds_of_lines(folder):
    rows = measured(folder).reset_index()
    return rows.groupby("line").seeds.first().to_dict()


def test_readings_of_other_settings_are_other_lines(tmp_path):
    write_run(tmp_path, "rope", 0, variants=[("yarn", {"beta_fast": 2.0})])
    write_run(tmp_path, "rope", 1, variants=[("yarn", {"beta_fast": 32.0})])
    assert seeds_of_lines(tmp_path) == {
        "rope": 2,
        "rope read as yarn at scale 8 (beta_fast 2.0)": 1,
        "rope read as yarn at scale 8 (beta_fast 32.0)": 1,
    }


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
    write_run(tmp_path, "cope", 0, config={"init_from": "runs/rope"})
    write_run(tmp_path, "cope", 1, config={"init_from": "runs/rope-s1"})
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


def test_what_only_watches_makes_no_line_and_a_copy_no_seed(tmp_path):
    write_run(tmp_path / "a", "rope", 0, finished=False)
    write_run(tmp_path / "b", "rope", 0)
    write_run(tmp_path / "c", "rope", 0)
    watched = {"trainer.log_every": 1, "trainer.devices": 2, "runs_dir": "elsewhere"}
    write_run(tmp_path, "rope", 1, config=watched)
    runs = frame.load(tmp_path)
    assert runs.runs.group.nunique() == 1
    assert sorted(runs.runs.seed) == [0, 1]
    assert runs.runs.done.all()  # of the copies a complete one is taken
    assert "has the same settings and seed" in runs.left_out[-1][1]


def test_sections_share_data_and_texts_or_training_lengths(tmp_path):
    write_run(tmp_path, "rope", name="other data", identity="b")
    write_run(tmp_path, "rope", name="short")
    write_run(tmp_path, "rope", name="long, same texts", config={"train_len": 512})
    write_run(tmp_path, "alibi", name="unmeasured", config={"train_len": 512}, finished=False)
    write_run(tmp_path, "rope", name="other length", config={"train_len": 1024}, finished=False)
    runs = frame.load(tmp_path).runs
    sections = sorted(sorted(names) for _, names in runs.groupby("section").name)
    assert sections == [["long, same texts", "short", "unmeasured"], ["other data"], ["other length"]]


def test_results_on_other_texts_are_not_compared(tmp_path):
    write_run(tmp_path, "rope")
    write_run(tmp_path, "alibi", settings={"texts": "others"})
    assert measured(tmp_path)["rank"].eq(1).all()


def test_a_task_is_told_by_the_seeds_that_learned_it(tmp_path):
    """In percent of wrong answers; a seed that guesses is not averaged with one that knows."""
    errors = {
        ("fox", 0): {"dense": 0, "sparse": 5},
        ("fox", 1): {"dense": 50, "sparse": 50},
        ("rope", 0): {"dense": 25, "sparse": 60},
    }
    for (pe, seed), percent in errors.items():
        run = write_run(tmp_path, pe, seed, task="recall")
        with edited(run) as values:
            for part in values["measured"]:
                part["tokens"] = [100] * TEXTS
                part["errors"] = [percent[part["difficulty"]]] * TEXTS
    table = measured(tmp_path, "lengths/error")
    columns = ["value", "learned", "seeds"]
    assert table.loc[("fox", "sparse", 256), columns].tolist() == [5, 1, 2]
    assert table.loc[("rope", "sparse", 256), columns].tolist() == [60, 0, 1]
    assert table[["difference", "low"]].isna().all(axis=None)  # errors are bounded, and seeds are few
    sentence = answer(table.reset_index())[0]
    assert "in sparse, the difficulty that is worst there, fox has the fewest errors" in sentence


def test_far_text_is_pooled_over_what_is_far(tmp_path):
    write_run(tmp_path, "cope", kinds=["far_copies", "ruler"])
    gain = measured(tmp_path, "far_copies/gain").value["cope", "far"]
    assert gain.item() == pytest.approx(0.6, abs=0.05)
    found = measured(tmp_path, "ruler/found").value["cope", "far"]
    assert found.item() == pytest.approx(62.5)  # 15 of 24 texts


def test_a_run_that_starts_from_a_model_is_compared_with_it(tmp_path):
    """As the model reads, and read by the run's own encoding; what is gained is over the model on its cut text."""
    run = write_run(tmp_path, "fox", config={"train_len": 1024, "init_from": "hf:rope"})
    config = yaml.safe_load((run / "config.yaml").read_text())
    for pe in ("fox", "rope"):
        evaluate(run, config | {"train_len": 256, "pe": pe_options(pe)}, step=0)
    table = measured(tmp_path)
    assert table.reset_index().groupby("line").reading.first().to_dict() == {
        "fox": "after training",
        "model before fox": "before training",
        "model before fox read as fox": "before training read as fox",
    }
    assert set(table.reference) == {"model before fox"}
    before = table.value["model before fox", "text"]
    for length, row in table.loc["fox", "text"].iterrows():
        assert row.difference == pytest.approx(row.value - before[length])
        assert row.gain == pytest.approx(before[min(length, 256)] - row.value)
    sentence = answer(table.reset_index())[0]
    assert "over the model before this training on the text cut to 256 tokens" in sentence


def test_a_line_that_diverged_is_last_and_tied_with_none(tmp_path):
    for pe in ("cope", "fox", "nope", "alibi"):
        run = write_run(tmp_path, pe, noise=0.3)
    with edited(run) as values:
        for part in values["measured"]:
            part["nats"] = [math.nan] * TEXTS
    rows = measured(tmp_path).loc[:, "text", 256]
    assert rows.tied.to_dict() == {"cope": True, "fox": True, "nope": False, "alibi": False}
    assert rows["rank"]["alibi"] == 4


DAMAGES = {
    "no results": lambda values: values.clear(),
    "other texts": lambda values: values["measured"][0]["bytes"].reverse(),
    "other documents": lambda values: values["measured"][0].update(documents=[*DOCUMENTS[1:], 12]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_run_breaks_no_report(tmp_path, damage):
    for pe in ("alibi", "fox", "rope"):
        run = write_run(tmp_path, pe)
    with edited(run) as values:
        DAMAGES[damage](values)
    run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff<b>"))
    runs = frame.load(tmp_path)
    ((_, reason),) = runs.left_out
    assert reason.startswith("broken:")
    assert set(results(runs).line) == {"alibi", "fox"}
    page.html(runs).encode()  # a name that is not UTF-8 can be written


def test_results_in_one_file_are_compared_like_their_runs(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a", "rope", seed, variants=["yarn"], kinds=["lengths", "far_copies"])
        write_run(tmp_path / "a", "alibi", seed, config={"runs_dir": "/secret"})
        write_run(tmp_path / "b", "fox", seed)
    file = tmp_path / "a.jsonl.gz"
    frame.save(file, [tmp_path / "a"])
    own = results(frame.load([tmp_path / "a", tmp_path / "b"]))
    theirs = results(frame.load([file, tmp_path / "b"]))
    numbers = ["value", "low", "high", "gain", "difference", "behind"]
    assert own.line.tolist() == theirs.line.tolist()
    assert own[numbers].to_numpy() == pytest.approx(theirs[numbers].to_numpy(), abs=2e-4, nan_ok=True)
    assert "secret" not in gzip.decompress(file.read_bytes()).decode()

    file.write_bytes(file.read_bytes()[:-20])
    ((path, reason),) = frame.load(file).left_out
    assert path == str(file)
    assert reason.startswith("broken: ")
