"""The end of a run, as it is printed."""

import os
import re
from types import SimpleNamespace

import pytest
from synthetic import write_run

from ropewalk.evaluation.results import load_all
from ropewalk.evaluation.statistics import Estimate
from ropewalk.report import terminal
from ropewalk.report.answer import verdict


@pytest.fixture
def shown(monkeypatch, capsys):
    """`shown(run)`: what is printed; with `width` on a terminal of so many columns, otherwise into a pipe."""

    def show(run, width=None, only=None, tolerance=0.02):
        if width:
            monkeypatch.setattr("sys.stdout.isatty", lambda: True)
            monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((width, 24)))
        terminal.show(run, SimpleNamespace(eval=SimpleNamespace(tolerance=tolerance, task_tolerance=1.0)), only)
        return capsys.readouterr().out

    return show


def test_one_screen_with_the_numbers_of_the_files(shown, tmp_path):
    run = write_run(tmp_path, "rope", name="[red]r", variants=("yarn",), kinds=("lengths", "far_copies"), noise=0.002)
    out = shown(run).splitlines()
    assert out[0].startswith("[red]r, trained at 256 tokens: bits per byte, 24 texts")
    assert len(out) <= 12
    cells = {line.split()[0]: re.split(r"\s{2,}", line) for line in out if re.match(r"[\d,]+ \(", line)}
    losses = {}
    for e in load_all(run):
        if e.kind == "lengths" and not e.variant.zero_shot:
            losses = {m.length: sum(m.nats) / 0.6931472 / sum(m.bytes) for m in e.measured}
    assert cells["2,048"][1] == f"{losses[2048]:.3f}"
    assert cells["2,048"][2].split(" ± ")[0] == f"{losses[256] - losses[2048]:+.3f}"
    assert len(cells["256"]) == 3  # at the training length nothing is cut: only YaRN's column has a gain


def test_the_answer_of_one_run_names_no_winner(shown, tmp_path):
    rope = shown(write_run(tmp_path, "rope", variants=("yarn",), noise=0.002))
    assert "Beyond 256 tokens cut the text: rope is worse when it reads on, -0.69" in rope
    assert "Read as yarn at scale 8 it is worse than cutting too" in rope
    assert "best" not in rope
    fox = shown(write_run(tmp_path, "fox", noise=0.002))
    assert "fox reads on to 2,048 tokens (8x) and gains from longer text: +0.0" in fox
    assert "fox reads on to 2,048 tokens (8x) and is level with cutting the text" in shown(
        tmp_path / "fox-code", tolerance=9
    )
    assert "Undecided beyond 256 tokens" in shown(write_run(tmp_path, "alibi", noise=0.3))


@pytest.mark.parametrize("width", [None, 80, 100, 200])
def test_no_line_is_too_long(shown, tmp_path, width):
    ways = ["yarn", "rerope", ("yarn", {"beta_fast": 2.0}), ("rerope", {"window": 9})]
    out = shown(write_run(tmp_path, "rope", variants=ways), width).splitlines()
    assert max(map(len, out)) <= min(width or 100, 100)
    assert re.match(r"\(\d more columns are on the page\)", out[out.index("") - 1])


def test_what_was_measured_is_shown(shown, tmp_path):
    run = write_run(tmp_path, "rope", kinds=("lengths", "far_copies", "ruler"))
    far = shown(run, only=[e for e in load_all(run) if e.kind == "far_copies"])
    assert "256-511" in far
    assert "2,048" not in far
    ruler = shown(run, only=[e for e in load_all(run) if e.kind == "ruler"])
    assert "answers found in percent" in ruler
    assert "2,048 (8x)" in ruler
    task = shown(write_run(tmp_path, "cope", task="recall"))
    assert "At least 99 % right to 1x: cope." in task
    assert "2,048 (8x) sparse" in task


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.03, 0.05, "better"), (-0.3, -0.1, "worse"), (-0.01, 0.015, "level"), (-0.1, 0.2, "undecided"),
     (0.0002, 0.0004, "level"), (-0.0001, 0.04, "undecided"), (float("nan"), float("nan"), "undecided")],
)  # fmt: skip
def test_no_winner_by_nothing(low, high, word):
    assert verdict(Estimate((low + high) / 2, low, high, 0, 1, 9), 0.02) == word
