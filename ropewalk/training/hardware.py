"""The hardware of a run: what "auto" means on this machine, how much memory there is, settings of PyTorch."""

import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from conf.schema import Config

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

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
        device = _device_of(accelerator)
        precision = _precision_of(precision, device)
        if compile == "auto":
            compile = device == "cuda"
        problem = kernel_problem(device, precision) if kernels else ""
        if problem and kernels is True:
            raise ValueError(f"trainer.kernels=true: {problem}; choose auto or false")
        return cls(device, precision, bool(compile), bool(kernels) and not problem)

    def autocast(self) -> torch.autocast:
        """A context manager in which the network computes as in training."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16-mixed")


def _device_of(accelerator: str) -> str:
    """The device that `accelerator` names; of "auto" the fastest here. ValueError if it is not available."""
    is_here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [name for name, here in is_here.items() if here]
    device = available[0] if accelerator == "auto" else accelerator
    if device not in available:
        raise ValueError(f"accelerator {accelerator} is not available here; choose auto or: {', '.join(available)}")
    return device


def _precision_of(precision: str, device: str) -> str:
    """The name of a precision; of "auto" bf16-mixed where matrix units compute bf16."""
    if precision == "auto":
        # Elsewhere bf16 is emulated, and slower than fp32.
        if device == "cuda":
            has_bf16_units = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            has_bf16_units = device == "cpu" and torch.cpu._is_amx_tile_supported()
        return "bf16-mixed" if has_bf16_units else "32-true"
    return precision


def kernel_problem(device: str, precision: str) -> str:
    """Say why attention cannot use kernels on this machine; "" if it may, where they prove right: see `plugins`."""
    if device != "cuda" or torch.version.hip:
        return f"they need CUDA, and the device is {device}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "they need an NVIDIA GPU of compute capability 8.0 (Ampere) or newer"
    if not precision.startswith("bf16"):
        return f"they compute in 16 bit, and the precision is {precision}"
    if find_spec("triton") is None:
        return "they need Triton"
    return ""


def check_memory(cfg: Config, hardware: Hardware, *, parameters: int) -> str:
    """Compare the memory that training takes at least with what a process can have.

    Counted are weights, gradients and AdamW's moments, and of the activations of a micro-batch those alone that every
    layer keeps: its input, queries, keys, values and the MLP's hidden layer.

    Returns:
        Both in words.

    Raises:
        ValueError: it takes more, and there are steps to train.
    """
    t = cfg.trainer
    assert isinstance(t.devices, int)  # resolved
    world_size = t.devices * t.num_nodes
    held = parameters // (world_size // t.replicas) if t.strategy == "fsdp" else parameters
    weights = held * (2 if hardware.precision == "bf16-true" else 4)
    tokens = t.batch_size * cfg.train_len // t.grad_accum_steps // world_size
    kept = cfg.model.dim
    if not t.checkpointing:
        kept += (cfg.model.n_head + 2 * cfg.model.kv_heads) * cfg.model.head_width + cfg.model.hidden
    activations = tokens * cfg.model.n_layer * kept * (4 if hardware.precision == "32-true" else 2)
    # Gradients grow while the backward pass frees activations.
    total = 3 * weights + max(weights, activations)

    available = memory_limit() // t.devices
    if hardware.device == "cuda":
        available = torch.cuda.get_device_properties(0).total_memory
    message = f"training takes at least {total / 2**30:,.2f} GiB, and a process can have {available / 2**30:,.1f}"
    if total > available and t.max_steps:
        remedy = "a smaller model or train_len, or a larger trainer.grad_accum_steps takes less"
        raise ValueError(f"not enough memory: {message}; {remedy}")
    return message


def memory_limit() -> int:
    """Bytes that the processes of this machine can have: the least of its memory, its container's and `ulimit -v`."""
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), address_space % 2**64]  # unlimited is -1
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        limits.append(int(CONTAINER_LIMIT.read_text()))
    return min(limits)


@contextmanager
def explain_compile_errors() -> Iterator[None]:
    """Turn a failure of the compiler into a ValueError with the remedy."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    try:
        yield
    except TorchDynamoException as error:
        first_paragraph = str(error).strip().split("\n\n")[0]
        reason = " ".join(first_paragraph.split())
        raise ValueError(f"the network cannot be compiled: {reason}; trainer.compile=false trains it") from error


def allow_graphs(stages: int) -> None:
    """Let the compiler keep the graphs of so many stages. Beyond its limit it runs them eagerly, without a word."""
    from torch._dynamo import config  # takes a second to import

    config.recompile_limit = max(config.recompile_limit, 8 * stages)


def tune(device: str, *, deterministic: bool = False) -> None:
    """Choose the settings that PyTorch leaves to its users; docs/log/performance.md has the measured differences.

    Args:
        device: cpu, cuda or mps.
        deterministic: a GPU adds in one order, and an operation that cannot do so raises RuntimeError.
    """
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it too, and reads it as it starts
    if device == "cpu":
        torch.set_flush_denormal(True)  # tiny softmax weights become 0: they can double the time of a backward pass
        # By default glibc maps a large activation afresh in every step, and zeroing its pages takes 5 % of a step.
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
