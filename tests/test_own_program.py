"""docs/own_program.md: its blocks of code run in a folder of the user's; and what hides our train.py is named."""

import ast
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from hydra.core.global_hydra import GlobalHydra

import ropewalk

PAGE = (ROOT / "docs" / "own_program.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAM = next(block for block in BLOCKS if block.startswith("# study.py"))


@pytest.mark.long
def test_the_code_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS:
        if block != PROGRAM:
            exec(block, names)

    runs = {path.parent.name for path in tmp_path.glob("runs/*/training.json")}

    assert runs == {"first", "rope-lr0.001", "rope-lr0.004", "trial-0", "trial-1"}
    assert names["study"].best_value == min(trial.value for trial in names["study"].trials)
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.long
def test_a_hydra_program_of_the_users_trains(tmp_path):
    (conf,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "study.yaml").write_text(conf)
    program = PROGRAM.replace("def main(config):\n", "def main(config):\n" + BEFORE).replace("\n\n\nmain()", AFTER)
    (tmp_path / "study.py").write_text(program)
    options = ast.literal_eval(re.search(r"SMALL = (\[.*?\n\])", PAGE, re.DOTALL)[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "study.py", "pe=rope", *options], cwd=tmp_path, env=environment, check=True)

    assert {path.parent.name for path in tmp_path.glob("runs/*/training.json")} == {"study", "other"}


BEFORE = """    from hydra.core.hydra_config import HydraConfig
    before = HydraConfig.get()
"""
AFTER = """
    assert HydraConfig.get() is before


main()
"""


def test_a_file_that_hides_train_py_is_named(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("raise AssertionError('it runs again')")
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/train.py, not Ropewalk's: give that file another name"):
        ropewalk.train("pe=rope", "data=markov")


@pytest.mark.parametrize(("overrides", "options"), [((["pe=rope"],), {}), ((), {"config": {"pe": "rope"}})])
def test_train_says_which_argument_has_another_type(overrides, options):
    """A list in place of its strings, a dictionary in place of what Hydra composes."""
    with pytest.raises(ValueError, match="Input should be"):
        ropewalk.train(*overrides, **options)
