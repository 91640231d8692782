"""The page needs nothing else and has all numbers, names are only text on it; the end of a run is one screen."""

import html
import re
from types import SimpleNamespace

from synthetic import MEASURES, write_run

from ropewalk.report import frame, page, terminal
from ropewalk.report.answer import amount, answer
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results

EVIL = "<script>alert(1)<!--script> \"'%{x} <b>|`*\x1b \\1 {{ 7 * 7 }}"


def words_of(text):
    """What stands between the tags of a page, as a reader sees it."""
    pieces = html.unescape(re.sub("<[^>]*>", "\n", text)).split("\n")
    return {piece.strip().replace("\N{MINUS SIGN}", "-").replace("\u00a0", " ") for piece in pieces}


def test_the_page_has_every_number_and_needs_nothing(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "rope", seed, kinds=MEASURES, variants=["yarn"], falls=0.06)
        write_run(tmp_path, "fox", seed, falls=0.06)
        write_run(tmp_path, "cope", seed, task="recall")
    write_run(tmp_path, "nope", settings={"sequences": 5})
    write_run(tmp_path, "alibi", 3, finished=False)
    runs = frame.load(tmp_path)
    text = page.html(runs)
    assert not re.search(r"<(script|iframe|object|embed|base|img)\b|\ssrc=|href=\"(?!#|data:,)", text)
    said = words_of(text)
    assert "python train.py" in said
    assert "alibi-code-s3" in text  # left out, as it is not finished

    table = results(runs)
    for _, of_section in table.groupby("section"):
        assert said.issuperset(answer(of_section))
    rows = over_seeds(table)
    for row in rows[rows.measure != "far_copies"].itertuples():  # which are shown as gains
        sign = "+" if row.quantity == "gain" else ""
        digits = 3 if "bit" in row.unit else 1
        assert amount(row.value, row.low, row.high, sign, digits) in said

    # The first table is that of the longest text, its best line first.
    first, *_ = page.grids(table[table.section == page.titles(runs)[0]])
    is_in_it = (rows.length == 2048) & rows.gain.notna() & ~rows.line.isin(["nope", BEST_POSSIBLE])
    lines = rows[is_in_it].sort_values("value")
    gains = [amount(row.gain, row.gain_low, row.gain_high, "+") for row in lines.itertuples()]
    assert list(first.cells.index[1:]) == lines.line.tolist()
    assert list(first.cells["gain at 2,048"][1:]) == gains


def test_names_are_only_text(tmp_path):
    names = {"data.name": EVIL, "optim.lr": EVIL}
    write_run(tmp_path, "rope", variants=["yarn"], config=names)
    write_run(tmp_path, "rope", name=EVIL, config=names | {"optim.lr": 1.0}, finished=False)
    runs = frame.load(tmp_path)
    text = page.html(runs)
    assert "<script" not in text
    assert "7 * 7" in text
    assert "<script" not in page.markdown(runs).replace("\\<", "")


def test_the_end_of_a_run_is_one_screen_with_its_numbers(tmp_path, capsys):
    readings = ["yarn", "rerope", ("yarn", {"beta_fast": 2.0}), ("rerope", {"window": 9})]
    run = write_run(tmp_path, "rope", name="[red]r", variants=readings, kinds=MEASURES)
    terminal.show(run, SimpleNamespace(eval=SimpleNamespace(tolerance=0.02)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("[red]r: ")
    table = over_seeds(results(frame.load(run)))
    best = table[(table.length == 2048) & (table["rank"] == 1)].gain.max()
    assert f"{best:+.3f}" in " ".join(lines)
