"""What differs with the ranks of a run: one process, DDP or FSDP. The loop says it once for all.

FSDP: weights, gradients and optimizer state in shards over the ranks (PyTorch's fully_shard). With replicas (HSDP) only
so many ranks as hold one copy share it: they gather weights among themselves, and only the gradients of the shards go
to the other copies.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from conf.schema import Config
from model.gpt import GPT
from ropewalk.training.hardware import Hardware

if TYPE_CHECKING:
    from lightning.fabric import Fabric

SHARDS = "tensor_parallel"  # Fabric's name for the ranks that share one copy of the model


class Ranks:
    """The processes of a run, as one of them sees them.

    Args:
        fabric: has launched all processes.
        net: on the device "meta"; its parameters then lie where they are trained, without values.
    """

    def __init__(self, fabric: "Fabric", net: GPT, cfg: Config, hardware: Hardware) -> None:
        self.fabric = fabric
        self.net = net
        self.sharded = cfg.trainer.strategy == "fsdp"
        if hardware.compile:
            from torch._dynamo import config  # takes a second to import

            # Layers of one kind share a graph, whatever their number; each length and stage has one of its own. Beyond
            # its limit the compiler runs further graphs eagerly, without a word.
            config.recompile_limit = max(config.recompile_limit, 8 * (len(cfg.stages) + 1))
            for block in net.blocks:
                block.compile(dynamic=False)
            if not self.sharded and not net.checkpointing:  # else the loss is made in pieces
                net.loss = torch.compile(net.loss, dynamic=False)  # type: ignore[method-assign]
        if not self.sharded:  # else each rank makes its part: see `shard`
            net.materialise("cpu")
        self.model = fabric.setup_module(net)  # wrapped by the strategy

    def seed(self, seed: int, micro_batch: int) -> None:
        """Seed what a micro-batch draws, numbered over the steps of one rank: dropout and random positions."""
        # By the run's seed and the micro-batch, mixed by odd constants: a resumed run repeats them without saved random
        # state. Micro-batches are numbered over all ranks, as in `micro_batches`, so that their number does not matter.
        number = micro_batch * self.fabric.world_size + self.fabric.global_rank
        torch.manual_seed((seed * 0x9E3779B1 + number * 0x85EBCA77) % 2**63)

    def accumulating(self, *, last: bool) -> AbstractContextManager:
        """The context of a micro-batch. DDP averages gradients over ranks once, after the last one.

        FSDP does after each: unreduced gradients are whole tensors, and would fill the device.
        """
        return self.fabric.no_backward_sync(self.model, enabled=not (last or self.sharded))

    def average_gradients(self) -> None:
        """After the last micro-batch: average over the ranks what FSDP leaves alone, gradients of whole parameters."""
        if self.sharded:
            for p in self.net.parameters():
                if p.grad is not None and not isinstance(p, DTensor):
                    dist.all_reduce(p.grad)
                    p.grad /= self.fabric.world_size


def shard(net: GPT, mesh: DeviceMesh, hardware: Hardware) -> GPT:
    """Shard `net` in place over the ranks. Each block is a unit, gathered when it runs.

    `mesh` is [replicas, ranks of a replica], as `ropewalk.training.distributed` asks Fabric for it. The
    network, on the device "meta", gets memory for its shards, without values.

    In bf16-mixed the gathered weights are bf16 and freed after each unit; autocast alone would keep a bf16 copy of all
    of them from the forward to the backward pass. The inputs of a block are not cast, as the tables of positions need
    fp32.
    """
    # The parameters of position encodings are small and need fp32: they stay whole on every rank, and FSDP leaves them
    # and their gradients alone.
    whole = {*nn.ModuleList(net.distinct_encodings).parameters()}
    policy = MixedPrecisionPolicy()
    if hardware.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # Norms, sinks and biases stay whole too: autocast alone would keep norms and sinks in fp32.
        whole.update(p for p in net.parameters() if p.ndim < 2)
    if mesh.size(0) == 1:  # one copy: nothing is reduced over copies
        mesh = mesh[SHARDS]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
    net.materialise(hardware.device)  # so no rank ever holds more than its shards
    return net


@contextmanager
def evaluating(net: GPT) -> Iterator[None]:
    """Allow `net.hidden_states` and `net.head` to be called on any network inside it, by all ranks alike.

    The network is in evaluation mode, without dropout, and afterwards in the mode that it was in. What is compiled for
    training runs eagerly: an evaluation has so many lengths that compiling takes longer.
    """
    with ExitStack() as ending:
        ending.callback(net.train, net.training)
        net.eval()
        if any(block._compiled_call_impl is not None for block in net.blocks):
            ending.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(net, FSDPModule):
            register_fsdp_forward_method(net, "hidden_states")
            ending.callback(net.reshard)
            ending.callback(delattr, net, "hidden_states")  # in training, `forward` does the same
        yield


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. If it is, all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(parameter: Tensor, whole: Tensor) -> None:
    """Copy the values `whole` into a tensor, which may be a shard: each rank cuts its part, without communication."""
    whole = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
