"""Checkpoints: one file, step=N.ckpt after N optimizer steps, of plain values and whole tensors.

The content does not depend on the strategy or on the world size, so a run may be resumed with others. No random state
is saved: batches and dropout are functions of the seed and the step.
"""

import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from conf.files import atomic_write, printable
from conf.schema import parse
from model.gpt import GPT
from model.serialization import renamed
from ropewalk.run.directory import steps_in
from ropewalk.run.processes import is_rank_zero, on_rank_zero, rank_zero_only
from ropewalk.training.ranks import assign, full_tensor


class Progress(BaseModel, extra="forbid", strict=True):
    """The progress of a run, and what was measured since the last row of metrics.jsonl.

    It is part of every checkpoint, so that a run has the same rows whenever it was interrupted.
    """

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # spent training, without pauses
    rows: int = 0  # rows written to metrics.jsonl
    logged_step: int = 0  # step of the last row
    logged_seconds: float = 0.0  # `seconds` at the last row
    peak_memory: int = 0  # bytes: the most that rank zero has held, over all restarts
    loss_sum: float = 0.0  # since the last row: sum over steps of mean loss x share of scored targets
    loss_weight: float = 0.0  # since the last row: sum of these shares

    def begin_row(self) -> None:
        """A row has been written: what follows belongs to the next one."""
        self.rows += 1
        self.logged_step = self.step
        self.logged_seconds = self.seconds
        self.loss_sum = self.loss_weight = 0.0


def path_of(folder: Path, step: int) -> Path:
    """The file of the checkpoint after `step` steps."""
    return folder / f"step={step}.ckpt"


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU of rank zero; other ranks get empty ones. Called by all ranks."""
    # One tensor after the other, so that a GPU never holds more than one whole tensor beside its shards.
    gathered = {}
    for name, tensor in tensors.items():
        whole = full_tensor(tensor.detach())
        gathered[name] = whole.cpu() if is_rank_zero() else whole.new_empty(0)
    return gathered


def save(folder: Path, net: GPT, optimizer: torch.optim.Optimizer, progress: Progress, *, keep: int) -> None:
    """Save a checkpoint, and delete those before the last `keep`. Called by all ranks alike.

    Raises:
        OSError: it could not be written.
    """
    state = {
        "progress": progress.model_dump(),
        "model": on_cpu(net.state_dict()),
        "optimizer": on_cpu(_state_of(net, optimizer)),
    }
    on_rank_zero(lambda: _write(path_of(folder, progress.step), state))
    prune(folder, newest=progress.step, keep=keep)


def _state_of(net: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer keeps for each parameter, by the parameter's name: the tensors themselves."""
    _make_state(net, optimizer)
    named = {}
    for name, p in net.named_parameters():
        for key, value in optimizer.state[p].items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{type(optimizer).__name__} keeps {key}={value!r}: a checkpoint holds tensors only")
            named[f"{name}/{key}"] = value
    return named


def _make_state(net: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make the state of parameters that it has not stepped yet, by a step that changes no weight."""
    missing = [p for p in net.parameters() if not optimizer.state[p]]
    if not missing:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in missing:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch hides the reason, such as a full disk, behind an error of its own.
            reason = error.__context__
            raise (reason if isinstance(reason, OSError) else error) from None


def resume(folder: Path, net: GPT, optimizer: torch.optim.Optimizer | None, only: int | None = None) -> Progress:
    """Load the newest whole checkpoint into `net` and `optimizer`. Called by all ranks, which read the same file.

    A damaged checkpoint is reported, and the one before it is taken. Without any checkpoint nothing is changed.

    Args:
        optimizer: None: the weights alone.
        only: the step of the one checkpoint to take; None: the newest that is whole.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    # The network's own tensors and those of the optimizer: `assign` fills both in place.
    parts = {"model": net.state_dict()}
    if optimizer:
        parts["optimizer"] = _state_of(net, optimizer)
    tensors = _all_tensors(parts)
    step = _newest(folder, tensors, only)
    if step is None:
        if optimizer:
            optimizer.state.clear()
        return Progress()
    # The file is memory-mapped, and may change later: everything is copied.
    progress, stored = _read(path_of(folder, step))
    for name, tensor in tensors.items():
        assign(tensor, stored[name])
    return progress


def take_over(base: str, net: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state of the newest checkpoint of the run at `base`. ValueError if it has none."""
    # The weights too: the moments belong to those of the checkpoint.
    if not resume(Path(base, "checkpoints"), net, optimizer).step:
        raise ValueError(f"init_optimizer=true needs a checkpoint, and {base} has none: leave it out")


@rank_zero_only
def _newest(folder: Path, expected: dict[str, Tensor], only: int | None) -> int | None:
    """The step of the newest checkpoint that is whole and has tensors like `expected`, or None. See `resume`."""
    steps = [step for step in steps_in(folder) if only is None or step == only]
    for step in reversed(steps):
        path = path_of(folder, step)
        try:
            _check(path, expected)
            return step
        except Exception as error:  # a damaged file fails in many ways
            reason = (str(error) or type(error).__name__).splitlines()[0]
            print(printable(f"{path} is damaged ({reason}): trying the one before"), file=sys.stderr)
    if steps:
        raise ValueError(f"no checkpoint in {folder} can be read: restore one, or delete the run and train again")
    return None


def _read(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """The progress in a checkpoint, and its tensors by the names of `_all_tensors`."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return parse(Progress, state["progress"], "progress."), renamed(_all_tensors(state))


def _all_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in the two parts of a checkpoint, as "model/NAME" and "optimizer/NAME"."""
    return {f"{part}/{name}": value for part in ("model", "optimizer") for name, value in state.get(part, {}).items()}


def _check(path: Path, expected: dict[str, Tensor]) -> None:
    """Raise an error for the first thing that is wrong with a checkpoint, which should have tensors like `expected`."""
    # torch.load does not compare checksums: it would silently load a changed byte.
    with zipfile.ZipFile(path) as file:
        broken = file.testzip()
    if broken:
        raise ValueError(f"the checksum of {broken} is wrong")
    _, tensors = _read(path)
    parts = {name.partition("/")[0] for name in expected}
    tensors = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] in parts}
    unlike = sorted(expected.keys() ^ tensors.keys())  # names that only one of the two has
    if unlike:
        raise ValueError(
            f"{unlike[0]} is missing" if unlike[0] in expected else f"{unlike[0]} is not part of this network"
        )
    for name, tensor in tensors.items():
        if not (tensor.shape == expected[name].shape and tensor.is_floating_point() and tensor.isfinite().all()):
            raise ValueError(
                f"{name} ({tensor.dtype} {list(tensor.shape)}) must hold finite numbers, {list(expected[name].shape)} "
                f"of them"
            )


@rank_zero_only
def prune(folder: Path, *, newest: int, keep: int) -> None:
    """Delete all but the last `keep` checkpoints up to step `newest`, and what killed processes left half written.

    Damaged checkpoints after `newest` do not count and stay, until the run reaches their step again.
    """
    counted = [path_of(folder, step) for step in steps_in(folder) if step <= newest]
    for path in [*folder.glob(".*.tmp"), *counted[:-keep]]:
        path.unlink()
