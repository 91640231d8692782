"""An entry of the board, from its folder to its line."""

import json
import os
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import snapshot, train_here

from conf.errors import ConfigError
from conf.options import encoding
from lab.board import board, counter, page, prediction, ranks, rules, trials
from model.gpt import GPT
from model.position.rotary import Rotary
from model.size import n_parameters
from scripts import enter as program

MINE = '''"""RoPE, as somebody writes it who has another idea."""

from model.position.rotary import Rotary


class Mine(Rotary):
    pass
'''
TRACK = [
    "model.n_layer=1", "model.dim=16", "model.n_head=2", "model.head_dim=8", "trainer.max_steps=2",
    "trainer.batch_size=2", "trainer.val_tokens=64", "trainer.val_every=2", "trainer.accelerator=cpu", "train_len=16",
    "eval.lengths=[1,8]", "eval.target_tokens=8", "eval.sequences=2", "optim.warmup_steps=1",
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
    monkeypatch.setattr(rules, "MANY", 3)
    monkeypatch.setattr(rules, "PROMISING", 0.0)
    monkeypatch.setattr("train.page.show_results", lambda run: 0.0)
    monkeypatch.setattr(trials, "train_all", train_here)
    monkeypatch.setenv("ROPEWALK_PLUGINS", "")  # whoever names an entry need not name its package
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


def test_entries_become_lines_verdicts_and_a_page(entries, enter, tmp_path):
    names = sorted(path.name for path in entries.iterdir())
    lines = [enter(name).out.splitlines()[-1] for name in names]

    assert lines[0].startswith("entry 2026-01-01-rope, score ")
    assert lines[0].endswith(": record")
    assert " of 2026-01-01-rope, p " in lines[1]

    rope, mine, yarn = (json.loads((entries / name / "verdict.json").read_text()) for name in names)

    assert mine["commit"] == git(entries, "rev-parse", "HEAD").strip()
    # The first one has more seeds, since all that follow are compared with it.
    assert rope["seeds"] == rules.drawn_seeds(mine["commit"])
    assert mine["seeds"] == rope["seeds"][:2]
    assert mine["measured_of_holder"]["gain"] == [of_chain[:2] for of_chain in rope["measured"]["gain"]]
    assert mine["parameters"] == 1.0
    # YaRN trains as RoPE does, bit for bit.
    assert yarn["measured"]["excess"] == yarn["measured_of_holder"]["excess"]
    assert yarn["measured"]["gain"] != yarn["measured_of_holder"]["gain"]

    configured = board.configured(board.load(entries / names[0]), [*TRACK, f"runs_dir={tmp_path / 'runs'}"])
    runs = board.runs_of(configured, rope["seeds"])
    losses = trials.losses(runs[0])
    samples = [losses[length]["sample"] for length in (16, 128)]
    short, long = (sample.values.sum() / sample.units.sum() for sample in samples)

    assert rope["measured"]["gain"][0][0] == pytest.approx(short - long, abs=1e-6)
    assert [run.data["texts"] for run in runs] == 2 * rope["seeds"]
    assert len([*(tmp_path / "runs").glob("*/training.json")]) == (3 + 2 + 2) * 2

    judged = snapshot(entries)

    assert enter(names[1]).out.splitlines()[-1] == lines[1]
    assert snapshot(entries) == judged  # an entry is judged once


def test_what_is_not_committed_has_no_seeds_yet(entries, enter):
    (entries / "2026-01-02-mine" / "encoding.py").write_text(MINE + "\n")
    assert "commit" in enter("2026-01-02-mine", code=2).err


class Heavy(Rotary):
    """RoPE with a table of positions that nobody reads, and a sum over millions of numbers in each step."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.unused = torch.nn.Parameter(torch.zeros(1000))
        self.register_buffer("learned_elsewhere", torch.zeros(500))

    def reset_parameters(self, generator):
        torch.nn.init.zeros_(self.unused)

    def tables(self, pos, length):
        sum(range(3_000_000))
        return super().tables(pos, length)


def test_size_and_cost_are_multiples_of_those_of_rope(monkeypatch):
    monkeypatch.setenv("ROPEWALK_PLUGINS", __name__)
    rope = encoding("rope")
    heavy = trials.configuration(*board.TEXTS, *TRACK, pe=rope | {"_target_": f"{__name__}.Heavy"})
    of_rope = n_parameters(GPT(heavy.model, rope, vocab_size=10, train_len=16))["total"]

    parameters, cost, reading = board.size_and_costs(heavy)

    assert parameters == pytest.approx(1 + 1500 / of_rope, abs=1e-4)
    assert cost > rules.COST
    assert reading > rules.READING


class Peeking(Rotary):
    """RoPE that sees the mean of all values: where it is told to."""

    longer, training_only = True, False

    def attend(self, q, k, v, state, ctx):
        out = super().attend(q, k, v, state, ctx)
        if (k.size(2) > self.train_len) == self.longer and self.training >= self.training_only:
            out = out + 1e-3 * v.mean(2, keepdim=True)
        return out


@pytest.mark.parametrize(
    ("longer", "training_only", "message"),
    [
        (True, False, "in training, at 128 tokens"),
        (False, False, "in training, at 16 tokens"),
        (True, True, "in training, at 128 tokens"),
    ],
)
def test_who_reads_the_future_is_refused_at_both_lengths(longer, training_only, message, monkeypatch):
    monkeypatch.setenv("ROPEWALK_PLUGINS", __name__)
    monkeypatch.setattr(Peeking, "longer", longer)
    monkeypatch.setattr(Peeking, "training_only", training_only)
    cfg = trials.configuration(*board.TEXTS, *TRACK, pe=encoding("rope") | {"_target_": f"{__name__}.Peeking"})

    with pytest.raises(ConfigError, match=f"reads the future: {message}"):
        board.size_and_costs(cfg)


VERDICT = "2026-11-25-rope/verdict.json"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (VERDICT, lambda measured: measured["possible"].pop()),
        (VERDICT, lambda measured: measured["excess"][1].pop()),
        (VERDICT, lambda measured: measured["gain"][0].insert(3, "x")),
        (VERDICT, lambda measured: [of_kind.pop() for kinds in measured.values() for of_kind in kinds]),
        ("counter.json", lambda measured: measured["excess"][1].pop()),
    ],
)
def test_a_file_without_a_number_for_each_kind_and_seed_is_named(file, damage, tmp_path):
    """It would end the page of all entries with words about arrays."""
    values = json.loads(Path("board", file).read_text())
    damage(values["measured"])
    copy = tmp_path / file
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(json.dumps(values))

    with pytest.raises(ConfigError, match=re.escape(f"{copy} is damaged")):
        counter.load(tmp_path) or board.verdicts(tmp_path)


def test_the_page_of_this_repository_is_what_its_verdicts_make():
    rows = rules.standings(board.verdicts(Path("board")))
    counted = counter.load(Path("board"))
    assert page.markdown(rows, "board.svg", counted) == Path("docs/board.md").read_text()


def test_what_the_board_predicts_stands_in_the_log():
    assert ranks.table(Path()) in Path("docs/log/ranks.md").read_text()


def test_a_prediction_stands_is_refuted_or_stays_open():
    of_arms = {"fox": 0.06, "tenfold": 0.04, "alibi": 0.03, "nape": 0.02, "kerple": 0.01, "rope": -1.0}
    changing = dict(zip(of_arms, [-0.006, 0.001, 0.002, 0.003, 0.0, -0.002], strict=True))

    def lines(sign=1.0, behind=(0.02, 0.011, 0.03)):
        rows = [{"line": "fox", "seed": 4, "gain": 0.0}]  # the others have not run with this seed
        for n, (line, gain) in enumerate(of_arms.items()):
            rows += [{"line": line, "seed": seed, "gain": sign * gain + 1e-4 * seed * n} for seed in (1, 2, 3)]
        low_high = dict(zip(("difference", "difference_low", "difference_high"), behind, strict=True))
        table = pd.DataFrame([*rows, {"line": "tenfold", "seed": None} | low_high])
        arms = {line: [float(n), gain, changing[line]] for n, (line, gain) in enumerate(of_arms.items())}
        return list(prediction.verdicts(table, arms))

    ran, by_hand, score, *_, first, second, third, fourth = lines()
    assert ran == "6 of 6 arms, each with 3 seeds"
    assert by_hand.startswith("by hand: 1.00 (1.00 to 1.00); of 5 that may hold 1.00")
    assert score.startswith("the board's score: 1.00")
    assert [line.split(": ")[-1] for line in (first, third)] == ["stands", "stands"]
    assert second.endswith("open")  # six arms are few
    assert fourth.endswith("refuted")  # both are right

    *_, first, _, third, _ = lines(sign=-1, behind=(0.001, -0.004, 0.003))
    assert [line.split(": ")[-1] for line in (first, third)] == ["refuted", "refuted"]
    *_, third, _ = lines(behind=(0.004, -0.004, 0.006))
    assert third.endswith("(+0.004 ± 0.005): open")
