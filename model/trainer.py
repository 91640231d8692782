"""The Lightning Trainer of a run: what "auto" means on this machine, and the loggers."""

import ctypes
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from model.callbacks import AtomicCheckpointIO
from model.gpt import GPT

# Lightning advertises and repeats itself; what a user needs to know, this project says.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
for _message in (
    "does not have many workers",  # batches are cut from memory-mapped files
    "your dataloader is not resumable",  # its sampler begins where the checkpoint ends
    "isinstance.treespec, LeafSpec.",  # Lightning's own use of torch
):
    warnings.filterwarnings("ignore", message=f".*{_message}")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of returning them to the kernel.

    By default every activation above 32 MiB is mapped afresh, and zeroing its pages costs more than computing it:
    a training step of the tiny model takes 0.83 of the time with this, one with plain CoPE 0.31.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            libc.mallopt(_M_TOP_PAD, 1 << 26)
        except (OSError, AttributeError):  # another libc has its own ways
            pass


@dataclass(frozen=True)
class Machine:
    """What a run computes with, and why."""

    device: str  # cpu, cuda or mps
    precision: str  # Lightning's name
    compile: bool
    why: dict[str, str]  # reason for each of the three

    @classmethod
    def choose(cls, *, accelerator: str, precision: str | int, compile: bool | str) -> "Machine":
        """Resolve every "auto" for this machine. Raises ValueError if the accelerator is not there."""
        keep_freed_memory()
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        have = [name for name, available in there.items() if available]
        device = have[0] if accelerator == "auto" else accelerator
        if device not in have:
            raise ValueError(f"trainer.accelerator={accelerator} is not available here; there is: {', '.join(have)}")
        why = {name: "as asked" for name in ("device", "precision", "compile")}
        if accelerator == "auto":
            why["device"] = "no GPU found" if device == "cpu" else "the fastest here"
        if precision == "auto":
            cuda = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            amx = device == "cpu" and torch.cpu._is_amx_tile_supported()
            precision = "bf16-mixed" if cuda or amx else 32
            why["precision"] = "bf16 matrix units" if cuda or amx else f"no bf16 matrix units in this {device}"
        if compile == "auto":
            compile = device == "cuda"
            why["compile"] = "a GPU gains from fused kernels" if compile else f"costs more than it saves on {device}"
        return cls(device, "32-true" if precision == 32 else str(precision), bool(compile), why)

    def describe(self) -> list[str]:
        values = {"device": self.device, "precision": self.precision, "compile": str(self.compile).lower()}
        return ["; ".join(f"{name} {value} ({self.why[name]})" for name, value in values.items())]


def compile_or_explain(net: GPT, length: int) -> str | None:
    """Compile `net` in place and try it; if that fails, leave it eager and return why."""
    net.compile()
    try:
        device = next(net.parameters()).device
        net.loss(*torch.zeros(2, 1, length, dtype=torch.int64, device=device)).backward()
        net.zero_grad(set_to_none=True)
    except Exception as error:  # the compiler's errors have no common class
        net._compiled_call_impl = None
        return str(error).strip().splitlines()[0]
    return None


def build_loggers(logger: dict[str, Any], run: Path, *, name: str, config: dict[str, Any]) -> list[Any]:
    """The Lightning loggers for a `logger` section; they only mirror metrics.jsonl. `config` is recorded with it.

    Raises:
        ValueError: the logger needs a package that is not installed.
    """
    kind = logger["kind"]
    if kind == "csv":
        from lightning.pytorch.loggers import CSVLogger

        return [CSVLogger(run, name="", version="csv")]
    if kind == "tensorboard":
        try:
            from lightning.pytorch.loggers import TensorBoardLogger

            return [TensorBoardLogger(run, name="", version="tensorboard")]
        except ModuleNotFoundError:
            raise ValueError('logger=tensorboard needs a package: pip install "ropewalk[tensorboard]"') from None
    if kind == "wandb":
        import wandb
        from lightning.pytorch.loggers import WandbLogger

        mode = os.environ.get("WANDB_MODE") or logger["mode"]
        if mode == "auto":
            mode = "online" if wandb.api.api_key else "offline"
        wandb_settings = wandb.Settings(silent=True, console="off", init_timeout=30)
        return [
            WandbLogger(
                name=name, id=name, project=logger["project"], save_dir=run, mode=mode, config=config,
                resume="allow", settings=wandb_settings,
            )
        ]  # fmt: skip
    return []


def build_trainer(
    run: Path,
    machine: Machine,
    *,
    devices: int | str,
    max_steps: int,
    accumulate: int,
    callbacks: list[L.Callback],
    loggers: list[Any],
) -> L.Trainer:
    """A Trainer that only runs the loop: validation, logging and checkpoints are our callbacks'."""
    return L.Trainer(
        default_root_dir=run,
        accelerator="gpu" if machine.device == "cuda" else machine.device,
        devices=devices,
        precision=machine.precision,  # type: ignore[arg-type]
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=loggers or False,
        plugins=[AtomicCheckpointIO()],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,  # data.sampler deals out the samples
    )
