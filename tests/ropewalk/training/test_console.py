"""What a run prints about itself."""

from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training.console import show


def test_of_the_time_left_it_says_what_is_known(capsys):
    """The first step says nothing of it, nor a speed that is 0.0 after a process was suspended."""
    row = {"step": 2, "train/loss": 2.0, "lr": 1e-3, "tokens_per_s": 10.0}
    for changes in ({"step": 1}, {}, {"tokens_per_s": 0.0}):
        show(row | changes, check(train_values()))
    first, second, suspended = capsys.readouterr().out.splitlines()

    assert "minutes left" in second
    assert "minutes left" not in first + suspended
