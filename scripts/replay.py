"""Compute an optimizer step of a run once more, to see why its loss or its gradient was not finite.

python scripts/replay.py run=runs/yarn-code step=37

Training is repeated from the newest checkpoint before the step, in memory: the run stays as it is. So the weights are
those that the run had, on a CPU to the bit. Printed are the samples of the step, each with its loss (without dropout)
and its beginning, and the gradients' norms.
"""

import math
from typing import Any

import lightning.pytorch as L
import torch
from pydantic import Field

import conf.cli
import data as data_sources
from conf.parent import begin
from conf.rundir import RunDir, check_identity, find, read_config
from conf.schema import ConfigError, Section, check, parse
from data.base import Data
from model.checkpoints import newest_checkpoint
from model.gpt import GPT
from model.lit import NonFiniteError
from model.machine import Machine, tune_cpu
from train import loop

SHOWN = 32  # tokens of each sample, and gradients


class Arguments(Section):
    run: str
    step: int = Field(ge=1)


class Show(L.Callback):
    """Prints what goes into optimizer step `step`, and what comes out."""

    def __init__(self, step: int, data: Data) -> None:
        self.step, self.data = step, data

    def on_train_batch_start(self, trainer: L.Trainer, lit: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 != self.step:
            return
        first = (batch_idx * trainer.world_size + trainer.global_rank) * len(batch[0])
        lit.net.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            for i, (x, y) in enumerate(zip(*batch, strict=True), first):
                print(
                    f"sample {i}: loss {lit.net.loss(x[None], y[None]):.4f}  {self.data.decode(x[:SHOWN].tolist())!r}"
                )
        lit.net.train()

    def on_before_optimizer_step(self, trainer: L.Trainer, lit: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 != self.step:
            return
        norms = {name: float(p.grad.norm()) for name, p in lit.net.named_parameters() if p.grad is not None}
        worst = sorted(norms, key=lambda name: -norms[name] if math.isfinite(norms[name]) else -math.inf)
        for name in worst[:SHOWN]:
            print(f"gradient {norms[name]:.3e}  {name}")
        print(f"gradient {math.hypot(*norms.values()):.3e}  of all {len(norms)} parameters")


def main(arguments: dict[str, str]) -> None:
    args = parse(Arguments, arguments, strings=True)
    path = find(args.run)
    cfg = check(read_config(path) | {"runs_dir": str(path.parent), "name": path.name})
    if args.step > cfg.trainer.max_steps:
        raise ConfigError(f"step={args.step}: the run has {cfg.trainer.max_steps}")
    machine = Machine.choose(**cfg.trainer.model_dump(include={"accelerator", "precision", "compile"}))
    if machine.device == "cpu":
        tune_cpu()
    # One process: the same batch, in larger portions.
    cfg.trainer = cfg.trainer.model_copy(update={"devices": 1, "num_nodes": 1, "strategy": "auto"})
    data = data_sources.build(cfg.data)
    data.prepare(progress=True)
    check_identity(path, data.identity())
    net = GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len, seed=cfg.seed)
    checkpoint, done = newest_checkpoint(path / "checkpoints", before=args.step)
    if cfg.init_from and not checkpoint:
        begin(net, data, cfg.init_from, partial=cfg.init_partial)
    net.to(machine.device)
    print(f"step {args.step} of {path}, from step {done}")
    show = Show(args.step, data)
    try:
        loop(net, data, cfg, RunDir(cfg), machine, callbacks=[show], checkpoint=checkpoint, done=done, last=args.step)
    except NonFiniteError as error:
        print(error)


if __name__ == "__main__":
    conf.cli.script(main)
