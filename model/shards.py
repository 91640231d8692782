"""FSDP: weights, gradients and optimizer state in shards over the processes, and their checkpoints.

A sharded checkpoint is a folder that torch.distributed.checkpoint writes, every process its own shards, as safetensors:
its usual format has pickles in it. Beside them, other.pt holds the few values that are the same everywhere.
"""

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from model.checkpoints import OTHER, SHARDS, remove, save
from model.files import sync
from model.gpt import GPT
from model.lit import LitGPT
from model.processes import first, once


class ShardedGPT(LitGPT):
    """Trains a copy of `net` in shards. `net` itself stays whole, in the CPU's memory, and comes to the device only to
    be evaluated: this must hold the weights, but not their gradients and optimizer state as well.

    With `compile` each block is compiled.
    """

    def __init__(self, net: GPT, *, compile: bool, **options: Any) -> None:
        super().__init__(net, **options)
        self.whole, self.compiled = [net], compile  # in a list, so that it is no part of this module

    def configure_model(self) -> None:
        (net,) = self.whole
        assert self.device_mesh is not None
        self.net = copy.deepcopy(net.cpu())
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            if self.compiled:
                block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def assemble(self) -> None:
        (net,) = self.whole
        state: dict[str, Any] = get_model_state_dict(self.net, options=StateDictOptions(full_state_dict=True))
        net.to(self.device, next(iter(state.values())).dtype).load_state_dict(state)

    def release(self) -> None:
        self.whole[0].cpu()


class Shards(ModelParallelStrategy):
    """Lightning's strategy, with checkpoints that are whole or not there and contain no pickle but tensors."""

    def __init__(self, world_size: int) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        tensors, other = _split(checkpoint)
        folder = _Folder(Path(filepath))
        folder.begin()
        try:
            dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder.temporary), save_distributed=True))
        except CheckpointException as error:  # on every process, with what went wrong on each
            (cause, _), *_ = error.failures.values()
            raise OSError(f"cannot write {filepath}: {cause}") from None
        folder.finish(other)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        assert self.model is not None
        (optimizer,) = self.optimizers
        state: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer)
        if path.is_file():  # of a run without shards
            other = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            weights, moments = other["state_dict"], other["optimizer_states"][0]
            names = [name for group in state["param_groups"] for name in group["params"]]
            _rename(moments, dict(enumerate(names)))
        else:
            tensors, _ = _split({"state_dict": get_model_state_dict(self.model), "optimizer_states": [state]})
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
            other = torch.load(path / OTHER, map_location="cpu", weights_only=True)
            weights, moments = _weights(tensors), _moments(tensors) | {"param_groups": other["optimizer_groups"]}
        # Not strict, because tied weights have one name; a missing one would have been noticed before.
        options = StateDictOptions(full_state_dict=path.is_file(), strict=False)
        set_model_state_dict(self.model, weights, options=options)
        set_optimizer_state_dict(self.model, optimizer, optim_state_dict=moments, options=options)
        return other


class _Folder:
    """A folder that takes the place of `path` once it is complete and on the disk."""

    def __init__(self, path: Path) -> None:
        self.path, self.temporary = path, path.with_name(f".{path.name}.tmp")

    @once
    def begin(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()

    def finish(self, other: dict[str, Any]) -> None:
        dist.barrier()
        if first():
            sizes = {file.name: file.stat().st_size for file in self.temporary.iterdir()}
            save(other | {SHARDS: sizes}, self.temporary / OTHER)
            for file in self.temporary.iterdir():
                sync(file)
            sync(self.temporary)
            remove(self.path)
            self.temporary.replace(self.path)
            sync(self.path.parent)
        dist.barrier()


def read(path: Path) -> dict[str, Any]:
    """A sharded checkpoint as a whole one, for a process without shards."""
    reader = HuggingFaceStorageReader(str(path))
    sizes = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(part.size, dtype=part.properties.dtype) for name, part in sizes.items()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    other = torch.load(path / OTHER, map_location="cpu", weights_only=True)
    del other[SHARDS]
    weights = _weights(tensors)
    weights |= {name: weights[same] for name, same in other.pop("tied").items()}
    moments = _moments(tensors) | {"param_groups": other.pop("optimizer_groups")}
    names = [name for group in moments["param_groups"] for name in group["params"]]
    _rename(moments, {name: i for i, name in enumerate(names)})
    return other | {"state_dict": weights, "optimizer_states": [moments]}


def _rename(moments: dict[str, Any], names: dict[Any, Any]) -> None:
    """Call the parameters of an optimizer's state by other names. In a whole checkpoint they are numbers, in the order
    of the groups; not, as Lightning takes them to be, in that of the model."""
    moments["state"] = {names[name]: state for name, state in moments["state"].items()}
    for group in moments["param_groups"]:
        group["params"] = [names[name] for name in group["params"]]


def _split(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint of Lightning's under names of one level, and what else is in it."""
    other = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    (optimizer,) = checkpoint["optimizer_states"]
    weights = dict(checkpoint["state_dict"])
    other["tied"] = tied = {"net.head.weight": "net.embedding.weight"} if _tied(weights) else {}
    tensors = {f"weight/{name}": value for name, value in weights.items() if name not in tied}
    for name, state in optimizer["state"].items():
        tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items()}
    other["optimizer_groups"] = optimizer["param_groups"]
    return tensors, other


def _tied(weights: dict[str, Any]) -> bool:
    one, other = (weights[f"net.{name}.weight"].to_local() for name in ("head", "embedding"))
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _weights(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix("weight/"): value for name, value in tensors.items() if name.startswith("weight/")}


def _moments(tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        kind, *names = path.split("/")
        if kind == "optimizer":
            state.setdefault(names[0], {})[names[1]] = value
    return {"state": state}
