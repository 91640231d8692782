"""An entry of the board, from its folder to its line."""

import json
import multiprocessing
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from process_helpers import NO_PAGE

from lab.board import board, rules, side_by_side
from scripts import enter as program

MINE = '''"""RoPE, as somebody writes it who has another idea."""

from model.position.rotary import Rotary


class Mine(Rotary):
    pass
'''
TRACK = [
    "model.n_layer=1", "model.dim=16", "model.n_head=2", "model.head_dim=8", "trainer.max_steps=2",
    "trainer.batch_size=2", "trainer.val_tokens=64", "trainer.val_every=2", "trainer.accelerator=cpu", "train_len=16",
    "eval.lengths=[1,8]", "eval.target_tokens=8", "eval.sequences=2", "eval.by_position=false", "optim.warmup_steps=1",
]  # fmt: skip


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """A board in a repository of its own with RoPE and an encoding that is not among ours, two seeds each."""
    monkeypatch.setattr(rules, "FEW", 2)
    monkeypatch.setattr(rules, "PROMISING", 0.0)
    # PyTorch has one thread here, so that the workers may be forks: each would import it for seconds.
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(side_by_side, "multiprocessing", SimpleNamespace(get_context=lambda _: fork))
    monkeypatch.setattr("ropewalk.app.ending.page", NO_PAGE)
    monkeypatch.setenv("ROPEWALK_PLUGINS", "board")
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "2026-01-01-rope/pe.yaml": "pe: rope\n",
        "2026-01-02-mine/pe.yaml": "name: mine\n_target_: board.2026-01-02-mine.encoding.Mine\nbase: 500.0\n",
        "2026-01-02-mine/encoding.py": MINE,
        "2026-01-03-yarn/pe.yaml": "pe: yarn\nscale: 8.0\n",
    }
    for name, content in files.items():
        path = tmp_path / "board" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.with_name("README.md").write_text("An idea.\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "Entries")
    return tmp_path / "board"


def test_an_entry_becomes_a_line_and_a_page_that_its_verdict_makes_again(entries, script, tmp_path):
    page = tmp_path / "page.md"

    def enter(name: str | None, *more: str):
        track = ",".join(f"'{option}'" for option in TRACK)
        entry = f"entry={entries / name}" if name else "entry=null"
        own = [f"board={entries}", f"page={page}", f"runs_dir={tmp_path / 'runs'}", f"track=[{track}]"]
        return script(program, entry, *own, *more)

    lines = []
    for name in ("2026-01-01-rope", "2026-01-02-mine", "2026-01-03-yarn"):
        said = enter(name)
        assert said.code == 0, said.err
        lines.append(said.out.splitlines()[-1])
    rope, mine, yarn = (json.loads(path.read_text()) for path in sorted(entries.glob("*/verdict.json")))
    assert lines[0].startswith("2026-01-01-rope: ")
    assert lines[0].endswith(": record")
    assert "against 2026-01-01-rope" in lines[1]
    assert "; 1x " in lines[2]
    assert mine["seeds"] == rope["seeds"] == rules.drawn_seeds(rope["commit"])[:2]
    assert mine["commit"] == git(entries, "rev-parse", "HEAD").strip()
    assert mine["measured_of_holder"] == rope["measured"]
    assert mine["parameters"] == 1.0
    # YaRN reads RoPE's weights.
    assert yarn["measured"]["excess"] == rope["measured"]["excess"]
    assert yarn["measured"]["gain"] != rope["measured"]["gain"]
    runs = [path.parent.name for path in (tmp_path / "runs").glob("*/training.json")]
    assert len(runs) == 2 * 2 * 2
    assert not any("yarn" in name for name in runs)

    before = page.read_text()
    assert "| **[2026-01-01-rope](" in before
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    assert enter("2026-01-02-mine").out.splitlines()[-1] == lines[1]
    assert enter(None).code == 0
    assert page.read_text() == before
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")} == files

    # What is not committed has no seeds yet.
    (entries / "2026-01-02-mine" / "encoding.py").write_text(MINE + "\n")
    said = enter("2026-01-02-mine")
    assert (said.code, "commit" in said.err) == (2, True)


def test_an_entry_without_a_readme_is_refused(entries):
    (entries / "2026-01-01-rope" / "README.md").unlink()
    with pytest.raises(ValueError, match=r"has no README\.md"):
        board.load(entries / "2026-01-01-rope")
