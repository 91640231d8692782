"""The command line of the report."""

import csv
import io
import os

import pytest
from synthetic import FAR, LEVELS, write_run

from scripts import report as program

STARTS = {
    "md": b"## code, trained at 256 tokens",
    "csv": b"section,data,train_len,",
    "html": b"<!doctype html>",
    "svg": b"<?xml ",
    "png": b"\x89PNG",
    "pdf": b"%PDF",
    "jsonl.gz": b"\x1f\x8b",
}


@pytest.fixture
def report(script):
    """`report(folder, "format=md")` runs the command line: (code, out, err)."""
    return lambda folders, *arguments: script(program, f"folders={folders}", *arguments)


@pytest.mark.long
def test_a_format_is_that_of_the_file_or_the_one_asked_for(report, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs, "rope")
    write_run(runs, "alibi", finished=False)
    for kind, start in STARTS.items():
        out = tmp_path / f"t.{kind}"
        assert report(runs, f"out={out}").out == f"wrote {out}: 1 complete runs, 1 left out\n"
        assert out.read_bytes().startswith(start)
    of_archive = report(tmp_path / "t.jsonl.gz", "format=csv")
    assert of_archive.out.count("\n") == (tmp_path / "t.csv").read_text().count("\n") > 1
    assert (of_archive.code, of_archive.err) == (0, "")
    assert "alibi-code: not finished" in report(runs, "format=pdf").err
    assert (runs / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_pipe_gets_the_report_and_nothing_else(report, tmp_path):
    write_run(tmp_path / "runs", "rope")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    outcome = report(tmp_path / "runs", "format=csv", f"out={pipe}")
    assert (outcome.code, outcome.out) == (0, "")
    assert f"wrote {pipe}: 1 complete runs" in outcome.err
    assert os.read(reader, 2**16).startswith(STARTS["csv"])
    os.close(reader)


def test_folders_patterns_and_another_reference(report, tmp_path):
    for pe in ("rope", "nope", "alibi", "cope"):
        write_run(tmp_path / pe, pe, 1)
    folders = ",".join(str(tmp_path / pe) for pe in ("rope", "nope", "alibi", "cope"))
    patterns = ("only=[*ope-*,alibi-*]", "exclude=[nope*,cope*]")
    out = report(f"[{folders}]", "format=csv", "reference=alibi", *patterns).out
    rows = csv.DictReader(io.StringIO(out))
    assert {(row["line"], row["reference"]) for row in rows} == {("rope", "alibi"), ("alibi", "alibi")}
    nothing = report(tmp_path, "only=[none*]")
    assert nothing.code == 2
    assert "no run with a name as in only=['none*']" in nothing.err


def test_names_of_others_reach_neither_terminal_nor_spreadsheet(report, tmp_path, monkeypatch):
    """A terminal would obey control characters, a spreadsheet compute what begins like a formula."""
    formula = "=HYPERLINK(1)"
    for levels in (FAR, LEVELS):
        monkeypatch.setitem(levels, formula, levels["rope"])
    write_run(tmp_path, "rope", config={"pe.name": formula})
    broken = write_run(tmp_path, "nope", name="broken\x1b]0;owned\x07")
    (broken / "config.yaml").write_text("{")
    outcomes = {kind: report(tmp_path, f"format={kind}") for kind in ("md", "csv")}
    for outcome in outcomes.values():
        assert "broken\\x1b]0;owned\\x07: " in outcome.err
        assert not {"\x1b", "\x07"} & set(outcome.out + outcome.err)
    lines = {row["line"] for row in csv.DictReader(io.StringIO(outcomes["csv"].out))}
    assert lines == {f"'{formula}"}
