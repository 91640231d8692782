"""The command line of the report."""

import csv
import io
import os

import pytest
from synthetic import FAR, LEVELS, write_run

from scripts import report as program


@pytest.fixture
def report(script):
    """`report(folder, "format=md")` runs the command line: (code, out, err)."""
    return lambda folders, *arguments: script(program, f"folders={folders}", *arguments)


STARTS = {
    "md": b"## code, trained at 256 tokens", "csv": b"section,data,train_len,", "html": b"<!doctype html>",
    "svg": b"<?xml ", "png": b"\x89PNG", "pdf": b"%PDF", "jsonl.gz": b"\x1f\x8b",
}  # fmt: skip


def test_a_format_is_that_of_the_file_or_the_one_asked_for(report, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs, "rope")
    write_run(runs, "alibi", finished=False)
    for kind, start in STARTS.items():
        out = tmp_path / f"t.{kind}"
        assert report(runs, f"out={out}").out == f"wrote {out}: 1 complete runs, 1 left out\n"
        assert out.read_bytes().startswith(start)
    code, out, err = report(tmp_path / "t.jsonl.gz", "format=csv")
    assert out.count("\n") == (tmp_path / "t.csv").read_text().count("\n") > 1
    assert (code, err) == (0, "")
    assert "alibi-code: not finished" in report(runs, "format=pdf").err
    assert (runs / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_pipe_gets_the_report_and_nothing_else(report, tmp_path):
    write_run(tmp_path / "runs", "rope")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code, out, err = report(tmp_path / "runs", "format=csv", f"out={pipe}")
    assert (code, out) == (0, "")
    assert f"wrote {pipe}: 1 complete runs" in err
    assert os.read(reader, 2**16).startswith(STARTS["csv"])
    os.close(reader)


def test_folders_patterns_and_another_reference(report, tmp_path):
    for pe in ("rope", "nope", "alibi"):
        write_run(tmp_path / pe, pe, 1)
    folders = f"[{tmp_path / 'rope'},{tmp_path / 'nope'},{tmp_path / 'alibi'}]"
    out = report(folders, "format=csv", "reference=alibi", "only=[rope-*,alibi-*]", "exclude=[nope*]").out
    rows = csv.DictReader(io.StringIO(out))
    assert {(row["line"], row["reference"]) for row in rows} == {("rope", "alibi"), ("alibi", "alibi")}
    code, _, err = report(tmp_path, "only=[none*]")
    assert (code, "no run with a name as in only=['none*']" in err, "Traceback" in err) == (2, True, False)


def test_names_of_others_reach_neither_terminal_nor_spreadsheet(report, tmp_path, monkeypatch):
    """A terminal would obey control characters, a spreadsheet compute what begins like a formula."""
    attack = "\x1b]0;owned\x07"
    formula = "=HYPERLINK(1)"
    monkeypatch.setitem(FAR, formula, FAR["rope"])
    monkeypatch.setitem(LEVELS, formula, LEVELS["rope"])
    write_run(tmp_path, "rope", config={"pe.name": formula})
    (write_run(tmp_path, "nope", name=f"broken{attack}") / "config.yaml").write_text("{")
    for kind in ("md", "csv"):
        code, out, err = report(tmp_path, f"format={kind}")
        assert (code, "broken\\x1b]0;owned\\x07: " in err) == (0, True)
        assert not {"\x1b", "\x07"} & set(out + err)
    assert {row["line"] for row in csv.DictReader(io.StringIO(out))} == {f"'{formula}"}
