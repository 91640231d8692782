"""What tests of benchmarks share: options of a small model, and a compiler that generates no code."""

from pathlib import Path

import torch
from conftest import write_knots

from conf.schema import parse
from ropewalk.app import cli
from scripts import bench


class SmallOptions:
    """Makes options of a small model on a small text, and one head of 64 channels.

    Args:
        folder: for the text.
    """

    def __init__(self, folder: Path) -> None:
        self.overrides = [
            f"data.files={write_knots(folder / 'corpus')}/*.txt", f"data.cache_dir={folder}", "data=text", "device=cpu",
            "model.n_layer=2", "model.dim=32", "train_len=16", "trainer.batch_size=4", "rounds=2",
            "data.val_fraction=0.3", "steps=1", "n_head=1", f"nanogpt={folder}", "shapes=[[2,4,32,16,4]]",
        ]  # fmt: skip

    def __call__(self, *overrides: str) -> bench.BenchOptions:
        with cli.composed("bench", "mode=peers", *self.overrides, *overrides) as config:
            return parse(bench.BenchOptions, cli.plain(config))


def compile_without_code(monkeypatch) -> None:
    """torch.compile traces, and generates no code."""
    compile = torch.compile

    def traced(*args, **kwargs):
        return compile(*args, **kwargs | {"backend": "eager"})

    monkeypatch.setattr(torch, "compile", traced)
