"""Starting the processes of a run, and what they share: kernels, the layout of batches."""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from conf import plugins
from conf.schema import Trainer
from data.sampler import micro_batch_size
from model.layout import Layout, Packing
from model.position.network import Encodings, exact_above
from ropewalk.run.processes import (
    ANOTHER_FAILED,
    forget_other_launchers,
    gather,
    is_child,
    is_rank_zero,
    rank,
    started_by,
    world_size,
)
from ropewalk.run.stop import PARENT_ENV, die_with_parent
from ropewalk.training.context_parallel import Shared
from ropewalk.training.hardware import Hardware

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import Strategy


def install_kernels(encodings: Encodings, hardware: Hardware) -> Hardware:
    """Let `encodings` use kernels, if all ranks can: each step waits for the slowest rank. Every rank calls it.

    Returns:
        `hardware`, without kernels unless they were installed.
    """
    if not hardware.kernels:
        return hardware
    # Why each rank cannot use them; "" from those that can.
    problems = [problem for problem in gather(plugins.kernels().problem(encodings, hardware.device)) if problem]
    if not problems:
        plugins.kernels().install(encodings)
    elif is_rank_zero():
        print(f"attention runs without kernels, slowly: {problems[0]}", file=sys.stderr)
    return replace(hardware, kernels=not problems)


def shared_batches(n: int, batch_size: int, context_parallel: int) -> list[int | None]:
    """Divide `n` sequences, in batches of `batch_size`, among the ranks, of which `context_parallel` share a batch.

    All ranks gather sharded weights together, so each must read as many batches as the others.

    Returns:
        The first sequence of each of this rank's batches; None stands for a padding batch, which does not count.
    """
    starts: list[int | None] = [*range(0, n, batch_size)]
    groups = world_size() // context_parallel
    starts += [None] * (-len(starts) % groups)  # padding, up to a multiple of `groups`
    return starts[rank() // context_parallel :: groups]


def resolve_devices(devices: int | str, *, device: str) -> int:
    """Return the number of processes on each machine: as many as a launcher started; of "auto" one for each GPU."""
    started = started_by().on_this_machine
    if started:
        return started
    if devices == "auto":
        return torch.cuda.device_count() if device == "cuda" else 1
    return int(devices)


@contextlib.contextmanager
def launch(trainer: Trainer, hardware: Hardware) -> Iterator["Fabric"]:
    """Start the other processes, unless a launcher has. From then on only rank zero prints.

    The first rank to fail says why. The others fail too, with errors about a lost connection, and leave without a word;
    those that wait on a device are ended by who started them: Fabric, torchrun, or srun --wait.

    Raises:
        ValueError: the batch cannot be divided among the ranks, or the ranks among texts or replicas.
    """
    assert isinstance(trainer.devices, int)  # "auto" is resolved by now
    # A launcher has started all processes, of which `devices` counts those on this machine. Else there is one so far.
    world = max(trainer.devices, started_by().world_size)
    _check_divisible(trainer, world)
    child = is_child()
    if child:
        die_with_parent(int(os.environ[PARENT_ENV]))
    elif started_by().on_this_machine:
        os.environ["SLURM_NTASKS_PER_NODE"] = str(trainer.devices)  # Fabric asks for it, also where srun was not told
    else:
        forget_other_launchers()
        if world > 1:
            os.environ[PARENT_ENV] = str(os.getpid())  # for `is_child`, in the processes that Fabric starts
    fabric = _make_fabric(trainer, hardware, world)
    if not dist.is_initialized():
        yield fabric
        return
    # Until the process ends, so that nothing is printed once for each rank.
    if not is_rank_zero():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        yield fabric
        dist.barrier()
    except SystemExit as end:
        if end.code == ANOTHER_FAILED:
            raise
        with contextlib.suppress(RuntimeError):  # all ranks stop after the same step; some may have left
            dist.barrier()
        # Fabric takes any other exit code of a process that it started for a failure.
        raise SystemExit(0 if child else end.code) from None
    except Exception as error:
        _fail(error)
    dist.destroy_process_group()


def _check_divisible(trainer: Trainer, world: int) -> None:
    """Raise ValueError: so many ranks cannot share the batch, or be divided among texts or replicas."""
    for key, divisor in {"context_parallel": trainer.context_parallel, "replicas": trainer.replicas}.items():
        if world % divisor:
            raise ValueError(
                f"trainer.{key}={divisor} does not divide the number of processes, {world}: "
                "set trainer=ddp or trainer=fsdp, and trainer.devices to a multiple of it"
            )
    micro_batch_size(trainer.batch_size, trainer.grad_accum_steps, world // trainer.context_parallel)


def packing_of(trainer: Trainer, hardware: Hardware, document_end: int | None, encodings: Encodings) -> Packing:
    """How texts lie in the batches of a run; joins this rank to those that share its texts, ranks in a row.

    All ranks call it, after `install_kernels`, on which the layout of documents depends.
    """
    size = trainer.context_parallel
    layout: Layout | None = None
    if size > 1:
        mesh = init_device_mesh(hardware.device, (world_size() // size, size), mesh_dim_names=("data", "context"))
        layout = Shared(mesh.get_group("context"), recompute=not trainer.checkpointing)
    elif hardware.kernels and document_end is not None:
        layout = plugins.kernels().layout_of(encodings, document_end)
    return Packing(document_end, layout, size, exact_above(encodings))


def _make_fabric(trainer: Trainer, hardware: Hardware, world: int) -> "Fabric":
    """Fabric with all its processes running."""
    from lightning.fabric import Fabric  # takes seconds to import, and most programs only ask for the rank
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    # What Fabric says of each rank, and of all: in the second name if Lightning's Trainer is imported too. What its
    # launcher says stays: it looks for ranks that are gone every few seconds, and may kill the others before `_fail`.
    for module in ("fabric.utilities.distributed", "fabric.utilities.rank_zero", "pytorch.utilities.rank_zero"):
        logging.getLogger(f"lightning.{module}").setLevel(logging.WARNING)
    try:
        fabric = Fabric(
            accelerator=hardware.device,
            strategy=_strategy(trainer, hardware, world),
            devices=trainer.devices,
            num_nodes=world // int(trainer.devices),
            precision=hardware.precision,  # type: ignore[arg-type]
            # Else Fabric would take variables of Slurm for ranks, also where srun has started none.
            plugins=[] if started_by().on_this_machine else [LightningEnvironment()],
        )
        fabric.launch()
    # Lightning's: about GPUs that are not there, variables of Slurm, or a notebook, which is one process.
    except (RuntimeError, MisconfigurationException) as error:
        raise ValueError(f"trainer.devices={trainer.devices}: {error}") from None
    return fabric


def _strategy(trainer: Trainer, hardware: Hardware, world: int) -> "Strategy | str":
    """Fabric's strategy for this run."""
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    from ropewalk.training.ranks import shard

    # gloo carries what is gathered and broadcast on the CPU, NCCL the gradients.
    backend = "cpu:gloo,cuda:nccl" if hardware.device == "cuda" else "gloo"
    if trainer.strategy == "fsdp":
        return ModelParallelStrategy(
            functools.partial(shard, hardware=hardware),
            data_parallel_size=trainer.replicas,
            tensor_parallel_size=world // trainer.replicas,
            process_group_backend=backend,
        )
    # With DDP the gradients lie in the buckets that are sent, without a copy of them.
    return "auto" if world == 1 else DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True)


def _fail(error: Exception) -> NoReturn:
    """Raise `error`, or SystemExit if another rank has already said what went wrong."""
    is_first = False
    # The store that all ranks share counts those that have failed. Rank zero keeps it, and may be gone.
    with contextlib.suppress(RuntimeError):
        is_first = dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    if not is_first:
        raise SystemExit(ANOTHER_FAILED) from None
    # The connection to another rank is lost, and that rank has not said why through the store.
    if isinstance(error, RuntimeError) and ("onnection" in str(error) or "remote process" in str(error)):
        raise ConnectionError("another process of this run has ended: its own message, if any, says why") from error
    raise error
