"""What a run prints about itself."""

from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import check
from ropewalk.training.console import show


def test_a_row_of_a_suspended_process(capsys):
    """Its speed, rounded, is 0.0: nothing can be said of the time left."""
    row = {"step": 2, "train/loss": 2.0, "lr": 1e-3, "tokens_per_s": 0.0}
    show(row, check(train_values()))
    assert capsys.readouterr().out == "step 2/700  loss 2.000  lr 1.00e-03  0 tokens/s\n"
