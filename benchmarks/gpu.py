"""The tables of `scripts/check_gpu.py`: is every encoding exact on this device, and how fast is the training step?"""

import copy
import itertools
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

from app import cli
from benchmarks import Options
from benchmarks.training import Job, configuration, trained
from model.gpt import GPT, parse_config
from training.hardware import Hardware, peak_memory, product_flops, reset_peak_memory

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
LENGTH = 300  # more than two blocks of queries, and no multiple of 8
LONG = 1100  # more queries than the backward passes of CoPE, stick-breaking and PaTH take at a time
TRAINED = 200  # steps with kernels and without, after which the losses, means of ten steps, differ by less than
AGREE = 1e-3  # nats
# The most that both passes of an encoding should take, compiled, in bf16 at a batch of 16, as a ratio to SDPA's.
TARGETS = {
    "rope": 1.15, "nope, window of T/8": 0.6, "nope, documents of T/8": 0.5, "nope, sinks": 1.05, "kerple": 3.0,
    "cope": 6.0, "cope, gates about 1/2": 2.5, "fox": 2.0, "alibi": 1.5, "t5": 3.0, "fire": 4.0, "relative": 5.0,
    "relative_capped": 2.5, "profiles": 2.5, "stick_breaking": 4.0, "path": 5.0, "pope": 2.2, "nape": 1.5,
    "fox_rope": 2.0, "path_fox": 5.0,
}  # fmt: skip
FORWARD_TARGETS = {"rerope": 2.0, "self_extend": 2.0, "dca": 2.0}  # the same of the forward pass of readings, eager
MEMORY_TARGET = 2.0  # the most memory of both passes, as a ratio to SDPA's
SHARE_TARGET = 0.38  # the least share of the speed of a large product that compiled training of `small` reaches


def results(net: GPT, hardware: Hardware, length: int) -> Tensor:
    """Return loss and gradients of a copy of `net` on this hardware, of two texts, in one vector on the CPU."""
    exact = hardware.precision == "64"
    net = copy.deepcopy(net).to(hardware.device, torch.float64 if exact else torch.float32)
    net.kernels = hardware.kernels
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(1, net.vocab_size, (2, length + 1), generator=generator)
    if net.document_end is not None:
        idx[:, ::40] = net.document_end
    documents = net.documents(idx[:, :-1])
    idx = idx.to(hardware.device)
    # Without the math kernel in the list, PyTorch raises where no fused kernel serves.
    kernels = nullcontext() if exact else sdpa_kernel(FUSED)
    scale = net.scale_for(length)
    with hardware.autocast(), kernels, net.at_scale(scale):
        loss = net(idx[:, :-1], targets=idx[:, 1:], documents=documents)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
    values = [loss.detach(), *gradients]
    return torch.cat([value.flatten().double().cpu() for value in values])


def exactness(
    options: Options, spec: Any, *, sinks: bool = False, documents: bool = False, length: int = LENGTH
) -> dict[str, str]:
    """Return a row: relative errors of loss and gradients against float64, beside those of a CPU in each precision.

    The text is four times as long as in training, so extensions and scalings are active.

    Args:
        sinks: with attention sinks.
        documents: of several documents, each read as if it were alone.
        length: tokens of a text.
    """
    torch.manual_seed(0)
    cfg = parse_config({"n_layer": 2, "n_head": 4, "n_kv_head": 2, "dim": 256, "sinks": sinks})
    net = GPT(cfg, cli.encoding(spec), vocab_size=512, train_len=length // 4).train()
    net.document_end = 0 if documents else None
    # A table that starts at zero would hide errors.
    with torch.no_grad():
        for pe in net.distinct_encodings:
            for p in pe.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    exact = results(net, Hardware("cpu", "64", False), length)

    def relative_error(device: str, precision: Any, *, kernels: bool = False) -> Tensor:
        rounded = results(net, Hardware(device, precision, False, kernels), length)
        return (rounded - exact).norm() / exact.norm()

    name = str(spec)
    if sinks:
        name += ", sinks"
    if documents:
        name += ", documents"
    if length != LENGTH:
        name += f", {length} tokens"
    row = {"": name}
    right = True
    for precision in ("bf16-mixed", "32-true"):
        try:
            error = relative_error(options.device, precision, kernels=options.kernels is True)
            usual = relative_error("cpu", precision)
        except Exception as failure:  # whatever a compiler or a driver may raise
            # Most often, that no kernel but the math kernel serves this encoding.
            reason = str(failure).strip().partition("\n")[0]
            row[precision] = f"fails: {reason}"
            right = False
            continue
        row[precision] = f"{error:.1e} (CPU {usual:.1e})"
        # The 1e-4 is for CoPE: rounding can move a position across an integer, which makes an error of 3e-5.
        right = right and bool(error < 2 * usual + 1e-4)
    return row | {"right": "yes" if right else "**no**"}


def agreement(options: Options, spec: Any) -> dict[str, str]:
    """Return a row: the loss of a small network after `TRAINED` steps with kernels and without, and if they agree."""
    model = options.model | {"n_layer": 2, "n_head": 4, "n_kv_head": None, "dim": 256}
    row = {"": str(spec)}
    ends = []
    for name, kernels in (("with kernels", True), ("without", False)):
        trainer = options.trainer | {"kernels": kernels, "compile": False, "max_steps": TRAINED}
        trainer["precision"] = "32-true"  # in bf16 weights that differ by 1e-7 train to losses that differ by 1e-2
        cfg = configuration(options, spec, model=model, train_len=256, trainer=trainer)
        losses = torch.stack(list(itertools.islice(trained(cfg), TRAINED)))
        ends.append(float(losses[-10:].mean()))
        row[name] = f"{ends[-1]:.4f}"
    same = abs(ends[0] - ends[1]) < AGREE
    return row | {"right": "yes" if same else "**no**"}


def profile(options: Options) -> str:
    """Return a table of the operations that take most of two training steps with RoPE, compiled in bf16."""
    cfg = configuration(options, "rope", trainer=options.trainer | {"precision": "bf16-mixed", "compile": True})
    losses = trained(cfg)
    torch.stack([next(losses) for _ in range(3)]).tolist()  # compiles and warms up
    activities = [ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if options.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        order = "self_cuda_time_total"
    with torch.profiler.profile(activities=activities) as found:
        torch.stack([next(losses) for _ in range(2)]).tolist()
    return found.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)


def verdict(checks: list[dict[str, str]], rows: list[dict[str, str]], steps: list[dict[str, str]]) -> str:
    """Return a sentence: which checks are not right, and which targets are missed.

    Args:
        checks: rows of `exactness` and `agreement`.
        rows: of `attention`, at the batch that the targets are for.
        steps: rows of `speed`.
    """
    wrong = [row[""] for row in checks if row["right"] != "yes"]
    found: list[tuple[str, float, float]] = []  # what, its ratio, the target
    base = rows[0] if rows else {}
    for row in rows[1:]:
        name = row[""]
        for key, cell in row.items():
            kind, _, length = key.partition(", ")
            first_number = float(cell.split()[0]) if length else 0.0  # a median stands before its quartiles
            if kind == "compiled" and name in TARGETS:
                found.append((f"{name} at {length} tokens", first_number, TARGETS[name]))
            if kind == "forward" and name in FORWARD_TARGETS:
                found.append((f"{name} at {length} tokens, forward", first_number, FORWARD_TARGETS[name]))
            if kind == "MB" and name in TARGETS:
                memory = first_number / float(base[key])
                found.append((f"memory of {name} at {length} tokens", memory, MEMORY_TARGET))
    missed = [f"{what} ({ratio:.3g}, target {target:g})" for what, ratio, target in found if ratio > target]
    for row in steps:
        share = next(float(cell) for key, cell in row.items() if key.startswith("share"))
        if row[""] == "compiled":
            found.append(("training", share, SHARE_TARGET))
            if share < SHARE_TARGET:
                missed.append(f"share of a large product in training ({share:g}, target {SHARE_TARGET:g})")

    exact = f"not exact: {'; '.join(wrong)}" if wrong else f"all {len(checks)} checks are exact"
    speeds = f"{len(found) - len(missed)} of {len(found)} targets met"
    return f"{exact}; {speeds}" + (f", missed: {'; '.join(missed)}" if missed else "")


def speed(options: Options, what: str, **trainer: bool | str) -> dict[str, str]:
    """Return a row: the training step of train.py with RoPE, with these options of `trainer`."""
    from torch._dynamo.utils import counters

    cfg = configuration(options, "rope", trainer=options.trainer | {"precision": "bf16-mixed", **trainer})
    reset_peak_memory()
    counters.clear()
    losses = trained(cfg)
    # The first steps compile and warm up. Reading their losses waits for the device, before the clock starts and stops.
    torch.stack([next(losses) for _ in range(3)]).tolist()
    start = perf_counter()
    torch.stack([next(losses) for _ in range(options.steps)]).tolist()
    seconds = perf_counter() - start
    per_second = options.steps * cfg.trainer.batch_size * cfg.train_len / seconds

    # The yardstick: one large product of matrices, in operations a second.
    size = 8192 if options.device == "cuda" else 512
    peak = product_flops(options.device, size)
    flops_per_token = Job(cfg).net.flops_per_token(cfg.train_len)
    share = per_second * flops_per_token / peak
    return {
        "": what,
        "graphs": str(counters["stats"]["unique_graphs"]),
        "tokens/s": f"{per_second:,.0f}",
        f"share of {peak / 1e12:.3g} TFLOP/s": f"{share:.2f}",
        "peak memory, MB": f"{peak_memory(options.device) / 2**20:,.0f}",
    }
