"""scripts/export.py on run directories; what it writes is tested where transformers reads it."""

import pytest
from process_helpers import On

from scripts import export as program

pytest.importorskip("transformers")


def test_another_run_that_takes_its_place_is_not_mixed_in(straight, script, monkeypatch, tmp_path):
    """Else the folder would have the tokenizer of one and the weights of the other."""
    run = tmp_path / "run"
    run.symlink_to(straight("pe=rope"))
    other = tmp_path / "other"
    other.symlink_to(straight("pe=rope", "seed=1"))

    On("ropewalk.hf:export", 1, lambda: other.replace(run))(monkeypatch.setattr)
    said = script(program, f"run={run}", f"out={tmp_path}/out")

    assert said.code == 2
    assert f"{run} is another run by now" in said.err
    assert not (tmp_path / "out").exists()
