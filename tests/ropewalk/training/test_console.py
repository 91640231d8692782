"""What a run prints about itself."""

from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training.rows import show


def test_a_speed_of_zero_says_nothing_of_the_time_left(capsys):
    """It is rounded to 0.0 after a process was suspended."""
    show({"step": 2, "train/loss": 2.0, "lr": 1e-3, "tokens_per_s": 0.0}, check(train_values()))
    assert "minutes left" not in capsys.readouterr().out
