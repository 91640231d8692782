"""FSDP: weights, gradients and optimizer state in shards over the ranks (PyTorch's fully_shard)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT
from training.hardware import Hardware


def shard(net: GPT, mesh: DeviceMesh, hardware: Hardware) -> GPT:
    """Shard `net` in place over the ranks: each block is a unit, gathered when it runs.

    In bf16-mixed the gathered weights are bf16 and freed after each unit; autocast alone would keep a bf16 copy of all
    of them from forward to backward. The small parameters of position encodings stay whole and in fp32 on every rank,
    and what a block is given is not cast, as the tables of positions need fp32.
    """
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = mixed if hardware.precision == "bf16-mixed" else MixedPrecisionPolicy()
    own = {p for pe in net.distinct_encodings for p in pe.to(hardware.device).parameters()}
    for module in (*net.blocks, net):
        if hardware.compile and module is not net:
            module.compile(dynamic=False)
        fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy, ignored_params=own)
    for p in own:
        p.register_hook(_mean_over_ranks)
    return net


def _mean_over_ranks(grad: Tensor) -> Tensor:
    total = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


@contextmanager
def evaluating(net: GPT) -> Iterator[None]:
    """Inside it `net.hidden_states` and `net.head` can be called on a sharded network, by all ranks alike."""
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
    """The whole of a tensor that may be in shards: then all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_for(whole: Tensor, like: Tensor) -> Tensor:
    """`whole` in the shards and on the device of `like`; each rank cuts its own, without communication."""
    whole = whole.to(like.device, like.dtype)
    if isinstance(like, DTensor):
        whole = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole
