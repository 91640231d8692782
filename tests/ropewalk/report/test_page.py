"""The page needs nothing else and has all numbers, names are only text on it; the end of a run has its numbers."""

import html
import math
import re
from types import SimpleNamespace

from conftest import pe_options
from synthetic import MEASURES, evaluate, write_run, write_runs

import ropewalk
from ropewalk.evaluation import archive
from ropewalk.report import frame, loggers, page
from ropewalk.report.answer import amount, answer
from ropewalk.report.table import over_seeds, results

EVIL = "<script>alert(1)<!--script> \"'%{x} <b>|`*\x1b \\1 {{ 7 * 7 }}"


def words_of(text):
    """What stands between the tags of a page, as a reader sees it."""
    pieces = html.unescape(re.sub("<[^>]*>", "\n", text)).split("\n")
    return {piece.strip().replace("\N{MINUS SIGN}", "-").replace("\u00a0", " ") for piece in pieces}


def test_the_page_has_every_number_and_needs_nothing(tmp_path):
    write_runs(
        tmp_path,
        "rope",
        seeds=(0, 1),
        kinds=MEASURES,
        variants=["yarn"],
        falls=0.06,
    )
    write_runs(tmp_path, "fox", seeds=(0, 1), falls=0.06)
    write_runs(tmp_path, "cope", seeds=(0, 1), task="recall")
    write_run(tmp_path, "nope", settings={"sequences": 5})
    write_run(tmp_path, "alibi", 3, finished=False)
    runs = frame.load(tmp_path)
    text = page.html(runs)
    assert not re.search(r"<(script|iframe|object|embed|base|img)\b|\ssrc=|href=\"(?!#|data:,)", text)
    assert "alibi-code-s3" in text  # left out, as it is not finished
    said = words_of(text)
    assert "python train.py" in said

    table = results(runs)
    for _, of_section in table.groupby("section"):
        assert said.issuperset(answer(of_section))
    rows = over_seeds(table).query("measure != 'far_copies'")  # which are shown as gains
    for row in rows.itertuples():
        sign = "+" if row.quantity == "gain" else ""
        digits = 3 if "bit" in row.unit else 1
        interval = (math.nan, math.nan) if row.quantity == "error" else (row.low, row.high)
        words = amount(row.value, *interval, sign, digits)
        assert words in said or any(text.startswith(f"{words} (") for text in said)


def test_the_first_table_ranks_the_gains_at_the_longest_text(tmp_path):
    write_runs(tmp_path, "rope", "fox", "cope", variants=["yarn"])
    table = ropewalk.runs(tmp_path)
    (_, first), *_ = page.grids(table, [])
    last = over_seeds(table).query("length == 2048").sort_values("value")
    gains = [(row.line, amount(row.gain, row.gain_low, row.gain_high, "+")) for row in last.itertuples()]
    assert list(first["gain at 2,048"].items()) == gains


def test_a_table_that_cannot_be_made_is_left_out_alone(tmp_path):
    """Here as its title says the settings of the measure."""
    table = ropewalk.runs(write_run(tmp_path, "rope", kinds=["lengths", "ruler"]))
    whole = [title for title, _ in page.grids(table, [])]
    odd = table.assign(eval=table["eval"].mask(table.measure == "ruler", "no JSON"))
    left_out = []
    assert [title for title, _ in page.grids(odd, left_out)] == [title for title in whole if "Ruler" not in title]
    assert {what for what, _ in left_out} == {"the tables of ruler"}


def test_distances_ascend_in_the_table_of_an_archive(tmp_path):
    runs = frame.load(write_run(tmp_path, kinds=["far_copies"]))
    archive.write(tmp_path / "a.parquet", runs.runs, runs.results)
    (_, cells), _ = page.grids(ropewalk.runs(tmp_path / "a.parquet"), [])
    assert list(cells) == ["32-63", "64-127", "128-255", "256-511", "512-1023", "1024-2047", "far"]


def test_names_are_only_text(tmp_path):
    names = {
        "data.name": EVIL,
        "optim.lr": EVIL,
    }
    write_run(tmp_path, "rope", variants=["yarn"], config=names)
    write_run(tmp_path, "rope", name=EVIL, config=names | {"optim.lr": 1.0}, finished=False)
    runs = frame.load(tmp_path)
    text = page.html(runs)
    assert "<script" not in text
    assert "7 * 7" in text
    assert "<script" not in page.markdown(runs).replace("\\<", "")


def test_the_end_of_a_run_has_its_numbers(tmp_path, capsys):
    run = write_run(tmp_path, "rope", name="[red]r", variants=["yarn"], kinds=MEASURES)
    page.show(run, SimpleNamespace(eval=SimpleNamespace(tolerance=0.02)))
    text = capsys.readouterr().out
    assert text.startswith("[red]r: ")
    gains = over_seeds(ropewalk.runs(run)).query("length == 2048 and rank == 1").gain
    assert f"{gains.max():+.3f}" in text


def test_measurements_with_several_settings_are_not_mixed(tmp_path):
    """In the overview of the page and in trackers, whose names have no place for a second number."""
    kinds = ["lengths", "far_copies"]
    run = write_run(tmp_path, kinds=kinds)

    def shown():
        table = results(frame.load(run))
        ((_, first), *_) = page.grids(table, [])
        return loggers.summary_metrics(table), first.to_dict()

    before = shown()
    evaluate(run, settings={"sequences": 99, "texts": "others"}, noise=3.0, kinds=kinds)

    assert shown() == before


def test_the_costs_of_a_run_are_not_those_of_the_model_it_starts_from(tmp_path):
    run = write_run(tmp_path, "fox", config={"init_from": "hf:rope"})
    evaluate(run, {"pe": pe_options("rope")}, step=0)
    _, cells = page.costs(over_seeds(results(frame.load(tmp_path))))

    assert cells.index.tolist() == ["fox"]


def test_what_else_differs_between_encodings_is_said(tmp_path):
    """Their labels stay short."""
    write_run(tmp_path, "rope", config={"optim.lr": 0.1})
    write_run(tmp_path, "alibi", config={"optim.lr": 0.2, "trainer.max_steps": 900})
    table = results(frame.load(tmp_path))
    _, cells = page.costs(over_seeds(table))

    assert cells["differs in"].to_dict() == {
        "alibi": "alibi (optim.lr 0.2, max_steps 900)",
        "rope": "rope (optim.lr 0.1, max_steps 600)",
    }
    assert answer(table)[-1] == "The lines were not trained alike: they also differ in optim.lr, trainer.max_steps."
    assert "not trained alike" not in " ".join(answer(table[table.line == "rope"]))
