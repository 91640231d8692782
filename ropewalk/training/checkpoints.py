"""Checkpoints: one file, step=N.ckpt after N optimizer steps, of plain values and whole tensors.

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
from safetensors import safe_open
from torch import Tensor

from model.gpt import GPT
from model.serialization import renamed
from ropewalk.files import atomic_write, printable, read_json, refuse_link, sha256
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
    names = [re.fullmatch(r"step=(\d{1,18})\.ckpt", path.name) for path in folder.glob("step=*")]
    return sorted(int(name[1]) for name in names if name)


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
    state = {"progress": asdict(progress), "model": on_cpu(net.state_dict())}
    state["optimizer"] = on_cpu(_moments(net, optimizer))
    on_rank_zero(lambda: _write(path_of(folder, progress.step), state))
    prune(folder, newest=progress.step, keep=keep)


def _moments(net: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What AdamW keeps for each parameter, by the parameter's name; zeros before the first step."""
    moments: dict[str, Tensor] = {}
    for name, p in net.named_parameters():
        state = optimizer.state[p] or {"step": torch.zeros(())}  # AdamW makes its state in the first step
        for key in _ADAMW_STATE:
            moments[f"{name}/{key}"] = state[key] if key in state else torch.zeros_like(p)
    return moments


def _write(path: Path, state: dict[str, Any]) -> None:
    _delete(path)  # where it exists it is damaged
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
    moments = _moments(net, optimizer)
    tensors: dict[str, Tensor] = {f"model/{name}": p for name, p in net.named_parameters()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    step = _newest(folder, shapes, only)
    if step is None:
        return Progress()
    # The file is memory-mapped, and may change later: everything is copied.
    progress, stored = _read(path_of(folder, step))
    for name, tensor in tensors.items():
        assign(tensor, stored[name])
    for name, p in net.named_parameters():
        optimizer.state[p] = {key: moments[f"{name}/{key}"] for key in _ADAMW_STATE}
        optimizer.state[p]["step"] = moments[f"{name}/step"].to(p.device)
    return progress


def take_over(base: Path, net: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state of the newest checkpoint of another run. ValueError if it has none."""
    # The weights too: the moments belong to those of the checkpoint.
    if not resume(base / "checkpoints", net, optimizer).step:
        raise ValueError(f"init_optimizer=true needs a checkpoint, and {base} has none: leave it out")


@rank_zero_only
def _newest(folder: Path, shapes: dict[str, torch.Size], only: int | None) -> int | None:
    """The step of the newest checkpoint that is whole and has tensors of these `shapes`, or None. See `resume`."""
    steps = [step for step in steps_in(folder) if only in (None, step)]
    for step in reversed(steps):
        path = path_of(folder, step)
        try:
            _check(path, step, shapes)
            return step
        except Exception as error:  # a damaged file fails in many ways
            reason = (str(error) or type(error).__name__).splitlines()[0]
            print(printable(f"{path} is damaged ({reason}): looking for one before"), file=sys.stderr)
    if steps:
        raise ValueError(f"no checkpoint in {folder} can be read: restore one, or delete the run and train anew")
    return None


def _read(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """The progress in a checkpoint, and its tensors: those of the "model/" and those of the "optimizer/"."""
    if path.is_dir():
        progress, tensors = _read_parts(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        progress, tensors = state["progress"], {}
        for part in ("model", "optimizer"):
            tensors |= {f"{part}/{name}": tensor for name, tensor in state[part].items()}
    return Progress(**progress), renamed(tensors)


def _read_parts(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same of a folder of shards, which earlier versions wrote. Raises ValueError if one is missing or damaged."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    index = read_json(folder / "index.json")
    # Names come from the folder and not from the index, which might name any file of the machine.
    found = {}
    for part in folder.glob("*.safetensors"):
        with safe_open(refuse_link(part), "pt"):  # its header says how long it is: it may be a sparse file without end
            found[part.name] = sha256(part)
    if found != index["sha256"]:
        raise ValueError("a part is missing, or its checksum is wrong")
    reader = HuggingFaceStorageReader(str(folder))
    tensors = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)  # type: ignore[union-attr]
    load(tensors, storage_reader=reader, no_dist=True)
    return index["progress"], tensors


def _check(path: Path, step: int, shapes: dict[str, torch.Size]) -> None:
    """Raise an error for the first thing that is wrong with a checkpoint."""
    if path.is_file():
        # torch.load does not compare checksums: it would silently load a changed byte.
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
    progress, tensors = _read(path)
    for name, default in asdict(Progress()).items():
        value = getattr(progress, name)
        if type(value) is not type(default):
            raise ValueError(f"its progress has {name}={value!r}")
    if progress.step != step:
        raise ValueError(f"its progress is {progress}")

    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    for name, tensor in tensors.items():
        if name == "model/head.weight" and name not in shapes:  # tied: the embedding under another name
            continue
        if name not in shapes:
            raise ValueError(f"{name} is not part of this network")
        if tensor.shape != shapes[name]:
            raise ValueError(f"{name}: {tensor.shape} instead of {shapes[name]}")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} holds {tensor.dtype}, not floating-point numbers")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is infinite or NaN")


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
