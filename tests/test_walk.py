"""The walk of docs/walk.sh as a user runs it, at a small size: what it makes is what transformers then reads."""

import os
import subprocess
import sys

import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from evaluation.results import Results
from evaluation.retrieval import Passkey
from model import store

THEIRS = """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("runs/walk-hf")
with torch.no_grad():
    save_file({"logits": model(load_file("idx.safetensors")["idx"]).logits}, "logits.safetensors")
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
    said = subprocess.run(
        ["bash", ROOT / "docs" / "walk.sh", *options], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout + said.stderr

    runs = tmp_path / "runs"
    assert {row.reading for row in Results.load(runs / "walk-rope" / "swap.json").lengths} == {
        "rope, as trained", "linear, scale 4", "ntk, scale 4", "yarn, scale 4"
    }  # fmt: skip
    tuned = Results.load(runs / "walk-yarn" / "results.json")
    assert {row.length for row in tuned.lengths} == {64, 128, 256, 512}
    assert {cell.length for cell in Passkey.load(runs / "walk-yarn" / "passkey.json").cells} == {64, 128, 256, 512}
    for name in ("walk-rope/figures/swap.png", "walk-yarn/figures/extrapolation.png", "walk-yarn/figures/passkey.png"):
        assert (runs / name).read_bytes().startswith(b"\x89PNG")

    net = store.load(runs / "walk-yarn")
    assert net.encodings[0].label == "scale 4, as trained"
    idx = torch.randint(net.vocab_size, (2, 256), generator=torch.Generator().manual_seed(0))
    save_file({"idx": idx}, tmp_path / "idx.safetensors")
    # -I: neither the working directory nor PYTHONPATH is searched, so that none of our code helps
    done = subprocess.run([sys.executable, "-I", "-c", THEIRS], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        ours = net(idx)
    assert ours.std() > 0.1
    torch.testing.assert_close(load_file(tmp_path / "logits.safetensors")["logits"], ours, rtol=1e-5, atol=1e-5)
