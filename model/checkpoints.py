"""The checkpoints of a run: step=N.ckpt, after N optimizer steps."""

import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from model.files import replacing


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
        try:
            with zipfile.ZipFile(path) as file:  # torch would not notice a changed byte
                if broken := file.testzip():
                    raise ValueError(f"the checksum of {broken} is wrong")
            return path, torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        except Exception as error:  # a cut or garbled file fails in many ways
            print(f"{path} is damaged ({str(error).splitlines()[0]}): looking for one before", file=sys.stderr)
    return None, 0


def prune(folder: Path, *, newest: int, keep: int, best: int) -> None:
    """Delete all but the last `keep` checkpoints and that of step `best`, and what killed processes left half written.

    Those after step `newest`, the one just written, do not count: they were damaged.
    """
    for part in folder.glob(".*.tmp"):
        part.unlink()
    written = [path for path in checkpoints_in(folder) if step_of(path) <= newest]
    for path in written[:-keep]:
        if step_of(path) != best:
            path.unlink()


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it there, so that no reader ever sees half of one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with replacing(Path(path)) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's writer hides why it could not write
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
