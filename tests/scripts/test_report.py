"""The command line of the report."""

import io

import pandas as pd
import pytest
from synthetic import write_run

from scripts import report as program

STARTS = {
    "md": b"## code, trained at 256 tokens",
    "csv": b"section,data,train_len,",
    "html": b"<!doctype html>",
    "svg": b"<svg ",
    "png": b"\x89PNG",
    "pdf": b"%PDF",
    "parquet": b"PAR1",
}


@pytest.fixture
def report(script):
    """`report(folder, "format=md")` runs the command line: (code, out, err)."""
    return lambda folders, *arguments, **expected: script(program, f"folders={folders}", *arguments, **expected)


def rows_of(outcome):
    return pd.read_csv(io.StringIO(outcome.out))


@pytest.mark.long
def test_a_format_is_that_of_the_file_or_the_one_asked_for(report, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs, "rope")
    write_run(runs, "alibi", finished=False)
    for kind, start in STARTS.items():
        out = tmp_path / f"t.{kind}"
        assert report(runs, f"out={out}").out == f"wrote {out}: 1 complete runs, 1 left out\n"
        assert out.read_bytes().startswith(start)
        assert b"\\xa0" not in out.read_bytes()  # the blanks of a page that keep a number together
    assert "one of .html, .md" in report(runs, "out=t.jpg", code=2).err
    assert "alibi-code: not finished" in report(runs, "format=pdf").err
    assert (runs / "report.pdf").read_bytes().startswith(b"%PDF")


def test_runs_are_chosen_by_place_and_name_and_compared_with_the_asked_reference(report, tmp_path):
    for pe in ("rope", "nope", "alibi", "cope"):
        write_run(tmp_path / pe, pe, 1)
    published = tmp_path / "published.parquet"
    report(f"[{tmp_path / 'rope'},{tmp_path / 'nope'}]", f"out={published}")
    folders = f"[{published},{tmp_path / 'alibi'},{tmp_path / 'cope'}]"
    outcome = report(folders, "only=[*ope-*,alibi-*]", "exclude=[nope*,cope*]", "reference=alibi", "format=csv")
    rows = rows_of(outcome)
    assert set(rows.line) == {"rope", "alibi"}
    assert set(rows.reference) == {"alibi"}


def test_names_of_others_reach_neither_terminal_nor_spreadsheet(report, tmp_path):
    """A terminal would obey control characters, a spreadsheet compute what begins like a formula."""
    write_run(tmp_path, "rope", name="=HYPERLINK(1)")
    broken = write_run(tmp_path, "nope", name="broken\x1b]0;owned\x07")
    (broken / "config.yaml").write_text("{")
    outcome = report(tmp_path, "format=csv")
    assert "broken\\x1b]0;owned\\x07: " in outcome.err
    assert not {"\x1b", "\x07"} & set(outcome.out + outcome.err)
    assert set(rows_of(outcome).run) == {"'=HYPERLINK(1)"}
