"""What a run shows while it trains."""

import pytest

from ropewalk.app.configure import train_values
from ropewalk.app.resolve import completed
from ropewalk.training import screen


@pytest.fixture
def cfg():
    options = ("trainer.max_steps=100", "trainer.batch_size=1", "train_len=64", "trainer.val_every=40")
    return completed(train_values("data=markov", *options, "trainer.val_tokens=300"))


def row(step: int, **more) -> dict:
    return {"step": step, "tokens": 64 * step, "seconds": step / 5, "train/loss": 2.0, "tokens_per_s": 320.0, **more}


def test_a_file_has_a_line_by_the_clock(cfg, monkeypatch, capsys):
    """And of the first step and of each validation."""
    now = 0.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    with screen.Screen(cfg, evaluation=0) as shown:
        for now, step in enumerate((1, 10, 20, 30, 40, 50, 60)):
            now *= 4.0
            more = {"val/error": 12.5, "val/loss": 1.0} if step == 40 else {}
            shown.show(row(step, **more))
    lines = capsys.readouterr().out.splitlines()

    assert [line.split("/")[0] for line in lines] == ["step 1", "step 30", "step 40"]
    assert "val error 12.5 %" in lines[-1]


def test_the_time_left_counts_what_is_still_to_be_read(cfg, capsys):
    """60 steps of 64 tokens, two validations of 300 and an evaluation of 9,000, which is three times as fast."""
    with screen.Screen(cfg, evaluation=9_000) as shown:
        shown.show(row(40, **{"val/loss": 1.0}))
    minutes = (60 * 64 + (2 * 300 + 9_000) / 3) / 320 / 60

    assert f"{minutes:.1f} minutes left" in capsys.readouterr().out
