"""The step of train.py with RoPE, beside that of a bare PyTorch loop on the same batches, and that of each encoding."""

import math
import sys
from collections.abc import Iterator
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Config
from data.base import build_data
from data.sampler import micro_batches
from lab.benchmarks.measure import Row, interleave, ratio
from model.gpt import GPT
from ropewalk.app import cli, init_from
from ropewalk.app.resolve import check
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware, tune
from ropewalk.training.optimizer import learning_rate, make_optimizer
from train import Training


def configuration(options: Any, encoding: str | dict[str, Any]) -> Config:
    """Return the configuration that train.py would make of the options.

    Raises ConfigError: an option is wrong.
    """
    values = init_from.train_values()
    values |= options.model_dump(include={"model", "data", "trainer", "train_len"})
    # One process without accumulation, as in the loop that it is compared with.
    alone = {"devices": 1, "num_nodes": 1, "strategy": "auto", "replicas": 1, "context_parallel": 1}
    alone["grad_accum_steps"] = 1
    values["trainer"] = values["trainer"] | alone
    values["pe"] = cli.encoding(encoding)
    return check(values)


class Steps:
    """A training of some steps at a time; the first ones, which compile and warm up, are made here.

    Calling it takes `steps` optimizer steps and returns the seconds.
    """

    def __init__(self, steps: int, losses: Iterator[Tensor]) -> None:
        self.steps = steps
        self.iterator = losses
        self.losses: list[float] = []
        self()

    def __call__(self) -> float:
        start = perf_counter()
        losses = [next(self.iterator) for _ in range(self.steps)]
        self.losses += torch.stack(losses).tolist()  # waits for the device, so it belongs to the time
        return perf_counter() - start


def made(cfg: Config) -> tuple[Hardware, Any, GPT]:
    """The hardware, the data and the network of a run."""
    t = cfg.trainer
    hardware = Hardware.resolve(accelerator=t.accelerator, precision=t.precision, compile=t.compile, kernels=t.kernels)
    tune(hardware.device)
    data = build_data(cfg.data)
    data.prepare()
    net = GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len, seed=cfg.seed)
    return hardware, data, net


def trained(cfg: Config) -> Iterator[Tensor]:
    """Train as train.py does, and yield the loss of each step."""
    hardware, data, net = made(cfg)
    with distributed.launch(cfg.trainer, hardware) as fabric:
        training = Training(fabric, cfg, hardware, data, net)
        batches = training.micro_batches(start_step=0)
        for step in count(1):
            totals, _ = training.step(step, batches, training.plan.at(step))
            yield totals[0] / totals[1]


def bare(cfg: Config) -> Iterator[Tensor]:
    """Train the same network by the shortest loop, with the same settings for CPUs, and yield the loss of each step."""
    hardware, data, net = made(cfg)
    net = net.to(hardware.device, torch.bfloat16 if hardware.precision == "bf16-true" else None)
    distributed.install_kernels(net.encodings, hardware)
    optimizer = make_optimizer(net, cfg.optim)
    batches = micro_batches(data, cfg.batch_shape, cfg.seed, pin_memory=hardware.device == "cuda")
    if hardware.compile:
        net.compile()
    for step in count():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.optim, cfg.trainer.max_steps)
        x, y = (tokens.to(hardware.device, non_blocking=True) for tokens in next(batches))
        with hardware.autocast():
            loss = net(x, targets=y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.optim.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def training(options: Any) -> Iterator[Row]:
    """Yield a row for the bare loop and one for each encoding: a step beside that of train.py with RoPE, in turns.

    Raises AssertionError: the bare loop and train.py have other losses, so they do not do the same work.
    """
    rope = configuration(options, "rope")
    of_rope = Steps(options.steps, trained(rope))
    of_bare = Steps(options.steps, bare(rope))
    yield _compared("rope, bare loop", of_bare, of_rope, options)
    both = [torch.tensor(steps.losses) for steps in (of_rope, of_bare)]
    torch.testing.assert_close(*both, rtol=1e-3, atol=0)
    for encoding in options.encodings or cli.encoding_names():
        cfg = configuration(options, encoding)
        yield _compared(cfg.pe["name"], Steps(options.steps, trained(cfg)), of_rope, options)


def _compared(name: str, steps: Steps, of_rope: Steps, options: Any) -> Row:
    """The row of a training."""
    print(name, file=sys.stderr, flush=True)
    rope_seconds, seconds = interleave(of_rope, steps, options.rounds)
    tokens = options.trainer["batch_size"] * options.train_len * options.steps
    row = {"": name, "time of a step / rope's": ratio(seconds, rope_seconds)}
    return row | {"tokens/s": f"{tokens / median(seconds):,.0f}"}
