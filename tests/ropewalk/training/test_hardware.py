"""What is set up on a CPU before anything is computed."""

import pytest
import torch

from ropewalk.training import hardware
from ropewalk.training.hardware import Hardware


def test_determinism_is_asked_of_pytorch_for_one_run_of_a_sweep():
    hardware.tune("cuda", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()

    hardware.tune("cuda")
    assert not torch.are_deterministic_algorithms_enabled()


def test_kernels_that_are_asked_for_and_cannot_be_had_are_an_error():
    """And "auto" takes what there is. Devices: see tests/scripts/test_evaluate.py."""
    options = dict(accelerator="cpu", precision="bf16-mixed")
    assert not Hardware.resolve(**options, kernels="auto").kernels
    with pytest.raises(ValueError, match=r"trainer\.kernels=true: kernels need an NVIDIA GPU .*; choose auto"):
        Hardware.resolve(**options, kernels=True)
