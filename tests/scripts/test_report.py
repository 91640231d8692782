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


def test_formats(report, folder, tmp_path):
    code, out, err = report(folder, "format=md")
    assert (code, out.splitlines()[0], "left out" in err) == (0, "## code, trained at 256 tokens", True)
    assert report(folder, "format=csv").out.startswith("section,data,train_len,")
    for name, start in (("t.md", "## code"), ("t.csv", "section,"), ("t.html", "<!doctype html>")):
        code, out, err = report(folder, f"out={tmp_path / name}")
        assert (code, out) == (0, f"wrote {tmp_path / name}: 2 complete runs, 2 left out\n")
        assert ("nope-code: broken: " in err, "alibi-code: not finished" in err) == (True, True)
        assert (tmp_path / name).read_text().startswith(start)
    for kind, start in {"svg": b"<?xml ", "png": b"\x89PNG", "pdf": b"%PDF"}.items():
        assert report(folder, f"format={kind}").code == 0
        assert (folder / f"report.{kind}").read_bytes().startswith(start)
    code, out, _ = report(folder, f"out={tmp_path / 'all.jsonl.gz'}")
    assert (code, out) == (0, f"wrote {tmp_path / 'all.jsonl.gz'}: 2 complete runs, 2 left out\n")
    of_file, of_runs = report(tmp_path / "all.jsonl.gz", "format=csv").out, report(folder, "format=csv").out
    assert of_file.count("\n") == of_runs.count("\n") > 1
    assert report(folder).code == 0
    assert (folder / "report.html").exists()


def test_a_pipe_gets_the_report_and_nothing_else(report, folder, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code, out, err = report(folder, "format=csv", f"out={pipe}")
    assert (code, out, f"wrote {pipe}: 2 complete runs" in err) == (0, "", True)
    assert os.read(reader, 2**16).startswith(b"section,data,train_len,")
    os.close(reader)
    assert pipe.is_fifo()


def test_two_folders_and_another_reference(report, folder, tmp_path):
    write_run(tmp_path / "more", "alibi")
    out = report(f"[{folder},{tmp_path / 'more'}]", "format=md", "reference=alibi").out
    assert "Minus alibi" in out
    assert "| rope |" in out


def test_patterns_of_names(report, folder):
    out = report(folder, "format=csv", "only=[rope-*]", "exclude=[*-s1]").out
    assert {row["seeds"] for row in csv.DictReader(io.StringIO(out))} == {"1"}  # of two
    assert "left out" not in report(folder, "format=csv", "only=[rope-*]").err
    code, _, err = report(folder, "only=[none*]")
    assert (code, "no run with a name as in only=['none*']" in err) == (2, True)


def test_mistakes_are_one_message(report, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([tmp_path / "empty"], "no run lies in"),
        ([folder, "format=gif"], "format="),
        ([folder, f"out={tmp_path / 'no' / 'x.md'}"], f"{tmp_path / 'no'}"),
    ):
        code, _, err = report(*arguments)
        assert code == 2, arguments
        assert message in err
        assert "Traceback" not in err


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
        assert code == 0
        assert "broken\\x1b]0;owned\\x07: " in err
        assert r"\x1b]0;owned\x07, trained at 256 tokens" in out.replace("\\\\", "\\").replace("\\]", "]")
        assert not {"\x1b", "\x07"} & set(out + err)
    rows = [row for row in csv.DictReader(io.StringIO(out)) if row["quantity"] == "loss"]
    assert {row["line"] for row in rows} >= {"'=HYPERLINK(1)", "'-1+1"}
    assert all(float(row["value"]) == float(row["value"]) for row in rows)
    err = report(tmp_path / f"no{attack}").err
    assert r"no\x1b]0;owned\x07" in err
