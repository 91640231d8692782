"""Checkpoints, step=N.ckpt after N optimizer steps: one file of plain values and whole tensors.

Its content does not depend on the strategy and the number of ranks, so a run may go on with others. No random state is
saved: batches and dropout are functions of the seed and the step.
"""

import re
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import atomic_write
from model.gpt import GPT
from training.distributed import is_rank_zero, rank_zero_only
from training.sharding import full_tensor, part_for

_ADAMW = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps for each parameter


@dataclass
class Progress:
    """How far a run is, and what was measured since the last row of metrics.jsonl. It is saved in checkpoints, so the
    rows of a run are the same whenever it was interrupted."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # of training, pauses left out
    rows: int = 0  # rows written
    logged_step: int = 0  # of the last row
    logged_seconds: float = 0.0
    peak_memory: int = 0  # bytes, the most that rank zero has held, restarts included
    loss_sum: float = 0.0  # since that row: sum over steps of mean loss x share of scored targets
    loss_weight: float = 0.0  # and of the shares

    def check_rows(self, steps: list[int], first: int) -> None:
        """Raise ValueError if checkpoints or rows are missing, so that no run continues with less than it had. `steps`
        are those of the rows in metrics.jsonl; the first checkpoint is of step `first`."""
        rows, last = sum(step <= self.step for step in steps), max(steps, default=0)
        if rows != self.rows or (self.step == 0 and last > first):
            what = f"has {rows} rows instead of {self.rows} up to step {self.step}, that of the newest checkpoint"
            what = what if self.step else f"ends at step {last}, and there is no checkpoint"
            remedy = "restore the files, or delete the run and train anew; scripts/evaluate.py measures a trained model"
            raise ValueError(f"checkpoints or rows are missing: metrics.jsonl {what}: {remedy}")


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step={step}.ckpt"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, ascending. Files with other names are left alone."""
    names = (re.fullmatch(r"step=(\d{1,18})\.ckpt", path.name) for path in folder.glob("step=*"))
    return sorted(int(name[1]) for name in names if name)


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank zero; empty ones elsewhere. Called by all ranks."""
    whole = ((name, full_tensor(tensor.detach())) for name, tensor in tensors.items())  # one after the other
    return {name: tensor.cpu() if is_rank_zero() else tensor.new_empty(0) for name, tensor in whole}


def save(folder: Path, net: GPT, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write the checkpoint of `progress.step`; it appears under its name once it is whole. Called by all ranks."""
    moments: dict[str, Tensor] = {}
    for name, p in net.named_parameters():
        state = optimizer.state[p] or {key: torch.zeros_like(p if key != "step" else p.new_zeros(())) for key in _ADAMW}
        moments |= {f"{name}/{key}": state[key] for key in _ADAMW}
    tensors = {"model": on_cpu(net.state_dict()), "optimizer": on_cpu(moments)}
    _write(path_of(folder, progress.step), {"progress": asdict(progress), **tensors})


@rank_zero_only
def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch hides why it could not write
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def resume(folder: Path, net: GPT, optimizer: torch.optim.Optimizer) -> Progress:
    """Load the newest checkpoint that is whole into `net` and `optimizer`; if there is none, they stay as they are.
    Damaged ones are reported, and the one before is taken; ValueError if all are. Called by all ranks, which read the
    same file."""
    step = _newest(folder, net)
    if step is None:
        return Progress()
    state = _read(path_of(folder, step))
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            tensor.copy_(part_for(state["model"][name], tensor))
        for name, p in net.named_parameters():
            count, *moments = (state["optimizer"][f"{name}/{key}"] for key in _ADAMW)
            moments = [part_for(moment, p).clone() for moment in moments]  # the file may change
            optimizer.state[p] = dict(zip(_ADAMW, (count.to(p.device, copy=True), *moments), strict=True))
    return Progress(**state["progress"])


@rank_zero_only
def _newest(folder: Path, net: GPT) -> int | None:
    """The step of the newest checkpoint that is whole and fits the network, or None. See `resume`."""
    shapes = {f"model/{name}": tensor.shape for name, tensor in net.state_dict().items()}
    for name, p in net.named_parameters():
        shapes |= {f"optimizer/{name}/{key}": torch.Size() if key == "step" else p.shape for key in _ADAMW}
    steps = steps_in(folder)
    for step in reversed(steps):
        path = path_of(folder, step)
        try:
            _check(path, step, shapes)
            return step
        except Exception as error:  # a damaged file fails in many ways
            reason = (str(error) or type(error).__name__).splitlines()[0]
            print(f"{path} is damaged ({reason}): looking for one before", file=sys.stderr)
    if steps:
        raise ValueError(f"no checkpoint in {folder} can be read: restore one, or delete the run and train anew")
    return None


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _check(path: Path, step: int, shapes: dict[str, torch.Size]) -> None:
    """Raise an error for the first thing that is wrong."""
    with zipfile.ZipFile(path) as file:  # torch would not notice a changed byte
        if broken := file.testzip():
            raise ValueError(f"the checksum of {broken} is wrong")
    state = _read(path)
    if Progress(**state["progress"]).step != step:
        raise ValueError(f"its progress is {state['progress']}")
    found = {f"{part}/{name}": value.shape for part in ("model", "optimizer") for name, value in state[part].items()}
    for name in sorted(shapes | found):
        if found.get(name) != shapes.get(name):
            raise ValueError(f"{name}: {found.get(name)} instead of {shapes.get(name)}")


@rank_zero_only
def prune(folder: Path, *, newest: int, keep: int) -> None:
    """Delete all but the last `keep` checkpoints, and what killed processes left half written. Those after step
    `newest`, the one just written, are damaged: they do not count."""
    for part in folder.glob(".*.tmp"):
        part.unlink(missing_ok=True)
    for step in [step for step in steps_in(folder) if step <= newest][:-keep]:
        path_of(folder, step).unlink(missing_ok=True)
