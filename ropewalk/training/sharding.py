"""FSDP: weights, gradients and optimizer state in shards over the ranks (PyTorch's fully_shard).

With replicas (HSDP) only so many ranks as hold one copy share it: they gather weights among themselves, and only the
gradients of the shards go to the other copies.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT
from ropewalk.training.hardware import Hardware

SHARDS = "tensor_parallel"  # Fabric's name for the ranks that share one copy of the model


def shard(net: GPT, mesh: DeviceMesh, hardware: Hardware) -> GPT:
    """Shard `net` in place over the ranks. Each block is a unit, gathered when it runs.

    `mesh` is [replicas, ranks of a replica], as `ropewalk.training.distributed` asks Fabric for it. A network
    on the device "meta" gets memory for its shards, without values.

    In bf16-mixed the gathered weights are bf16 and freed after each unit; autocast alone would keep a bf16 copy of all
    of them from the forward to the backward pass. The inputs of a block are not cast, as the tables of positions need
    fp32.
    """
    policy = MixedPrecisionPolicy()
    if hardware.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

    # The parameters of position encodings are small and need fp32: they stay whole on every rank, and FSDP leaves them
    # and their gradients alone. So do norms and sinks where autocast alone would keep them in fp32.
    whole = {p for pe in net.distinct_encodings for p in pe.parameters()}
    if hardware.precision == "bf16-mixed":
        whole.update(p for p in net.parameters() if p.ndim < 2)
    if not net.embedding.weight.is_meta:
        for p in whole:
            p.data = p.data.to(hardware.device)
    if mesh.size(0) == 1:
        mesh = mesh[SHARDS]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
    if net.embedding.weight.is_meta:
        net.materialise(hardware.device)  # so no rank ever holds more than its shards
    return net


def average_unsharded_gradients(net: GPT) -> None:
    """Average over the ranks the gradients that FSDP leaves alone, in one message. Without FSDP nothing happens."""
    if not isinstance(net, FSDPModule):
        return
    grads = [p.grad for p in net.parameters() if p.grad is not None and not isinstance(p, DTensor)]
    if not grads:
        return
    bucket = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    averages = bucket.split([grad.numel() for grad in grads])
    for grad, average in zip(grads, averages, strict=True):
        grad.copy_(average.view_as(grad))


@contextmanager
def evaluating(net: GPT) -> Iterator[None]:
    """Allow `net.hidden_states` and `net.head` to be called on any network inside it, by all ranks alike.

    What is compiled for training runs eagerly: an evaluation has so many lengths that compiling takes longer.
    """
    with ExitStack() as ending:
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


def part_for(whole: Tensor, like: Tensor) -> Tensor:
    """Shard `whole` as `like` is, on its device. Each rank cuts its own part, without communication."""
    whole = whole.to(like.device, like.dtype)
    if isinstance(like, DTensor):
        whole = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole


@torch.no_grad()
def assign(parameter: Tensor, whole: Tensor) -> None:
    """Copy the values `whole` into a parameter, which may be a shard of them. Without communication."""
    parameter.copy_(part_for(whole, parameter))
