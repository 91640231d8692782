"""Checkpoints: one file, step=N.ckpt after N optimizer steps, of plain values and whole tensors.

With trainer.checkpoint_parts it is a folder of this name with a part for each rank:
`ropewalk.training.sharded_checkpoints`.

The content does not depend on the strategy or on the world size, so a run may be resumed with others. No random state
is saved: batches and dropout are functions of the seed and the step.
"""

import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from model.gpt import GPT
from model.serialization import renamed
from ropewalk.files import atomic_write, printable
from ropewalk.training import sharded_checkpoints
from ropewalk.training.distributed import is_rank_zero, on_rank_zero, rank_zero_only
from ropewalk.training.sharding import full_tensor, part_for

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


def on_cpu(tensors: dict[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU of rank zero; other ranks get empty ones. Called by all ranks.

    Args:
        copy: of tensors that are there already, so that they may change.
    """
    # One tensor after the other, so that a GPU never holds more than one whole tensor beside its shards.
    gathered = {}
    for name, tensor in tensors.items():
        whole = full_tensor(tensor.detach())
        gathered[name] = whole.to("cpu", copy=copy) if is_rank_zero() else whole.new_empty(0)
    return gathered


class Writer:
    """Writes the checkpoints of a run, and deletes those that are no longer kept. Called by all ranks alike.

    In the background a thread writes copies while training goes on, at most one at a time. The first checkpoint of a
    run is waited for, since a run that has rows of steps after it cannot continue without it. So are those in parts.

    Args:
        keep: number of checkpoints.
        parts: each rank writes what it holds.
        background: write in a thread.
    """

    def __init__(self, folder: Path, *, keep: int, parts: bool, background: bool) -> None:
        self.folder = folder
        self.keep = keep
        self.parts = parts
        self.background = background and not parts
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def save(self, net: GPT, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Save a checkpoint, after the one before it is on the disk.

        Raises:
            OSError: this one could not be written, or the one before it.
        """
        self.wait()
        step = progress.step  # of now: training goes on
        path = path_of(self.folder, step)
        moments = _moments(net, optimizer)
        if self.parts:
            sharded_checkpoints.save(path, _in_parts(net, moments), asdict(progress))
            on_rank_zero(lambda: prune(self.folder, newest=step, keep=self.keep))
            return

        model = on_cpu(net.state_dict(), copy=self.background)
        state = {"progress": asdict(progress), "model": model, "optimizer": on_cpu(moments, copy=self.background)}

        def write() -> None:
            _write(path, state)
            prune(self.folder, newest=step, keep=self.keep)

        on_rank_zero(lambda: self._start(write))

    def _start(self, write: Callable[[], None]) -> None:
        if self.background and steps_in(self.folder):
            self._pending = self._threads.submit(write)
        else:
            write()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; OSError if it could not be written."""
        on_rank_zero(self._finish)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # The thread ends before another process may use the folder. After an error, this rank may be the only one here.
        self._threads.shutdown()
        if error is None:
            self.wait()


def _moments(net: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What AdamW keeps for each parameter, by the parameter's name; zeros before the first step."""
    moments: dict[str, Tensor] = {}
    for name, p in net.named_parameters():
        state = optimizer.state[p]
        if not state:  # AdamW makes its state in the first step
            state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for key in _ADAMW_STATE:
            moments[f"{name}/{key}"] = state[key]
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
    if path.is_dir():
        return _resume_from_parts(path, net, optimizer)
    # The file is memory-mapped, and may change later: everything is copied.
    state = _read(path)
    moments = state["optimizer"]
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            tensor.copy_(part_for(state["model"][name], tensor))
        for name, p in net.named_parameters():
            count = moments[f"{name}/step"].to(p.device, copy=True)
            mean = part_for(moments[f"{name}/exp_avg"], p).clone()
            square = part_for(moments[f"{name}/exp_avg_sq"], p).clone()
            optimizer.state[p] = {"step": count, "exp_avg": mean, "exp_avg_sq": square}
    return Progress(**state["progress"])


def take_over(base: Path, net: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state of the newest checkpoint of another run. ValueError if it has none."""
    # The weights too: the moments belong to those of the checkpoint.
    if not resume(base / "checkpoints", net, optimizer).step:
        raise ValueError(f"init_optimizer=true needs a checkpoint, and {base} has none: leave it out")


def _resume_from_parts(path: Path, net: GPT, optimizer: torch.optim.Optimizer) -> Progress:
    moments = {key: torch.empty_like(tensor) for key, tensor in _moments(net, optimizer).items()}
    progress = sharded_checkpoints.load(path, _in_parts(net, moments))
    for name, p in net.named_parameters():
        state = {key: moments[f"{name}/{key}"] for key in _ADAMW_STATE}
        optimizer.state[p] = state | {"step": state["step"].to(p.device)}
    return Progress(**progress)


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


def _shapes(net: GPT, model: Iterable[tuple[str, Tensor]]) -> dict[str, torch.Size]:
    """The shapes of all tensors of a checkpoint with the weights `model` of `net`."""
    shapes = {f"model/{name}": tensor.shape for name, tensor in model}
    for name, p in net.named_parameters():
        shapes[f"optimizer/{name}/step"] = torch.Size()
        shapes[f"optimizer/{name}/exp_avg"] = p.shape
        shapes[f"optimizer/{name}/exp_avg_sq"] = p.shape
    return shapes


def _check(path: Path, step: int, net: GPT) -> None:
    """Raise an error for the first thing that is wrong with a checkpoint."""
    if path.is_dir():
        progress, found = sharded_checkpoints.check(path)
        _check_progress(progress, step)
        _check_shapes(found, _shapes(net, net.named_parameters()))
        return
    # torch.load does not compare checksums: it would silently load a changed byte.
    with zipfile.ZipFile(path) as file:
        broken = file.testzip()
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
    state = _read(path)
    _check_progress(state["progress"], step)
    tensors = {}
    for part in ("model", "optimizer"):
        for name, tensor in state[part].items():
            tensors[f"{part}/{name}"] = tensor
    found = {name: tensor.shape for name, tensor in tensors.items()}
    _check_shapes(found, _shapes(net, net.state_dict().items()))
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} holds {tensor.dtype}, not floating-point numbers")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is infinite or NaN")


def _check_shapes(found: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    """Raise ValueError for the first tensor that is missing, of another shape, or not of this network."""
    different = sorted(found.keys() ^ expected.keys())
    if different:
        name = different[0]
        raise ValueError(f"{name} is missing" if name in expected else f"{name} is not part of this network")
    for name, shape in found.items():
        if shape != expected[name]:
            raise ValueError(f"{name}: {shape} instead of {expected[name]}")


def _check_progress(values: dict[str, Any], step: int) -> None:
    """Raise ValueError unless `values` are the progress of `step`, with numbers of the right types."""
    progress = Progress(**values)
    for name, default in asdict(Progress()).items():
        value = getattr(progress, name)
        if type(value) is not type(default):
            raise ValueError(f"its progress has {name}={value!r}")
    if progress.step != step:
        raise ValueError(f"its progress is {values}")


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
