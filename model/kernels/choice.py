"""Which kernel serves CoPE's attention: that in PyTorch or that in Triton.

Triton's on CUDA, where it can and agrees with PyTorch's in a small comparison. The environment variable
ROPEWALK_COPE=torch or =triton overrules it; auto is the default.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

TRITON_HEAD_DIMS = (16, 32, 64, 128)


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, *, gate_keys: bool) -> tuple[str, str]:
    """ "triton" or "torch", the kernel that serves such tensors, and why.

    Raises:
        ValueError: ROPEWALK_COPE is neither "auto", "torch" nor "triton", or asks for Triton where it cannot serve.
    """
    asked = os.environ.get("ROPEWALK_COPE", "auto")
    if asked not in ("auto", "torch", "triton"):
        raise ValueError(f"ROPEWALK_COPE={asked} must be auto, torch or triton")
    if asked == "torch":
        return "torch", "ROPEWALK_COPE=torch"
    if asked == "auto" and device.type != "cuda":
        return "torch", f"the device is {device.type}"
    obstacle = _obstacle(device, dtype, head_dim, gate_keys)
    if asked == "triton" and obstacle:
        raise ValueError(f"ROPEWALK_COPE=triton cannot be met: {obstacle}; ROPEWALK_COPE=auto takes PyTorch's kernel")
    return ("torch", obstacle) if obstacle else ("triton", "CUDA")


def _obstacle(device: torch.device, dtype: torch.dtype, head_dim: int, gate_keys: bool) -> str:
    """Why the Triton kernel cannot serve; empty if it can."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "the Triton kernel needs an NVIDIA GPU of compute capability 8.0 or newer"
    if gate_keys:
        return "the Triton kernel makes its gates of the attention's keys alone"
    if head_dim not in TRITON_HEAD_DIMS:
        return f"the Triton kernel has no head_dim {head_dim}, only {', '.join(map(str, TRITON_HEAD_DIMS))}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton kernel has no {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and os.environ.get("ROPEWALK_COPE", "auto") == "auto":
        return disagreement(device, dtype, head_dim)
    return ""


@functools.cache
def disagreement(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """How the Triton kernel fails a small comparison with PyTorch's on the CPU, forward and backward; empty if it does
    not. So a GPU, compiler or driver on which it is wrong costs speed, and no wrong number."""
    from model.kernels import cope  # which asks this file

    generator = torch.Generator().manual_seed(0)
    shapes = [
        (1, 2, 130, head_dim),
        (1, 1, 130, head_dim),
        (1, 1, 130, head_dim),
        (head_dim, 16),
        (1, 2, 130, head_dim),
    ]
    *inputs, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    scale = head_dim**-0.5
    *exact_inputs, exact_grad = (x.float() for x in (*inputs, grad))
    out, *state = cope._forward(*exact_inputs, None, None, scale)
    expected = [out, *cope._backward(exact_grad, out, *state, *exact_inputs, None, None, scale)]
    try:
        from model.kernels import cope_triton

        q, k, v, table = (x.to(device) for x in inputs)
        out, lse, start = cope_triton.forward(q, k, v, table, None, scale)
        found = [out, *cope_triton.backward(grad.to(device), out, lse, start, q, k, v, table, None, scale)]
    except Exception as error:  # of the compiler, or of the driver
        return f"the Triton kernel cannot run: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    for name, x, y in zip(("output", "dq", "dk", "dv", "dtable"), found, expected, strict=False):
        if not (off := ((x.cpu().float() - y).norm() / y.norm()).item()) < tolerance:
            return f"the Triton kernel's {name} is {off:.0e} off, more than {tolerance:.0e}"
    return ""


def takes_triton(q: Tensor, k: Tensor, v: Tensor, gate_keys: Tensor | None) -> bool:
    if not q.dtype == k.dtype == v.dtype:
        if os.environ.get("ROPEWALK_COPE") == "triton":
            raise ValueError("ROPEWALK_COPE=triton cannot be met: q, k and v differ in their dtypes")
        return False
    return kernel_for(q.device, q.dtype, q.size(3), gate_keys=gate_keys is not None)[0] == "triton"
