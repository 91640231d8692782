"""Runs as one long table: what shares a line, what is compared with what, and what is left out."""

import gzip
import math
import os

import pytest
import synthetic
import yaml
from synthetic import TEXTS, edited, write_run

from ropewalk.report import frame, page
from ropewalk.report.answer import answer
from ropewalk.report.table import over_seeds, results


def measured(folder, measure="lengths", quantity="loss"):
    """The rows over all seeds of one quantity of a measure, by line, part and length."""
    rows = over_seeds(results(frame.load(folder)))
    rows = rows[(rows.measure == measure) & (rows.quantity == quantity)]
    return rows.set_index(["line", "part", "length"]).sort_index()


def results_file(run):
    (path,) = (run / "evals").glob("*.json")
    return path


def test_other_settings_are_other_lines(tmp_path):
    """Options of the encoding, of its reading, of the training and the texts: none is averaged as seeds."""
    for seed, beta_fast in enumerate((2.0, 32.0)):
        write_run(tmp_path, "rope", seed, variants=[("yarn", {"beta_fast": beta_fast})])
    longer = write_run(tmp_path, "rope", 0, name="longer", config={"trainer.max_steps": 900})
    synthetic.evaluate(longer, yaml.safe_load((longer / "config.yaml").read_text()), step=200)
    for folder in ("a", "b"):  # several differences are named by the run, whose name two may have
        several = {"optim.lr": ord(folder), "trainer.max_steps": 900}
        write_run(tmp_path / folder, "yarn", name="tuned", config=several)
    write_run(tmp_path, "yarn", 1)
    write_run(tmp_path, "alibi", 0, settings={"texts": "others"})
    table = over_seeds(results(frame.load(tmp_path)))
    of_texts = [set(rows.line) for _, rows in table.groupby("eval")]
    assert sorted(of_texts, key=len) == [
        {"alibi"},
        {
            "rope (max_steps 600)",
            "rope (max_steps 900)",
            "rope (max_steps 900) at step 200",
            "tuned",
            "tuned [2]",
            "yarn-code",
            "rope (max_steps 600) read as yarn at scale 8 (beta_fast 2.0)",
            "rope (max_steps 600) read as yarn at scale 8 (beta_fast 32.0)",
        },
    ]
    assert set(table.seeds[table.line == "rope (max_steps 600)"]) == {2}
    is_itself = table.base == table.line
    assert is_itself.equals(~table.zero_shot.astype(bool))  # what a line is compared with
    # Whoever reads the answer is told of the line that is not in it.
    assert answer(table)[-1].endswith("so not compared: alibi.")


def test_what_only_watches_makes_no_line(tmp_path):
    write_run(tmp_path / "a", "rope", 0, finished=False)
    for copy in ("b", "c"):  # the same run counts once, complete if it can
        write_run(tmp_path / copy, "rope", 0)
    write_run(tmp_path, "rope", 1, config={"trainer.log_every": 1, "trainer.devices": 2, "runs_dir": "elsewhere"})
    runs = frame.load(tmp_path)
    assert runs.runs.groupby("group").seed.apply(sorted).tolist() == [[0, 1]]
    assert runs.runs.done.all()
    assert "has the same settings and seed" in runs.left_out[-1][1]


@pytest.mark.parametrize(
    ("parents", "lines"),
    [
        (["runs/rope", "runs/rope-s1"], 1),
        (["the-same-s1", "the-same-s1"], 1),
        (["a", "b"], 2),
    ],
)
def test_seeds_may_start_from_weights_of_their_own(tmp_path, parents, lines):
    for seed, parent in enumerate(parents):
        write_run(tmp_path, "rope", seed, config={"init_from": parent})
    assert frame.load(tmp_path).runs.group.nunique() == lines


def test_sections_share_data_and_texts_or_training_lengths(tmp_path):
    write_run(tmp_path, "rope", 1, identity="b")
    write_run(tmp_path, "rope", name="short")
    write_run(tmp_path, "alibi", name="unmeasured", config={"train_len": 512}, finished=False)
    long = write_run(tmp_path, "rope", name="long", config={"train_len": 512})
    with edited(results_file(long)) as values:
        values["train_len"] = 512
    write_run(tmp_path, "rope", name="other", config={"train_len": 1024}, finished=False)
    of_runs = frame.load(tmp_path).runs.groupby("section").name.apply(sorted)
    assert sorted(of_runs) == [["long", "short", "unmeasured"], ["other"], ["rope-code-s1"]]


def test_a_task_is_told_by_the_seeds_that_learned_it(tmp_path):
    """In percent of wrong answers; a seed that guesses is not averaged with one that knows."""
    errors = {
        ("fox", 0): {"dense": 0, "sparse": 2},
        ("fox", 1): {"dense": 32, "sparse": 32},
        ("rope", 0): {"dense": 16, "sparse": 32},
    }
    for (pe, seed), of_difficulty in errors.items():
        run = write_run(tmp_path, pe, seed, task="recall")
        with edited(results_file(run)) as values:
            for part in values["measured"]:
                part["errors"] = [of_difficulty[part["difficulty"]]] * TEXTS
    table = measured(tmp_path, quantity="error")
    columns = ["value", "learned", "seeds"]
    assert table.loc[("rope", "sparse", 256), columns].tolist() == [50, 0, 1]
    assert table.loc[("fox", "sparse", 256), columns].tolist() == [3.125, 1, 2]
    assert table[["difference", "low"]].isna().all(axis=None)  # errors are bounded, and seeds are few
    assert "in sparse, the difficulty that is worst there, fox has the fewest errors" in answer(table.reset_index())[0]


def test_far_text_is_pooled_over_what_is_far(tmp_path):
    write_run(tmp_path, "cope", kinds=("far_copies", "ruler"))
    assert measured(tmp_path, "far_copies", "gain").value["cope", "far"].item() == pytest.approx(0.6, abs=0.05)
    rows = measured(tmp_path, "ruler", "found").reset_index()
    is_far = (1 - rows.depth) * rows.length >= 256
    assert rows.value[rows.part == "far"].item() == pytest.approx(rows.value[is_far].mean())


def test_a_run_that_starts_from_a_model_is_compared_with_it(tmp_path):
    """As the model reads, and read by the run's own encoding; what is gained is over the model on its cut text."""
    run = write_run(tmp_path, "fox", config={"train_len": 1024, "init_from": "hf:rope"})
    with edited(results_file(run)) as values:
        values["train_len"] = 1024
    config = yaml.safe_load((run / "config.yaml").read_text())
    for pe in ("fox", "rope"):
        synthetic.evaluate(run, config | {"pe": synthetic.options(pe)}, step=0)
    (path,) = run.glob("evals/*rope*")
    with edited(path) as values:
        values["variant"]["zero_shot"] = True
    table = measured(tmp_path)
    assert table.reset_index().groupby("line").reading.first().to_dict() == {
        "fox": "after training",
        "model before fox": "before training",
        "model before fox read as fox": "before training read as fox",
    }
    assert set(table.reference) == set(table.base) == {"model before fox"}
    before = table.value["model before fox", "text"]
    for length, row in table.loc["fox", "text"].iterrows():
        assert row.difference == pytest.approx(row.value - before[length])
        assert row.gain == pytest.approx(before[min(length, 256)] - row.value)
    assert "over the model before this training on the text cut to 256 tokens" in answer(table.reset_index())[0]


def diverge(values):
    for part in values["measured"]:
        part["nats"] = [math.nan] * TEXTS


DAMAGES = {
    "no results": lambda values: values.clear(),
    "other texts": lambda values: values["measured"][0]["bytes"].__setitem__(0, 65),
    "other documents": lambda values: values["measured"][0].update(documents=[n // 2 for n in range(TEXTS)]),
    "odd parts": lambda values: values["measured"][0].update(task="\0", depth=0.5),
    "diverged": diverge,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_run_breaks_no_report(tmp_path, damage):
    for pe in ("alibi", "fox", "rope"):
        run = write_run(tmp_path, pe)
        with edited(results_file(run)) as values:
            for part in values["measured"]:
                part["documents"] = [n % 12 for n in range(TEXTS)]
            if pe == "rope":
                DAMAGES[damage](values)
    run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff<b>"))
    runs = frame.load(tmp_path)
    for text in (page.html(runs), page.csv(runs)):
        text.encode()  # a name that is not UTF-8 can be written
    is_broken = damage not in ("odd parts", "diverged")
    assert [reason.startswith("broken:") for _, reason in runs.left_out].count(True) == is_broken
    assert {"alibi", "fox"} <= set(runs.results.line)
    if damage == "diverged":
        rows = measured(tmp_path).loc[:, "text", 2048]
        assert rows["rank"]["rope"] == 3
        assert not rows.tied["rope"]


def test_results_in_one_file_are_compared_like_their_runs(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a", "rope", seed, variants=("yarn",), kinds=("lengths", "far_copies"))
        write_run(tmp_path / "a", "alibi", seed, config={"runs_dir": "/secret"})
        write_run(tmp_path / "b", "fox", seed)
    file = tmp_path / "a.jsonl.gz"
    frame.save(file, [tmp_path / "a"])
    own, theirs = (results(frame.load([place, tmp_path / "b"])) for place in (tmp_path / "a", file))
    numbers = ["value", "low", "high", "gain", "difference", "behind"]
    assert own.line.tolist() == theirs.line.tolist()
    assert own[numbers].to_numpy() == pytest.approx(theirs[numbers].to_numpy(), abs=2e-4, nan_ok=True)
    assert (own.behind[own["rank"] == 1] == 0).all()
    assert "secret" not in gzip.decompress(file.read_bytes()).decode()
    file.write_bytes(file.read_bytes()[:-20])
    ((path, why),) = frame.load(file).left_out
    assert (path, why.startswith("broken: ")) == (str(file), True)
