"""The machine a run computes on: what "auto" means here, and why."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of returning them to the kernel.

    By default a large activation is mapped afresh at every step, and zeroing its pages can cost more than computing it:
    docs/results.md has the measured difference.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            libc.mallopt(_M_TOP_PAD, 1 << 26)
        except (OSError, AttributeError):  # another libc has its own ways
            pass


def tune_cpu() -> None:
    """What PyTorch leaves to its users on a CPU; docs/performance.md has the measured differences."""
    keep_freed_memory()
    multiply_with_onednn()


def multiply_with_onednn() -> bool:
    """Let oneDNN multiply fp32 matrices where MKL is slow: on AMD's processors with AVX-512, of which MKL uses half.

    PyTorch chooses oneDNN for fp32 only where rounding the factors to bf16 is permitted. Without AMX that permission
    has no effect but this choice: oneDNN has no kernel that would make use of it. A product tells; if it is not
    within fp32's rounding, all stays as it was. Returns whether oneDNN is used.
    """
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        amd = False
    if not amd or not torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        return False
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, dtype=torch.float64, generator=generator) for _ in range(2))
    error = (a.float() @ b.float() - a.float().double() @ b.float().double()).abs().max()
    if error < 1e-4:  # bf16 would be 0.1 away
        return True
    setting.fp32_precision = before
    return False


def forget_past_work() -> None:
    """Give back what earlier work in this process holds: memory, with its peak, and compiled graphs, of which PyTorch
    keeps only a few for one function."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError, AttributeError):  # of Linux alone
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak that getrusage tells


def peak_memory(device: str) -> int:
    """Most bytes held at once: by this process, or on the GPU; since its start or `forget_past_work`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)


@dataclass(frozen=True)
class Machine:
    """What a run computes with, and why."""

    device: str  # cpu, cuda or mps
    precision: str  # Lightning's name
    compile: bool
    why: dict[str, str]  # reason for each of the three

    @classmethod
    def choose(cls, *, accelerator: str, precision: str | int, compile: bool | str = False) -> "Machine":
        """Resolve every "auto" for this machine. Raises ValueError if the accelerator is not there."""
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
