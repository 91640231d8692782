"""Tables and words on the terminal."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from test_results import BITS, TEXTS, evaluation, text

from conf.init_from import compose, resolve
from evaluation import terminal


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """`shown(evaluations, width)` is what a terminal of this width shows of a run with these results."""

    def show(evaluations, width: int, only=None) -> str:
        run = tmp_path / "[red]r"
        (run / "evals").mkdir(parents=True, exist_ok=True)
        config = resolve(compose("pe=rope", "train_len=256", "eval.tolerance=9", "eval.task_tolerance=9"))
        (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump()))
        for name in ("data.json", "environment.json", "training.json"):
            (run / name).write_text(json.dumps({}))
        (run / "metrics.jsonl").write_text("")
        for e in evaluations:
            e.save(run / "evals")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        cfg = SimpleNamespace(eval=SimpleNamespace(tolerance=0.02, task_tolerance=1.0))
        terminal.show(run, cfg, only)
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)

    return show


def pair():
    yarn = dict(label="yarn, scale 8", pe={"name": "yarn"}, scale=8.0, zero_shot=True)
    return [evaluation(bits=(2.3, 2.3, 2.3, 2.25), **yarn), evaluation(skipped=[2048])]


def test_the_table_has_the_baseline_unit_and_gains(shown):
    out = shown(pair(), 200)
    assert out.startswith("[red]r, lengths: bits per byte, mean ± half of the 95 % interval over texts")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] or [""] for line in out.splitlines()]
    values = text(256, 2.0).nats
    mean, half = np.mean(values) / 10 / BITS, 2.093024 * np.std(values, ddof=1) / math.sqrt(TEXTS) / 10 / BITS
    cut = f"{mean:.3f} ± {half:.3f}"
    assert ["cut to 256", cut, "", cut, ""] in rows
    at_4x = next(row for row in rows if row[0] == "1,024 (4x)")
    assert {at_4x[2], at_4x[4]} == {"-0.500 ± 0.000", "-0.250 ± 0.000"}


def test_words(shown):
    assert shown(pair(), 200).splitlines()[-2:] == [
        "rope read as yarn, scale 8: safe at no measured length, useful to at most 0.5x (128 tokens)",
        "rope: safe to 2x (512 tokens), useful to 1x (256 tokens)",
    ]


def test_words_of_what_holds_to_the_end(shown):
    out = shown([evaluation(bits=(2.1, 2.0, 1.9, 1.8))], 200)
    assert "rope: safe to >= 4x (1,024 tokens), useful to >= 4x (1,024 tokens)" in out


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_narrow_terminals_cut_no_numbers(width, shown):
    wide, narrow = shown(pair(), 200), shown(pair(), width)
    numbers = [word for word in wide.replace("│", " ").split() if "." in word and "0x" not in word]
    assert "…" not in narrow
    assert sorted(set(numbers) - set(narrow.replace("│", " ").split())) == []
    tables = [line for line in narrow.splitlines() if line[:1] in "┏┃┡│├└"]
    assert max(map(len, tables)) <= max(width, 75)


def test_tasks(shown):
    errors = {("easy", 512): 1, ("hard", 512): 3}
    names = ("easy", "hard")
    measured = [text(n, 1.0, name, errors=[errors.get((name, n), 1)] * TEXTS) for name in names for n in (256, 512)]
    out = shown([evaluation(task="recall", measured=measured)], 120)
    assert "error in percent" in out
    assert "cut to" not in out
    assert out.splitlines()[-1] == "rope: safe to 1x (256 tokens)"  # the harder of the two


def test_far_copies_and_only_what_was_asked_for(shown):
    far = evaluation(
        kind="far_copies", measured=[text(1024, 2.0, "distance 256-511", baseline_nats=[30 * BITS] * TEXTS)]
    )
    out = shown([far, evaluation()], 120, only=[far])
    assert "256 to 511" in out or "256-511" in out
    assert "+1.0" in out
    assert "cut to" not in out
