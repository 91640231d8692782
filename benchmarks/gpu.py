"""What `scripts/check_gpu.py` prints: is every encoding exact on this device, and how fast is the training step?"""

import copy
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from app import cli
from benchmarks import Options
from benchmarks.measure import timed
from benchmarks.training import Job, configuration, trained
from model.gpt import GPT, parse_config
from training.hardware import Hardware, peak_memory, reset_peak_memory

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
LENGTH = 300  # more than two blocks of queries, and no multiple of 8


def results(net: GPT, hardware: Hardware) -> Tensor:
    """Loss and gradients of a copy of `net` on this hardware, in one vector on the CPU."""
    net = copy.deepcopy(net).to(hardware.device, torch.float64 if hardware.precision == "64" else torch.float32)
    idx = torch.randint(net.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0)).to(hardware.device)
    with hardware.autocast(), nullcontext() if hardware.precision == "64" else sdpa_kernel(FUSED):  # math is an error
        loss = net(idx[:, :-1], targets=idx[:, 1:])
        gradients = torch.autograd.grad(loss, list(net.parameters()))
    return torch.cat([x.flatten().double().cpu() for x in (loss.detach(), *gradients)])


def exactness(options: Options, spec: Any) -> dict[str, str]:
    """A row: relative errors of loss and gradients against float64, beside those that a CPU makes in this precision."""
    torch.manual_seed(0)
    cfg = parse_config({"n_layer": 2, "n_head": 4, "n_kv_head": 2, "dim": 256})
    net, row = GPT(cfg, cli.encoding(spec), vocab_size=512, train_len=LENGTH).train(), {"": str(spec)}
    with torch.no_grad():
        for p in (p for pe in net.distinct_encodings for p in pe.parameters()):
            p.add_(torch.randn_like(p), alpha=0.1)  # a table that starts at zero would hide errors
    exact, right = results(net, Hardware("cpu", "64", False)), True
    for precision in ("bf16-mixed", "32-true"):
        here, cpu = Hardware(options.device, precision, False), Hardware("cpu", precision, False)
        try:  # 1e-4: where rounding moves a position of CoPE across an integer, that makes 3e-5
            error, usual = ((results(net, h) - exact).norm() / exact.norm() for h in (here, cpu))
            row[precision], right = f"{error:.1e} (CPU {usual:.1e})", right and bool(error < 2 * usual + 1e-4)
        except RuntimeError as failure:  # no kernel for it but the math kernel
            row[precision], right = f"fails: {str(failure).splitlines()[0]}", False
    return row | {"right": "yes" if right else "**no**"}


def speed(options: Options, what: str, **trainer: bool) -> dict[str, str]:
    """A row: the training step of train.py with RoPE."""
    from torch._dynamo.utils import counters

    cfg = configuration(options, "rope", trainer=options.trainer | {"precision": "bf16-mixed", **trainer})
    reset_peak_memory()
    counters.clear()
    losses = trained(cfg)
    torch.stack([next(losses) for _ in range(3)]).tolist()
    start = perf_counter()
    torch.stack([next(losses) for _ in range(options.steps)]).tolist()  # waits for the device
    per_second = options.steps * cfg.trainer.batch_size * cfg.train_len / (perf_counter() - start)
    size = 8192 if options.device == "cuda" else 512
    a = torch.randn(size, size, device=options.device, dtype=torch.bfloat16)
    peak = 2 * size**3 / timed(lambda: a @ a)()  # Timer waits for the device
    return {
        "": what,
        "graphs": str(counters["stats"]["unique_graphs"]),
        "tokens/s": f"{per_second:,.0f}",
        f"share of {peak / 1e12:.3g} TFLOP/s": f"{per_second * Job(cfg).net.flops_per_token(cfg.train_len) / peak:.2f}",
        "peak memory, MB": f"{peak_memory(options.device) / 2**20:,.0f}",
    }
