"""The walk of docs/walk.sh as a user runs it, at a small size: what it makes is what transformers then reads."""

import json
import os
import subprocess
import sys

import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from model import serialization

THEIRS = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("runs/walk-hf")
with torch.no_grad():
    save_file({"logits": model(load_file("idx.safetensors")["idx"]).logits}, "logits.safetensors")
assert not {"model", "conf", "data"} & sys.modules.keys()
"""


def test_the_walk(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(12):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"{i} knots in a rope; " * 40)
    options = [
        "data=text", f"data.files={tmp_path}/corpus/*.txt", f"data.cache_dir={tmp_path}/cache", "data.val_fraction=0.3",
        "model.n_layer=1", "model.dim=32", "model.n_head=2", "trainer.accelerator=cpu", "trainer.val_tokens=512",
    ]  # fmt: skip
    small = {"PYTHON": sys.executable, "RUNS": str(tmp_path / "runs"), "LENGTH": "64", "STEPS": "40"}
    environment = os.environ | small | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    walk = ["bash", ROOT / "docs" / "walk.sh", *options]
    done = subprocess.run(walk, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    found = {name: [json.loads(p.read_text()) for p in (tmp_path / "runs" / name / "evals").glob("*.json")]
             for name in ("walk-rope", "walk-yarn")}  # fmt: skip
    assert {result["variant"]["label"] for result in found["walk-rope"]} == {
        "rope", "yarn, scale 8", "linear, scale 4", "ntk, scale 4", "yarn, scale 4"
    }  # fmt: skip
    for kind in ("lengths", "passkeys"):
        (result,) = (result for result in found["walk-yarn"] if result["kind"] == kind)
        assert {measured["length"] for measured in result["measured"]} == {64, 128, 256, 512}
    assert (tmp_path / "runs" / "walk-yarn" / "report.html").is_file()

    net = serialization.load(tmp_path / "runs" / "walk-yarn")
    assert net.scales == (4.0,)
    idx = torch.randint(net.vocab_size, (2, 256), generator=torch.Generator().manual_seed(0))
    save_file({"idx": idx}, tmp_path / "idx.safetensors")
    # -I: neither the working directory nor PYTHONPATH is searched, so that none of our code helps
    done = subprocess.run([sys.executable, "-I", "-c", THEIRS], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        ours = net(idx)
    assert ours.std() > 0.1
    torch.testing.assert_close(load_file(tmp_path / "logits.safetensors")["logits"], ours, rtol=1e-5, atol=1e-5)
