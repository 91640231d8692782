"""Runs as DataFrames and comparisons of them, against sums done by hand from the JSON files."""

import gzip
import json
import math
import os

import numpy as np
import pandas as pd
import pytest
import synthetic
import yaml
from synthetic import LENGTHS, TEXTS, write_run

from conf.schema import ConfigError
from ropewalk.evaluation.results import Evaluation
from ropewalk.report import frame, page, retrieval
from ropewalk.report.answer import answer
from ropewalk.report.comparison import Key, tables
from ropewalk.report.grids import numbers


def only(runs, kind="lengths", quantity=None):
    """The single table of this kind, and of this quantity where there are several."""
    of_kind = [table for table in tables(runs) if table.kind == kind]
    if quantity is not None:
        of_kind = [table for table in of_kind if table.quantity == quantity]
    (table,) = of_kind
    return table


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
    table = only(frame.load(tmp_path))
    assert set(table.lines.index) == {"rope", "rope read as yarn at scale 8", "fox"}
    for length in table.lengths:
        rope = np.array([bits_per_byte(run, length) for run in rope_runs])
        mean = table.means["rope", "text", length]
        assert mean.value == pytest.approx(rope.mean())
        assert mean.std == pytest.approx(rope.std(ddof=1))
        assert mean.seeds == 3

        cut = np.array([bits_per_byte(run, min(length, 256)) for run in rope_runs])
        gain = table.gains["rope", "text", length]
        assert gain.value == pytest.approx((cut - rope).mean(), abs=1e-9)

        # Paired over seeds 1 and 2, which both have.
        fox = np.array([bits_per_byte(run, length, file="lengths-fox-*") for run in fox_runs[:2]])
        difference = table.differences["fox", "text", length]
        assert difference.value == pytest.approx((fox - rope[1:]).mean())
        assert difference.seeds == 2
        assert ("rope", "text", length) not in table.differences

    assert table.gains["rope read as yarn at scale 8", "text", 256].value < -0.3  # against the same weights as trained
    # Cutting the text is better at every length than YaRN at scale 8.
    assert table.safe == {"rope": 256, "fox": 2048, "rope read as yarn at scale 8": 0}
    assert table.useful["rope"] == 256
    assert table.useful["fox"] == 2048


def test_other_settings_are_other_lines(tmp_path):
    """Options of the encoding, of the variant, of the training and the texts: none is averaged as seeds."""
    write_run(tmp_path, "rope", 0, variants=[("yarn", {"beta_fast": 2.0})])
    write_run(tmp_path, "rope", 1, variants=[("yarn", {"beta_fast": 32.0})])
    write_run(tmp_path, "rope", 0, name="longer", config={"trainer.max_steps": 900})
    write_run(tmp_path, "yarn", 0)
    write_run(tmp_path, "yarn", 0, name="other", pe_more={"ramp": "paper"})
    write_run(tmp_path, "alibi", 0, settings={"texts": "others", "lengths": [128, 2048]})

    of_same_texts, of_other_texts = tables(frame.load(tmp_path))
    assert numbers(of_same_texts)[0].title != numbers(of_other_texts)[0].title  # what differs is said
    assert set(of_same_texts.lines.index) == {
        "rope (max_steps 600)",
        "rope (max_steps 900)",
        "yarn (ramp code)",
        "yarn (ramp paper)",
        "rope (max_steps 600) read as yarn at scale 8 (beta_fast 2.0)",
        "rope (max_steps 600) read as yarn at scale 8 (beta_fast 32.0)",
    }
    assert of_same_texts.lines.seeds["rope (max_steps 600)"] == 2
    # Nothing to tell alibi from: that it was trained for as long as others is in a table.
    assert set(of_other_texts.lines.index) == {"alibi"}


def test_several_differences_are_named_by_the_run(tmp_path):
    write_run(tmp_path, "rope", name="plain")
    for seed in (1, 2):  # whose seed is left out
        write_run(tmp_path, "rope", seed, name=f"tuned-s{seed}", config={"optim.lr": 1.0, "trainer.max_steps": 900})
    write_run(tmp_path / "more", "rope", name="tuned", config={"optim.lr": 3.0, "trainer.max_steps": 900})
    write_run(tmp_path, "alibi", config={"init_from": "runs/a"})
    write_run(tmp_path, "alibi", name="second")
    labels = set(frame.load(tmp_path).runs.label)
    assert labels == {"plain", "tuned", "tuned [2]", "alibi (init_from runs/a)", "alibi"}  # never "init_from None"
    grid = page.differences(frame.load(tmp_path), "code, trained at 256 tokens")
    assert list(grid.frame.loc[["plain", "tuned [2]", "tuned"], "optim.lr"]) == ["0.002", "1", "3"]
    assert grid.frame.loc["alibi (init_from runs/a)", "init_from"] == '"runs/a"'


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


def test_a_task_is_as_safe_as_its_hardest_difficulty(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "fox", seed, task="recall", skipped=(2048,))
    table = only(frame.load(tmp_path))
    assert table.unit == "error in percent"
    assert table.best(1024)[0] == "sparse"
    assert table.safe == {"fox": 512}
    assert table.useful == {}

    # What guesses is as good at 8x as at 1x, and not safe.
    guesses = write_run(tmp_path, "rope", task="recall")
    path = results_file(guesses)
    values = json.loads(path.read_text())
    for measured in values["measured"]:
        measured["errors"] = [32] * len(measured["errors"])
    path.write_text(json.dumps(values))
    table = only(frame.load(tmp_path))
    how_far = " ".join(answer([table])["How far"]).replace("**", "")
    assert "At least 99 % right to 2x: fox; at no length: rope." in how_far
    (grid,) = numbers(table)  # no differences: errors are bounded, and seeds are few
    assert grid.frame.loc["dense: rope", "256 (1x)"] == "0 of 1: 50.0"
    assert grid.frame.loc["sparse: fox", "256 (1x)"] == "2 of 2: 0.0"
    which = answer([table])["Which"]
    assert "**fox** has the lowest error: 0.0 %, the median over the 2 of 2 seeds that learned the task." in which[0]


def test_retrieval_is_pooled_over_what_is_far(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "cope", seed, kinds=("far_copies", "ruler"))
    runs = frame.load(tmp_path)
    copies = retrieval.pooled(only(runs, "far_copies", "gain"))
    assert copies["cope"].value == pytest.approx(0.6, abs=0.05)

    rows = runs.results[(runs.results.kind == "ruler") & (runs.results.quantity == "found")]
    distance = (1 - rows.depth) * rows.length
    far = rows[distance >= 256]
    assert set(far.task) == {"niah_single"}
    keys = only(runs, "ruler", "found")
    assert retrieval.pooled(keys)["cope"].value == pytest.approx(far.value.mean())
    for length in keys.lengths:
        of_tasks = rows[(rows.length == length) & (rows.task != "mean")]
        mean_over_depths = of_tasks.groupby("task").value.mean()
        assert keys.means["cope", "mean", length].value == pytest.approx(mean_over_depths.mean())


def test_cells_of_the_tables_are_plain(tmp_path):
    write_run(tmp_path, "rope", 0, kinds=("lengths", "by_position", "far_copies", "ruler"))
    runs = frame.load(tmp_path)
    for table in (runs.runs, runs.results):
        for column in table:
            assert set(map(type, table[column].tolist())) <= {str, int, float, bool}
    assert set(runs.samples) == set(runs.results.index)


def test_checkpoints_are_lines_of_their_own(tmp_path):
    run = write_run(tmp_path, "rope", 0)
    values = yaml.safe_load((run / "config.yaml").read_text())
    synthetic.evaluate(run, values, step=200, worse=0.5)
    table = only(frame.load(tmp_path))
    assert set(table.lines.index) == {"rope", "rope at step 200"}
    assert table.gains["rope at step 200", "text", 512].value == pytest.approx(-0.7, abs=0.1)  # against its own 1x


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
    path = results_file(run)
    values = json.loads(path.read_text())
    damage(values)
    path.write_text(json.dumps(values))
    run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff<b>"))

    runs = frame.load(tmp_path)
    assert "rope" in set(runs.runs.encoding)
    for text in (page.html(runs), page.markdown(runs), page.csv(runs)):
        text.encode()  # a name that is not UTF-8 can be written
    assert len(runs.left_out) == is_left_out
    assert all(reason.startswith("broken: ") for _, reason in runs.left_out)
    if damage is diverge:
        assert only(runs).best(2048)[1] == ["rope", "alibi"]  # first by name, and last by what it measured


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

    key = Key("fox", "text", 2048)
    table = only(runs)
    alibi, fox = (runs.samples[i].values for i in runs.results.index[runs.results.length == 2048])
    paired = (fox - alibi).reshape(-1)
    bytes_of_document = 128
    standard_error = paired.std(ddof=1) / math.sqrt(TEXTS // 2) / bytes_of_document
    assert table.differences[key].texts == TEXTS // 2
    assert table.differences[key].error == pytest.approx(standard_error, rel=1e-6)
    assert table.gains[key].texts == TEXTS // 2


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
    for own, theirs in zip(tables(runs), tables(of_file), strict=True):
        assert list(own.lines.index) == list(theirs.lines.index)
        for estimates in ("means", "differences", "gains", "behind"):
            assert getattr(own, estimates).keys() == getattr(theirs, estimates).keys()
            for key, e in getattr(own, estimates).items():
                assert getattr(theirs, estimates)[key][:3] == pytest.approx(e[:3], abs=2e-4)
    assert list(frame.load(file, only=["alibi*"]).runs.encoding) == ["alibi", "alibi"]
    table = pd.read_json(file, lines=True)
    assert set(table[table.kind == "lengths"].length) == set(LENGTHS)
    assert "secret" not in gzip.decompress(file.read_bytes()).decode()
    file.write_bytes(file.read_bytes()[:-20])
    ((path, why),) = frame.load(file).left_out
    assert (path, why.startswith("broken: ")) == (str(file), True)
