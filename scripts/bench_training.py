"""Tokens per second of train.py's loop against a bare PyTorch loop over the same model and the same batches.

python scripts/bench_training.py rounds=5 steps=20 pe=rope model=tiny trainer.batch_size=16

The two take turns; each round prints both speeds and their ratio, then comes the median ratio. Keys other than `rounds`
and `steps` are those of train.py. The loop of train.py logs every 10 steps; validation and checkpoints are outside of
what is timed, as they are in its own tokens_per_s.
"""

import contextlib
import io
import statistics
import tempfile
import time
from itertools import pairwise

import torch
from pydantic import Field

import conf.cli
import data as data_sources
from conf.rundir import RunDir, read_metrics
from conf.schema import Config, Section, check, parse
from data.base import Data
from data.sampler import BatchSampler, train_loader
from model.gpt import GPT
from model.lit import LitGPT
from model.machine import Machine, keep_freed_memory
from model.trainer import compile_or_explain
from train import fit


class Arguments(Section):
    rounds: int = Field(5, ge=1)
    steps: int = Field(20, ge=2)


def network(cfg: Config, data: Data, machine: Machine) -> GPT:
    net = GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len, seed=cfg.seed)
    return net.to(machine.device)


def trained(cfg: Config, data: Data, machine: Machine) -> float:
    """Tokens per second of train.py's loop after its first step."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cfg = cfg.model_copy(update={"runs_dir": folder})
        run = RunDir(cfg)
        run.make(data.identity())
        fit(network(cfg, data, machine), data, cfg, run, machine, mirror=lambda: None)
        rows = list(read_metrics(run.path))
    pieces = [(after["tokens"] - before["tokens"], after["tokens_per_s"]) for before, after in pairwise(rows)]
    return sum(tokens for tokens, _ in pieces) / sum(tokens / speed for tokens, speed in pieces)


def bare(cfg: Config, data: Data, machine: Machine) -> float:
    """Tokens per second of the shortest loop that does the same work, after its first step."""
    net = network(cfg, data, machine).train()
    if machine.compile:
        compile_or_explain(net, machine, cfg.trainer.batch_size // cfg.trainer.accumulate, cfg.train_len)
    lit = LitGPT(net, seed=cfg.seed, max_steps=cfg.trainer.max_steps, **cfg.optim.model_dump())
    setup = lit.configure_optimizers()
    optimizer, scheduler = setup["optimizer"], setup["lr_scheduler"]["scheduler"]
    t = cfg.trainer
    sampler = BatchSampler(
        batch_size=t.batch_size, accumulate=t.accumulate, rank=0, world_size=1, steps=t.max_steps, start_step=0
    )
    loader = iter(train_loader(data, sampler, length=cfg.train_len, seed=cfg.seed, num_workers=t.num_workers))
    mixed = torch.autocast(machine.device, torch.bfloat16, enabled=machine.precision == "bf16-mixed")
    for step in range(t.max_steps):
        for _ in range(t.accumulate):
            x, y = (part.to(machine.device, non_blocking=True) for part in next(loader))
            with mixed:
                loss = net.loss(x, y) / t.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.optim.grad_clip or float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 0:
            loss.item()
            start = time.perf_counter()
    loss.item()  # waits for the device
    return (t.max_steps - 1) * t.batch_size * cfg.train_len / (time.perf_counter() - start)


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, {key: arguments.pop(key) for key in ("rounds", "steps") if key in arguments}, strings=True)
    never = [f"trainer.{key}={10**9}" for key in ("val_every", "checkpoint_every")]
    overrides = [f"{key}={value}" for key, value in arguments.items()]
    fixed = [f"trainer.max_steps={args.steps}", "trainer.val_tokens=1", *never]
    cfg = check(conf.cli.compose(*overrides, *fixed))
    machine = Machine.choose(**cfg.trainer.model_dump(include={"accelerator", "precision", "compile"}))
    if machine.device == "cpu":
        keep_freed_memory()
    data = data_sources.build(cfg.data)
    data.prepare(progress=True)
    print(*machine.describe(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", sep="\n")
    ratios = []
    for i in range(args.rounds):
        # first one, then the other, so that neither always has the warmer machine
        order = (trained, bare) if i % 2 else (bare, trained)
        speed = {loop: loop(cfg, data, machine) for loop in order}
        ratios.append(speed[trained] / speed[bare])
        print(
            f"train.py {speed[trained]:9,.0f} tokens/s   bare {speed[bare]:9,.0f}   ratio {ratios[-1]:.3f}", flush=True
        )
    print(f"median ratio {statistics.median(ratios):.3f} of {args.rounds} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    conf.cli.script(main)
