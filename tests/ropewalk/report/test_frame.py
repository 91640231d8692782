"""Runs as one long table, against sums done by hand from the JSON files."""

import gzip
import json
import math
import os

import numpy as np
import pandas as pd
import pytest
import synthetic
import yaml
from scipy import stats
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


def bits_per_byte(run, length, file="lengths-rope-*"):
    """Bits per byte of a run at one length, read without our classes."""
    (path,) = (run / "evals").glob(f"{file}.json")
    measured = json.loads(path.read_text())["measured"]
    (at_length,) = [m for m in measured if m["length"] == length]
    return sum(at_length["nats"]) / math.log(2) / sum(at_length["bytes"])


def test_means_differences_gains_and_lengths(tmp_path):
    rope_runs = [write_run(tmp_path, "rope", seed, variants=["yarn"]) for seed in (0, 1, 2)]
    fox_runs = [write_run(tmp_path, "fox", seed, noise=0.002) for seed in (1, 2, 3)]
    table = only(tmp_path)
    assert set(table.index.levels[0]) == {"rope", "rope read as yarn at scale 8", "fox"}
    for length in table.index.levels[2]:
        rope = np.array([bits_per_byte(run, length) for run in rope_runs])
        of_rope = table.loc[("rope", "text", length)]
        assert of_rope.value == pytest.approx(rope.mean())
        assert of_rope.seeds == 3
        cut = np.array([bits_per_byte(run, min(length, 256)) for run in rope_runs])
        assert of_rope.gain == pytest.approx((cut - rope).mean(), abs=1e-9)
        assert math.isnan(of_rope.difference)

        # Paired over seeds 1 and 2, which both have.
        fox = np.array([bits_per_byte(run, length, file="lengths-fox-*") for run in fox_runs[:2]])
        of_fox = table.loc[("fox", "text", length)]
        assert of_fox.difference == pytest.approx((fox - rope[1:]).mean())
        assert of_fox.lead == pytest.approx((cut[1:] - fox).mean())

    yarn = table.loc[("rope read as yarn at scale 8", "text", 256)]
    assert yarn.gain < -0.3  # against the same weights as trained
    assert table.verdict["fox", "text", 2048] == "better"
    assert table.verdict["rope", "text", 2048] == "worse"


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


def test_only_and_exclude(tmp_path):
    for name in ("rope-a", "rope-b", "alibi-a"):
        pe, letter = name.split("-")
        write_run(tmp_path, pe, name=name, config={"optim.lr": float(ord(letter))})  # so that a and b are two lines
    assert set(frame.load(tmp_path, only=["rope-*"]).runs["name"]) == {"rope-a", "rope-b"}
    assert set(frame.load(tmp_path, only=["*-a"], exclude=["al*", "x"]).runs["name"]) == {"rope-a"}


def test_curves_and_costs(tmp_path):
    for seed in (0, 1):
        run = write_run(tmp_path, "rope", seed)
        first = {"step": 10, "tokens": 40, "val/bits_per_byte": 2.0 + seed}
        second = {"step": 20, "tokens": 80, "val/bits_per_byte": 1.0 + seed}
        (run / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    damaged = write_run(tmp_path, "fox")  # has no curve
    (damaged / "metrics.jsonl").write_text("{}\n")
    runs = frame.load(tmp_path)
    curves = frame.curves(runs)
    assert list(curves.seed) == [0, 0, 1, 1]
    assert curves.groupby("tokens")["val/bits_per_byte"].mean().to_dict() == {40: 2.5, 80: 1.5}
    assert set(runs.runs.tokens_per_s) == {9000.0}
    assert list(frame.curves(frame.load(tmp_path, only=["none"]))) == list(curves)[:-1]


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

    runs = frame.load(tmp_path)
    rows = runs.results[(runs.results.kind == "ruler") & (runs.results.quantity == "found")]
    distance = (1 - rows.depth) * rows.length
    found = only(tmp_path, "ruler", "found")
    assert found.value["cope", "far"].item() == pytest.approx(rows[distance >= 256].value.mean())
    for length, value in found.value["cope", "mean"].items():
        of_tasks = rows[(rows.length == length) & (rows.task != "mean")]
        mean_over_depths = of_tasks.groupby("task").value.mean()
        assert value == pytest.approx(mean_over_depths.mean())


def test_cells_of_the_table_are_plain(tmp_path):
    write_run(tmp_path, "rope", 0, kinds=("lengths", "by_position", "far_copies", "ruler"))
    runs = frame.load(tmp_path)
    table = results(runs)
    for column in table.drop(columns=["seed", "rank", "learned", "cut"]):
        assert set(map(type, table[column].tolist())) <= {str, int, float, bool}, column
    assert all(row.sample.units.size == row.documents for row in runs.results.itertuples())


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


def no_part(values):
    values["measured"][0].update(span=[-1, 2])


def no_1x(values):
    del values["measured"][1]


def diverge(values):
    for measured in values["measured"]:
        measured["nats"] = [math.nan] * len(measured["nats"])


@pytest.mark.parametrize(
    ("damage", "is_left_out"),
    [(no_results, True), (other_texts, True), (odd_parts, False), (no_part, True), (no_1x, False), (diverge, False)],
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
    assert len(runs.left_out) == is_left_out
    assert all(reason.startswith("broken: ") for _, reason in runs.left_out)
    if damage is diverge:
        rank = only(tmp_path)["rank"]
        first, last = rank.index.levels[0][rank.index.levels[0].str.contains("alibi")][0], "rope"
        assert rank[first, "text", 2048] > rank[last, "text", 2048]  # first by name, and last by what it measured


def test_folders(tmp_path):
    with pytest.raises(ConfigError, match="none is not a directory"):
        frame.load(tmp_path / "none")
    runs = frame.load(tmp_path)
    assert len(runs.runs) == 0
    assert runs.left_out == []

    run = write_run(tmp_path / "a", "rope")
    write_run(tmp_path / ".hidden", "alibi")
    assert list(frame.load([tmp_path, tmp_path / "a", run]).runs.encoding) == ["rope"]


def test_other_documents_are_never_paired(tmp_path):
    """Documents of the same sizes, but of other texts: sums alone would not tell them apart."""
    by_two = [i // 2 for i in range(TEXTS)]
    documents_of = {
        "alibi": by_two,
        "fox": [f"file {number}" for number in by_two],
        "rope": [i % (TEXTS // 2) for i in range(TEXTS)],
    }
    for pe, documents in documents_of.items():
        run = write_run(tmp_path, pe)
        evaluation = Evaluation.load(results_file(run))
        measured = [m.model_copy(update={"documents": documents}) for m in evaluation.measured]
        evaluation.model_copy(update={"measured": measured}).save(run / "evals")

    runs = frame.load(tmp_path)
    ((_, reason),) = runs.left_out
    assert "was measured on other documents than its settings say" in reason
    assert set(runs.results.line) == {"alibi", "fox"}
    assert set(runs.results.documents) == {TEXTS // 2}

    alibi, fox = (sample.values for sample in runs.results["sample"][runs.results.length == 2048])
    paired = (fox - alibi).reshape(-1)
    bytes_of_document = 128
    standard_error = paired.std(ddof=1) / math.sqrt(TEXTS // 2) / bytes_of_document
    row = only(tmp_path).loc[("fox", "text", 2048)]
    half = stats.t.ppf(0.975, TEXTS // 2 - 1) * standard_error
    assert row.documents == TEXTS // 2
    assert (row.difference_high - row.difference_low) / 2 == pytest.approx(half, rel=1e-6)


def test_a_file_that_is_older_than_an_option_has_its_default(tmp_path):
    write_run(tmp_path / "old", "rope", 0)
    file = tmp_path / "old.jsonl.gz"
    frame.save(file, [tmp_path / "old"])
    lines = []
    for line in gzip.decompress(file.read_bytes()).decode().splitlines():
        row = json.loads(line)
        del row["config"]["model.conv"]
        lines.append(json.dumps(row) + "\n")
    file.write_bytes(gzip.compress("".join(lines).encode()))
    write_run(tmp_path / "new", "rope", 1)
    write_run(tmp_path / "new", "rope", 2, config={"trainer.kernels": True})  # exact, so no other line
    assert set(frame.load([file, tmp_path / "new"]).runs.label) == {"rope"}


def test_results_in_one_file_are_compared_like_their_runs(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a", "rope", seed, variants=("yarn",), kinds=("lengths", "far_copies"))
        write_run(tmp_path / "a", "alibi", seed, config={"runs_dir": "/secret"})
        write_run(tmp_path / "b", "fox", seed)
    write_run(tmp_path / "a", "cope", finished=False)
    file = tmp_path / "a.jsonl.gz"
    frame.save(file, [tmp_path / "a"])
    runs, of_file = frame.load([tmp_path / "a", tmp_path / "b"]), frame.load([file, tmp_path / "b"])
    assert len(of_file.runs) == 6
    assert of_file.left_out == []
    own, theirs = results(runs), results(of_file)
    numbers = ["value", "low", "high", "gain", "difference", "behind"]
    assert own.line.tolist() == theirs.line.tolist()
    assert own[numbers].to_numpy() == pytest.approx(theirs[numbers].to_numpy(), abs=2e-4, nan_ok=True)
    assert list(frame.load(file, only=["alibi*"]).runs.encoding) == ["alibi", "alibi"]
    table = pd.read_json(file, lines=True)
    assert set(table[table.kind == "lengths"].length) == set(LENGTHS)
    assert "secret" not in gzip.decompress(file.read_bytes()).decode()
    file.write_bytes(file.read_bytes()[:-20])
    ((path, why),) = frame.load(file).left_out
    assert (path, why.startswith("broken: ")) == (str(file), True)
