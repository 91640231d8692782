"""Kernels compile for GPUs that are not here. With another Triton first on PYTHONPATH it is that one that compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")


def rows(*arguments):
    """What `compile_kernels.py` prints."""
    program = Path(__file__).with_name("compile_kernels.py")
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kernel", ["row.keys_kernel", "cope.queries_kernel"])
@pytest.mark.parametrize("length", [192, 150])
def test_a_kernel_of_each_kind_compiles_for_hopper(kernel, length):
    """Lengths that 16 divides are compiled for on their own."""
    (row,) = rows(90, 64, length, kernel)
    assert row["spilled"] <= 128, row
    assert row["fences"] == 0, row  # additions to one number wait for each other, but for nothing else


@pytest.mark.slow
@pytest.mark.parametrize("length", [192, 150])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_all_kernels_compile(capability, head_dim, length):
    """They fit into shared memory, the least of which is that of 8.6, 8.9 and 12.0; hardly a register is spilled."""
    memory = (227 if capability in (90, 100) else 99) * 1024
    found = rows(capability, head_dim, length)
    assert len(found) == 3 * 5
    for row in found:
        assert row["shared"] <= memory, row
        assert row["fences"] == 0, row
        assert row["spilled"] <= 128, row
