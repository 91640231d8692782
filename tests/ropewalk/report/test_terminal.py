"""The end of a run, as it is printed."""

import re
from types import SimpleNamespace

import pytest
from synthetic import write_run

from ropewalk.evaluation.results import load_all
from ropewalk.report import terminal


@pytest.fixture
def shown(monkeypatch, capsys):
    """`shown(run)`: what is printed; with `width` on a terminal of so many columns, otherwise into a pipe."""

    def show(run, width=None, only=None, tolerance=0.02):
        if width:
            monkeypatch.setattr("sys.stdout.isatty", lambda: True)
            monkeypatch.setenv("COLUMNS", str(width))
        terminal.show(run, SimpleNamespace(eval=SimpleNamespace(tolerance=tolerance)), only)
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)

    return show


def test_one_screen_with_the_numbers_of_the_files(shown, tmp_path):
    run = write_run(tmp_path, "rope", name="[red]r", variants=("yarn",), kinds=("lengths", "far_copies"), noise=0.002)
    out = shown(run).splitlines()
    assert out[0].startswith("[red]r: ")
    assert len(out) <= 24
    (e,) = [e for e in load_all(run) if e.kind == "lengths" and not e.variant.zero_shot]
    losses = {m.length: sum(m.nats) / 0.6931472 / sum(m.bytes) for m in e.measured}
    (gain,) = [line for line in out if line.split()[:3] == ["gain", "at", "2,048"]]
    assert gain.split()[-3] == f"{losses[256] - losses[2048]:+.3f}"
    (loss,) = [line for line in out if line.split()[:3] == ["loss", "at", "2,048"]]
    assert loss.split()[-3] == f"{losses[2048]:.3f}"


def test_the_tolerance_is_that_of_the_configuration(shown, tmp_path):
    run = write_run(tmp_path, "fox", noise=0.002)
    assert "it gains 0.0" in shown(run)
    assert "it is level with the text cut" in shown(run, tolerance=9)


@pytest.mark.parametrize("width", [None, 80, 200])
def test_no_line_is_too_long(shown, tmp_path, width):
    ways = ["yarn", "rerope", ("yarn", {"beta_fast": 2.0}), ("rerope", {"window": 9})]
    out = shown(write_run(tmp_path, "rope", variants=ways), width)
    assert max(map(len, out.splitlines())) <= min(width or 100, 100)
    assert "1 more columns are on the page" in out


def test_what_was_measured_is_shown(shown, tmp_path):
    run = write_run(tmp_path, "rope", kinds=("lengths", "far_copies", "ruler"))
    far = shown(run, only=[e for e in load_all(run) if e.kind == "far_copies"])
    assert "256-511" in far
    assert "loss at" not in far
    assert "answers found in percent" in shown(run, only=[e for e in load_all(run) if e.kind == "ruler"])
    assert "sparse, 2,048" in shown(write_run(tmp_path, "cope", task="recall"))
