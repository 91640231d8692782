"""The ranks of a run: one process, or several that Fabric, torchrun or Slurm start, one for each device.

Every rank runs the whole program. Rank zero alone writes files and prints; `rank_zero_only` and `on_rank_zero` run a
function there and hand its result to all. With a single process these functions cost nothing.
"""

import contextlib
import ctypes
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from data.sampler import micro_batch_size
from training.hardware import Hardware

if TYPE_CHECKING:
    from lightning.fabric import Fabric

R = TypeVar("R")
_PARENT = "ROPEWALK_PARENT"  # process id of rank zero, for the ranks that it starts
ANOTHER_FAILED = 2  # exit code of a rank that ends because another one failed, which says why
_on_rank_zero = False  # whether this process is inside a function that only rank zero runs


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    return rank() == 0


def gather(value: R) -> list[R]:
    """The values of all ranks, in their order, on every rank. They are pickled."""
    values: list[Any] = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def on_rank_zero(function: Callable[[], R]) -> R:
    """Call `function` on rank zero only; every rank gets its result, or ends if it fails. Calls may be nested."""
    global _on_rank_zero
    if not dist.is_initialized() or _on_rank_zero:
        return function()
    outcome: list[Any] = [False, None]  # has it worked, result
    try:
        if is_rank_zero():
            _on_rank_zero = True
            outcome = [True, function()]
    finally:  # the others must not wait for a result that will never come
        _on_rank_zero = False
        dist.broadcast_object_list(outcome)
    if not outcome[0]:
        raise SystemExit(ANOTHER_FAILED)
    return outcome[1]


def rank_zero_only(function: Callable[..., R]) -> Callable[..., R]:
    """Decorates a function that every rank calls: it runs on rank zero, and its result goes to all."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> R:
        return on_rank_zero(lambda: function(*args, **kwargs))

    return wrapped


def any_rank(*flags: bool) -> list[bool]:
    """For each flag, whether it is set on any rank. Reduced on the CPU, so no GPU waits."""
    found = torch.tensor(flags, dtype=torch.int32)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def shared_batches(n: int, step: int) -> list[int | None]:
    """Starts of this rank's batches, when `n` sequences in batches of `step` are divided among the ranks. Each gets as
    many, because all gather sharded weights together: None is padding, a batch that does not count."""
    starts = [*range(0, n, step)]
    return [*starts, *[None] * (-len(starts) % world_size())][rank() :: world_size()]


def started_by() -> tuple[str, int, int]:
    """Who started several processes: (name, processes on this machine, in all); ("", 1, 1) if nobody did."""
    env = os.environ
    if env.keys() >= {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "WORLD_SIZE"}:
        return "torchrun", int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"])
    if "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):  # as Fabric sees it
        return "Slurm", int(env.get("SLURM_NTASKS_PER_NODE", env["SLURM_NTASKS"])), int(env["SLURM_NTASKS"])
    return "", 1, 1


def _is_child() -> bool:
    """Whether Fabric's launcher in another process started this one: it sets these three, and `launch` the fourth."""
    return not started_by()[0] and os.environ.keys() >= {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", _PARENT}


def env_rank() -> int:
    """The rank this process was started as, also before the ranks have met; 0 unless a launcher started several."""
    if started_by()[2] > 1:
        return int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    return int(os.environ["LOCAL_RANK"]) if _is_child() else 0


def resolve_devices(devices: int | str, *, num_nodes: int, device: str) -> int:
    """Processes on each machine; "auto" is as many as a launcher started, or one for each GPU. Raises ValueError: a
    launcher started another number, or this machine has fewer GPUs."""
    name, started, world = started_by()
    gpus = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device)
    automatic = started if name else gpus or 1
    here = automatic if devices == "auto" else int(devices)
    asked = f"trainer.devices={here} trainer.num_nodes={num_nodes}"
    if name and (here, here * num_nodes) != (started, world):
        remedy = f"trainer=ddp trainer.num_nodes={world // started} takes them all"
        raise ValueError(f"{asked}, but {name} started {world} processes, {started} on this machine: {remedy}")
    if num_nodes > 1 and not name:
        raise ValueError(f"{asked}: start it on every machine with torchrun or srun")
    if gpus and here > gpus:
        raise ValueError(f"{asked}: this machine has {gpus} GPUs; lower trainer.devices, or auto takes them all")
    return here


@contextmanager
def launch(trainer: Any, hardware: Hardware) -> Iterator["Fabric"]:
    """Start the other processes, unless a launcher has; from then on only rank zero prints. When a rank fails, it says
    why, and all ranks end. `trainer` is the section of the configuration; ValueError if its batch cannot be divided."""
    world, backend = trainer.devices * trainer.num_nodes, "cpu:gloo,cuda:nccl" if hardware.device == "cuda" else "gloo"
    micro_batch_size(trainer.batch_size, trainer.grad_accum_steps, world)
    from lightning.fabric import Fabric  # seconds to import, and most programs only ask for the rank
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, Strategy

    for package in ("fabric", "pytorch"):  # importing both, Lightning logs for the first through the second
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.strategies.launchers").setLevel(logging.INFO)  # it tells of killed ranks
    strategy: Strategy | str = "auto"
    if trainer.strategy == "fsdp":
        from training.sharding import shard

        parallelize = functools.partial(shard, hardware=hardware)
        strategy = ModelParallelStrategy(parallelize, world, 1, process_group_backend=backend)
    elif world > 1:
        strategy = DDPStrategy(process_group_backend=backend)
    if child := _is_child():
        die_with_parent(int(os.environ[_PARENT]))
    os.environ[_PARENT] = str(os.getpid())
    try:
        options: dict[str, Any] = {"num_nodes": trainer.num_nodes, "precision": hardware.precision}
        fabric = Fabric(accelerator=hardware.device, strategy=strategy, devices=trainer.devices, **options)
        fabric.launch()
    except RuntimeError as error:  # Lightning's, about variables of Slurm
        raise ValueError(str(error)) from None
    if not dist.is_initialized():
        yield fabric
        return
    try:
        if not is_rank_zero():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        yield fabric
        dist.barrier()
    except SystemExit as end:
        if end.code == ANOTHER_FAILED:
            raise
        with contextlib.suppress(RuntimeError):  # all ranks stop after the same step; some may have left
            dist.barrier()
        raise SystemExit(0 if child else end.code) from None  # Fabric takes another code of a child for a failure
    except Exception as error:
        _fail(error)
    dist.destroy_process_group()


def _fail(error: Exception) -> None:
    """Raise `error`, or end without a word if another rank has said what went wrong."""
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("onnection", "remote process"))
    if lost:
        time.sleep(1)  # the message of the rank that is gone comes first
    told = True
    with contextlib.suppress(RuntimeError):  # rank zero keeps the store, and may be gone
        told = dist.distributed_c10d._get_default_store().add("failed", 1) > 1
    if told:
        raise SystemExit(ANOTHER_FAILED) from None
    if lost:
        raise ConnectionError("another process of this run has ended: its own message, if any, says why") from error
    raise error


def leave_to_rank_zero() -> None:
    """Before an error that all ranks make is printed: ends a rank other than zero if the ranks have not met yet."""
    if not dist.is_initialized() and env_rank():
        sys.stdout.flush()
        time.sleep(10)  # else the launcher might end rank zero before it has printed
        raise SystemExit(ANOTHER_FAILED)


def die_with_parent(parent: int) -> None:
    """End when the process `parent`, which started this one, does, however that ends; at once if it has ended."""
    with contextlib.suppress(OSError, AttributeError):  # of Linux alone
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
