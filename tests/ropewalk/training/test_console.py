"""What a run prints about itself."""

from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training.console import Pulse, show


def test_a_row_of_a_suspended_process(capsys):
    """Its speed, rounded, is 0.0: nothing can be said of the time left."""
    row = {"step": 2, "train/loss": 2.0, "lr": 1e-3, "tokens_per_s": 0.0}
    show(row, check(train_values()))
    assert capsys.readouterr().out == "step 2/700  loss 2.000  lr 1.00e-03  0 tokens/s\n"


def test_a_step_is_shown_where_no_row_is(capsys):
    cfg = check(train_values())
    pulse = Pulse(every=0)
    pulse(1, cfg, row=True)
    pulse(2, cfg, row=False)
    Pulse(every=3600)(3, cfg, row=False)
    assert capsys.readouterr().err == "step 2/700\n"


def test_the_first_step_says_nothing_of_the_time_left(capsys):
    row = {"step": 1, "train/loss": 2.0, "lr": 1e-3, "tokens_per_s": 10.0}
    show(row, check(train_values()))
    show(row | {"step": 2}, check(train_values()))
    first, second = capsys.readouterr().out.splitlines()
    assert "left" not in first
    assert "left" in second
