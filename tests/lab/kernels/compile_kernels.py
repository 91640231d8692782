"""Compile all kernels for a GPU that need not be here, and print what each takes as a line of JSON.

TRITON_INTERPRET=0 PYTHONPATH=. python tests/model/kernels/compile_kernels.py 90 bf16 64,128
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

from lab.kernels import cope, fire, flash, path, reflections, relative, stick_breaking

PTXAS = max(path for path in Path(triton.__file__).parent.rglob("ptxas*") if path.is_file())  # the newest
ELEMENT_SIZES = {"bf16": 2, "fp32": 4}
INTEGERS = ("T", "TILES", "G", "L", "keys_batch", "first_batch", "reach_batch", "start")
LIKE_Q = ("q", "k", "v", "out", "out_grad", "q_grad", "k_grad", "v_grad", "position_q", "gate_keys")
LIKE_Q += ("position_grad", "bank")
SUMMED_IN_FP32 = ("k_grad", "v_grad")  # by kernels that take chunks of queries


def kind(kernel, name: str, dtype: str) -> str:
    """The type of an argument, as Triton writes it."""
    if name in INTEGERS:
        return "i32"
    if name == "scale":
        return "fp32"
    if name in ("first", "last", "newest", "oldest", "pos", "oldest_counted", "oldest_reached"):
        return "*i32"
    in_chunks = kernel in (cope.keys_kernel, stick_breaking.keys_kernel)
    of_path = kernel.fn.__module__ in (path.__name__, reflections.__name__)
    if (in_chunks or of_path) and name in SUMMED_IN_FP32:
        return "*fp32"
    return f"*{dtype}" if name in LIKE_Q else "*fp32"


def compiled(kernel, capability, dtype, warps, num_stages=2, **sizes):
    """What a kernel for these sizes takes: bytes spilled from registers, and of shared memory.

    Of fp32 the memory alone: wide heads, unrolled, take minutes to assemble.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else kind(kernel, name, dtype) for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if dtype == "fp32":
        return {"shared": binary.metadata.shared}
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [PTXAS, "-v", f"--gpu-name={architecture}", file.name, "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", log)
    return {"spilled": int(spilled[1]), "shared": binary.metadata.shared}


def flash_kernels(head_dims, element_size):
    """Kernels of `lab.kernels.flash`, their warps and sizes: plain, with keys, a row, both, gaps; and a zone."""
    cases = [("SINKS",), ("KEYS",), ("ROW", "SINKS"), ("KEYS", "ROW", "SINKS"), ("ROW", "POS", "SINKS")]
    cases.append(("NEWEST", "SINKS"))
    for head_dim, case in itertools.product(head_dims, cases):
        if {"KEYS", "ROW"} <= set(case) and head_dim > 64:
            continue  # both are in the check at the start of a program alone
        tiles = flash.tiles(head_dim, element_size)
        common = {"H": 8, "G": 2, "D": head_dim}
        common |= {f"HAS_{name}": name in case for name in ("NEWEST", "KEYS", "ROW", "POS")}
        forward = common | {"BM": tiles.queries, "BN": tiles.keys, "HAS_SINKS": "SINKS" in case}
        backward = common | {"N": tiles.backward}
        yield flash.forward_kernel, tiles.forward_warps, forward
        yield flash.queries_kernel, tiles.backward_warps, backward
        yield flash.keys_kernel, tiles.backward_warps, backward


def kernels_of_cope(head_dims, element_size):
    """Kernels of `lab.kernels.cope`, their warps and sizes: with gates made of the keys, and with their own."""
    for head_dim, has_gate_keys in itertools.product(head_dims, (False, True)):
        tiles = cope.tiles(head_dim, element_size, has_gate_keys)
        common = {"H": 8, "G": 2, "D": head_dim, "P": 64, "BM": tiles.queries, "BN": tiles.keys}
        common["HAS_GATE_KEYS"] = has_gate_keys
        backward = common | {"C": cope.CHUNK}
        yield cope.forward_kernel, tiles.forward_warps, common | {"HAS_SINKS": True}
        yield cope.queries_kernel, tiles.backward_warps, backward
        yield cope.keys_kernel, tiles.backward_warps, backward


def kernels_of_stick_breaking(head_dims, element_size):
    """Kernels of `lab.kernels.stick_breaking`, their warps and sizes."""
    for head_dim in head_dims:
        tiles = stick_breaking.tiles(head_dim, element_size)
        common = {"H": 8, "G": 2, "D": head_dim, "BM": tiles.queries, "BN": tiles.keys, "REMAINDER": True}
        backward = common | {"C": stick_breaking.CHUNK}
        yield stick_breaking.forward_kernel, tiles.forward_warps, common
        yield stick_breaking.queries_kernel, tiles.backward_warps, backward
        yield stick_breaking.keys_kernel, tiles.backward_warps, backward


def kernels_of_fire(head_dims, element_size):
    """Kernels of `lab.kernels.fire`, their warps and sizes."""
    for head_dim in head_dims:
        tiles = fire.tiles(head_dim, element_size)
        common = {"H": 8, "G": 2, "D": head_dim, "S": 33, "P": 64}
        kernels = (fire.forward_kernel, fire.queries_kernel, fire.keys_kernel)
        for kernel, tile in zip(kernels, tiles, strict=True):
            sizes = common | {"BM": tile.queries, "BN": tile.keys}
            if kernel is fire.forward_kernel:
                sizes["HAS_SINKS"] = True
            yield kernel, tile.warps, sizes


def kernels_of_path(head_dims, element_size):
    """Kernels of `lab.kernels.path` and `lab.kernels.reflections`, their warps and sizes."""
    for head_dim in head_dims:
        if head_dim > path.MAX_WIDTH:
            continue
        size = reflections.tiles(head_dim, element_size)
        common = {"H": 8, "D": head_dim, "N": size.tokens, "PRECISION": reflections.precision_of(element_size)}
        with_gates = common | {"HAS_GATES": True}
        in_chunks = {"G": 2, "R": size.span, "C": path.CHUNK}
        yield path.forward_kernel, size.forward_warps, with_gates | {"G": 2, "R": size.span, "HAS_SINKS": True}
        yield path.queries_kernel, size.backward_warps, with_gates | in_chunks
        yield path.keys_kernel, size.backward_warps, with_gates | in_chunks
        yield path.crossings_kernel, size.backward_warps, common | in_chunks
        yield path.own_queries_kernel, size.backward_warps, with_gates | {"G": 2}
        yield path.own_keys_kernel, size.backward_warps, with_gates | {"num_stages": size.own_stages}
        yield path.reflections_kernel, size.backward_warps, common | {"num_stages": size.own_stages}
        of_places = {
            "D": head_dim,
            "N": size.tokens,
            "R": size.span,
            "PRECISION": reflections.precision_of(element_size),
        }
        for kernel in (
            reflections.tiles_kernel,
            reflections.carry_kernel,
            reflections.carry_back_kernel,
            reflections.passing_kernel,
            reflections.tiles_back_kernel,
        ):
            yield kernel, size.backward_warps, of_places | {"num_stages": size.own_stages}


def kernels_of_relative(head_dims, element_size):
    """Kernels of `lab.kernels.relative`, their warps and sizes: of `Relative`, capped or not, and of `Profiles`."""
    cases = [(head_dim, head_dim, capped, False) for head_dim in head_dims for capped in (False, True)]
    for head_dim in head_dims:
        rank = 128 if head_dim == 256 else 16  # the most that there may be, which spills, and the default
        cases.append((head_dim, rank, True, True))
    for head_dim, rank, capped, profiles in cases:
        tiles = relative.tiles(max(head_dim, rank), element_size)
        common = {"H": 8, "G": 2, "D": head_dim, "R": rank, "CAPPED": capped, "HAS_POSITION_Q": profiles}
        backward = common | {"N": tiles.backward}
        yield relative.forward_kernel, tiles.forward_warps, common | {"N": tiles.forward, "HAS_SINKS": True}
        yield relative.queries_kernel, tiles.backward_warps, backward
        yield relative.keys_kernel, tiles.backward_warps, backward


if __name__ == "__main__":
    capability, dtype, head_dims = sys.argv[1:]
    head_dims = [int(head_dim) for head_dim in head_dims.split(",")]
    every = (
        flash_kernels,
        kernels_of_cope,
        kernels_of_stick_breaking,
        kernels_of_fire,
        kernels_of_path,
        kernels_of_relative,
    )
    for kernels in every:
        for kernel, warps, sizes in kernels(head_dims, ELEMENT_SIZES[dtype]):
            name = {"kernel": f"{kernel.fn.__module__}.{kernel.fn.__name__}", "dtype": dtype}
            print(json.dumps(name | sizes | compiled(kernel, int(capability), dtype, warps, **sizes)), flush=True)
