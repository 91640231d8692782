"""Whether the Triton kernel serves CoPE's attention.

It does on CUDA, where it can and agrees with the definition in a small comparison. The environment variable
ROPEWALK_COPE=torch or =triton overrules it; auto is the default.
"""

import functools
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

TRITON_HEAD_DIMS = (16, 32, 64, 128)


def why_not_triton(device: torch.device, dtype: torch.dtype, head_dim: int, definition: Callable[..., Tensor]) -> str:
    """Why the Triton kernel does not serve such tensors; empty if it does.

    Args:
        definition: `model.position.cope.cope_attention`, with which the kernel is compared.

    Raises:
        ValueError: ROPEWALK_COPE is neither "auto", "torch" nor "triton", or asks for Triton where it cannot serve.
    """
    asked = os.environ.get("ROPEWALK_COPE", "auto")
    if asked not in ("auto", "torch", "triton"):
        raise ValueError(f"ROPEWALK_COPE={asked} must be auto, torch or triton")
    if asked == "torch":
        return "ROPEWALK_COPE=torch"
    obstacle = _obstacle(device, dtype, head_dim, interpreted=asked == "triton" and device.type == "cpu")
    if asked == "triton" and obstacle:
        raise ValueError(f"ROPEWALK_COPE=triton cannot be met: {obstacle}; ROPEWALK_COPE=auto takes PyTorch there")
    return obstacle or ("" if asked == "triton" else self_test(device, dtype, head_dim, definition))


def _obstacle(device: torch.device, dtype: torch.dtype, head_dim: int, interpreted: bool) -> str:
    if device.type != "cuda" and not (interpreted and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "the Triton kernel needs an NVIDIA GPU of compute capability 8.0 or newer"
    if head_dim not in TRITON_HEAD_DIMS:
        return f"the Triton kernel has no head_dim {head_dim}, only {', '.join(map(str, TRITON_HEAD_DIMS))}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton kernel has no {str(dtype).removeprefix('torch.')}"
    return ""


@functools.cache
@torch.inference_mode(False)
@torch.enable_grad()
def self_test(device: torch.device, dtype: torch.dtype, head_dim: int, definition: Callable[..., Tensor]) -> str:
    """How the Triton kernel fails a small comparison with the definition on the CPU, forward and backward; empty if it
    does not. So a GPU, compiler or driver on which it is wrong costs speed, and no wrong number."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 130, head_dim), (1, 1, 130, head_dim), (1, 1, 130, head_dim), (head_dim, 16)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    visible = torch.ones(130, 130, dtype=torch.bool).tril()
    exact = [x.float().requires_grad_() for x in inputs]
    out = definition(*exact, scale=head_dim**-0.5, visible=visible)
    expected = [out, *torch.autograd.grad(out, exact, out.detach())]
    try:
        from model.kernels import cope_triton

        given = [x.to(device).requires_grad_() for x in inputs]
        found = cope_triton.cope_attention(*given, scale=head_dim**-0.5)
        results = [found, *torch.autograd.grad(found, given, out.detach().to(found))]
    except Exception as error:  # of the compiler, or of the driver
        return f"the Triton kernel cannot run: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    for name, x, y in zip(("output", "dq", "dk", "dv", "dtable"), results, expected, strict=True):
        if not (off := ((x.cpu().float() - y).norm() / y.norm()).item()) < tolerance:
            return f"the Triton kernel's {name} is {off:.0e} off, more than {tolerance:.0e}"
    return ""
