"""Compiles the Triton kernels for GPUs that need not be here, and prints their registers; exits with 1 if any spill.

python tests/model/compile_kernels.py

16-bit kernels only: those of fp32 make each product of three and may spill, which costs time and nothing else. Triton
specialises a kernel for arguments that are 1, so groups of one head, the usual case, are compiled besides.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before the kernels are defined

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.kernels import cope_triton, cope_triton_kernels

POINTERS = {"TABLE": "i64", "START": "i32", "CARRY": "i32", "REACH": "i32"}
FP32 = ("LSE", "PASSED", "SUMS", "DELTA", "TOTAL", "DQ", "DK", "DV")
SIZES = ("H", "GROUPS", "T", "tiles")


def compiled(name: str, arch: int, head_dim: int, npos: int, ones: tuple[str, ...]):
    """The kernel as Triton compiles it for bf16 tensors, aligned as PyTorch's are, and arguments `ones` that are 1."""
    kernel = getattr(cope_triton_kernels, name)
    tiling = getattr(cope_triton.tilings(head_dim, 2), name)
    constants = cope_triton.constants(torch.bfloat16, head_dim, npos, tiling) | dict.fromkeys(ones, 1)
    if name == "bwd_preprocess":
        constants["P2"] = triton.next_power_of_2(npos)
    signature, attributes = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in SIZES or argument.islower():
            signature[argument] = "fp32" if argument == "scale" else "i32"
            if argument[1:] in ("_b", "_h", "_t"):  # strides
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "*" + ("fp32" if argument in FP32 else POINTERS.get(argument, "bf16"))
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as NVIDIA's cuobjdump tells; it comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    spilled = 0
    kernels, groups = ("forward", "bwd_preprocess", "bwd_dq", "bwd_dkdv"), ((), ("GROUPS",))
    for arch, head_dim, npos, ones, name in itertools.product((80, 90), (32, 64, 128), (64, 128), groups, kernels):
        registers, stack = resources(compiled(name, arch, head_dim, npos, ones).asm["cubin"])
        print(f"{name:15} sm_{arch} D={head_dim} P={npos} {ones}: {registers} registers, {stack} spilled", flush=True)
        spilled += stack > 0
    sys.exit(f"{spilled} kernels spill registers" if spilled else 0)
