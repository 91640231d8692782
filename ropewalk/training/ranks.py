"""What a step does in another way with DDP, with FSDP and with CUDA graphs. The loop says it once for all."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conf.schema import Config
from model.gpt import GPT
from ropewalk.training.hardware import Hardware, allow_graphs
from ropewalk.training.sharding import average_unsharded_gradients

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class Ranks:
    """The processes of a run, as one of them sees them. By itself it is DDP, of one process or more.

    Args:
        fabric: has launched all processes.
        model: `net`, wrapped by Fabric's strategy.
    """

    def __init__(self, fabric: "Fabric", model: Any, net: GPT) -> None:
        self.fabric = fabric
        self.model = model
        self.net = net
        self.size = fabric.world_size
        self.number = fabric.global_rank

    def begin(self, seed: int, micro_batch: int) -> None:
        """Seed what a micro-batch draws, numbered over the steps of one rank: dropout and random positions."""
        # By the run's seed and the micro-batch, mixed by odd constants: a resumed run repeats them without saved random
        # state. Micro-batches are numbered over all ranks, as in `micro_batches`, so that their number does not matter.
        number = micro_batch * self.size + self.number
        torch.manual_seed((seed * 0x9E3779B1 + number * 0x85EBCA77) % 2**63)

    def accumulating(self, *, last: bool) -> AbstractContextManager:
        """The context of a micro-batch. DDP averages gradients over ranks once, after the last one."""
        return self.fabric.no_backward_sync(self.model, enabled=not last)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to those before."""
        self.fabric.backward(loss)

    def end(self, totals: Tensor) -> Tensor:
        """After the last micro-batch: the sum of `totals` over the ranks. Gradients are averages over them now."""
        return self.fabric.all_reduce(totals, reduce_op="sum")  # type: ignore[return-value]

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients of a step."""
        optimizer.zero_grad()


class Sharded(Ranks):
    """FSDP. It averages after each micro-batch: unreduced gradients are whole tensors, and would fill the device."""

    def accumulating(self, *, last: bool) -> AbstractContextManager:
        return super().accumulating(last=True)

    def end(self, totals: Tensor) -> Tensor:
        totals = super().end(totals)
        average_unsharded_gradients(self.net)  # those of encodings, which are whole on every rank
        return totals


class Graphs(Ranks):
    """DDP with CUDA graphs, whose memory the next micro-batch overwrites."""

    def __init__(self, fabric: "Fabric", model: Any, net: GPT) -> None:
        super().__init__(fabric, model, net)
        self.kept: set[nn.Parameter] = set()

    def begin(self, seed: int, micro_batch: int) -> None:
        super().begin(seed, micro_batch)
        torch.compiler.cudagraph_mark_step_begin()

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        # Each parameter's first gradient gets memory of its own, to which later ones are added.
        for p in self.net.parameters():
            if p.grad is not None and p not in self.kept:
                p.grad = p.grad.clone()
                self.kept.add(p)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


def set_up(fabric: "Fabric", net: GPT, cfg: Config, hardware: Hardware) -> Ranks:
    """Put `net` on the devices of a run, compiled if `hardware` says so.

    Args:
        net: if it is on the device "meta", its parameters then lie where they are trained, without values.
    """
    sharded = cfg.trainer.strategy == "fsdp"
    # Each stage gets graphs of its own, so that resuming within a stage changes no bit. Of a network in shards the
    # blocks alone are compiled, and each rank materialises its part: see `sharding.shard`.
    if hardware.compile:
        allow_graphs(len(cfg.stages) + 1)
        if not sharded:
            compile_parts(net, graphs=hardware.graphs)
    if net.embedding.weight.is_meta and not sharded:
        net.materialise("cpu")
    kind = Sharded if sharded else Graphs if hardware.graphs else Ranks
    return kind(fabric, fabric.setup_module(net), net)


def compile_parts(net: GPT, *, graphs: bool = False) -> None:
    """Compile the blocks of `net`, and its loss apart: layers of one kind share a graph, whatever their number.

    Each length has a graph of its own. Wrap evaluations, which need none, in `sharding.evaluating`.

    Args:
        graphs: record the launches of kernels as CUDA graphs, each of which a GPU then starts at once. What they
            return is overwritten after `torch.compiler.cudagraph_mark_step_begin`.
    """
    mode = "reduce-overhead" if graphs else None
    for block in net.blocks:
        block.compile(dynamic=False, mode=mode)
    net.loss = torch.compile(net.loss, dynamic=False, mode=mode)  # type: ignore[method-assign]
