"""FSDP: weights, gradients and optimizer state in shards over the ranks (PyTorch's fully_shard)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT
from training.hardware import Hardware


def shard(net: GPT, mesh: DeviceMesh, hardware: Hardware) -> GPT:
    """Shard `net` in place over the ranks. Each block is a unit, gathered when it runs.

    In bf16-mixed the gathered weights are bf16 and freed after each unit; autocast alone would keep a bf16 copy of all
    of them from the forward to the backward pass. The inputs of a block are not cast, as the tables of positions need
    fp32.
    """
    policy = MixedPrecisionPolicy()
    if hardware.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

    # The parameters of position encodings are small and need fp32: they stay whole on every rank, and their gradients
    # are averaged by a hook, as FSDP leaves them alone.
    position_parameters: set[nn.Parameter] = set()
    for pe in net.distinct_encodings:
        position_parameters.update(pe.to(hardware.device).parameters())

    for module in (*net.blocks, net):
        if hardware.compile and module is not net:
            module.compile(dynamic=False)
        fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy, ignored_params=position_parameters)
    for p in position_parameters:
        p.register_hook(_mean_over_ranks)
    return net


def _mean_over_ranks(grad: Tensor) -> Tensor:
    total = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


@contextmanager
def evaluating(net: GPT) -> Iterator[None]:
    """Allow `net.hidden_states` and `net.head` to be called on a sharded network inside it, by all ranks alike."""
    if not isinstance(net, FSDPModule):
        yield
        return
    register_fsdp_forward_method(net, "hidden_states")
    try:
        with torch.compiler.set_stance("force_eager"):  # blocks are compiled for training alone
            yield
    finally:
        del net.hidden_states  # in training, `forward` does the same
        net.reshard()


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
