"""Checkpoints in parts: folders to which every rank writes what it holds, for models that no process can hold whole.

The parts are safetensors files, written and read by torch.distributed.checkpoint; reading them runs no code. index.json
has the progress of the run, and the checksum of each part.
"""

import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from model.serialization import renamed
from ropewalk.files import read_json, refuse_link, sha256, sync, write_json
from ropewalk.training.distributed import gather, on_rank_zero, rank, world_size

INDEX = "index.json"
# Of a checkpoint: its progress, the shape of each tensor, and the tensors.
Content = tuple[dict[str, Any], dict[str, torch.Size], Iterable[tuple[str, Tensor]]]


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
    write_json(temporary / INDEX, index)
    sync(temporary)
    if folder.exists():  # a damaged one
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync(folder.parent)


def read(folder: Path) -> Content:
    """Return the progress, the shapes of all tensors, and what the parts hold of each.

    Raises:
        ValueError, OSError: a part is missing or damaged.
    """
    index = read_json(folder / INDEX)
    # Names come from the folder and not from the index, which might name any file of the machine.
    parts = {path.name: refuse_link(path) for path in sorted(folder.glob("*.safetensors"))}
    different = sorted(parts.keys() ^ index["sha256"].keys())
    if different:
        name = different[0]
        raise ValueError(f"{name} is not part of it" if name in parts else f"{name} is missing")
    for name, path in parts.items():
        with safe_open(path, "pt"):  # its header says how long it is: it may be a sparse file without an end
            pass
        if sha256(path) != index["sha256"][name]:
            raise ValueError(f"the checksum of {name} is wrong")
    metadata = checkpoint.HuggingFaceStorageReader(str(folder)).read_metadata()
    shapes = {}
    for name, found in metadata.state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)  # safetensors hold nothing else
        shapes[name] = found.size
    return index["progress"], renamed(shapes), _tensors(parts.values())


def _tensors(parts: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in all parts, one at a time. A tensor of several parts comes several times, under one name."""
    for part in parts:
        with safe_open(part, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def load(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint that has been found whole. All ranks call it.

    Returns:
        The progress.
    """
    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    stored = renamed({name: name for name in reader.read_metadata().state_dict_metadata})  # by the names of today
    with _quietly():
        by_stored_name = {stored[name]: tensor for name, tensor in tensors.items()}
        checkpoint.load(by_stored_name, storage_reader=reader, no_dist=not dist.is_initialized())
    return dict(read_json(folder / INDEX)["progress"])
