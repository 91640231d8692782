"""What differs between two finished runs, to the bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ropewalk.run.directory import read_metrics, steps_in
from ropewalk.training.checkpoints import path_of

# May differ: what a clock measured, the name, what tells one start of the program from another, and checksums of these.
CLOCK = {
    "tokens_per_s",
    "seconds",
    "logged_seconds",
    "peak_memory",
    "peak_memory_mb",
    "checksum",
    "run",
    "run_id",
    "provenance",
}


def leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """(where, what) of everything in nested dicts and lists; of a tensor its type, shape and bytes."""
    if isinstance(value, dict):
        for key in value.keys() - CLOCK:
            yield from leaves(value[key], f"{at}/{key}")
    elif isinstance(value, list):
        yield from leaves(dict(enumerate(value)), at)
    elif isinstance(value, torch.Tensor):
        yield at, (value.dtype, value.shape, value.flatten().view(torch.uint8).numpy().tobytes())
    elif value != value:
        yield at, "NaN"
    else:
        yield at, value


def results(run: Path) -> dict[str, Any]:
    """All numbers of a finished run: rows, evaluations, what it says of its training."""
    files = [*run.glob("evals/*.json"), run / "training.json"]
    read = {path.name: json.loads(path.read_text()) for path in files}
    return dict(leaves({"metrics.jsonl": list(read_metrics(run)), **read}, ""))


def contents(run: Path) -> dict[str, Any]:
    """These numbers, the weights and the newest checkpoint."""
    checkpoint = path_of(run / "checkpoints", steps_in(run / "checkpoints")[-1])
    weights = load_file(run / "model.safetensors")
    state = torch.load(checkpoint, weights_only=True)
    return results(run) | dict(leaves({"model.safetensors": weights, checkpoint.name: state}, ""))


def differences(one: Path, other: Path) -> list[str]:
    """Where the contents of two runs are not the same."""
    first = contents(one)
    second = contents(other)
    return sorted(at for at in first.keys() | second.keys() if first.get(at, ...) != second.get(at, ...))
