"""The hardware of a run: what "auto" means on this machine; settings that make a CPU faster."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.gpt import LOGITS


@dataclass(frozen=True)
class Hardware:
    """What a run computes with."""

    device: str  # cpu, cuda or mps
    precision: str  # 32-true, bf16-mixed or bf16-true
    compile: bool

    @classmethod
    def resolve(cls, *, accelerator: str, precision: str | int, compile: bool | str = False) -> "Hardware":
        """Resolve every "auto" for this machine. Raises ValueError if the accelerator is not available."""
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        have = [name for name, available in there.items() if available]
        device = have[0] if accelerator == "auto" else accelerator
        if device not in have:
            raise ValueError(f"accelerator {accelerator} is not available here; choose auto or: {', '.join(have)}")
        if precision == "auto":  # bf16 where the device has matrix units for it
            cuda = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            amx = device == "cpu" and torch.cpu._is_amx_tile_supported()
            precision = "bf16-mixed" if cuda or amx else 32
        compiles = device == "cuda" if compile == "auto" else bool(compile)
        return cls(device, "32-true" if precision == 32 else str(precision), compiles)

    def autocast(self) -> torch.autocast:
        """A context manager in which the network computes as in training."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16-mixed")


def training_memory(cfg: Any, precision: str, *, parameters: int, vocab_size: int) -> dict[str, int]:
    """Lower bound on the bytes that a device needs to train on one micro-batch of `cfg`, by what holds them. What the
    position encoding and kernels keep is not counted, nor what a compiler recomputes, such as norms."""
    model, t, world = cfg.model, cfg.trainer, cfg.trainer.devices * cfg.trainer.num_nodes
    weights = parameters * (2 if precision == "bf16-true" else 4) // (world if t.strategy == "fsdp" else 1)
    number = 4 if precision == "32-true" else 2  # bytes of what the backward pass needs
    tokens = t.batch_size // t.grad_accum_steps // world * cfg.train_len
    heads = 2 * model.n_head + 2 * model.kv_heads  # q, k, v and the output
    block = tokens * (2 * model.dim + heads * model.head_width + (1 + model.gated) * model.hidden)
    inputs = tokens * model.dim * model.n_layer  # of all blocks: with checkpointing the others are computed again
    logits = tokens * vocab_size
    return {
        "weights": weights,
        "AdamW": 2 * weights,
        "gradients": weights,
        "activations": number * (inputs + block if t.checkpointing else model.n_layer * block),
        "logits": number * (min(logits, LOGITS) if t.checkpointing else logits),
    }


def check_memory(cfg: Any, hardware: Hardware, *, parameters: int, vocab_size: int) -> str:
    """In words, what the training of the run `cfg` needs at least. Raises ValueError: more than there can be."""
    needed = training_memory(cfg, hardware.precision, parameters=parameters, vocab_size=vocab_size)
    spared = min(needed["gradients"], needed["activations"] + needed["logits"])  # held one after the other
    total = sum(needed.values()) - spared
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cfg.trainer.devices
    if hardware.device == "cuda":
        have = torch.cuda.get_device_properties(0).total_memory
    parts = ", ".join(f"{what} {size / 2**30:,.2f}" for what, size in needed.items())
    said = f"training takes at least {total / 2**30:,.2f} GiB ({parts}), and a process can have {have / 2**30:,.1f}"
    if total > have and cfg.trainer.max_steps:
        remedy = "a smaller model or train_len, or a larger trainer.grad_accum_steps takes less"
        raise ValueError(f"not enough memory: {said}; {remedy}")
    return said


@contextmanager
def explain_compile_errors() -> Iterator[None]:
    """Raises ValueError, with the remedy, where the compiler fails."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    try:
        yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).strip().split("\n\n")[0].split())
        raise ValueError(f"the network cannot be compiled: {reason}; trainer.compile=false trains it") from error


def tune(device: str, *, deterministic: bool = False) -> None:
    """Settings that PyTorch leaves to its users; docs/performance.md has the measured differences. With `deterministic`
    a GPU adds in one order, and an operation that cannot do so raises RuntimeError."""
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, and reads it as it starts
    if device != "cpu":
        return
    torch.set_flush_denormal(True)  # tiny softmax weights: some backward passes take twice as long with them
    # glibc maps a large activation afresh in every step, and zeroing its pages can cost more than computing it
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        with contextlib.suppress(OSError, AttributeError):  # another libc has no mallopt
            libc = ctypes.CDLL("libc.so.6")
            for option, value in ((-3, 1 << 30), (-1, 2**31 - 1), (-2, 1 << 26)):  # M_{MMAP,TRIM}_THRESHOLD, M_TOP_PAD
                libc.mallopt(option, value)


def reset_peak_memory() -> None:
    """Release what earlier work in this process holds: memory, with its peak, and compiled graphs."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # PyTorch keeps few graphs for one function
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError, AttributeError):  # of Linux alone
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak that getrusage reports


def peak_memory(device: str) -> int:
    """Most bytes held at once since the start or `reset_peak_memory`: on the GPU, or by this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)
