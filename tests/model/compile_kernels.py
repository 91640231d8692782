"""Compile all kernels for a GPU that need not be here, and print what each takes as a line of JSON.

TRITON_INTERPRET=0 PYTHONPATH=. python tests/model/compile_kernels.py 90
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

from model import kernels

PTXAS = max(path for path in Path(triton.__file__).parent.rglob("ptxas*") if path.is_file())  # the newest
INTEGERS = ("T", "L", "keys_batch")
LIKE_Q = ("q", "k", "v", "out", "out_grad", "q_grad", "k_grad", "v_grad")


def kind(name: str, dtype: str) -> str:
    """The type of an argument, as Triton writes it."""
    if name in INTEGERS:
        return "i32"
    if name == "scale":
        return "fp32"
    if name in ("first", "last"):
        return "*i32"
    return f"*{dtype}" if name in LIKE_Q else "*fp32"


def compiled(kernel, capability, dtype, warps, **sizes):
    """What a kernel for these sizes takes: bytes spilled from registers, and of shared memory."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else kind(name, dtype) for name in names}
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


if __name__ == "__main__":
    capability = int(sys.argv[1])
    # Nothing is added to scores, a number for each key, or one for each distance.
    biases = [(False, False), (True, False), (False, True)]
    for (dtype, size, head_dim), (keys, row) in itertools.product((("bf16", 2, 64), ("bf16", 2, 128)), biases):
        tiles = kernels.tiles(head_dim, size)
        common = {"H": 8, "G": 2, "D": head_dim, "HAS_KEYS": keys, "HAS_ROW": row}
        forward = {"BM": tiles.queries, "BN": tiles.keys, "HAS_SINKS": not keys}
        backward = {"N": tiles.backward}
        for kernel, warps, sizes in (
            (kernels.forward_kernel, tiles.forward_warps, forward),
            (kernels.queries_kernel, tiles.backward_warps, backward),
            (kernels.keys_kernel, tiles.backward_warps, backward),
        ):
            row_of_kernel = {"kernel": kernel.fn.__name__, "dtype": dtype} | common
            print(json.dumps(row_of_kernel | compiled(kernel, capability, dtype, warps, **common, **sizes)), flush=True)
