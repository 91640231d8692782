"""The command line of the report, and what stands in its page: checked without a browser."""

import json
import math
import re
import runpy
import statistics
import time

import plotly.graph_objects as go
import pytest
from conftest import ROOT
from reader import Reader
from synthetic import write_passkey, write_run

from evaluation import page
from evaluation.compare import compare


@pytest.fixture
def report(monkeypatch, capsys):
    """`report("runs", "--format", "md")` runs the command line: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["report.py", *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(ROOT / "scripts" / "report.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_passkey(write_run(folder, "pe=yarn", seed=seed), seed)
        write_run(folder, "pe=cope", "eval.lengths=[1,2]", seed=seed, task="flip_flop")
    write_run(folder, "pe=yarn", seed=2, finished=False)
    (write_run(folder, "pe=nope") / "results.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def read(folder):
    return Reader(page.render(compare([folder])))


def figures(read):
    """Title -> data and layout, in the first section that has it."""
    titles = [words.strip() for words in read.words]
    ids = [attributes["data-figure"] for tag, attributes in read.tags if "data-figure" in attributes]
    captions = [attributes["aria-label"] for _, attributes in read.tags if attributes.get("class") == "plot"]
    assert set(captions) <= set(titles)
    found = list(zip(captions, (read.data["figures"][name] for name in ids), strict=True))
    return dict(reversed(found))


def test_formats(report, folder, tmp_path):
    code, out, _ = report(folder, "--format", "md")
    assert (code, out.splitlines()[2]) == (0, "## code, trained at 256 tokens")
    code, out, _ = report(folder, "--format", "csv")
    assert out.startswith("data,train_len,")
    for name, start in (("t.md", "Means over"), ("t.csv", "data,"), ("t.html", "<!doctype html>")):
        assert report(folder, "--out", tmp_path / name)[:2] == (0, f"wrote {tmp_path / name}: 6 runs; left out: 2\n")
        assert (tmp_path / name).read_text().lstrip().startswith(start)
    assert report(folder)[0] == 0
    assert (folder / "report.html").exists()


def test_mistakes_are_one_message(report, tmp_path):
    for arguments, message in (
        ([tmp_path / "none"], "none is not a directory"),
        ([tmp_path], "no run lies in"),
        ([tmp_path, "--watch", "--format", "md"], "--watch rewrites a page"),
        ([tmp_path, "--out", tmp_path / "no" / "x.md"], "no run lies in"),
    ):
        code, _, err = report(*arguments)
        assert code == 2
        assert message in err
        assert "Traceback" not in err


def test_watch_rewrites_what_changed(report, tmp_path, monkeypatch):
    run = write_run(tmp_path, "pe=rope", finished=False)
    out, steps, seen = tmp_path / "page.html", iter(range(4)), []

    def pause(_):
        """In place of the time between two looks: nothing, then another step, then the end."""
        seen.append(
            re.search(r"step \d+ of", out.read_text())[0] + (" live" if 'data-live="10"' in out.read_text() else "")
        )
        step = next(steps)
        if step == 1:
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 11, "tokens": 45056, "train/loss": 2.0}\n')
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    code, printed, _ = report(tmp_path, "--watch", "--out", out)
    assert code == 0
    assert seen == ["step 10 of live"] * 2 + ["step 11 of live"] * 2
    assert printed.count("wrote") == 2
    assert 'data-live="0"' in out.read_text()  # it does not wait for more


def test_the_page_needs_no_other_file(read):
    for tag, attributes in read.tags:
        assert tag not in ("iframe", "object", "embed", "base")
        assert not attributes.get("src")
        if tag == "link":
            assert attributes["href"] == "data:,"


def test_plotly_accepts_every_figure(read):
    titles = figures(read)
    assert {"Loss against context length", "Loss by position", "Training loss", "Validation loss"} <= set(titles)
    assert {"Error on train", "Error on dense", "Error on sparse", "Frequencies of the rotary encodings"} <= set(titles)
    for figure in read.data["figures"].values():
        go.Figure(figure)


def test_every_row_of_a_figure_is_a_row_of_a_table(read):
    rows = {attributes["id"] for tag, attributes in read.tags if tag == "tr" and "id" in attributes}
    drawn = {row for f in read.data["figures"].values() for trace in f["data"] for row in trace["meta"]["rows"]}
    assert drawn == rows


def test_lengths_show_the_means_of_the_files(read, folder):
    traces = {trace["name"]: trace for trace in figures(read)["Loss against context length"]["data"]}
    files = [json.loads((folder / f"yarn-code-s{seed}" / "results.json").read_text()) for seed in (0, 1)]
    for i, length in enumerate((128, 256, 512, 1024, 2048)):
        values = [
            row["bits_per_byte"]
            for file in files
            for row in file["lengths"]
            if (row["reading"], row["length"]) == ("scale 4", length)
        ]
        mean = traces["yarn, scale 4"]
        assert mean["x"][i] == length
        assert mean["y"][i] == pytest.approx(statistics.mean(values), rel=1e-3)
        assert mean["error_y"]["array"][i] == pytest.approx(max(values) - statistics.mean(values), rel=1e-3)
        assert traces["yarn, scale 4, seed 1"]["y"][i] == pytest.approx(values[1], rel=1e-3)


def test_curves_are_means_and_unfinished_runs_stand_alone(read, folder):
    traces = {trace["name"]: trace for trace in figures(read)["Training loss"]["data"]}
    lines = [(folder / f"yarn-code-s{seed}" / "metrics.jsonl").read_text().splitlines() for seed in (0, 1)]
    rows = [[json.loads(line) for line in each] for each in lines]
    assert traces["yarn"]["x"] == [row["tokens"] for row in rows[0]]
    expected = [(a["train/loss"] + b["train/loss"]) / 2 for a, b in zip(*rows, strict=True)]
    assert traces["yarn"]["y"] == pytest.approx(expected, rel=1e-3)
    alone = traces["yarn (at step 10 of 600), seed 2"]
    assert (len(alone["x"]), alone["meta"]["rows"]) == (10, [])


def test_long_curves_are_thinned(tmp_path):
    write_run(tmp_path, "pe=nope", steps=1999)
    data = figures(Reader(page.render(compare([tmp_path]))))["Training loss"]["data"]
    rows = [json.loads(line) for line in (tmp_path / "nope-code-s0" / "metrics.jsonl").read_text().splitlines()]
    assert len(data[0]["x"]) == 100
    assert data[0]["x"][-1] == rows[-1]["tokens"]
    assert data[0]["y"][0] == pytest.approx(statistics.mean(row["train/loss"] for row in rows[:20]), rel=1e-3)


def test_frequencies_are_those_of_the_formula(read):
    traces = {trace["name"]: trace for trace in figures(read)["Frequencies of the rotary encodings"]["data"]}
    assert set(traces) == {"yarn, scale 1, as trained", "yarn, scale 4"}
    plain = traces["yarn, scale 1, as trained"]
    assert plain["y"] == pytest.approx([10_000 ** (-i / 16) for i in range(16)], rel=1e-3)  # heads of 32 channels
    assert plain["customdata"] == pytest.approx([2 * math.pi * 10_000 ** (i / 16) for i in range(16)], rel=1e-3)


def test_passkeys(read, folder):
    (trace,) = figures(read)["Passkeys: yarn, scale 4"]["data"]
    files = [json.loads((folder / f"yarn-code-s{seed}" / "passkey.json").read_text()) for seed in (0, 1)]
    for i, depth in enumerate(("0.00", "0.50", "1.00")):
        assert trace["y"][i] == depth
        for j, length in enumerate((256, 512)):
            values = [
                cell["gain"]
                for file in files
                for cell in file["cells"]
                if (cell["reading"], cell["length"], cell["depth"]) == ("scale 4", length, float(depth))
            ]
            assert trace["z"][i][j] == pytest.approx(statistics.mean(values), rel=1e-3)


def test_passkeys_of_swaps_stand_beside(tmp_path):
    """Of a swap's readings, the run's own are there already."""
    run = write_run(tmp_path, "pe=yarn")
    write_passkey(run, 0)
    own = json.loads((run / "passkey.json").read_text())
    cells = [cell | {"reading": f"yarn, {cell['reading']}"} for cell in own["cells"]]
    cells += [cell | {"reading": "linear, scale 8"} for cell in own["cells"] if cell["reading"] == "scale 4"]
    (run / "passkey_swap.json").write_text(json.dumps(own | {"cells": cells}))
    reader = Reader(page.render(compare([tmp_path])))
    labels = [attributes["aria-label"] for tag, attributes in reader.tags if attributes.get("class") == "plot"]
    named = [label for label in labels if label.startswith("Passkeys")]
    assert named == [
        "Passkeys: yarn, scale 1, as trained", "Passkeys: yarn, scale 4", "Passkeys: yarn read as linear, scale 8",
    ]  # fmt: skip


def test_configurations_are_whole(read, folder):
    assert len(read.data["runs"]) == 6
    every = [read.data["common"] | own for own in read.data["runs"]]
    (nope,) = [config for config in every if config["name"] == "nope-code-s0"]
    assert (nope["model.dim"], nope["pe.name"], nope["environment.python"]) == ("128", "nope", "3.11.7")
    assert "pe.scale" not in nope
    assert sorted(read.data["names"]) == sorted({name for config in every for name in config})


def test_names_are_only_text(tmp_path):
    evil = "<script>alert(1)<!--script> \"'%{x} <b>|`"
    write_run(tmp_path, "pe=rope", name=evil)
    write_run(tmp_path, "pe=rope", name=f"{evil}2", seed=1, finished=False)
    for path in tmp_path.glob("*/config.yaml"):
        path.write_text(path.read_text().replace("name: rope", f"name: {json.dumps(evil)}"))
    text = page.render(compare([tmp_path]))
    read = Reader(text)
    assert "<script>alert" not in text
    assert [tag for tag, _ in read.tags].count("script") == 3
    assert evil in "".join(read.words)
    names = {trace["name"] for figure in read.data["figures"].values() for trace in figure["data"]}
    assert not [name for name in names if "<" in name or "%{" in name]


def test_nothing_yet(tmp_path):
    assert "There is no run yet." in page.render(compare([tmp_path]))


def test_one_run(tmp_path):
    write_run(tmp_path, "pe=rope")
    words = " ".join(Reader(page.render(compare([tmp_path]))).words)
    assert "rope-code-s0" in words
    assert "Seeds" not in words  # nothing to filter


def test_training_one_run_writes_its_page(train, monkeypatch):
    def alone(*arguments):
        monkeypatch.setattr("sys.argv", ["train.py", *train.complete(*arguments)])
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

    alone("pe=rope")
    run = train.runs / "rope-text"
    words = Reader((run / "report.html").read_text()).words
    for row in json.loads((run / "results.json").read_text())["lengths"]:
        assert f"{row['bits_per_byte']:.3f}" in words
    (run / "report.html").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(page, "render", lambda *_, **__: 1 / 0)
        with pytest.warns(UserWarning, match=r"report.html was not written: division by zero"):
            alone("pe=rope")
    alone("pe=rope,nope", "-m")
    assert (train.runs / "nope-text" / "results.json").exists()
    assert not list(train.runs.rglob("report.html"))  # a sweep has one page, if it is asked for
