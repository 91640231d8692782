"""The processes of a run: one, or one for each device that Fabric, torchrun or Slurm starts.

Every rank runs the whole program. Only rank zero writes files and prints: `rank_zero_only` and `on_rank_zero` run a
function there and give its result to all ranks. In a single process these functions cost nothing.
"""

import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ropewalk.run.stop import PARENT_ENV

R = TypeVar("R")
ANOTHER_FAILED = 2  # exit code of a rank that ends because another one failed, which says why
_on_rank_zero = False  # True inside a function that only rank zero runs


def rank() -> int:
    """This process's rank; 0 before the ranks have met."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 before they have met."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """True on the rank that writes files and prints."""
    return rank() == 0


def gather(value: R) -> list[R]:
    """Return the values of all ranks, in rank order, on every rank. Values are pickled."""
    values: list[Any] = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def on_rank_zero(function: Callable[[], R]) -> R:
    """Call `function` on rank zero only. Every rank gets its result, or ends if it fails. Calls may be nested."""
    global _on_rank_zero
    if not dist.is_initialized() or _on_rank_zero:
        return function()
    outcome: list[Any] = [False, None]  # succeeded, result
    try:
        if is_rank_zero():
            _on_rank_zero = True
            outcome = [True, function()]
    finally:
        # Broadcast also after an error: the other ranks must not wait for a result that will never come.
        _on_rank_zero = False
        dist.broadcast_object_list(outcome)
    succeeded, result = outcome
    if not succeeded:
        raise SystemExit(ANOTHER_FAILED)
    return result


def rank_zero_only(function: Callable[..., R]) -> Callable[..., R]:
    """Decorate a function that every rank calls: it runs on rank zero, and all ranks get its result."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> R:
        return on_rank_zero(lambda: function(*args, **kwargs))

    return wrapped


def any_rank(*flags: bool) -> list[bool]:
    """For each flag, True if it is set on any rank. The reduction is on the CPU, so no GPU waits."""
    reduced = torch.tensor(flags, dtype=torch.int32)
    if dist.is_initialized():
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
    return reduced.bool().tolist()


class Launcher(NamedTuple):
    """Who started the processes of this run."""

    on_this_machine: int  # processes that it started here; 0 if nobody did, or Fabric
    world_size: int  # processes on all machines; 1 if nobody did, or Fabric
    rank: int  # of this process, also before the ranks have met


def started_by() -> Launcher:
    """Read from the environment who started this process.

    Raises ValueError: srun has started other numbers of processes on other machines.
    """
    env = os.environ
    if env.keys() >= {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "WORLD_SIZE"}:
        return Launcher(int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"]), int(env["RANK"]))
    # SLURM_NTASKS says what a job has reserved. Only srun starts that many processes, and sets the other two.
    in_step = env.keys() >= {"SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"}
    if in_step and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):  # the second is Fabric's rule
        return Launcher(_tasks_of_slurm(), int(env["SLURM_NTASKS"]), int(env["SLURM_PROCID"]))
    # Fabric sets LOCAL_RANK for the processes that it starts.
    return Launcher(on_this_machine=0, world_size=1, rank=int(env["LOCAL_RANK"]) if is_child() else 0)


def _tasks_of_slurm() -> int:
    """The number of processes that srun has started on each machine."""
    # The first is that of the step; the second is what was asked for, if anything, the third what was reserved. "2(x3)"
    # are 2 on each of three machines.
    names = "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"
    said = next(filter(None, map(os.environ.get, names)))
    numbers = set(re.sub(r"\(x\d+\)", "", said).split(","))
    if len(numbers) > 1:
        raise ValueError(f"srun has started {said} processes on its machines: give it --ntasks-per-node=N")
    return int(numbers.pop())


def forget_other_launchers() -> None:
    """Let Fabric start the processes of a run that nobody has started.

    Images and clusters set variables which tell Fabric that somebody has, or that this machine is another one.

    Raises:
        ValueError: a program that is not known here has started several processes. Each would train the whole run.
    """
    env = os.environ
    for size, number in {"WORLD_SIZE": "RANK", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK"}.items():
        if number in env and env.get(size, "1") != "1":
            raise ValueError(
                f"{number}={env[number]} and {size}={env[size]}, but neither torchrun nor srun has started "
                f"this process: start it by one of them, as in docs/scaling.md, or unset {number} to train alone"
            )
    for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)


def is_child() -> bool:
    """True if this process was started by Fabric's own launcher, in another process of this run."""
    # `launch` puts the id of rank zero's process there, and the processes that it starts inherit it.
    return os.environ.get(PARENT_ENV, str(os.getpid())) != str(os.getpid())
