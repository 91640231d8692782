"""The hardware of a run: the meaning of "auto" on this machine, the memory that a run needs, settings of PyTorch."""

import contextlib
import ctypes
import gc
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from conf.schema import Config
from model.gpt import MAX_LOGITS

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CONTROL_GROUPS = Path("/sys/fs/cgroup")

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
    precision: str  # 32-true, bf16-mixed or bf16-true; 64 to check the others
    compile: bool
    kernels: bool = False  # attention may use kernels, where they prove right: see `plugins.kernels`
    graphs: bool = False  # what is compiled is recorded as CUDA graphs

    @classmethod
    def resolve(
        cls, *, accelerator: str, precision: str | int, compile: bool | str = False, kernels: bool | str = False
    ) -> "Hardware":
        """Resolve every "auto" for this machine; print one line if a GPU has to do without kernels.

        Raises:
            ValueError: the accelerator is not available, or the kernels that `kernels=True` asks for, or CUDA for
                `compile="graphs"`.
        """
        device = _device_of(accelerator)
        precision = _precision_of(precision, device)
        graphs = compile == "graphs"
        if graphs and device != "cuda":
            raise ValueError(f"trainer.compile=graphs needs CUDA, and the device is {device}: use auto or true")
        if compile == "auto":
            compile = device == "cuda"
        if kernels:
            problem = kernel_problem(device, precision)
            if problem and kernels is True:
                raise ValueError(f"trainer.kernels=true: {problem}; choose auto or false")
            if problem and device == "cuda":
                _say_once(f"attention runs without kernels, slowly with some encodings: {problem}")
            kernels = not problem
        return cls(device, precision, bool(compile), bool(kernels), graphs)

    def autocast(self) -> torch.autocast:
        """A context manager in which the network computes as in training."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16-mixed")


def _device_of(accelerator: str) -> str:
    """The device that `accelerator` names; of "auto" the fastest here. ValueError if it is not available."""
    available = []
    if torch.cuda.is_available():
        available.append("cuda")
    if torch.backends.mps.is_available():
        available.append("mps")
    available.append("cpu")
    device = available[0] if accelerator == "auto" else accelerator
    if device not in available:
        raise ValueError(f"accelerator {accelerator} is not available here; choose auto or: {', '.join(available)}")
    return device


def _precision_of(precision: str | int, device: str) -> str:
    """The name of a precision; of "auto" bf16-mixed where matrix units compute bf16."""
    if precision == "auto":
        # Elsewhere bf16 is emulated, and slower than fp32.
        if device == "cuda":
            has_bf16_units = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            has_bf16_units = device == "cpu" and torch.cpu._is_amx_tile_supported()
        return "bf16-mixed" if has_bf16_units else "32-true"
    return "32-true" if precision == 32 else str(precision)


@cache
def _say_once(line: str) -> None:
    """Print a line to stderr, by one process of each machine."""
    if _local_rank() == 0:
        print(line, file=sys.stderr)


def _local_rank() -> int:
    """The number of this process among those of this machine, each of which has a GPU of its own."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))


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


def reason_of(failure: BaseException) -> str:
    """The type of an exception and what says most of its message: the first line, and the one that names the fault.

    Of a chain it is the first exception. A compiler prints code first and the fault later.
    """
    while failure.__cause__ is not None:
        failure = failure.__cause__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    first, rest = lines[:1], lines[1:]
    faults = [line for line in rest if "error" in line or "fatal" in line]
    said = first + (faults or rest[-1:])[:1]
    return f"{type(failure).__name__}: {' ... '.join(said)}".removesuffix(": ")


@cache
def measured_flops(device: str, size: int = 8192) -> float | None:
    """`product_flops` of a GPU; None on a CPU.

    It is the yardstick of a run's utilisation: data sheets count sparse matrices, or clocks that no GPU keeps.
    """
    return product_flops(device, size) if device == "cuda" else None


def product_flops(device: str, size: int) -> float:
    """Operations a second of a product of two bf16 matrices [size, size], the median of five measurements."""
    from torch.utils.benchmark import Timer  # takes 0.3 s to import

    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    timer = Timer("a @ a", globals={"a": a})  # waits for the device
    timer.timeit(3)
    seconds = [timer.timeit(5).median for _ in range(5)]
    return 2 * size**3 / statistics.median(seconds)


def training_memory(cfg: Config, precision: str, *, parameters: int, vocab_size: int) -> dict[str, int]:
    """Estimate from below the memory that one process needs to train on one micro-batch of `cfg`.

    Left out is what the position encoding and kernels keep, and what a compiler recomputes, such as norms.

    Args:
        cfg: a resolved configuration.
        precision: as in `Hardware`.
        parameters: of the whole network.
        vocab_size: tokens of the vocabulary.

    Returns:
        Bytes by what holds them.
    """
    model = cfg.model
    trainer = cfg.trainer
    assert isinstance(trainer.devices, int)  # resolved
    world_size = trainer.devices * trainer.num_nodes
    sharded_over = world_size // trainer.replicas if trainer.strategy == "fsdp" else 1
    weight_bytes = 2 if precision == "bf16-true" else 4
    weights = parameters * weight_bytes // sharded_over

    # Activations: of each block what the backward pass reads, in numbers a token.
    activation_bytes = 4 if precision == "32-true" else 2
    tokens = trainer.batch_size * cfg.train_len // trainer.grad_accum_steps // world_size
    residuals = 2 * model.dim
    attention = (2 * model.n_head + 2 * model.kv_heads) * model.head_width  # q, k, v and the output
    mlp = (1 + model.gated) * model.hidden
    block = tokens * (residuals + attention + mlp)
    activations = model.n_layer * block
    logits = tokens * vocab_size
    if trainer.checkpointing:  # the inputs of all blocks, and one block at a time computed again; logits in pieces
        activations = tokens * model.dim * model.n_layer + block
        logits = min(logits, MAX_LOGITS)
    return {
        "weights": weights,
        "AdamW": 2 * weights,
        "gradients": weights,
        "activations": activation_bytes * activations,
        "logits": activation_bytes * logits,
    }


def check_memory(cfg: Config, hardware: Hardware, *, parameters: int, vocab_size: int) -> str:
    """Compare what the training of the run `cfg` needs at least with what a process can have.

    Returns:
        Both in words.

    Raises:
        ValueError: it needs more, and there are steps to train.
    """
    needed = training_memory(cfg, hardware.precision, parameters=parameters, vocab_size=vocab_size)
    # Gradients grow while the backward pass frees activations and logits: the smaller of the two is not held on top.
    freed = min(needed["gradients"], needed["activations"] + needed["logits"])
    total = sum(needed.values()) - freed
    if hardware.device == "cuda":
        available = torch.cuda.get_device_properties(0).total_memory
    else:
        assert isinstance(cfg.trainer.devices, int)
        available = memory_limit() // cfg.trainer.devices

    parts = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in needed.items())
    need = f"training takes at least {total / 2**30:,.2f} GiB ({parts})"
    message = f"{need}, and a process can have {available / 2**30:,.1f}"
    if total > available and cfg.trainer.max_steps:
        remedy = "a smaller model or train_len, or a larger trainer.grad_accum_steps takes less"
        raise ValueError(f"not enough memory: {message}; {remedy}")
    return message


def memory_limit() -> int:
    """Bytes that the processes of this machine can have: the least of its memory, its container's and `ulimit -v`."""
    limits = [2**63]
    if hasattr(os, "sysconf"):  # not on Windows
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Control groups, versions 2 and 1, as a container sees its own. "max" and huge numbers mean no limit.
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((CONTROL_GROUPS / name).read_text()))
    if resource is not None:
        address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
        if address_space != resource.RLIM_INFINITY:
            limits.append(address_space)
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
    """Choose the settings that PyTorch leaves to its users; docs/performance.md has the measured differences.

    Args:
        device: cpu, cuda or mps.
        deterministic: a GPU adds in one order, and an operation that cannot do so raises RuntimeError.
    """
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it too, and reads it as it starts
    if device == "cpu":
        torch.set_flush_denormal(True)  # tiny softmax weights become 0: they can double the time of a backward pass
        _keep_memory_mapped()


def _keep_memory_mapped() -> None:
    """Let glibc keep freed memory, unless the environment has settings of its own."""
    # By default glibc maps a large activation afresh in every step, and zeroing its pages can cost more than computing
    # it. With these thresholds it comes from a heap that is not trimmed.
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or configured:
        return
    with contextlib.suppress(OSError, AttributeError):  # another libc has no mallopt
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
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 2**10  # Linux counts KiB
