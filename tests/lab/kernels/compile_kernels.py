"""Compile all kernels for GPUs that need not be here, as attention launches them; print a line of JSON for each.

TRITON_INTERPRET=0 PYTHONPATH=. python tests/lab/kernels/compile_kernels.py CAPABILITY HEAD_DIMS [NAME]

HEAD_DIMS are numbers with commas between them. NAME: only kernels whose names contain it.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lab.kernels.biases import BIASES
from lab.kernels.operator import attention

PTXAS = max(path for path in Path(triton.__file__).parent.rglob("ptxas*") if path.is_file())  # the newest
RUN = JITFunction.run
LENGTHS = (192, 150)  # Triton compiles for lengths that 16 divides on their own


def gpu(capability):
    """What Triton asks the driver of a GPU before it compiles."""
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
    )


def spilled_bytes(ptx, capability):
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [PTXAS, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", log)[1])


def tensors_of(bias, length):
    """What attention with a bias depends on besides, for one text and 4 heads."""
    numbers = torch.zeros(1, 4, length)
    kinks, slopes = torch.zeros(64), torch.zeros(4, 64)
    tensors = {
        "nothing": (),
        "keys": (numbers, numbers),
        "row": (numbers[0],),
        "fire": (kinks, slopes, slopes, numbers, numbers),
        "cope": (torch.zeros(1, 4, length, 64),),
    }
    return tensors[bias]


def compile_all(bias, capability, head_dim, length, name):
    """Attention with a bias, whose kernels are compiled where they would be launched."""

    def compiled(kernel, *arguments, warmup, **options):
        full_name = f"{bias}.{kernel.fn.__name__}"
        if name in full_name:
            binary = RUN(kernel, *arguments, warmup=True, **options)
            spilled = spilled_bytes(binary.asm["ptx"], capability)
            row = {"kernel": full_name, "spilled": spilled, "shared": binary.metadata.shared}
            # Atomic additions that other additions wait for have fences around them.
            row["fences"] = len(re.findall(r"\batom\.\S*acq_rel", binary.asm["ptx"]))
            print(json.dumps(row), flush=True)

    JITFunction.run = compiled
    q = torch.zeros(1, 4, length, head_dim, dtype=torch.bfloat16, requires_grad=True)
    k = q[:, :2].detach()
    seen = [torch.arange(length, dtype=torch.int32)] * 2
    extra = tensors_of(bias, length)
    attention(q, k, k, *seen, scale=1.0, bias=bias, extra=extra).sum().backward()


if __name__ == "__main__":
    capability, head_dims, name = [*sys.argv[1:], ""][:3]
    driver.set_active(gpu(int(capability)))
    for head_dim, length, bias in itertools.product(head_dims.split(","), LENGTHS, (*BIASES, "cope")):
        compile_all(bias, int(capability), int(head_dim), length, name)
