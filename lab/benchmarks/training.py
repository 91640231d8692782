"""The step of train.py beside others on the same first weights and batches: a bare PyTorch loop, and nanoGPT's."""

import contextlib
import math
import runpy
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Config, ConfigError
from data.base import build_data
from data.sampler import micro_batches
from lab.benchmarks.measure import Worker, interleave, ratio
from model.gpt import GPT
from ropewalk.app import cli, init_from
from ropewalk.app.resolve import check
from ropewalk.hf.architectures import ARCHITECTURES
from ropewalk.training.distributed import launch
from ropewalk.training.hardware import Hardware, allow_kernels, tune
from ropewalk.training.optimizer import learning_rate, make_optimizer
from train import Training


class Job:
    """Everything that a training needs besides its loop, made as train.py makes it.

    Args:
        cfg: the run.
        tuned: apply train.py's settings for CPUs.
    """

    def __init__(self, cfg: Config, *, tuned: bool = True) -> None:
        self.cfg = cfg
        trainer = cfg.trainer
        self.hardware = Hardware.resolve(
            accelerator=trainer.accelerator, precision=trainer.precision, compile=trainer.compile,
            kernels=trainer.kernels,
        )  # fmt: skip
        self.device = self.hardware.device
        if tuned:
            tune(self.device)
        self.data = build_data(cfg.data)
        self.data.prepare()
        self.net = GPT(cfg.model, cfg.pe, vocab_size=self.data.vocab_size, train_len=cfg.train_len, seed=cfg.seed)
        allow_kernels(self.net, self.hardware)
        self.batches = micro_batches(self.data, cfg.batch_shape, cfg.seed, pin_memory=self.device == "cuda")


def configuration(options: Any, encoding: str | dict[str, Any], **sections: Any) -> Config:
    """Return the configuration that train.py would make of the options, with some `sections` replaced.

    Raises ConfigError: an option is wrong.
    """
    values = init_from.train_values()
    values |= options.model_dump(include={"model", "data", "trainer", "train_len"})
    values |= sections
    # One process without accumulation, as in the loops that it is compared with.
    alone = {"devices": 1, "num_nodes": 1, "strategy": "auto", "replicas": 1, "context_parallel": 1}
    values["trainer"] = values["trainer"] | alone | {"grad_accum_steps": 1}
    values["pe"] = cli.encoding(encoding)
    return check(values)


def trained(cfg: Config) -> Iterator[Tensor]:
    """Train as train.py does, and yield the loss of each step."""
    return steps_of(Job(cfg))


def steps_of(job: Job) -> Iterator[Tensor]:
    """Train the network of `job` as train.py does, and yield the loss of each step."""
    with launch(job.cfg.trainer, job.hardware) as fabric:
        training = Training(fabric, job.cfg, job.hardware, job.data, job.net)
        for step in count(1):
            totals, _ = training.step(step, job.batches)
            yield totals[0] / totals[1]


def bare(cfg: Config) -> Iterator[Tensor]:
    """Train the same network by the shortest loop, with the same settings for CPUs, and yield the loss of each step."""
    job = Job(cfg)
    net = job.net.to(job.device)
    if job.hardware.precision == "bf16-true":
        net = net.to(torch.bfloat16)
    return loop(job, net, make_optimizer(net, cfg.optim), lambda x, y: net(x, targets=y))


def nanogpt(cfg: Config, folder: str) -> Iterator[Tensor]:
    """Train the same network as nanoGPT's train.py does, on our batches, and yield the loss of each step."""
    job = Job(cfg, tuned=False)
    optim = cfg.optim
    sizes = {
        "n_layer": cfg.model.n_layer,
        "n_head": cfg.model.n_head,
        "n_embd": cfg.model.dim,
        "block_size": cfg.train_len,
        "vocab_size": job.net.vocab_size,
    }
    # nanoGPT prints what it builds, but stdout is for the table.
    with contextlib.redirect_stdout(sys.stderr):
        peer = runpy.run_path(str(Path(folder) / "model.py"), run_name="nanogpt")
        net = peer["GPT"](peer["GPTConfig"](**sizes, dropout=0.0, bias=False)).to(job.device)
        betas = (optim.beta1, optim.beta2)
        optimizer = net.configure_optimizers(optim.weight_decay, optim.lr, betas, job.device)
    # nanoGPT names its tensors as GPT-2 does.
    names = ARCHITECTURES["gpt2"]
    weights = {}
    for name, weight in job.net.state_dict().items():
        weights[names.tensors(name)[0]] = weight
    net.load_state_dict(weights)
    return loop(job, net, optimizer, lambda x, y: net(x, y)[1])


def loop(job: Job, net: nn.Module, optimizer: Any, loss_of: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Train by a bare PyTorch loop over the batches of `job`, and yield the loss of each step."""
    if job.hardware.compile:
        net.compile()
    for step in count():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.cfg.optim, job.cfg.trainer.max_steps)
        x, y = next(job.batches)
        x = x.to(job.device, non_blocking=True)
        y = y.to(job.device, non_blocking=True)
        with job.hardware.autocast():
            loss = loss_of(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), job.cfg.optim.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def compare(options: Any, cfg: Config, tolerance: float, other: Callable[..., Any], *arguments: Any) -> dict[str, str]:
    """Return the row of a table: train.py's step beside `other`, each in a process of its own, in turns.

    Raises AssertionError: their losses differ by more than the relative `tolerance`, so they do not do the same work.
    """
    other_worker = Worker(options.steps, other, cfg, *arguments)
    our_worker = Worker(options.steps, trained, cfg)
    other_seconds, our_seconds = interleave(other_worker, our_worker, options.rounds)
    our_losses = torch.tensor(our_worker.losses)
    other_losses = torch.tensor(other_worker.losses)
    torch.testing.assert_close(our_losses, other_losses, rtol=tolerance, atol=0)
    batch = cfg.trainer.batch_size
    tokens = batch * cfg.train_len * options.steps
    return {
        "network": f"{cfg.model.n_layer} x {cfg.model.dim}, {cfg.pe['name']}, batch {batch} x {cfg.train_len}",
        f"speed of train.py / {other.__name__}": ratio(other_seconds, our_seconds),
        "train.py, tokens/s": f"{tokens / median(our_seconds):,.0f}",
    }


def training(options: Any) -> list[dict[str, str]]:
    """Return the rows of mode=training, one for each encoding: train.py beside the bare loop."""
    return [compare(options, configuration(options, pe), 1e-3, bare) for pe in options.encodings or ["rope"]]


def costs(options: Any) -> list[dict[str, str]]:
    """Return the rows of mode=cost: the time of train.py's step with each encoding, beside that with RoPE."""
    rope = configuration(options, "rope")
    of_rope = Worker(options.steps, trained, rope)
    rows = []
    for encoding in options.encodings or cli.encoding_names():
        cfg = configuration(options, encoding)
        print(cfg.pe["name"], file=sys.stderr, flush=True)
        rope_seconds, seconds = interleave(of_rope, Worker(options.steps, trained, cfg), options.rounds)
        tokens = cfg.trainer.batch_size * cfg.train_len * options.steps
        rows.append(
            {
                "": cfg.pe["name"],
                "time of a step / rope's": ratio(seconds, rope_seconds),
                "tokens/s": f"{tokens / median(seconds):,.0f}",
            }
        )
    return rows


def peers(options: Any) -> list[dict[str, str]]:
    """Return the rows of mode=peers, one for each shape: train.py beside nanoGPT.

    Raises:
        ConfigError: `options.nanogpt` is no checkout of nanoGPT.
    """
    check_nanogpt(options)
    return [peer(options, shape) for shape in options.shapes]


def check_nanogpt(options: Any) -> None:
    """Raise ConfigError if `options.nanogpt` is no checkout of nanoGPT."""
    if not options.nanogpt or not (Path(options.nanogpt) / "model.py").is_file():
        raise ConfigError(f"nanogpt={options.nanogpt}: name the folder of a checkout of nanoGPT, with its model.py")


def peer(options: Any, shape: list[int]) -> dict[str, str]:
    """Return a row: train.py beside nanoGPT with a network of this shape, one of `options.shapes`."""
    n_layer, n_head, dim, length, batch = shape
    model = options.model | {"n_layer": n_layer, "n_head": n_head, "dim": dim, "mlp": "gelu_exact"}
    trainer = options.trainer | {"batch_size": batch}
    cfg = configuration(options, "learned", model=model, trainer=trainer, train_len=length)
    # A wide tolerance: nanoGPT's weight decay includes its positions, so losses differ a little.
    return compare(options, cfg, 0.02, nanogpt, options.nanogpt)
