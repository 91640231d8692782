"""Compiles the Triton kernels for GPUs that need not be here, and says what each takes; fails if registers spill.

python scripts/check_kernels.py                                  all sizes: minutes
python scripts/check_kernels.py dtypes=bfloat16 head_dims=64     some

`spilled` is the stack of a thread in bytes. fp32 products are made of three each and may spill: that costs time,
nothing else, and does not fail.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import conf.cli
from conf.schema import ConfigError, Section, parse
from model.kernels.choice import TRITON_HEAD_DIMS

POINTERS = {"TABLE": "i64", "START": "i32", "CARRY": "i32", "REACH": "i32"}
FP32 = ("LSE", "PASSED", "SUMS", "DELTA", "TOTAL", "DQ", "DK", "DV")


DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NAMES = ("forward", "walk", "queries", "keys")


class Arguments(Section):
    archs: str = "80,90"
    dtypes: str = "bfloat16,float32"
    head_dims: str = "32,64,128"
    npos: str = "64,128"
    kernels: str = ",".join(NAMES)


def compiled(name: str, arch: int, dtype: str, head_dim: int, npos: int) -> Any:
    """The kernel as Triton compiles it for calls whose tensors are aligned as PyTorch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from model.kernels import cope_triton, cope_triton_kernels

    kernel = getattr(cope_triton_kernels, f"{name}_kernel")
    torch_dtype = getattr(torch, dtype)
    tiling = getattr(cope_triton.tilings(head_dim, torch_dtype.itemsize), name)
    constants = cope_triton.constants(torch_dtype, head_dim, npos, tiling)
    if name == "walk":
        constants["P2"] = triton.next_power_of_2(npos)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list] = {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("H", "GROUPS", "T", "tiles") or argument.islower():
            signature[argument] = "fp32" if argument == "scale" else "i32"
            aligned = argument[1:] in ("_b", "_h", "_t")  # strides
            attributes |= {(i,): [["tt.divisibility", 16]]} if aligned else {}
        else:
            signature[argument] = "*" + ("fp32" if argument in FP32 else POINTERS.get(argument, DTYPES[dtype]))
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack of each thread, as NVIDIA's cuobjdump tells; it comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return {"registers": int(found[1]), "spilled": int(found[2])}


def chosen(key: str, text: str, allowed: Iterable[str]) -> list[str]:
    """The parts of "a,b". Raises ConfigError if one is not allowed."""
    parts, allowed = [part.strip() for part in text.split(",")], list(allowed)
    wrong = [part for part in parts if part not in allowed]
    if wrong:
        few = ", ".join(allowed if len(allowed) < 10 else (allowed[0], "..", allowed[-1]))
        raise ConfigError(f"{key}={text}: {wrong[0]} is not one of {few}")
    return parts


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, arguments, strings=True)
    dtypes = chosen("dtypes", args.dtypes, DTYPES)
    names = chosen("kernels", args.kernels, NAMES)
    archs = [int(x) for x in chosen("archs", args.archs, ("80", "86", "89", "90"))]
    head_dims = [int(x) for x in chosen("head_dims", args.head_dims, map(str, TRITON_HEAD_DIMS))]
    npos = [int(x) for x in chosen("npos", args.npos, map(str, range(1, 1025)))]
    os.environ["TRITON_INTERPRET"] = "0"  # before the kernels are defined
    try:
        import triton
    except ImportError:
        raise ConfigError("Triton is not installed: pip install triton (Linux)") from None
    print(f"triton {triton.__version__}")
    print("kernel   arch dtype     head_dim  npos  registers  spilled  shared memory")
    bad = 0
    for dtype, head_dim, entries, arch, name in itertools.product(dtypes, head_dims, npos, archs, names):
        kernel = compiled(name, arch, dtype, head_dim, entries)
        found = resources(kernel.asm["cubin"])
        row = f"{name:8} {arch:4} {dtype:9} {head_dim:8} {entries:5} {found['registers']:10} {found['spilled']:8}"
        print(f"{row} {kernel.metadata.shared:14}", flush=True)
        bad += found["spilled"] > 0 and dtype != "float32"
    if bad:
        sys.exit(f"{bad} kernels spill registers")


if __name__ == "__main__":
    conf.cli.script(main)
