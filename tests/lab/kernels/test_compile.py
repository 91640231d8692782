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
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(reversed(paths))}
    done = subprocess.run([sys.executable, program, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kernel", ["flash.keys_kernel.row", "cope.queries_kernel.gates"])
def test_a_kernel_of_each_kind_compiles_for_hopper(kernel):
    found = rows("90", "64", kernel)
    assert [row["divisible"] for row in found] == [True, False]
    for row in found:
        assert row["spilled"] <= 160, row
        assert row["fences"] == 0, row  # additions to one number wait for each other, but for nothing else


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_all_kernels_compile(capability):
    """They fit into shared memory, the least of which is that of 8.6, 8.9 and 12.0; hardly a register is spilled."""
    memory = (227 if capability in (90, 100) else 99) * 1024
    found = rows(str(capability), "64,128")
    assert len(found) == 2 * 2 * (3 * 5 + 3 * 2)
    for row in found:
        assert row["shared"] <= memory, row
        assert row["fences"] == 0, row
        assert row["spilled"] <= 400, row
