"""Checkpoints: one file, step=N.ckpt after N optimizer steps, of plain values and whole tensors.

With trainer.checkpoint_parts it is a folder of this name with a part for each rank: `sharded_checkpoints`.

The content does not depend on the strategy or on the world size, so a run may be resumed with others. No random state
is saved: batches and dropout are functions of the seed and the step.
"""

import re
import shutil
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT
from model.serialization import renamed
from ropewalk.files import atomic_write, printable
from ropewalk.training import sharded_checkpoints
from ropewalk.training.distributed import is_rank_zero, on_rank_zero, rank_zero_only
from ropewalk.training.sharding import assign, full_tensor

_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps for each parameter


@dataclass
class Progress:
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

    def check_rows(self, steps: list[int], first: int) -> None:
        """Make sure that no run continues with less than it had.

        Args:
            steps: the step of each row in metrics.jsonl.
            first: the step by which a first checkpoint must exist; 0 for a complete run. A run killed earlier has
                rows but no checkpoint.

        Raises:
            ValueError: checkpoints or rows are missing.
        """
        rows = sum(step <= self.step for step in steps)
        last = max(steps, default=0)
        if self.step == 0 and last > first:
            problem = f"ends at step {last}, and there is no checkpoint"
        elif rows != self.rows:
            problem = f"has {rows} rows instead of {self.rows} up to step {self.step}, that of the newest checkpoint"
        else:
            return
        remedy = "restore the files, or delete the run and train anew; scripts/evaluate.py measures a trained model"
        raise ValueError(f"checkpoints or rows are missing: metrics.jsonl {problem}: {remedy}")


def path_of(folder: Path, step: int) -> Path:
    """The file of the checkpoint after `step` steps."""
    return folder / f"step={step}.ckpt"


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, ascending. Files with other names are ignored."""
    steps = []
    for path in folder.glob("step=*"):
        match = re.fullmatch(r"step=(\d{1,18})\.ckpt", path.name)
        if match:
            steps.append(int(match[1]))
    return sorted(steps)


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU of rank zero; other ranks get empty ones. Called by all ranks."""
    # One tensor after the other, so that a GPU never holds more than one whole tensor beside its shards.
    gathered = {}
    for name, tensor in tensors.items():
        whole = full_tensor(tensor.detach())
        gathered[name] = whole.cpu() if is_rank_zero() else whole.new_empty(0)
    return gathered


def save(
    folder: Path, net: GPT, optimizer: torch.optim.Optimizer, progress: Progress, *, keep: int, parts: bool
) -> None:
    """Save a checkpoint, and delete those that are no longer kept. Called by all ranks alike.

    Args:
        keep: number of checkpoints.
        parts: each rank writes what it holds.

    Raises:
        OSError: it could not be written.
    """
    path = path_of(folder, progress.step)
    moments = _moments(net, optimizer)
    if parts:
        sharded_checkpoints.save(path, _in_parts(net, moments), asdict(progress))
    else:
        state = {"progress": asdict(progress), "model": on_cpu(net.state_dict()), "optimizer": on_cpu(moments)}
        on_rank_zero(lambda: _write(path, state))
    prune(folder, newest=progress.step, keep=keep)


def _moments(net: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What AdamW keeps for each parameter, by the parameter's name; zeros before the first step."""
    moments: dict[str, Tensor] = {}
    for name, p in net.named_parameters():
        state = optimizer.state[p] or {"step": torch.zeros(())}  # AdamW makes its state in the first step
        for key in _ADAMW_STATE:
            moments[f"{name}/{key}"] = state[key] if key in state else torch.zeros_like(p)
    return moments


def _in_parts(net: GPT, moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint in parts: no tensor has two names, as tied embeddings have in a state dict."""
    tensors = {f"model/{name}": p.detach() for name, p in net.named_parameters()}
    return tensors | {f"optimizer/{name}": tensor for name, tensor in moments.items()}


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch hides the reason, such as a full disk, behind an error of its own.
            reason = error.__context__
            raise (reason if isinstance(reason, OSError) else error) from None


def resume(folder: Path, net: GPT, optimizer: torch.optim.Optimizer, only: int | None = None) -> Progress:
    """Load the newest whole checkpoint into `net` and `optimizer`. Called by all ranks, which read the same file.

    A damaged checkpoint is reported, and the one before it is taken. Without any checkpoint nothing is changed.

    Args:
        only: the step of the one checkpoint to take.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    step = _newest(folder, net, only)
    if step is None:
        return Progress()
    path = path_of(folder, step)
    moments = _moments(net, optimizer)
    if path.is_dir():
        progress = sharded_checkpoints.load(path, _in_parts(net, moments))
    else:
        # The file is memory-mapped, and may change later: everything is copied.
        state = _read(path)
        progress = state["progress"]
        for part, tensors in (("model", net.state_dict()), ("optimizer", moments)):
            for name, tensor in tensors.items():
                assign(tensor, state[part][name])
    for name, p in net.named_parameters():
        optimizer.state[p] = {key: moments[f"{name}/{key}"] for key in _ADAMW_STATE}
        optimizer.state[p]["step"] = moments[f"{name}/step"].to(p.device)
    return Progress(**progress)


def take_over(base: Path, net: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state of the newest checkpoint of another run. ValueError if it has none."""
    # The weights too: the moments belong to those of the checkpoint.
    if not resume(base / "checkpoints", net, optimizer).step:
        raise ValueError(f"init_optimizer=true needs a checkpoint, and {base} has none: leave it out")


@rank_zero_only
def _newest(folder: Path, net: GPT, only: int | None) -> int | None:
    """The step of the newest checkpoint that is whole and fits the network, or None. See `resume`."""
    steps = [step for step in steps_in(folder) if only in (None, step)]
    for step in reversed(steps):
        path = path_of(folder, step)
        try:
            _check(path, step, net)
            return step
        except Exception as error:  # a damaged file fails in many ways
            reason = (str(error) or type(error).__name__).splitlines()[0]
            print(printable(f"{path} is damaged ({reason}): looking for one before"), file=sys.stderr)
    if steps:
        raise ValueError(f"no checkpoint in {folder} can be read: restore one, or delete the run and train anew")
    return None


def _read(path: Path) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state | {part: renamed(state[part]) for part in ("model", "optimizer")}


def _check(path: Path, step: int, net: GPT) -> None:
    """Raise an error for the first thing that is wrong with a checkpoint."""
    read = sharded_checkpoints.read if path.is_dir() else _read_whole
    progress, shapes, tensors = read(path)
    _check_progress(progress, step)
    # A file has tied weights twice, parts once.
    model = dict(net.named_parameters()) if path.is_dir() else net.state_dict()
    expected = {f"model/{name}": tensor.shape for name, tensor in model.items()}
    for name, p in net.named_parameters():
        expected |= {f"optimizer/{name}/{key}": p.shape for key in _ADAMW_STATE}
        expected[f"optimizer/{name}/step"] = torch.Size()
    different = sorted(shapes.keys() ^ expected.keys())
    if different:
        name = different[0]
        raise ValueError(f"{name} is missing" if name in expected else f"{name} is not part of this network")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(f"{name}: {shape} instead of {expected[name]}")
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"{name} holds {tensor.dtype}, not floating-point numbers")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is infinite or NaN")


def _read_whole(path: Path) -> sharded_checkpoints.Content:
    """The content of a checkpoint in one file. Raises ValueError if it is damaged."""
    # torch.load does not compare checksums: it would silently load a changed byte.
    with zipfile.ZipFile(path) as file:
        broken = file.testzip()
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
    state = _read(path)
    tensors: dict[str, Tensor] = {}
    for part in ("model", "optimizer"):
        tensors |= {f"{part}/{name}": tensor for name, tensor in state[part].items()}
    return state["progress"], {name: tensor.shape for name, tensor in tensors.items()}, tensors.items()


def _check_progress(values: dict[str, Any], step: int) -> None:
    """Raise ValueError unless `values` are the progress of `step`, with numbers of the right types."""
    progress = Progress(**values)
    for name, default in asdict(Progress()).items():
        value = getattr(progress, name)
        if type(value) is not type(default):
            raise ValueError(f"its progress has {name}={value!r}")
    if progress.step != step:
        raise ValueError(f"its progress is {values}")


@rank_zero_only
def prune(folder: Path, *, newest: int, keep: int) -> None:
    """Delete all but the last `keep` checkpoints up to step `newest`, and what killed processes left half written.

    Damaged checkpoints after `newest` do not count and stay, until the run reaches their step again.
    """
    for leftover in folder.glob(".*.tmp"):
        _delete(leftover)
    steps = [step for step in steps_in(folder) if step <= newest]
    for step in steps[:-keep]:
        _delete(path_of(folder, step))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
