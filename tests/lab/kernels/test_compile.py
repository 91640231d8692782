"""Kernels compile for GPUs that are not here. With another Triton first on PYTHONPATH it is that one that compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

# Capability, head_dims, and a part of the names of kernels. By day a kernel of each kind.
CASES = [
    (90, "64", "row.keys_kernel"),
    (90, "64", "cope.queries_kernel"),
    *[pytest.param(capability, "64,128", "", marks=pytest.mark.slow) for capability in (80, 86, 90, 100, 120)],
]


@pytest.mark.parametrize(("capability", "head_dims", "name"), CASES)
def test_kernels_compile_and_fit_into_shared_memory(capability, head_dims, name):
    """The least of which is that of 8.6, 8.9 and 12.0. Hardly a register is spilled.

    On Hopper tiles were measured, with Triton 3.6: some that spill more are faster than those that do not.
    """
    program = Path(__file__).with_name("compile_kernels.py")
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, program, str(capability), head_dims, name]

    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr

    rows = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(rows) == (2 if name else 3 * 5 * 2 * 2)

    memory = (227 if capability in (90, 100) else 99) * 1024
    for row in rows:
        assert row["spilled"] <= (1024 if capability == 90 else 128), row
        assert row["shared"] <= memory, row
        assert row["fences"] == 0, row
