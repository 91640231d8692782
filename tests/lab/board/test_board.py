"""An entry of the board, from its folder to its line."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import train_here

from lab.board import board, page, rules, trials
from model.gpt import GPT
from ropewalk.app.cli import encoding
from scripts import enter as program

MINE = '''"""RoPE, as somebody writes it who has another idea."""

from model.position.rotary import Rotary


class Mine(Rotary):
    pass
'''
HEAVY = '''"""RoPE with 1,000 more parameters, and a sum over millions of numbers in each step."""

import torch

from model.position.rotary import Rotary


class Heavy(Rotary):
    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.unused = torch.nn.Parameter(torch.zeros(1000))

    def reset_parameters(self, generator):
        torch.nn.init.zeros_(self.unused)

    def tables(self, pos, length):
        sum(range(3_000_000))
        return super().tables(pos, length)
'''
TRACK = [
    "model.n_layer=1", "model.dim=16", "model.n_head=2", "model.head_dim=8", "trainer.max_steps=2",
    "trainer.batch_size=2", "trainer.val_tokens=64", "trainer.val_every=2", "trainer.accelerator=cpu", "train_len=16",
    "eval.lengths=[1,8]", "eval.target_tokens=8", "eval.sequences=2", "eval.by_position=false", "optim.warmup_steps=1",
]  # fmt: skip
FILES = {
    "2026-01-01-rope/pe.yaml": "pe: rope\n",
    "2026-01-02-mine/pe.yaml": "name: mine\n_target_: board.2026-01-02-mine.encoding.Mine\nbase: 500.0\n",
    "2026-01-02-mine/encoding.py": MINE,
    "2026-01-03-yarn/pe.yaml": "pe: yarn\nscale: 8.0\n",
}


def git(folder: Path, *arguments: str) -> str:
    """What git says, with a commit that depends on no clock, for seeds are drawn from it."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    when = dict.fromkeys(["GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"], "2026-01-01T00:00:00Z")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | when, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """A board in a repository of its own with RoPE and an encoding that is not among ours, two seeds each."""
    monkeypatch.setattr(rules, "FEW", 2)
    monkeypatch.setattr(rules, "PROMISING", 0.0)
    monkeypatch.setattr("train.show_results", lambda run: 0.0)
    monkeypatch.setattr(trials, "train_all", train_here)
    monkeypatch.setenv("ROPEWALK_PLUGINS", "board")
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in FILES.items():
        path = tmp_path / "board" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.with_name("README.md").write_text("An idea.\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "Entries")
    return tmp_path / "board"


@pytest.fixture
def enter(entries, script, tmp_path):
    """`enter(name)` runs the command line on an entry."""
    track = ",".join(f"'{option}'" for option in TRACK)
    own = [f"page={tmp_path / 'page.md'}", f"runs_dir={tmp_path / 'runs'}", f"track=[{track}]"]
    return lambda name, code=0: script(program, f"entry={entries / name}", *own, code=code)


def bits_by_length(run) -> dict[int, float]:
    """Mean losses of a run."""
    return {length: row.sample.values.sum() / row.sample.units.sum() for length, row in trials.losses(run).items()}


def test_entries_become_lines_verdicts_and_a_page(entries, enter, tmp_path):
    names = sorted(path.name for path in entries.iterdir())
    lines = [enter(name).out.splitlines()[-1] for name in names]

    assert lines[0].startswith("entry 2026-01-01-rope, score ")
    assert lines[0].endswith(": record")
    assert " of 2026-01-01-rope, p " in lines[1]

    rope, mine, yarn = (json.loads((entries / name / "verdict.json").read_text()) for name in names)

    assert mine["commit"] == git(entries, "rev-parse", "HEAD").strip()
    assert mine["seeds"] == rope["seeds"] == rules.drawn_seeds(mine["commit"])[:2]
    assert mine["measured_of_holder"] == rope["measured"]
    assert mine["parameters"] == 1.0
    # YaRN trains as RoPE does, bit for bit.
    assert yarn["measured"]["excess"] == rope["measured"]["excess"]
    assert yarn["measured"]["gain"] != rope["measured"]["gain"]

    configured = board.configured(board.load(entries / names[0]), [*TRACK, f"runs_dir={tmp_path / 'runs'}"])
    runs = board.runs_of(configured, rope["seeds"])
    bits = bits_by_length(runs[0])

    assert rope["measured"]["gain"][0][0] == pytest.approx(bits[16] - bits[128], abs=1e-6)
    assert [run.data["texts"] for run in runs] == 2 * rope["seeds"]
    assert len([*(tmp_path / "runs").glob("*/training.json")]) == 3 * 2 * 2

    # Again: nothing is trained, and the page is the same.
    def files():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}

    trained = files()
    pages = [(tmp_path / name).read_bytes() for name in ("page.md", "page.svg")]

    assert enter(names[1]).out.splitlines()[-1] == lines[1]
    assert files() == trained
    assert [(tmp_path / name).read_bytes() for name in ("page.md", "page.svg")] == pages


def test_what_is_not_committed_has_no_seeds_yet(entries, enter):
    (entries / "2026-01-02-mine" / "encoding.py").write_text(MINE + "\n")
    assert "commit" in enter("2026-01-02-mine", code=2).err


def test_an_entry_without_a_readme_is_refused(entries):
    (entries / "2026-01-01-rope" / "README.md").unlink()
    with pytest.raises(ValueError, match=r"has no README\.md"):
        board.load(entries / "2026-01-01-rope")


def test_a_reading_that_ends_before_the_longest_text_is_refused_before_it_is_trained(entries):
    (entries / "2026-01-03-yarn" / "pe.yaml").write_text("pe: learned\n")
    learned = board.configured(board.load(entries / "2026-01-03-yarn"), TRACK)
    with pytest.raises(ValueError, match="learned ends at 16 tokens"):
        board.size_and_cost(learned)


def test_size_and_cost_are_multiples_of_those_of_rope(entries):
    folder = entries / "2026-01-04-heavy"
    folder.mkdir()
    (folder / "README.md").write_text("An idea.\n")
    (folder / "encoding.py").write_text(HEAVY)
    (folder / "pe.yaml").write_text("name: heavy\n_target_: board.2026-01-04-heavy.encoding.Heavy\n")
    heavy = board.configured(board.load(folder), TRACK)
    parameters, cost = board.size_and_cost(heavy)

    of_rope = sum(p.numel() for p in GPT(heavy.model, encoding("rope"), vocab_size=10, train_len=16).parameters())
    assert parameters == pytest.approx(1 + 1000 / of_rope, abs=1e-4)
    assert cost > rules.COST


def test_the_page_of_this_repository_is_what_its_verdicts_make():
    rows = rules.standings(board.verdicts(Path("board")))
    assert page.markdown(rows, "board.svg") == Path("docs/board.md").read_text()
