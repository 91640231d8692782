"""Text that comes from files stands for itself on Hydra's command line; a process ends with who has started it."""

import os
import signal
import subprocess
import sys
from itertools import product

import pytest
from conftest import ROOT

from ropewalk.app.compose import composed, plain, quoted
from ropewalk.app.side_by_side import LAUNCHER
from ropewalk.run.stop import PARENT

PIECES = ["\\", "'", "${oc.env:SECRET}", "${", "$", "}", " ", "\n"]


def test_text_stands_for_itself(monkeypatch):
    """All orders of three pieces that Hydra or OmegaConf read as something else."""
    monkeypatch.setenv("SECRET", "hunter2")
    texts = ["".join(pieces) for pieces in product(PIECES, repeat=3)]
    overrides = [f"+texts.t{i}={quoted(text)}" for i, text in enumerate(texts)]
    with composed("report", *overrides) as config:
        assert [*plain(config)["texts"].values()] == texts


@pytest.mark.parametrize("variable", [LAUNCHER, PARENT])
def test_a_process_whose_starter_is_gone_ends_before_it_has_imported_anything(variable):
    command = [sys.executable, "train.py", "--help"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {variable: "1"}, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")
