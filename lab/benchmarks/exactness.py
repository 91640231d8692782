"""How exact the gradients of a network are on this device: against float64, and beside those of a CPU.

python -m lab.benchmarks.exactness NAME DEVICE PRECISION KERNELS LENGTH     # prints a row as JSON
"""

import copy
import json
import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.gpt import GPT, parse_config
from model.position.network import for_length
from ropewalk import plugins
from ropewalk.app import cli
from ropewalk.training.hardware import Hardware

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
# By how much the error of a gradient may exceed twice that of a CPU. The gradient of a gate is a sum whose terms nearly
# cancel, and rounding can move a position of CoPE across an integer.
EXCESS = 2e-4
# What chance adds to the error of a gradient that is one number; that of n numbers has it divided by the root of n. In
# bf16 c of FIRE is off by 6e-4 to 7e-2 on a CPU, with four seeds; errors of large tensors hardly differ.
CHANCE = {"bf16-mixed": 0.1, "32-true": 0.0}


class Errors(NamedTuple):
    """The relative errors of the gradient of one parameter."""

    name: str
    here: float  # on the device that is checked
    on_cpu: float
    limit: float  # of the error here

    @property
    def is_right(self) -> bool:
        return self.here < self.limit  # not if it is NaN

    def __str__(self) -> str:
        return f"{self.here:.1e} (CPU {self.on_cpu:.1e}), {self.name}"


def gradients(net: GPT, hardware: Hardware, length: int) -> dict[str, Tensor]:
    """Return the gradient of each parameter of a copy of `net` on this hardware, of two texts, float64 on the CPU."""
    exact = hardware.precision == "64"
    net = copy.deepcopy(net).to(hardware.device, torch.float64 if exact else torch.float32)
    if hardware.kernels:
        plugins.kernels().install(net.encodings)  # unchecked: this is a check
    if hardware.compile:
        torch.compiler.reset()
        net.compile(dynamic=False)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(1, net.vocab_size, (2, length + 1), generator=generator).to(hardware.device)
    # Without the math kernel in the list, PyTorch raises where no fused kernel serves.
    backends = nullcontext() if exact else sdpa_kernel(FUSED)
    encodings = for_length(net.encodings, length, net.train_len)
    parameters = dict(net.named_parameters())
    with hardware.autocast(), backends:
        loss = net(idx[:, :-1], targets=idx[:, 1:], encodings=encodings)
        grads = torch.autograd.grad(loss, list(parameters.values()))
    return {name: grad.double().cpu() for name, grad in zip(parameters, grads, strict=True)}


def worst_errors(net: GPT, exact: Mapping[str, Tensor], here: Hardware, length: int) -> Errors:
    """Return the errors of the parameter whose gradient comes nearest to its limit, or exceeds it most.

    Args:
        net: the network, on the CPU.
        exact: its `gradients` in float64.
        here: what is checked; a CPU computes with the same precision.
        length: tokens of a text.
    """
    grads = gradients(net, here, length)
    usual = gradients(net, replace(here, device="cpu", compile=False, kernels=False), length)
    largest = max(grad.norm() for grad in exact.values())
    found = []
    for name, of_exact in exact.items():
        norm = of_exact.norm()
        if norm < 1e-12 * largest:
            continue  # 0 but for rounding: the last bias of FIRE, which adds the same to all scores of a query
        error = float((grads[name] - of_exact).norm() / norm)
        on_cpu = float((usual[name] - of_exact).norm() / norm)
        limit = 2 * on_cpu + max(EXCESS, CHANCE[here.precision] / of_exact.numel() ** 0.5)
        found.append(Errors(name, error, on_cpu, limit))
    return max(found, key=lambda errors: math.inf if math.isnan(errors.here) else errors.here / errors.limit)


def exactness(name: str, here: Hardware, length: int) -> dict[str, str | bool]:
    """Return the worst error of a gradient of a small network with the encoding `name`, and whether it is right.

    The text is four times as long as in training, so extensions and scalings are active.
    """
    torch.manual_seed(0)
    cfg = parse_config({"n_layer": 2, "n_head": 4, "n_kv_head": 2, "dim": 256})
    net = GPT(cfg, cli.encoding(name), vocab_size=512, train_len=length // 4).train()
    # A table that starts at zero would hide errors.
    with torch.no_grad():
        for pe in net.distinct_encodings:
            for p in pe.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    exact = gradients(net, Hardware("cpu", "64", False), length)
    worst = worst_errors(net, exact, here, length)
    return {"worst": str(worst), "is_right": worst.is_right}


if __name__ == "__main__":
    encoding, device, precision, kernels, tokens = sys.argv[1:]
    hardware = Hardware(device, precision, compile=False, kernels=kernels == "True")
    print(json.dumps(exactness(encoding, hardware, int(tokens))))
