"""The tables of `scripts/check_gpu.py`: is every encoding exact on this device, and how fast is the training step?"""

import copy
import functools
import itertools
import math
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

from lab.benchmarks import Options, attention
from lab.benchmarks.checklist import Row
from lab.benchmarks.measure import Passes, reason_of
from lab.benchmarks.targets import target_of
from lab.benchmarks.training import Job, configuration, steps_of, trained
from model.gpt import GPT, parse_config
from model.position.cope import CoPE
from ropewalk.app import cli
from ropewalk.training.hardware import Hardware, peak_memory, product_flops, reset_peak_memory, tune

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
LENGTH = 300  # more than two blocks of queries, and no multiple of 8
LONG = 1100  # more queries than the backward passes of CoPE, stick-breaking and PaTH take at a time
# By how much the error of a gradient may exceed twice that of a CPU. The gradient of a gate is a sum whose terms nearly
# cancel: in Triton's interpreter that of `path_fox` is off by 1.2e-5 in fp32, on the CPU by 1e-6.
EXCESS = 5e-5
# What chance adds to the error of a gradient that is one number; that of n numbers has it divided by the root of n. In
# bf16 c of FIRE is off by 6e-4 to 7e-2 on a CPU, with four seeds; errors of large tensors hardly differ.
CHANCE = {"bf16-mixed": 0.1, "32-true": 0.0}
EXACTNESS_COLUMNS = [*CHANCE, "right"]

# Training with kernels and without is compared by the largest difference of the losses of the same step. Rounding grows
# from step to step: after 200 steps, initial weights that differ by 1e-7 make losses (means of ten) that differ by 4e-3
# (gemma3, fp32), as much as some defects make. Within 75 steps they differ by at most 1.5e-6 in any step (three
# seeds of each encoding), and so do losses of attention in blocks of 64 queries instead of 128. An error of 1 % in the
# gradient of every other 64 keys makes 1.9e-4 to 9.5e-4. tests/benchmarks/test_agreement.py measures both.
AGREEING_STEPS = 75
MAX_DIFFERENCE = 3e-5  # nats
NOISE = 1e-7  # relative change of each initial weight, about one last bit
# Windows and a bias in the flash kernel, and a kernel of its own. Not CoPE: its gradient jumps where a position crosses
# an integer, so weights that differ by 1e-7 make losses that differ by 3e-3 within 75 steps.
AGREEING = ("gemma3", "kerple", "stick_breaking")
AGREEMENT_COLUMNS = ["with kernels", "without", "largest difference", f"of weights that differ by {NOISE:g}", "right"]

# By how much gradients of a compiled layer may be off from those of the layer itself. The compiler keeps in fp32 what
# the layer rounds to 16 bit: RoPE's differ by 3e-3. In fp32 rounding can move a position of CoPE across an integer.
COMPILED_LIMIT = {"bfloat16": 2e-2, "float32": 1e-3}

SPEED_COLUMNS = ["graphs", "tokens/s", "share", "of a product's TFLOP/s", "peak memory, MB"]


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
    net.kernels = hardware.kernels
    if hardware.compile:
        torch.compiler.reset()
        net.compile(dynamic=False)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(1, net.vocab_size, (2, length + 1), generator=generator)
    if net.document_end is not None:
        idx[:, ::40] = net.document_end
    documents = net.documents(idx[:, :-1])
    idx = idx.to(hardware.device)
    # Without the math kernel in the list, PyTorch raises where no fused kernel serves.
    kernels = nullcontext() if exact else sdpa_kernel(FUSED)
    scale = net.scale_for(length)
    parameters = dict(net.named_parameters())
    with hardware.autocast(), kernels, net.at_scale(scale):
        loss = net(idx[:, :-1], targets=idx[:, 1:], documents=documents)
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
    has_cope = any(isinstance(pe, CoPE) for pe in net.distinct_encodings)
    found = []
    for name, of_exact in exact.items():
        norm = of_exact.norm()
        if norm < 1e-12 * largest:
            continue  # 0 but for rounding: the last bias of FIRE, which adds the same to all scores of a query
        error = float((grads[name] - of_exact).norm() / norm)
        on_cpu = float((usual[name] - of_exact).norm() / norm)
        limit = 2 * on_cpu + max(EXCESS, CHANCE[here.precision] / of_exact.numel() ** 0.5)
        if has_cope:
            limit += 1e-4  # rounding can move a position across an integer, which makes errors of 6e-5
        found.append(Errors(name, error, on_cpu, limit))
    return max(found, key=lambda errors: math.inf if math.isnan(errors.here) else errors.here / errors.limit)


def exactness(
    options: Options, spec: Any, *, sinks: bool = False, documents: bool = False, length: int = LENGTH
) -> Row:
    """Return cells: in each precision the worst relative error of a gradient against float64, beside that of a CPU.

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
    exact = gradients(net, Hardware("cpu", "64", False), length)

    row = {}
    right = True
    for precision in CHANCE:
        here = Hardware(options.device, precision, False, options.kernels is True)
        try:
            worst = worst_errors(net, exact, here, length)
        except Exception as failure:  # whatever a compiler or a driver may raise
            # Most often, that no kernel but the math kernel serves this encoding.
            traceback.print_exc()
            row[precision] = f"fails: {reason_of(failure)}".replace("|", "\\|")
            right = False
            continue
        row[precision] = str(worst)
        right = right and worst.is_right
    return row | {"right": "yes" if right else "**no**"}


def training_losses(options: Options, spec: Any, *, kernels: bool, noise: float = 0.0) -> Tensor:
    """Return the losses of `AGREEING_STEPS` steps of a small network in fp32, on the CPU.

    Args:
        options: data and device.
        spec: the encoding.
        kernels: attention uses them.
        noise: relative change of every initial weight, up or down at random.

    Raises:
        RuntimeError: `kernels`, but those of this encoding do not work on this device.
    """
    model = options.model | {"n_layer": 2, "n_head": 4, "n_kv_head": None, "dim": 256}
    # Four texts, so that a CPU can measure the noise of this very training.
    trainer = options.trainer | {"kernels": kernels, "compile": False, "max_steps": AGREEING_STEPS, "batch_size": 4}
    trainer["precision"] = "32-true"
    job = Job(configuration(options, spec, model=model, train_len=256, trainer=trainer))
    if kernels and not job.net.kernels:
        raise RuntimeError("training runs without kernels, since they are not exact here")
    if noise:
        generator = torch.Generator().manual_seed(job.cfg.seed)
        with torch.no_grad():
            for p in job.net.parameters():
                up_or_down = 2 * torch.randint(0, 2, p.shape, generator=generator) - 1
                p.mul_(1 + noise * up_or_down)
    losses = list(itertools.islice(steps_of(job), AGREEING_STEPS))
    return torch.stack(losses).cpu()


def agreement(options: Options, spec: Any) -> Row:
    """Return cells: the last losses of a small network with kernels and without, and how far they differ in any step.

    Beside it stands the noise: the same difference of two trainings without kernels, whose initial weights differ.
    """
    with_kernels = training_losses(options, spec, kernels=True)
    without = training_losses(options, spec, kernels=False)
    with_noise = training_losses(options, spec, kernels=False, noise=NOISE)
    difference = float((with_kernels - without).abs().max())
    noise = float((with_noise - without).abs().max())
    # A GPU adds in any order, so its noise may be larger than a CPU's. Beyond the limit it would hide defects.
    if noise > MAX_DIFFERENCE:
        right = "**too noisy to tell**"
    elif difference < max(MAX_DIFFERENCE, 5 * noise):
        right = "yes"
    else:
        right = "**no**"
    return {
        "with kernels": f"{with_kernels[-1]:.4f}",
        "without": f"{without[-1]:.4f}",
        "largest difference": f"{difference:.1e}",
        AGREEMENT_COLUMNS[3]: f"{noise:.1e}",
        "right": right,
    }


def attention_jobs(options: Options) -> dict[str, Callable[[], Row]]:
    """Return a job for each encoding and length, a row of the table of attention: by length, with targets first."""
    tune(options.device)
    base_of = functools.cache(functools.partial(attention.layer, options))

    def job(name: str, make: Callable[[int], Passes], length: int) -> Row:
        row = {"name": name, "tokens": str(length), "target": target_of(name)}
        row |= attention.measured(options, name, make, length, base_of(length))
        if "off by" in row:
            is_right = float(row["off by"]) < COMPILED_LIMIT[options.dtype]
            row["right"] = "yes" if is_right else "**no**"
        return row

    def has_no_target(layer: tuple[str, Any]) -> bool:
        name, _ = layer
        return name != attention.BASE and not target_of(name)

    jobs: dict[str, Callable[[], Row]] = {}
    layers = sorted(attention.layers(options), key=has_no_target)  # otherwise in the same order
    for length in options.lengths:
        for name, make in layers:
            jobs[f"{name} at {length:,} tokens"] = functools.partial(job, name, make, length)
    return jobs


def attention_columns(options: Options) -> list[str]:
    """The columns of the table of attention; that of targets where the compiled layer is measured."""
    if options.compiled:
        return ["forward", "both", "compiled", "off by", "MB", "target"]
    return ["forward", "both", "MB"]


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
    with torch.profiler.profile(activities=activities) as profiler:
        torch.stack([next(losses) for _ in range(2)]).tolist()
    table = profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60)
    return f"```\n{table}```"


def speed(options: Options, **trainer: bool | str) -> Row:
    """Return cells: the training step of train.py with RoPE, with these options of `trainer`."""
    from torch._dynamo.utils import counters

    cfg = configuration(options, "rope", trainer=options.trainer | {"precision": "bf16-mixed", **trainer})
    reset_peak_memory()
    counters.clear()
    job = Job(cfg)
    losses = steps_of(job)
    # The first steps compile and warm up. Reading their losses waits for the device, before the clock starts and stops.
    torch.stack([next(losses) for _ in range(3)]).tolist()
    start = perf_counter()
    torch.stack([next(losses) for _ in range(options.steps)]).tolist()
    seconds = perf_counter() - start
    per_second = options.steps * cfg.trainer.batch_size * cfg.train_len / seconds

    # The yardstick: one large product of matrices, in operations a second.
    size = 8192 if options.device == "cuda" else 512
    peak = product_flops(options.device, size)
    flops_per_token = job.net.flops_per_token(cfg.train_len)
    share = per_second * flops_per_token / peak
    return {
        "graphs": str(counters["stats"]["unique_graphs"]),
        "tokens/s": f"{per_second:,.0f}",
        "share": f"{share:.2f}",
        "of a product's TFLOP/s": f"{peak / 1e12:.3g}",
        "peak memory, MB": f"{peak_memory(options.device) / 2**20:,.0f}",
    }
