"""Compile all kernels for a GPU that need not be here, and print what each takes as a line of JSON.

TRITON_INTERPRET=0 PYTHONPATH=. python tests/lab/kernels/compile_kernels.py 90 64,128 [NAME]

With another Triton first on PYTHONPATH it is that one that compiles. NAME: only kernels whose names contain it.
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

from lab.kernels import cope, flash
from lab.kernels.biases import BIASES

PTXAS = max(path for path in Path(triton.__file__).parent.rglob("ptxas*") if path.is_file())  # the newest
INTEGERS = ("T", "first_batch", "start")
LIKE_Q = ("q", "k", "v", "out", "out_grad", "q_grad", "k_grad", "v_grad", "position_q", "gate_keys")
NUMBERS = "*fp32"
# What the kernels of each bias take: its tensors, and those of the gradients of queries and keys.
EXTRA = {
    "nothing": (), "keys": (NUMBERS, NUMBERS, "i32"), "row": (NUMBERS, "i32"),
    "terms": (NUMBERS, "i32"), "fire": (NUMBERS,) * 5 + ("i32",),
}  # fmt: skip
DEST = {
    "nothing": ((), ()), "keys": ((NUMBERS,), (NUMBERS,)), "row": ((), (NUMBERS,)),
    "terms": ((NUMBERS,), ()), "fire": ((NUMBERS, NUMBERS), (NUMBERS,)),
}  # fmt: skip


def flash_kernels(head_dims):
    """Name, kernel, types of arguments that are tuples, and constants with options, of each kernel of `flash`."""
    kernels = (flash.forward_kernel, flash.queries_kernel, flash.keys_kernel)
    for head_dim, bias in itertools.product(head_dims, BIASES):
        added = BIASES[bias]
        hooks = (None, added.of_queries, added.of_keys)
        dests = ((), *DEST[bias])
        for kernel, size, hook, dest in zip(kernels, flash.tiles(head_dim, 2, bias), hooks, dests, strict=True):
            constants = {"H": 8, "G": 2, "D": head_dim, "P": 64 if bias == "fire" else 1}
            constants |= added.constants(hook) | size.options()
            if hook is None:
                constants["HAS_SINKS"] = True
            tuples = {"extra": EXTRA[bias], "dest": dest}
            yield f"flash.{kernel.fn.__name__}.{bias}", kernel, tuples, constants


def cope_kernels(head_dims):
    """The same of `cope`: with gates made of the keys, and with their own."""
    for head_dim, has_gate_keys in itertools.product(head_dims, (False, True)):
        size = cope.tiles(head_dim, 2, has_gate_keys)
        common = {"H": 8, "G": 2, "D": head_dim, "P": 64, "BM": size.queries, "BN": size.keys, "num_stages": 2}
        common["HAS_GATE_KEYS"] = has_gate_keys
        backward = common | {"C": cope.CHUNK, "num_warps": size.backward_warps}
        kind = "own_gates" if has_gate_keys else "gates"
        yield f"cope.forward_kernel.{kind}", cope.forward_kernel, {}, common | {
            "HAS_SINKS": True, "num_warps": size.forward_warps,
        }  # fmt: skip
        yield f"cope.queries_kernel.{kind}", cope.queries_kernel, {}, backward
        yield f"cope.keys_kernel.{kind}", cope.keys_kernel, {}, backward


def kind(kernel, name):
    """The type of an argument, as Triton writes it."""
    if name in INTEGERS:
        return "i32"
    if name == "scale":
        return "fp32"
    if name in ("first", "last", "oldest_counted"):
        return "*i32"
    if kernel is cope.keys_kernel and name in ("k_grad", "v_grad"):  # sums over chunks
        return NUMBERS
    return "*bf16" if name in LIKE_Q else NUMBERS


def aligned(types, divisible):
    """What Triton may assume: pointers begin at multiples of 16, and T is one where `divisible`."""
    attributes = {}
    for i, (name, of_argument) in enumerate(types.items()):
        parts = {(i,): of_argument}
        if isinstance(of_argument, tuple):
            parts = {(i, j): part for j, part in enumerate(of_argument)}
        for path, part in parts.items():
            if part.startswith("*") or (name == "T" and divisible):
                attributes[path] = [["tt.divisibility", 16]]
    return attributes


def compiled(kernel, tuples, constants, capability, divisible, keep=None):
    """Registers, bytes spilled, shared memory and waits of a kernel; `keep`: where its PTX and machine code go."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    types = {name: tuples.get(name) or kind(kernel, name) for name in kernel.arg_names}
    types |= {name: tuples[name] for name in tuples if name in types}
    types |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned(types, divisible))
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        stem = keep or f"{folder}/kernel"
        Path(f"{stem}.ptx").write_text(binary.asm["ptx"])
        command = [PTXAS, "-v", f"--gpu-name={architecture}", f"{stem}.ptx", "-o", f"{stem}.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
    # Atomic additions that other additions wait for have fences around them.
    fences = len(re.findall(r"\batom\.\S*acq_rel", binary.asm["ptx"]))
    return {"registers": registers, "spilled": spilled, "shared": binary.metadata.shared, "fences": fences}


if __name__ == "__main__":
    capability, head_dims, *names = sys.argv[1:]
    head_dims = [int(head_dim) for head_dim in head_dims.split(",")]
    for name, kernel, tuples, constants in [*flash_kernels(head_dims), *cope_kernels(head_dims)]:
        if names and names[0] not in name:
            continue
        for divisible in (True, False):
            row = {"kernel": name, "triton": triton.__version__, "D": constants["D"], "divisible": divisible}
            keep = os.environ.get("KEEP")
            stem = keep and f"{keep}/{name}.{constants['D']}.{'' if divisible else 'not_'}divisible"
            row |= compiled(kernel, tuples, dict(constants), int(capability), divisible, stem)
            print(json.dumps(row), flush=True)
