"""Runs as one long table, against sums done by hand from the JSON files."""

import gzip
import json
import math
import os

import pandas as pd
import pytest
import synthetic
import yaml
from synthetic import LENGTHS, TEXTS, edited, write_run

from conf.schema import ConfigError
from ropewalk.evaluation.results import Evaluation
from ropewalk.report import frame, page
from ropewalk.report.answer import answer
from ropewalk.report.table import over_seeds, results


def only(folder, measure="lengths", quantity="loss"):
    """The rows over all seeds of one quantity of a measure, by line, part and length."""
    rows = over_seeds(results(frame.load(folder)))
    rows = rows[(rows.measure == measure) & (rows.quantity == quantity)]
    assert rows["eval"].nunique() == 1
    return rows.set_index(["line", "part", "length"]).sort_index()


def results_file(run):
    (path,) = (run / "evals").glob("*.json")
    return path


def test_other_settings_are_other_lines(tmp_path):
    """Options of the encoding, of the variant, of the training and the texts: none is averaged as seeds."""
    write_run(tmp_path, "rope", 0, variants=[("yarn", {"beta_fast": 2.0})])
    write_run(tmp_path, "rope", 1, variants=[("yarn", {"beta_fast": 32.0})])
    write_run(tmp_path, "rope", 0, name="longer", config={"trainer.max_steps": 900})
    write_run(tmp_path, "yarn", 0)
    write_run(tmp_path, "yarn", 0, name="other", pe_more={"ramp": "paper"})
    write_run(tmp_path, "alibi", 0, settings={"texts": "others", "lengths": [128, 2048]})

    table = over_seeds(results(frame.load(tmp_path)))
    lines_of_texts = [set(rows.line) for _, rows in table.groupby("eval")]
    of_same_texts = {
        "rope (max_steps 600)",
        "rope (max_steps 900)",
        "yarn (ramp code)",
        "yarn (ramp paper)",
        "rope (max_steps 600) read as yarn at scale 8 (beta_fast 2.0)",
        "rope (max_steps 600) read as yarn at scale 8 (beta_fast 32.0)",
    }
    # Nothing to tell alibi from: that it was trained for as long as others is in a column.
    assert of_same_texts in lines_of_texts
    assert {"alibi"} in lines_of_texts
    assert set(table.seeds[table.line == "rope (max_steps 600)"]) == {2}


def test_several_differences_are_named_by_the_run(tmp_path):
    write_run(tmp_path, "rope", name="plain")
    for seed in (1, 2):  # whose seed is left out
        write_run(tmp_path, "rope", seed, name=f"tuned-s{seed}", config={"optim.lr": 1.0, "trainer.max_steps": 900})
    write_run(tmp_path / "more", "rope", name="tuned", config={"optim.lr": 3.0, "trainer.max_steps": 900})
    write_run(tmp_path, "alibi", config={"init_from": "runs/a"})
    write_run(tmp_path, "alibi", name="second")
    labels = set(frame.load(tmp_path).runs.label)
    assert labels == {"plain", "tuned", "tuned [2]", "alibi (init_from runs/a)", "alibi"}  # never "init_from None"
    settings = frame.load(tmp_path).runs.drop_duplicates("label").set_index("label").settings
    assert settings["tuned"] == "rope (optim.lr 3.0, max_steps 900)"
    assert settings["tuned [2]"] == "rope (optim.lr 1.0, max_steps 900)"


def test_what_only_watches_makes_no_group(tmp_path):
    for copy in ("a", "b"):  # the same run twice counts once
        write_run(tmp_path / copy, "rope", 0)
    write_run(tmp_path, "rope", 1, config={"trainer.log_every": 1, "logger.kind": "csv", "trainer.devices": 2})
    write_run(tmp_path, "rope", 2, config={"runs_dir": "elsewhere", "overwrite": True})
    runs = frame.load(tmp_path)
    assert runs.runs.groupby("group").seed.apply(sorted).tolist() == [[0, 1, 2]]
    ((_, why),) = runs.left_out
    assert "has the same settings and seed" in why


@pytest.mark.parametrize(
    "parents", [["runs/rope", "runs/rope-s1"], ["runs/0/rope", "runs/1/rope"], ["the-same-s1", "the-same-s1"]]
)
def test_seeds_may_start_from_weights_of_their_own(tmp_path, parents):
    for seed, parent in enumerate(parents):
        write_run(tmp_path, "rope", seed, config={"init_from": parent})
    write_run(tmp_path, "rope", 0, name="another", config={"init_from": "runs/alibi"})
    runs_of_group = frame.load(tmp_path).runs.groupby("group").size()
    assert sorted(runs_of_group) == [1, 2]


def test_data_and_lengths_are_sections(tmp_path):
    write_run(tmp_path, "rope", identity="a")
    write_run(tmp_path, "rope", 1, identity="b")
    write_run(tmp_path, "rope", task="recall")
    sections = sorted(frame.load(tmp_path).runs.section)
    assert len(set(sections)) == 3
    assert sections[2] == "recall, trained at 256 tokens"
    assert sections[0].startswith("code (")


def test_a_task_is_told_by_the_seeds_that_learned_it(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "fox", seed, task="recall", skipped=(2048,))
    guesses = write_run(tmp_path, "rope", task="recall", skipped=(2048,))
    with edited(results_file(guesses)) as values:
        for measured in values["measured"]:
            measured["errors"] = [32 if measured["difficulty"] == "sparse" else 16] * len(measured["errors"])
    table = only(tmp_path, quantity="error")
    assert table.loc[("rope", "sparse", 256)][["value", "learned", "seeds"]].tolist() == [50, 0, 1]
    assert table.loc[("fox", "sparse", 256)][["value", "learned", "seeds"]].tolist() == [0, 2, 2]
    assert table.difference.isna().all()  # errors are bounded, and seeds are few
    which, _ = answer(results(frame.load(tmp_path)))
    assert which.startswith("At 1,024 tokens (4x), in sparse, the difficulty that is worst there, fox has the fewest")
    assert which.endswith("the median over the 2 of 2 seeds that learned the task.")


def test_far_text_is_pooled_over_what_is_far(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "cope", seed, kinds=("far_copies", "ruler"))
    far = only(tmp_path, "far_copies", "gain").value["cope", "far"]
    assert far.item() == pytest.approx(0.6, abs=0.05)

    rows = frame.load(tmp_path).results
    rows = rows[(rows.kind == "ruler") & (rows.quantity == "found")]
    is_far = (1 - rows.depth) * rows.length >= 256
    assert only(tmp_path, "ruler", "found").value["cope", "far"].item() == pytest.approx(rows[is_far].value.mean())


def test_checkpoints_are_lines_of_their_own(tmp_path):
    run = write_run(tmp_path, "rope", 0)
    values = yaml.safe_load((run / "config.yaml").read_text())
    synthetic.evaluate(run, values, step=200, worse=0.5)
    table = only(tmp_path)
    assert set(table.index.levels[0]) == {"rope", "rope at step 200"}
    assert table.gain["rope at step 200", "text", 512] == pytest.approx(-0.7, abs=0.1)  # against its own 1x


def test_a_run_that_starts_from_a_model_is_compared_with_it(tmp_path):
    """As the model reads, and read by the run's own encoding; what is gained is over the model on its cut text."""
    run = write_run(tmp_path, "fox", config={"train_len": 1024, "init_from": "hf:rope"})
    after = Evaluation.load(results_file(run))
    after.model_copy(update={"train_len": 1024}).save(run / "evals")
    values = yaml.safe_load((run / "config.yaml").read_text())
    for pe in ("fox", "rope"):
        synthetic.evaluate(run, values | {"pe": synthetic.options(pe)}, step=0)
    (path,) = run.glob("evals/*rope*")
    model = Evaluation.load(path)
    model.model_copy(update={"variant": model.variant.model_copy(update={"zero_shot": True})}).save(run / "evals")
    table = only(tmp_path)
    assert set(table.index.levels[0]) == {"fox", "fox before", "fox before read as fox"}
    assert set(table.reading) == {"after", "before", "before, read as fox"}
    assert set(table.reference) == set(table.base) == {"fox before"}
    assert set(table.cut) == {256}
    before = table.value["fox before", "text"]
    for length, row in table.loc["fox", "text"].iterrows():
        assert row.difference == pytest.approx(row.value - before[length])
        assert row.gain == pytest.approx(before[min(length, 256)] - row.value)
    (which, *_) = answer(results(frame.load(tmp_path)))
    assert "over the model before on the text cut to 256 tokens" in which


def no_results(values):
    values.clear()


def other_texts(values):
    values["measured"][0]["bytes"][0] = 65


def odd_parts(values):
    for i, measured in enumerate(values["measured"]):
        measured.update(task="\0" * i, depth=0.5)


def diverge(values):
    for measured in values["measured"]:
        measured["nats"] = [math.nan] * len(measured["nats"])


@pytest.mark.parametrize(
    ("damage", "is_left_out"), [(no_results, True), (other_texts, True), (odd_parts, False), (diverge, False)]
)
def test_a_broken_run_breaks_no_report(tmp_path, damage, is_left_out):
    write_run(tmp_path, "rope", 0)
    run = write_run(tmp_path, "alibi", 0)
    with edited(results_file(run)) as values:
        damage(values)
    run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff<b>"))

    runs = frame.load(tmp_path)
    assert "rope" in set(runs.runs.encoding)
    for text in (page.html(runs), page.markdown(runs), page.csv(runs)):
        text.encode()  # a name that is not UTF-8 can be written
    assert [reason.startswith("broken: ") for _, reason in runs.left_out] == [True] * is_left_out
    if damage is diverge:  # first by name, and last by what it measured
        rank = only(tmp_path)["rank"]
        assert rank["alibi", "text", 2048] > rank["rope", "text", 2048]


def test_other_documents_are_never_paired(tmp_path):
    """Documents of the same sizes, but of other texts: sums alone would not tell them apart."""
    by_two = [i // 2 for i in range(TEXTS)]
    documents_of = {
        "alibi": by_two,
        "fox": [f"file {number}" for number in by_two],
        "rope": [i % (TEXTS // 2) for i in range(TEXTS)],
    }
    for pe, documents in documents_of.items():
        with edited(results_file(write_run(tmp_path, pe))) as values:
            for measured in values["measured"]:
                measured["documents"] = documents
    runs = frame.load(tmp_path)
    ((_, reason),) = runs.left_out
    assert "was measured on other documents than its settings say" in reason
    assert set(runs.results.line) == {"alibi", "fox"}
    assert set(runs.results.documents) == {TEXTS // 2}


def test_results_in_one_file_are_compared_like_their_runs(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a", "rope", seed, variants=("yarn",), kinds=("lengths", "far_copies"))
        write_run(tmp_path / "a", "alibi", seed, config={"runs_dir": "/secret"})
        write_run(tmp_path / "b", "fox", seed)
    write_run(tmp_path / "a", "cope", finished=False)
    file = tmp_path / "a.jsonl.gz"
    frame.save(file, [tmp_path / "a"])
    own, theirs = (results(frame.load([place, tmp_path / "b"])) for place in (tmp_path / "a", file))
    numbers = ["value", "low", "high", "gain", "difference", "behind"]
    assert own.line.tolist() == theirs.line.tolist()
    assert own[numbers].to_numpy() == pytest.approx(theirs[numbers].to_numpy(), abs=2e-4, nan_ok=True)
    assert set(pd.read_json(file, lines=True).length) == set(LENGTHS)
    assert "secret" not in gzip.decompress(file.read_bytes()).decode()

    # An option that the file is older than has its default.
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    for row in rows:
        del row["config"]["model.conv"]
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    write_run(tmp_path / "new", "rope", 2, config={"trainer.kernels": True})  # exact, so no other line
    assert set(frame.load([file, tmp_path / "new"]).runs.label) == {"rope", "alibi"}
    file.write_bytes(file.read_bytes()[:-20])
    ((path, why),) = frame.load(file).left_out
    assert (path, why.startswith("broken: ")) == (str(file), True)


def test_curves_are_those_of_the_runs_that_have_them(tmp_path):
    run = write_run(tmp_path / "a", "rope")
    rows = [{"step": 10, "tokens": 40, "val/loss": 2.0}, {"step": 20, "tokens": 80, "val/loss": 1.0}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (write_run(tmp_path / "a", "fox") / "metrics.jsonl").write_text("{}\n")  # damaged
    curves = frame.curves(frame.load([tmp_path, tmp_path / "a", run]))  # each run counts once
    assert curves[["step", "tokens", "val/loss"]].to_dict("records") == rows
    assert set(curves.label) == {"rope"}
    with pytest.raises(ConfigError, match="none is not a directory"):
        frame.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert frame.curves(frame.load(tmp_path / "empty")).empty


def test_parents_whose_names_are_numbers_are_two_lines(tmp_path):
    for parent in ("runs/a-0", "runs/a-1"):
        for seed in (0, 1):
            write_run(tmp_path, "rope", seed, name=f"{parent[-1]}-{seed}", config={"init_from": parent})
    names_of_group = frame.load(tmp_path).runs.groupby("group").name.apply(sorted)
    assert sorted(names_of_group) == [["0-0", "0-1"], ["1-0", "1-1"]]
