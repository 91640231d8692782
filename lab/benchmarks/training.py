"""The step of train.py with RoPE, beside that of a bare PyTorch loop on the same batches, and that of each encoding."""

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from conf.options import by_name, encoding_names
from conf.options import encoding as options_of
from conf.schema import Config
from data.base import build_data
from data.sampler import micro_batches
from lab.benchmarks.measure import Row, interleave, ratio
from lab.board import trials
from model.gpt import GPT
from ropewalk.training import distributed
from ropewalk.training.hardware import Hardware, tune
from ropewalk.training.optimizer import learning_rate, make_optimizer
from ropewalk.training.ranks import assign
from train import Training


def configuration(options: Any, encoding: str | dict[str, Any]) -> Config:
    """Return the configuration that train.py would make of the options.

    Raises ConfigError: an option is wrong.
    """
    sections = options.model_dump(include={"model", "data", "trainer", "train_len"})
    return trials.configuration(**sections, pe=options_of(encoding))


def seconds_of(losses: Iterator[Tensor], steps: int) -> float:
    """Take some steps of a training, and return the seconds."""
    start = perf_counter()
    float(sum(islice(losses, steps)))  # waits for the device, so it belongs to the time
    return perf_counter() - start


def timed(losses: Iterator[Tensor], steps: int) -> Callable[[], float]:
    """Return a call of `seconds_of`, after the first steps, which compile and warm up."""
    seconds_of(losses, steps)
    return partial(seconds_of, losses, steps)


def made(cfg: Config, *, tuned: bool = True) -> tuple[Hardware, Any, GPT]:
    """The hardware, the data and the network of a run, on the device "meta".

    Args:
        tuned: choose the settings of PyTorch that train.py chooses, for the whole process.
    """
    t = cfg.trainer
    hardware = Hardware.resolve(accelerator=t.accelerator, precision=t.precision, compile=t.compile, kernels=t.kernels)
    if tuned:
        tune(hardware.device)
    data = build_data(cfg.data)
    data.prepare()
    with torch.device("meta"):
        net = GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len)
    return hardware, data, net


def trained(cfg: Config) -> Iterator[Tensor]:
    """Train as train.py does, and yield the loss of each step."""
    hardware, data, net = made(cfg)
    with distributed.launch(cfg.trainer, hardware) as fabric:
        training = Training(fabric, cfg, hardware, data, net)
        net.init_weights(cfg.seed, assign)
        batches = training.micro_batches(start_step=0)
        for step in count(1):
            totals, _ = training.step(step, batches, training.schedule.at(step))
            yield totals[0] / totals[1]


def bare(cfg: Config) -> Iterator[Tensor]:
    """Train the same network by the shortest loop, with the same settings for CPUs, and yield the loss of each step."""
    hardware, data, net = made(cfg)
    net.materialise(hardware.device)
    net.init_weights(cfg.seed)
    if hardware.precision == "bf16-true":
        net = net.to(torch.bfloat16)
    distributed.install_kernels(net.encodings, hardware)
    return loop(cfg, hardware, data, net, make_optimizer(net, cfg.optim), lambda x, y: net(x, targets=y))


def loop(
    cfg: Config,
    hardware: Hardware,
    data: Any,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[Tensor]:
    """Train any network by the shortest loop on the batches of a run, and yield the loss of each step."""
    batches = micro_batches(data, cfg.batch_shape, cfg.seed, pin_memory=hardware.device == "cuda")
    if hardware.compile:
        net.compile()
    for step in count():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.optim, cfg.trainer.max_steps)
        x, y = (tokens.to(hardware.device, non_blocking=True) for tokens in next(batches))
        with hardware.autocast():
            loss = loss_of(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.optim.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def training(options: Any) -> Iterator[Row]:
    """Yield a row for the bare loop and one for each encoding: a step beside that of train.py with RoPE, in turns."""
    encodings = by_name(options.encodings or encoding_names(), "encodings")
    rope = configuration(options, "rope")
    of_rope = timed(trained(rope), options.steps)
    others = {"rope, bare loop": partial(bare, rope)}
    for name, encoding in encodings.items():
        others[name] = partial(trained, configuration(options, encoding))
    tokens = options.trainer["batch_size"] * options.train_len * options.steps
    for name, begin in others.items():
        print(name, file=sys.stderr, flush=True)
        rope_seconds, seconds = interleave(of_rope, timed(begin(), options.steps), options.rounds)
        speed = f"{tokens / median(seconds):,.0f}"
        yield {"": name, "time of a step / rope's": ratio(seconds, rope_seconds), "tokens/s": speed}
