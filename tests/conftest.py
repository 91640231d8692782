"""Shared by all tests: every YAML under conf/pe is an encoding to test, with no list to keep."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from model import position
from model.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[1]
ENCODINGS = sorted(path.stem for path in (ROOT / "conf" / "pe").glob("*.yaml"))


def pe_options(name: str, **options) -> dict:
    """The options in conf/pe/`name`.yaml, its defaults merged in, with some replaced."""
    own = OmegaConf.load(ROOT / "conf" / "pe" / f"{name}.yaml")
    parents = [p for p in own.pop("defaults", []) if p != "_self_"]
    merged = {}
    for parent in parents:
        merged |= pe_options(parent)
    return merged | OmegaConf.to_container(own) | options


def build_pe(name: str, *, dim=64, n_head=4, head_dim=16, train_len=32, layer=0, **options):
    """The encoding `name` for a small network, with random parameters instead of their initial values."""
    pe = position.build(pe_options(name, **options), position.Shape(dim, n_head, head_dim, train_len, layer))
    with torch.no_grad():
        pe.reset_parameters(torch.Generator().manual_seed(0))
    return randomise(pe)


def build_gpt(name: str, *, vocab_size=50, train_len=32, seed=0, pe=None, **cfg) -> GPT:
    """A small network with the encoding `name`; `pe` replaces options of its YAML."""
    cfg = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "dim": 64} | cfg
    net = GPT(GPTConfig(**cfg), pe_options(name, **(pe or {})), vocab_size=vocab_size, train_len=train_len, seed=seed)
    randomise(net.positions)
    return net.eval()


def randomise(module):
    """Parameters that start at zero (CoPE's table) would hide errors: give them values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.empty_like(p).normal_(0, 0.3, generator=generator))
    return module


@pytest.fixture(params=ENCODINGS)
def encoding(request) -> str:
    """Each encoding that has a YAML."""
    return request.param
