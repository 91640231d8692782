"""Checkpoints in parts: folders to which every rank writes what it holds, for models that no process can hold whole.

The parts are safetensors files, written and read by torch.distributed.checkpoint; reading them runs no code. index.json
has the progress of the run, and the checksum of each part.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ropewalk.files import sha256, sync, write_json
from ropewalk.training.distributed import gather, on_rank_zero, rank, world_size


def save(folder: Path, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
    """Write a checkpoint. `folder` gets its name only once it is whole. Called by all ranks, with the same names.

    Raises:
        OSError: a part could not be written.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    on_rank_zero(lambda: _empty(temporary))
    writer = checkpoint.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
    try:
        with _quietly():
            checkpoint.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except checkpoint.CheckpointException as failed:
        # It is no Exception, and its text a traceback. All ranks get it.
        reason, _ = next(iter(failed.failures.values()))
        raise OSError(f"cannot write {folder}: {reason}") from None

    # The ranks share the reading, part by part.
    parts = sorted(temporary.glob("*.safetensors"))
    checksums = {}
    for part in parts[rank() :: world_size()]:
        checksums[part.name] = sha256(part)
    of_all = {name: value for of_rank in gather(checksums) for name, value in of_rank.items()}
    on_rank_zero(lambda: _finish(temporary, folder, {"progress": progress, "sha256": of_all}))


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the warning that PyTorch gives where a single process writes or reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _finish(temporary: Path, folder: Path, index: dict[str, Any]) -> None:
    """Give a complete folder its name."""
    write_json(temporary / "index.json", index)
    sync(temporary)
    if folder.exists():  # a damaged one
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync(folder.parent)


def check(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Size]]:
    """Return the progress and the shapes of all tensors of a checkpoint.

    Raises:
        ValueError, OSError: a part is missing or damaged.
    """
    index = read_index(folder)
    for name, expected in index["sha256"].items():
        if sha256(folder / name) != expected:
            raise ValueError(f"the checksum of {name} is wrong")
    parts = {path.name for path in folder.glob("*.safetensors")}
    strange = sorted(parts - index["sha256"].keys())
    if strange:
        raise ValueError(f"{strange[0]} is not part of it")
    metadata = checkpoint.HuggingFaceStorageReader(str(folder)).read_metadata()
    shapes = {}
    for name, found in metadata.state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)  # safetensors hold nothing else
        shapes[name] = found.size
    return index["progress"], shapes


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of index.json."""
    index: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return index


def load(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint that `check` has found whole. All ranks call it.

    Returns:
        The progress.
    """
    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    with _quietly():
        checkpoint.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    return dict(read_index(folder)["progress"])
