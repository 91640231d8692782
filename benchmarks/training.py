"""The step of train.py beside others on the same first weights and batches: a bare PyTorch loop, and nanoGPT's."""

import contextlib
import io
import math
import runpy
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import data as data_sources
from benchmarks.measure import Worker, interleave, ratio, timed
from conf import cli, compose
from conf.schema import Config, ConfigError, check
from data.sampler import micro_batches
from model.gpt import GPT
from model.hf.architectures import ARCHITECTURES
from train import setup, training_step
from training.distributed import launch
from training.hardware import Hardware, tune_cpu
from training.optimizer import learning_rate, make_optimizer


class Job:
    """What a training needs besides its loop, made as train.py makes it; `tune`: with its settings of a CPU."""

    def __init__(self, cfg: Config, *, tune: bool = True) -> None:
        t, data = cfg.trainer, data_sources.build(cfg.data)
        self.cfg, self.hardware = cfg, Hardware.resolve(**t.model_dump(include={"accelerator", "precision", "compile"}))
        self.device = self.hardware.device
        if tune and self.device == "cpu":
            tune_cpu()
        data.prepare()
        self.net = GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len, seed=cfg.seed)
        options = t.model_dump(include={"batch_size", "grad_accum_steps", "num_workers"})
        pin = self.device == "cuda"
        self.batches = micro_batches(data, length=cfg.train_len, seed=cfg.seed, pin_memory=pin, **options)


def configuration(options: Any, encoding: str | dict[str, Any], **sections: Any) -> Config:
    """The run that train.py would make of the options, with other `sections` where given. Raises ConfigError."""
    own = {key: getattr(options, key) for key in ("model", "data", "trainer", "train_len")} | sections
    own["trainer"] = own["trainer"] | {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    return check(cli.compose() | own | {"pe": compose.encoding(encoding)})


def trained(cfg: Config) -> Iterator[Tensor]:
    """Train as train.py does; yields the loss of each step."""
    job = Job(cfg)
    with launch(cfg.trainer, job.hardware) as fabric:
        model, optimizer = setup(fabric, job.net, cfg, job.hardware)
        for step in count(1):
            totals, _ = training_step(fabric, model, optimizer, job.batches, cfg, step)
            yield totals[0] / totals[1]


def bare(cfg: Config) -> Iterator[Tensor]:
    """Train the same by the shortest loop, with the same settings of a CPU; yields the loss of each step."""
    job = Job(cfg)
    net = job.net.to(job.device, torch.bfloat16 if job.hardware.precision == "bf16-true" else None)
    if job.hardware.compile:
        net.compile()
    return loop(job, net, make_optimizer(net, cfg.optim, job.device), net.loss, job.batches)


def nanogpt(cfg: Config, folder: str, steps: int) -> Iterator[Tensor]:
    """Train the same network as nanoGPT's train.py does, on batches that are ready in memory; yields each loss."""
    job, o, gpt2 = Job(cfg, tune=False), cfg.optim, ARCHITECTURES["gpt2"]
    size = {"n_layer": cfg.model.n_layer, "n_head": cfg.model.n_head, "n_embd": cfg.model.dim, "dropout": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        peer = runpy.run_path(str(Path(folder) / "model.py"), run_name="nanogpt")
        sizes = peer["GPTConfig"](block_size=cfg.train_len, vocab_size=job.net.vocab_size, bias=False, **size)
        net = peer["GPT"](sizes).to(job.device)
        optimizer = net.configure_optimizers(o.weight_decay, o.lr, (o.beta1, o.beta2), job.device)
    net.load_state_dict({gpt2.tensors(name)[0]: weight for name, weight in job.net.state_dict().items()})
    call = torch.compile(net) if job.hardware.compile else net
    ready = [tuple(part.to(job.device) for part in next(job.batches)) for _ in range(steps)]
    return loop(job, net, optimizer, lambda x, y: call(x, y)[1], iter(ready))


def loop(
    job: Job, net: nn.Module, optimizer: Any, loss_of: Callable[[Tensor, Tensor], Tensor], batches: Iterator[Any]
) -> Iterator[Tensor]:
    """A bare PyTorch loop over micro-batches, inputs and targets int64 [B, T]; yields the loss of each step."""
    n, o = job.cfg.trainer.grad_accum_steps, job.cfg.optim
    for step in count():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, o, job.cfg.trainer.max_steps)
        total = torch.zeros((), device=job.device)
        for _ in range(n):
            x, y = (part.to(job.device, non_blocking=True) for part in next(batches))
            with job.hardware.autocast():
                loss = loss_of(x, y) / n
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(net.parameters(), o.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        yield total


def beside(options: Any, cfg: Config, tolerance: float, other: Callable[..., Any], *arguments: Any) -> dict[str, str]:
    """The row of a table: train.py's step and `other`, each in a process of its own, in turns."""
    job, t = Job(cfg), cfg.trainer
    base, own = Worker(options.steps, other, cfg, *arguments), Worker(options.steps, trained, cfg)
    of_base, of_own = interleave(base, own, options.rounds)
    losses = torch.tensor([own.losses, base.losses])
    torch.testing.assert_close(*losses, rtol=tolerance, atol=0)  # where they differ, speeds do not compare
    seconds = median(of_own) / options.steps
    making_batches = t.grad_accum_steps * timed(lambda: next(job.batches))()
    return {
        "network": f"{cfg.model.n_layer} x {cfg.model.dim}, {cfg.pe['name']}, batch {t.batch_size} x {cfg.train_len}",
        f"speed of train.py / {other.__name__}": ratio(of_base, of_own),
        "train.py, tokens/s": f"{t.batch_size * cfg.train_len / seconds:,.0f}",
        "making batches, % of its step": f"{100 * making_batches / seconds:.1f}",
        "last losses": f"{losses[0, -1]:.3f}, {losses[1, -1]:.3f}",
    }


def training(options: Any) -> list[dict[str, str]]:
    """Rows of mode=training, one for each encoding: beside the bare loop."""
    return [beside(options, configuration(options, pe), 1e-3, bare) for pe in options.encodings or ["rope"]]


def peers(options: Any) -> list[dict[str, str]]:
    """Rows of mode=peers, one for each shape: beside nanoGPT. It decays its positions, so losses differ a little."""
    if not options.nanogpt or not (Path(options.nanogpt) / "model.py").is_file():
        raise ConfigError(f"nanogpt={options.nanogpt}: name the folder of a checkout of nanoGPT, with its model.py")
    rows = []
    for n_layer, n_head, dim, length, batch in options.shapes:
        model = options.model | {"n_layer": n_layer, "n_head": n_head, "dim": dim, "mlp": "gelu_exact"}
        trainer = options.trainer | {"batch_size": batch, "grad_accum_steps": 1}
        cfg = configuration(options, "learned", model=model, trainer=trainer, train_len=length)
        rows.append(beside(options, cfg, 0.02, nanogpt, options.nanogpt, (options.rounds + 1) * options.steps))
    return rows
