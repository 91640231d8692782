"""The loop of train.py beside a bare PyTorch loop over the same model and the same batches."""

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import Field

import conf.cli
import data as data_sources
from benchmarks.measure import Clock, Contender, Course, Kind, Turn, in_fresh_process, ratio, take_turns
from benchmarks.report import Outcome, Table, progress
from conf.rundir import RunDir, read_metrics
from conf.schema import Config, ConfigError, Section, check, parse
from data.base import Data
from data.sampler import BatchSampler, train_loader
from model.gpt import GPT
from model.lit import LitGPT
from model.machine import Machine, tune_cpu
from model.trainer import compile_or_explain
from train import fit

# Dense bf16, in FLOP/s, of the makers' data sheets; by a part of the name that CUDA gives.
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


class Arguments(Section):
    rounds: int = Field(9, ge=1)  # pieces of work, in turn
    steps: int = Field(10, ge=1)  # optimizer steps of a piece; train.py logs at the end of each
    threads: int = Field(0, ge=0)  # 0: as PyTorch chooses
    clock: Kind = "wall"  # of the tables; JSON has both
    out: str | None = None  # JSON file


@dataclass(frozen=True)
class Request:
    args: Arguments
    device: str
    configs: dict[str, Config]  # by encoding


def read(arguments: dict[str, str]) -> Request:
    """Keys other than those of `Arguments` are train.py's; `pe` may name several encodings. Raises ConfigError."""
    args = parse_own(Arguments, arguments)
    names = arguments.pop("pe", "rope").split(",")
    configs = {name: configure(arguments | {"pe": name}, args.rounds, args.steps) for name in names}
    return Request(args, machine_of(next(iter(configs.values()))).device, configs)


def parse_own(schema: type[Section], arguments: dict[str, str]) -> Any:
    """The arguments of the mode; taken from those of train.py."""
    own = {key: arguments.pop(key) for key in list(arguments) if key in schema.model_fields}
    return parse(schema, own, strings=True)


def configure(arguments: Mapping[str, str], rounds: int, steps: int) -> Config:
    """The configuration of a run that logs after each piece of work and does nothing else between its steps."""
    never = [f"trainer.{key}={10**9}" for key in ("val_every", "checkpoint_every", "checkpoint_minutes")]
    # a piece more than is done: at its last step a run validates and writes a checkpoint
    fixed = [f"trainer.max_steps={(rounds + 1) * steps + 1}", f"trainer.log_every={steps}", "trainer.val_tokens=1"]
    for key in (override.split("=")[0] for override in (*fixed, *never)):
        if key in arguments:
            raise ConfigError(f"{key} is set by the benchmark: drop it; rounds and steps say how much is measured")
    return check(conf.cli.compose(*(f"{key}={value}" for key, value in arguments.items()), *fixed, *never))


def machine_of(cfg: Config) -> Machine:
    return Machine.choose(**cfg.trainer.model_dump(include={"accelerator", "precision", "compile"}))


def network(cfg: Config, data: Data) -> GPT:
    return GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len, seed=cfg.seed)


def batches(cfg: Config, data: Data, machine: Machine) -> Any:
    """What train.py trains on, in its order."""
    t = cfg.trainer
    sampler = BatchSampler(batch_size=t.batch_size, accumulate=t.accumulate, rank=0, world_size=1, steps=t.max_steps)
    pin = machine.device == "cuda"
    return iter(
        train_loader(data, sampler, length=cfg.train_len, seed=cfg.seed, num_workers=t.num_workers, pin_memory=pin)
    )


def trained(cfg: Config, data: Data, machine: Machine, turn: Turn) -> None:
    """A contender: the loop of train.py."""
    if machine.device == "cpu":
        tune_cpu()
    data.prepare()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cfg = cfg.model_copy(update={"runs_dir": folder})
        run = RunDir(cfg)
        run.make(data.identity())
        net = network(cfg, data).to(machine.device)

        def logged() -> None:
            *_, row = read_metrics(run.path)
            turn(row["step"], loss=row["train/loss"], weights=fingerprint(net))

        fit(net, data, cfg, run, machine, mirror=logged)


def bare(cfg: Config, data: Data, machine: Machine, turn: Turn) -> None:
    """A contender: the shortest loop that does the same work."""
    if machine.device == "cpu":
        tune_cpu()
    data.prepare()
    net = network(cfg, data).to(machine.device).train()
    if machine.precision == "bf16-true":
        net.bfloat16()  # as Lightning does
    if machine.compile:
        compile_or_explain(net, machine, cfg.trainer.batch_size // cfg.trainer.accumulate, cfg.train_len)
    lit = LitGPT(net, seed=cfg.seed, max_steps=cfg.trainer.max_steps, **cfg.optim.model_dump())
    setup = lit.configure_optimizers()
    optimizer, scheduler = setup["optimizer"], setup["lr_scheduler"]["scheduler"]
    mixed = torch.autocast(machine.device, torch.bfloat16, enabled=machine.precision == "bf16-mixed")
    loader, waited, losses = batches(cfg, data, machine), 0.0, torch.zeros((), device=machine.device)
    for step in range(1, cfg.trainer.max_steps + 1):
        for _ in range(cfg.trainer.accumulate):
            asked = time.perf_counter()
            x, y = next(loader)
            waited += time.perf_counter() - asked
            x, y = x.to(machine.device, non_blocking=True), y.to(machine.device, non_blocking=True)
            with mixed:
                loss = net.loss(x, y) / cfg.trainer.accumulate
            loss.backward()
            losses += loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.optim.grad_clip or float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1 or step % cfg.trainer.log_every == 0:
            since = 1 if step == 1 else min(cfg.trainer.log_every, step - 1)
            turn(step, loss=float(losses) / since, waited=waited, weights=fingerprint(net))  # waits for the device
            waited, losses = 0.0, torch.zeros_like(losses)


def fingerprint(net: GPT) -> float:
    """Equal for equal weights: the sum of their magnitudes."""
    return float(torch.stack([p.detach().double().abs().sum() for p in net.parameters()]).sum())


def peak_flops(machine: Machine, threads: int) -> float:
    """FLOP/s that can be reached at best: of the GPU's data sheet; on a CPU, of the best of 20 products of 2048^3."""
    if machine.device == "cuda" and machine.precision.startswith("bf16"):
        name = torch.cuda.get_device_name()
        for known, peak in PEAKS.items():
            if known in name:
                return peak
    if machine.device == "cpu":
        tune_cpu()
    if threads:
        torch.set_num_threads(threads)
    n, dtype = 2048, torch.bfloat16 if machine.precision.startswith("bf16") else torch.float32
    a, b = (torch.randn(n, n, device=machine.device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        start = Clock.now()
        (a @ b)[0, 0].item()
        best = min(best, Clock.now().since(start).wall)
    return 2 * n**3 / best


def measure(request: Request) -> Outcome:
    args = request.args
    rows, measurements = [], []
    machine = machine_of(next(iter(request.configs.values())))
    peak = in_fresh_process(peak_flops, machine, args.threads)
    for name, cfg in request.configs.items():
        progress(f"training with {name}")
        data = data_sources.build(cfg.data)
        data.prepare(progress=True)
        contenders: dict[str, Contender] = {
            "bare": partial(bare, cfg, data, machine),
            "train.py": partial(trained, cfg, data, machine),
        }
        courses = take_turns(contenders, rounds=args.rounds, threads=args.threads)
        for course in courses.values():
            check_same_work(course, courses["bare"])
        net = network(cfg, data)
        tokens = cfg.trainer.batch_size * cfg.train_len
        speed = {who: tokens / middle(course, args.clock) for who, course in courses.items()}
        waits = [p.facts["waited"] / p.clock.wall for p in courses["bare"].pieces]
        against = ratio(courses["bare"].per_step(args.clock), courses["train.py"].per_step(args.clock))
        rows.append(
            {
                "encoding": name,
                "train.py / bare": against.median,
                "range": f"{against.low:.2f} to {against.high:.2f}",
                "train.py, tokens/s": speed["train.py"],
                "of the peak FLOP/s, %": 100 * speed["train.py"] * net.flops_per_token(cfg.train_len) / peak
                if peak
                else None,
                "waiting for data, %": 100 * statistics.median(waits),
                "peak memory, MB": courses["train.py"].peak_memory / 2**20,
            }
        )
        measurements.append({"encoding": name, "tokens_per_step": tokens, "peak_flops": peak} | described(courses))
    shape = " ".join(f"{k}={v}" for k, v in next(iter(request.configs.values())).model.model_dump().items() if v)
    notes = [
        f"{shape}; {machine.describe()[0]}",
        f"{args.clock} time, medians of {args.rounds} rounds of {args.steps} steps; the two took turns, each in a "
        f"process of its own. The peak is {(peak or 0) / 1e9:,.0f} GFLOP/s, see `peak_flops`.",
    ]
    return Outcome([Table("The loop of train.py against a bare loop", rows)], measurements, notes)


def middle(course: Course, kind: Kind) -> float:
    """Median seconds of a step."""
    return statistics.median(course.per_step(kind))


def check_same_work(course: Course, base: Course, tolerance: float = 1e-3) -> None:
    """Raise ValueError unless both trained on the same batches with the same results: else their speeds do not
    compare."""
    for own, other in zip(course.pieces, base.pieces, strict=True):
        losses = own.facts["loss"], other.facts["loss"]
        if own.steps != other.steps or abs(losses[0] - losses[1]) > tolerance * abs(losses[1]):
            raise ValueError(f"the contenders did not do the same work: their losses are {losses[0]} and {losses[1]}")


def described(courses: Mapping[str, Course]) -> dict[str, Any]:
    """All pieces of work, for JSON."""
    return {
        who: {
            "peak_memory": course.peak_memory,
            "pieces": [{"steps": p.steps, **p.clock._asdict(), **p.facts} for p in course.pieces],
        }
        for who, course in courses.items()
    }
