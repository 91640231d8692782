"""The commands of docs/walk.sh, at a small size: what they make is what transformers then reads."""

import json
import os
import subprocess
import sys
from importlib import import_module

import torch
import transformers
from conftest import ROOT, outcome_of, write_knots

from model import serialization


def commands(folder, *options: str) -> list[list[str]]:
    """What docs/walk.sh would call python with."""
    python = folder / "python"
    python.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" '' >> {folder}/said\n")
    python.chmod(0o755)
    small = {"PYTHON": str(python), "RUNS": str(folder / "runs"), "LENGTH": "64", "STEPS": "20"}
    subprocess.run(["bash", ROOT / "docs" / "walk.sh", *options], env=os.environ | small, check=True)
    return [said.split("\n") for said in (folder / "said").read_text().removesuffix("\n\n").split("\n\n")]


def test_the_walk(tmp_path, monkeypatch, capfd):
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

    found = {name: [json.loads(p.read_text()) for p in (tmp_path / "runs" / name / "evals").glob("*.json")]
             for name in ("walk-rope", "walk-yarn")}  # fmt: skip
    assert {result["variant"]["label"] for result in found["walk-rope"]} == {
        "rope", "yarn at scale 8", "linear at scale 4", "ntk at scale 4", "yarn at scale 4"
    }  # fmt: skip
    for kind, lengths in {"lengths": {64, 128, 256, 512}, "ruler": {512}}.items():
        (result,) = (result for result in found["walk-yarn"] if result["kind"] == kind)
        assert {measured["length"] for measured in result["measured"]} == lengths
    assert (tmp_path / "runs" / "walk-yarn" / "report.html").is_file()

    net = serialization.load(tmp_path / "runs" / "walk-yarn")
    assert net.scales == (4.0,)
    idx = torch.randint(net.vocab_size, (2, 256), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "walk-hf")
    torch.testing.assert_close(theirs(idx).logits, net(idx), rtol=1e-5, atol=1e-5)
    assert net(idx).std() > 0.1
