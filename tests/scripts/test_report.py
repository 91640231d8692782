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


@pytest.fixture
def folder(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs", "rope", seed)
    (write_run(tmp_path / "runs", "nope") / "config.yaml").write_text("{")
    write_run(tmp_path / "runs", "alibi", finished=False)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("md", b"## code, trained at 256 tokens"), ("csv", b"section,data,train_len,"), ("html", b"<!doctype html>"),
        ("svg", b"<?xml "), ("png", b"\x89PNG"), ("pdf", b"%PDF"),
    ],
)  # fmt: skip
def test_a_format_is_that_of_the_file_or_the_one_asked_for(report, folder, tmp_path, kind, start):
    out = tmp_path / f"t.{kind}"
    code, said, err = report(folder, f"out={out}")
    assert (code, said) == (0, f"wrote {out}: 2 complete runs, 2 left out\n")
    assert ("nope-code: broken: " in err, "alibi-code: not finished" in err) == (True, True)
    assert out.read_bytes().startswith(start)
    said = report(folder, f"format={kind}").out
    to_terminal = kind in ("md", "csv")
    assert (said.encode() if to_terminal else (folder / f"report.{kind}").read_bytes()).startswith(start)


def test_a_file_of_all_results_is_a_folder_of_runs(report, folder, tmp_path):
    archive = tmp_path / "all.jsonl.gz"
    assert report(folder, f"out={archive}").code == 0
    of_file, of_runs = report(archive, "format=csv").out, report(folder, "format=csv").out
    assert of_file.count("\n") == of_runs.count("\n") > 1


def test_a_pipe_gets_the_report_and_nothing_else(report, folder, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code, out, err = report(folder, "format=csv", f"out={pipe}")
    assert (code, out, f"wrote {pipe}: 2 complete runs" in err) == (0, "", True)
    assert os.read(reader, 2**16).startswith(b"section,data,train_len,")
    os.close(reader)


def test_folders_patterns_and_another_reference(report, folder, tmp_path):
    write_run(tmp_path / "more", "alibi")
    folders = f"[{folder},{tmp_path / 'more'}]"
    out = report(folders, "format=csv", "reference=alibi", "only=[rope-*,alibi-*]", "exclude=[*-s1]").out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {(row["line"], row["seeds"], row["reference"]) for row in rows} == {
        ("rope", "1", "alibi"),
        ("alibi", "1", "alibi"),
    }
    code, _, err = report(folder, "only=[none*]")
    assert (code, "no run with a name as in only=['none*']" in err) == (2, True)


@pytest.mark.parametrize(
    ("argument", "message"), [("format=gif", "format="), ("out=no/x.md", "no/"), ("foldrs=x", "did you mean folders")]
)
def test_a_mistake_is_one_message(report, folder, argument, message):
    code, _, err = report(folder, argument)
    assert (code, message in err, "Traceback" in err) == (2, True, False)


def test_names_of_others_reach_neither_terminal_nor_spreadsheet(report, tmp_path, monkeypatch):
    """A terminal would obey control characters, a spreadsheet compute what begins like a formula."""
    attack = "\x1b]0;owned\x07"
    for name in ("=HYPERLINK(1)", "-1+1"):
        monkeypatch.setitem(FAR, name, FAR["rope"])
        monkeypatch.setitem(LEVELS, name, LEVELS["rope"])
    write_run(tmp_path / "runs", "rope", config={"pe.name": "=HYPERLINK(1)"})
    evil = {"data.name": attack, "pe.name": "-1+1", "name": "run"}  # no configuration with an evil name is read
    write_run(tmp_path / "runs", "rope", config=evil, name=f"run{attack}")
    (write_run(tmp_path / "runs", "nope", name=f"broken{attack}") / "config.yaml").write_text("{")
    for format in ("md", "csv"):
        code, out, err = report(tmp_path / "runs", f"format={format}")
        assert (code, "broken\\x1b]0;owned\\x07: " in err) == (0, True)
        assert not {"\x1b", "\x07"} & set(out + err)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {row["line"] for row in rows} >= {"'=HYPERLINK(1)", "'-1+1"}
