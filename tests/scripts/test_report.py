"""The command line of the report."""

import csv
import io

import pytest
from synthetic import write_run

from ropewalk.report import frame
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


def rows_of(outcome):
    return list(csv.DictReader(io.StringIO(outcome.out)))


@pytest.mark.long
def test_a_format_is_that_of_the_file_or_the_one_asked_for(report, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs, "rope")
    write_run(runs, "alibi", finished=False)
    for kind, start in STARTS.items():
        out = tmp_path / f"t.{kind}"
        assert report(runs, f"out={out}").out == f"wrote {out}: 1 complete runs, 1 left out\n"
        assert out.read_bytes().startswith(start)
    outcome = report(runs, "format=pdf")
    assert "alibi-code: not finished" in outcome.err
    assert (runs / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_device_is_not_written_to(report, tmp_path):
    """Text goes to the terminal without out=."""
    write_run(tmp_path, "rope")
    outcome = report(tmp_path, "format=csv", "out=/dev/stdout")
    assert outcome.code == 2
    assert "/dev/stdout is a link, a pipe or a device" in outcome.err


def test_files_and_folders_patterns_and_another_reference(report, tmp_path):
    for pe in ("rope", "nope", "alibi", "cope"):
        write_run(tmp_path / pe, pe, 1)
    published = tmp_path / "published.jsonl.gz"
    frame.save(published, [tmp_path / "rope", tmp_path / "nope"])
    folders = f"[{published},{tmp_path / 'alibi'},{tmp_path / 'cope'}]"
    patterns = ("only=[*ope-*,alibi-*]", "exclude=[nope*,cope*]")
    rows = rows_of(report(folders, "format=csv", "reference=alibi", *patterns))
    assert {(row["line"], row["reference"]) for row in rows} == {("rope", "alibi"), ("alibi", "alibi")}

    nothing = report(tmp_path, "only=[none*]")
    assert nothing.code == 2
    assert "no run with a name as in only=['none*']" in nothing.err


def test_names_of_others_reach_neither_terminal_nor_spreadsheet(report, tmp_path):
    """A terminal would obey control characters, a spreadsheet compute what begins like a formula."""
    write_run(tmp_path, "rope", name="=HYPERLINK(1)")
    broken = write_run(tmp_path, "nope", name="broken\x1b]0;owned\x07")
    (broken / "config.yaml").write_text("{")
    for kind in ("md", "csv"):
        outcome = report(tmp_path, f"format={kind}")
        assert "broken\\x1b]0;owned\\x07: " in outcome.err
        assert not {"\x1b", "\x07"} & set(outcome.out + outcome.err)
    assert {row["run"] for row in rows_of(outcome)} == {"'=HYPERLINK(1)"}
