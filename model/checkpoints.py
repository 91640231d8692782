"""The checkpoints of a run: step=N.ckpt, after N optimizer steps; a file, or a folder of shards (model.shards)."""

import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from model.files import replacing

OTHER = "other.pt"  # in a folder of shards, what is in none of them
SHARDS = "shards"  # in that file, the size of each shard in bytes


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step={step}.ckpt"


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step="))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step=*.ckpt"), key=step_of)


def newest_checkpoint(folder: Path, before: float = float("inf")) -> tuple[Path | None, int]:
    """(the newest checkpoint that can be read, its optimizer step), or (None, 0). Damaged ones are reported.

    `before`: leave out those of this step and later ones.
    """
    for path in reversed([path for path in checkpoints_in(folder) if step_of(path) < before]):
        main = path / OTHER if path.is_dir() else path
        try:
            with zipfile.ZipFile(main) as file:  # torch would not notice a changed byte
                if broken := file.testzip():
                    raise ValueError(f"the checksum of {broken} is wrong")
            values = torch.load(main, map_location="cpu", weights_only=True, mmap=True)
            for name, size in values.get(SHARDS, {}).items():
                if (path / name).stat().st_size != size:
                    raise ValueError(f"{name} is cut short")
            return path, values["global_step"]
        except Exception as error:  # a cut or garbled file fails in many ways
            print(f"{path} is damaged ({str(error).splitlines()[0]}): looking for one before", file=sys.stderr)
    return None, 0


def prune(folder: Path, *, newest: int, keep: int, best: int) -> None:
    """Delete all but the last `keep` checkpoints and that of step `best`, and what killed processes left half written.

    Those after step `newest`, the one just written, do not count: they were damaged.
    """
    for part in folder.glob(".*.tmp"):
        remove(part)
    written = [path for path in checkpoints_in(folder) if step_of(path) <= newest]
    for path in written[:-keep]:
        if step_of(path) != best:
            remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint of either kind, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def save(checkpoint: dict[str, Any], file: Any) -> None:
    """torch.save, which hides why it could not write. Raises OSError."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it there, so that no reader ever sees half of one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if Path(path).is_dir():
            remove(Path(path))  # damaged shards, which no file can replace
        with replacing(Path(path)) as file:
            save(checkpoint, file)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        if Path(path).is_dir():
            from model import shards  # imports much of torch

            return shards.read(Path(path))
        return super().load_checkpoint(path, *arguments, **options)
