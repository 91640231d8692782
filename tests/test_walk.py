"""The commands of docs/walk.sh, at a small size: what they make is what transformers then reads."""

import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
import transformers
from conftest import ROOT, outcome_of, write_knots

from model import serialization
from model.position.network import scales_of
from ropewalk.evaluation.results import load_all


def commands(folder, *options: str) -> list[list[str]]:
    """What docs/walk.sh would call python with."""
    python = folder / "python"
    python.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" '' >> {folder}/said\n")
    python.chmod(0o755)
    small = {"PYTHON": str(python), "RUNS": str(folder / "runs"), "LENGTH": "48", "STEPS": "20"}
    subprocess.run(["bash", ROOT / "docs" / "walk.sh", *options], env=os.environ | small, check=True)
    return [said.split("\n") for said in (folder / "said").read_text().removesuffix("\n\n").split("\n\n")]


@pytest.mark.long
def test_the_commands_of_the_walk_end_with_the_same_model_in_transformers(tmp_path, monkeypatch, capfd):
    options = [
        "data=text", f"data.files={write_knots(tmp_path / 'corpus')}/*.txt", f"data.cache_dir={tmp_path}/prepared",
        "data.val_fraction=0.3", "model.n_layer=1", "model.dim=32", "model.n_head=2", "trainer.accelerator=cpu",
        "trainer.val_tokens=512", "eval.by_position=false", "eval.far_copies=false",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for program, *arguments in commands(tmp_path, *options):
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        main = import_module(program.removesuffix(".py").replace("/", ".")).main
        outcome = outcome_of(main, capfd)
        assert outcome.code == 0, outcome.err

    rope, yarn = (tmp_path / "runs" / name for name in ("walk-rope", "walk-yarn"))
    zero_shot = {"linear at scale 4", "ntk at scale 4", "yarn at scale 4"}
    assert {e.variant.label for e in load_all(rope)} == zero_shot | {"rope", "yarn at scale 8"}
    assert {e.kind for e in load_all(yarn)} == {"lengths", "ruler"}

    net = serialization.load(yarn)
    assert scales_of(net.encodings) == (4.0,)

    idx = torch.randint(net.vocab_size, (2, 192), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "walk-hf")
    torch.testing.assert_close(theirs(idx).logits, net(idx), rtol=1e-5, atol=1e-5)
    assert net(idx).std() > 0.1
