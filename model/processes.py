"""The processes of a run: one, or several that torchrun, Slurm or Lightning start, one for each device.

All run the same program from its first line to its last. What must happen once is done by the first of them while the
others wait for its result (`on_first`), and what each did in part is put together (`gather`, `any_of`). Alone, all of
these cost nothing.
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist

R = TypeVar("R")
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # of torchrun, Lightning and Slurm, before the processes have met
_INTERACTIVE = ("bash", "interactive")  # jobs of Slurm in which, as Lightning has it, one starts processes by hand
_PATIENCE = 40  # seconds in which whoever started the processes ends them all after one has failed, as srun --wait=30


class AnotherFailed(SystemExit):
    """This process ends because another one failed, which tells why."""


def several() -> bool:
    """Whether there are other processes, or one that behaves as if there were (FSDP)."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if several() else 0


def number() -> int:
    """That with which this process was started, also before the processes have met and after they have parted."""
    return next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)


def count() -> int:
    return dist.get_world_size() if several() else 1


def first() -> bool:
    """Whether this is the process that writes files and speaks."""
    return rank() == 0


def gather(value: R) -> list[R]:
    """The values of all processes, in their order."""
    if not several():
        return [value]
    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def on_first(function: Callable[[], R]) -> R:
    """What `function` returns on the first process, the only one that calls it. If it fails, all end."""
    if not several():
        return function()
    result = [function() if first() else None]
    dist.broadcast_object_list(result)
    return result[0]  # type: ignore[return-value]


def once(function: Callable[..., R]) -> Callable[..., R]:
    """Decorates what all processes call and the first one does."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> R:
        return on_first(lambda: function(*arguments, **options))

    return wrapped


def any_of(*flags: bool) -> list[bool]:
    """Of each flag, whether it is set on any process. It goes through the CPU: no GPU has to wait for it."""
    if not several():
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def started_by() -> tuple[str, int, int]:
    """Who started the processes: a name, how many on this machine, and how many in all; ("", 0, 0) if nobody has."""
    env = os.environ
    if int(env.get("SUBMITIT_LOCAL_NTASKS", 1)) > 1 and "LOCAL_WORLD_SIZE" not in env:
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        env["TORCHELASTIC_RUN_ID"] = "submitit"  # by this Lightning knows torchrun
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun", int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"])
    if "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in _INTERACTIVE:
        tasks = int(env["SLURM_NTASKS"])
        here = env.get("SLURM_NTASKS_PER_NODE") or tasks // int(env.get("SLURM_NNODES", 1))
        return "Slurm", int(here), tasks
    return "", 0, 0


def devices(wanted: int | str, *, num_nodes: int, device: str) -> int:
    """Processes on each machine, where `wanted` may be "auto": as many as were started, or one for each GPU.

    Raises:
        ValueError: it is not the number that torchrun or Slurm started, or that this machine has GPUs.
    """
    by, started, world = started_by()
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    here = (started or max(1, gpus)) if wanted == "auto" else int(wanted)
    if started and here != started:
        raise ValueError(
            f"trainer.devices={here}, and {by} started {started} processes on this machine: trainer=ddp takes them all"
        )
    if started and world != here * num_nodes:
        raise ValueError(
            f"trainer.num_nodes={num_nodes}, and {by} started {world} processes, {started} on this machine: set "
            f"trainer.num_nodes={world // started}"
        )
    if num_nodes > 1 and not started:
        raise ValueError(
            f"trainer.num_nodes={num_nodes}: start it on every machine with torchrun or srun, see docs/scaling.md"
        )
    if here > 1 and device == "mps":
        raise ValueError(f"trainer.devices={here}: a Mac has one GPU; trainer.accelerator=cpu has more processes")
    if gpus and here > gpus:
        raise ValueError(f"trainer.devices={here} is more than the {gpus} GPUs of this machine")
    return here


@contextlib.contextmanager
def joined(here: int, *, num_nodes: int, strategy: str, device: str) -> Iterator[None]:
    """Start the other processes, unless that has been done, and meet them; within it only the first one speaks.

    Whichever fails first tells why, and all end.
    """
    if here * num_nodes == 1 and strategy != "fsdp":
        yield
        return
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.strategies.launchers").setLevel(logging.INFO)  # it tells of killed processes
    child = not started_by()[0] and "LOCAL_RANK" in os.environ  # of Lightning's own
    if child:
        _die_with_parent()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    accelerator = "gpu" if device == "cuda" else device
    try:
        engine = DDPStrategy(process_group_backend=backend)
        Fabric(accelerator=accelerator, devices=here, num_nodes=num_nodes, strategy=engine).launch()
    except RuntimeError as error:  # Lightning's, about variables of Slurm
        raise ValueError(str(error)) from None
    try:
        with contextlib.ExitStack() as quiet:
            if not first():
                nowhere = quiet.enter_context(open(os.devnull, "w"))
                quiet.enter_context(contextlib.redirect_stdout(nowhere))
            yield
        dist.barrier()
    except AnotherFailed:
        raise
    except SystemExit:  # all stop after the same step
        with contextlib.suppress(RuntimeError):  # others may have left
            dist.barrier()
        if child:  # the code of the process that started it is that of the run
            raise SystemExit(0) from None
        raise
    except Exception as error:
        _fail(error)
    dist.destroy_process_group()


def _fail(error: Exception) -> None:
    """Raise `error`, or end without a word if another process has told what went wrong."""
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("onnection", "remote process"))
    if lost:
        time.sleep(1)  # its message comes first
    try:
        told = dist.distributed_c10d._get_default_store().add("failed", 1) > 1
    except RuntimeError:  # kept by the first process, which is gone
        told = True
    if told:
        raise AnotherFailed(2) from None
    if lost:
        raise ConnectionError("another process of this run has ended: its own message, if any, says why") from error
    raise error


def wait_for_the_first() -> None:
    """Let the first process tell of a mistake that all of them make before they have met: then this one is ended."""
    if not several() and number():
        sys.stdout.flush()
        time.sleep(_PATIENCE)


def _die_with_parent() -> None:
    """End when the process that started this one does, however that ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
