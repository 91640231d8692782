"""The commands of docs/walk.sh, at a small size: what they make is what transformers then reads."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ROOT, outcome_of, tokens, write_knots

from model import serialization
from model.position.network import scales_of
from ropewalk.evaluation.results import load_all


def commands(folder, *options: str) -> list[list[str]]:
    """What docs/walk.sh would call python with."""
    python = folder / "python"
    python.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" '' >> {folder}/said\n")
    python.chmod(0o755)
    small = {
        "PYTHON": str(python),
        "RUNS": str(folder / "runs"),
        "LENGTH": "48",
        "STEPS": "20",
    }
    subprocess.run(
        ["bash", ROOT / "docs" / "walk.sh", *options],
        env=os.environ | small,
        check=True,
    )
    said = (folder / "said").read_text().removesuffix("\n\n")
    return [command.split("\n") for command in said.split("\n\n")]


@pytest.mark.long
def test_the_commands_of_the_walk_end_with_the_same_model_in_transformers(tmp_path, monkeypatch, capfd):
    corpus = write_knots(tmp_path / "corpus")
    options = [
        "data=text",
        f"data.files={corpus}/*.txt",
        f"data.cache_dir={tmp_path}/prepared",
        "data.val_fraction=0.3",
        "model.n_layer=1",
        "model.dim=32",
        "model.n_head=2",
        "trainer.accelerator=cpu",
        "trainer.val_tokens=512",
        "eval.by_position=false",
        "eval.far_copies=false",
    ]
    monkeypatch.chdir(tmp_path)
    for program, *arguments in commands(tmp_path, *options):
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        module = program.removesuffix(".py").replace("/", ".")
        outcome = outcome_of(module, capfd)
        assert outcome.code == 0, outcome.err

    runs = tmp_path / "runs"
    read_by = {e.variant.label for e in load_all(runs / "walk-rope")}

    assert read_by == {"rope", "linear at scale 4", "ntk at scale 4", "yarn at scale 4", "yarn at scale 8"}
    assert {e.kind for e in load_all(runs / "walk-yarn")} == {"lengths", "ruler"}

    net = serialization.load(runs / "walk-yarn")

    assert scales_of(net.encodings) == (4.0,)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(runs / "walk-hf")
    idx = tokens(192, vocab_size=net.vocab_size)
    logits = net(idx)

    torch.testing.assert_close(theirs(idx).logits, logits, rtol=1e-5, atol=1e-5)
    assert logits.std() > 0.1
