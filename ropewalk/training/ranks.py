"""What a step does with one process, DDP or FSDP. The loop says it once for all."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conf.schema import Config
from model.gpt import GPT
from ropewalk.training.hardware import Hardware
from ropewalk.training.sharding import average_unsharded_gradients

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class Ranks:
    """The processes of a run, as one of them sees them.

    Args:
        fabric: has launched all processes.
        net: if it is on the device "meta", its parameters then lie where they are trained, without values.
    """

    def __init__(self, fabric: "Fabric", net: GPT, cfg: Config, hardware: Hardware) -> None:
        self.fabric = fabric
        self.net = net
        self.size = fabric.world_size
        self.number = fabric.global_rank
        self.sharded = cfg.trainer.strategy == "fsdp"
        if hardware.compile:
            compile_parts(net, loss=not self.sharded, stages=len(cfg.stages) + 1)
        if net.embedding.weight.is_meta and not self.sharded:  # else each rank makes its part: see `sharding.shard`
            net.materialise("cpu")
        self.model = fabric.setup_module(net)  # wrapped by the strategy

    def begin(self, seed: int, micro_batch: int) -> None:
        """Seed what a micro-batch draws, numbered over the steps of one rank: dropout and random positions."""
        # By the run's seed and the micro-batch, mixed by odd constants: a resumed run repeats them without saved random
        # state. Micro-batches are numbered over all ranks, as in `micro_batches`, so that their number does not matter.
        number = micro_batch * self.size + self.number
        torch.manual_seed((seed * 0x9E3779B1 + number * 0x85EBCA77) % 2**63)

    def accumulating(self, *, last: bool) -> AbstractContextManager:
        """The context of a micro-batch. DDP averages gradients over ranks once, after the last one.

        FSDP does after each: unreduced gradients are whole tensors, and would fill the device.
        """
        return self.fabric.no_backward_sync(self.model, enabled=not (last or self.sharded))

    def end(self, totals: Tensor) -> Tensor:
        """After the last micro-batch: the sum of `totals` over the ranks. Gradients are averages over them now."""
        average_unsharded_gradients(self.net)
        return self.fabric.all_reduce(totals, reduce_op="sum")  # type: ignore[return-value]


def compile_parts(net: GPT, *, loss: bool, stages: int = 1) -> None:
    """Compile the blocks of `net`, and its loss apart: layers of one kind share a graph, whatever their number.

    Each length and stage has a graph of its own. Wrap evaluations, which need none, in `sharding.evaluating`.
    """
    from torch._dynamo import config  # takes a second to import

    # Beyond its limit the compiler runs further graphs eagerly, without a word.
    config.recompile_limit = max(config.recompile_limit, 8 * stages)
    for block in net.blocks:
        block.compile(dynamic=False)
    if loss:
        net.loss = torch.compile(net.loss, dynamic=False)  # type: ignore[method-assign]
