"""Compile all kernels for a GPU that need not be here, and print what each takes as a line of JSON.

TRITON_INTERPRET=0 PYTHONPATH=. python tests/model/kernels/compile_kernels.py 90
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.kernels import cope, flash, relative, stick_breaking

PTXAS = max(path for path in Path(triton.__file__).parent.rglob("ptxas*") if path.is_file())  # the newest
DTYPE = "bf16"
ELEMENT_SIZE = 2
INTEGERS = ("T", "L", "keys_batch", "first_batch", "start")
LIKE_Q = ("q", "k", "v", "out", "out_grad", "q_grad", "k_grad", "v_grad", "position_q", "gate_keys")
LIKE_Q += ("position_grad", "bank")
SUMMED_IN_FP32 = ("k_grad", "v_grad")  # by kernels that take chunks of queries


def kind(kernel, name: str, dtype: str) -> str:
    """The type of an argument, as Triton writes it."""
    if name in INTEGERS:
        return "i32"
    if name == "scale":
        return "fp32"
    if name in ("first", "last", "oldest_counted", "oldest_reached"):
        return "*i32"
    in_chunks = kernel in (cope.keys_kernel, stick_breaking.keys_kernel)
    if in_chunks and name in SUMMED_IN_FP32:
        return "*fp32"
    return f"*{dtype}" if name in LIKE_Q else "*fp32"


def compiled(kernel, capability, dtype, warps, **sizes):
    """What a kernel for these sizes takes: bytes spilled from registers, and of shared memory."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else kind(kernel, name, dtype) for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 2}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [PTXAS, "-v", f"--gpu-name={architecture}", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", log)
    return {"spilled": int(spilled[1]), "shared": binary.metadata.shared}


def flash_kernels():
    """Kernels of `model.kernels.flash`, their warps and sizes: with nothing added to scores, keys or a row."""
    biases = [(False, False), (True, False), (False, True)]
    for head_dim, (keys, row) in itertools.product((64, 128), biases):
        tiles = flash.tiles(head_dim, ELEMENT_SIZE)
        common = {"H": 8, "G": 2, "D": head_dim, "HAS_KEYS": keys, "HAS_ROW": row}
        forward = common | {"BM": tiles.queries, "BN": tiles.keys, "HAS_SINKS": not keys}
        backward = common | {"N": tiles.backward}
        yield flash.forward_kernel, tiles.forward_warps, forward
        yield flash.queries_kernel, tiles.backward_warps, backward
        yield flash.keys_kernel, tiles.backward_warps, backward


def kernels_of_cope():
    """Kernels of `model.kernels.cope`, their warps and sizes: with gates made of the keys, and with their own."""
    for head_dim, has_gate_keys in itertools.product((64, 128), (False, True)):
        tiles = cope.tiles(head_dim, ELEMENT_SIZE, has_gate_keys)
        common = {"H": 8, "G": 2, "D": head_dim, "P": 64, "BM": tiles.queries, "BN": tiles.keys}
        common["HAS_GATE_KEYS"] = has_gate_keys
        backward = common | {"C": cope.CHUNK}
        yield cope.forward_kernel, tiles.forward_warps, common | {"HAS_SINKS": True}
        yield cope.queries_kernel, tiles.backward_warps, backward
        yield cope.keys_kernel, tiles.backward_warps, backward


def kernels_of_stick_breaking():
    """Kernels of `model.kernels.stick_breaking`, their warps and sizes."""
    for head_dim in (64, 128):
        tiles = stick_breaking.tiles(head_dim, ELEMENT_SIZE)
        common = {"H": 8, "G": 2, "D": head_dim, "BM": tiles.queries, "BN": tiles.keys, "REMAINDER": True}
        backward = common | {"C": stick_breaking.CHUNK}
        yield stick_breaking.forward_kernel, tiles.forward_warps, common
        yield stick_breaking.queries_kernel, tiles.backward_warps, backward
        yield stick_breaking.keys_kernel, tiles.backward_warps, backward


def kernels_of_relative():
    """Kernels of `model.kernels.relative`, their warps and sizes: of `Relative`, capped or not, and of `Profiles`."""
    for head_dim, (capped, profiles) in itertools.product((64, 128), ((False, False), (True, False), (True, True))):
        tiles = relative.tiles(head_dim, ELEMENT_SIZE)
        common = {"H": 8, "G": 2, "D": head_dim, "R": 16 if profiles else head_dim}
        common |= {"CAPPED": capped, "HAS_POSITION_Q": profiles}
        backward = common | {"N": tiles.backward}
        yield relative.forward_kernel, tiles.forward_warps, common | {"N": tiles.forward, "HAS_SINKS": True}
        yield relative.queries_kernel, tiles.backward_warps, backward
        yield relative.keys_kernel, tiles.backward_warps, backward


if __name__ == "__main__":
    capability = int(sys.argv[1])
    kernels = (flash_kernels(), kernels_of_cope(), kernels_of_stick_breaking(), kernels_of_relative())
    for kernel, warps, sizes in itertools.chain(*kernels):
        name = {"kernel": f"{kernel.fn.__module__}.{kernel.fn.__name__}", "dtype": DTYPE}
        print(json.dumps(name | sizes | compiled(kernel, capability, DTYPE, warps, **sizes)), flush=True)
