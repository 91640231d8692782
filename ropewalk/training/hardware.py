"""The hardware of a run: what "auto" means on this machine, settings of PyTorch, the peak of memory."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

# Options of glibc's mallopt, as malloc.h numbers them, and their values.
MALLOC_OPTIONS = {
    -3: 1 << 30,  # M_MMAP_THRESHOLD: smaller allocations, in bytes, come from the heap
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: free bytes at the end of the heap that it may keep
    -2: 1 << 26,  # M_TOP_PAD: bytes that it grows by beyond what is asked for
}


@dataclass(frozen=True)
class Hardware:
    """Device and arithmetic of a run."""

    device: str  # cpu, cuda or mps
    precision: str  # 32-true, bf16-mixed or bf16-true
    compile: bool
    kernels: bool = False  # attention may use kernels, where they prove right: see `plugins.kernels`

    @classmethod
    def resolve(
        cls, *, accelerator: str, precision: str, compile: bool | str = False, kernels: bool | str = False
    ) -> "Hardware":
        """Resolve every "auto" for this machine.

        Raises:
            ValueError: the accelerator is not available, or the kernels that `kernels=True` asks for.
        """
        device = device_of(accelerator)
        # The precision; of "auto" bf16-mixed where matrix units compute bf16. Elsewhere it is emulated, and slower than
        # fp32.
        if precision == "auto":
            if device == "cuda":
                has_bf16_units = torch.cuda.is_bf16_supported(including_emulation=False)
            else:
                has_bf16_units = device == "cpu" and torch.cpu._is_amx_tile_supported()
            precision = "bf16-mixed" if has_bf16_units else "32-true"
        if compile == "auto":
            compile = device == "cuda"

        # Kernels; for "auto" only if all of this holds.
        can_use_kernels = (
            device == "cuda"
            and not torch.version.hip
            and torch.cuda.get_device_capability() >= (8, 0)
            and precision.startswith("bf16")
            and find_spec("triton") is not None
        )
        if kernels is True and not can_use_kernels:
            raise ValueError(
                "trainer.kernels=true: kernels need an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, "
                "a precision in bf16, and Triton; choose auto or false"
            )
        return cls(device, precision, bool(compile), bool(kernels) and can_use_kernels)  # "auto" counts as true

    def autocast(self) -> torch.autocast:
        """A context manager in which the network computes as in training."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16-mixed")


def device_of(accelerator: str) -> str:
    """Return the device cpu, cuda or mps; of "auto" the fastest that is here. Raises ValueError: it is not here."""
    is_here = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }  # fastest first
    available = [name for name, here in is_here.items() if here]
    device = available[0] if accelerator == "auto" else accelerator
    if device not in available:
        raise ValueError(f"accelerator {accelerator} is not available here; choose auto or: {', '.join(available)}")
    return device


def tune(device: str, *, deterministic: bool = False) -> None:
    """Choose the settings that PyTorch leaves to its users, and count memory anew, as of another run in this process.

    docs/log/performance.md has the measured differences.

    Args:
        device: cpu, cuda or mps.
        deterministic: a GPU adds in one order, and an operation that cannot do so raises RuntimeError.
    """
    reset_peak_memory()
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it too, and reads it as it starts
    if device == "cpu":
        torch.set_flush_denormal(True)  # tiny softmax weights become 0: they can double the time of a backward pass
        # By default glibc maps a large activation afresh in every step, and zeroing its pages takes 5 % of a step. With
        # these options activations come from a heap that keeps its memory.
        with contextlib.suppress(OSError, AttributeError):  # another libc
            libc = ctypes.CDLL("libc.so.6")
            for option, value in MALLOC_OPTIONS.items():
                libc.mallopt(option, value)


def reset_peak_memory() -> None:
    """Release what earlier work in this process holds, memory and compiled graphs, and reset the peak of memory."""
    gc.collect()
    # PyTorch limits the compiled graphs of a function; those of an earlier run in a sweep must not use up the limit.
    # The module is looked up rather than imported, which takes seconds.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
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
    unit = 1 if sys.platform == "darwin" else 2**10  # Linux counts KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
