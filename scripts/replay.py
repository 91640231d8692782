"""Compute an optimizer step of a run once more, to see why its loss or its gradient was not finite.

python scripts/replay.py run=runs/yarn-code step=37

Training is repeated in memory from the newest checkpoint before the step; the run stays as it is. With a CPU and one
process the weights are those of the run to the bit. Prints the samples of the step, each with its beginning and its
loss without dropout, and the norms of the gradients.
"""

import hydra
import torch
from omegaconf import DictConfig
from pydantic import Field

import data as data_sources
from conf.cli import friendly_errors, plain
from conf.init_from import load_weights
from conf.run_dir import check_identity, data_options, find, read_config
from conf.schema import ConfigError, Section, check, parse
from model.gpt import GPT
from train import setup, train_batches, training_step
from training import checkpoints, distributed
from training.hardware import Hardware, tune_cpu
from training.optimizer import NonFiniteError

SHOWN = 32  # tokens of a sample; gradients


class Arguments(Section):
    run: str
    step: int = Field(ge=1)
    cache_dir: str


@friendly_errors
@hydra.main(version_base="1.3", config_path="../conf", config_name="replay")
def main(composed: DictConfig) -> None:
    args = parse(Arguments, plain(composed))
    path = find(args.run)
    cfg = check(read_config(path) | {"runs_dir": str(path.parent), "name": path.name})
    t = cfg.trainer = cfg.trainer.model_copy(update={"devices": 1, "num_nodes": 1, "strategy": "auto"})
    if args.step > t.max_steps:
        raise ConfigError(f"step={args.step}: the run has {t.max_steps}")
    hardware = Hardware.resolve(accelerator=t.accelerator, precision=t.precision, compile=t.compile)
    if hardware.device == "cpu":
        tune_cpu()
    data = data_sources.build(data_options(path, args.cache_dir))
    data.prepare(progress=True)
    check_identity(path, data.identity())
    net = GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len, seed=cfg.seed)
    if cfg.init_from and not checkpoints.steps_in(path / "checkpoints"):
        load_weights(net, data, cfg.init_from, partial=cfg.init_partial)
    with distributed.launch(t, hardware) as fabric:
        model, optimizer = setup(fabric, net, cfg, hardware)
        done = checkpoints.resume(path / "checkpoints", net, optimizer, before=args.step).step
        print(f"step {args.step} of {path}, from step {done}")
        batches = train_batches(fabric, data, cfg, done)
        for step in range(done + 1, args.step):
            training_step(fabric, model, optimizer, batches, cfg, step)
        samples = [next(batches) for _ in range(t.grad_accum_steps)]
        net.eval()
        for i, (x, y) in enumerate((x, y) for batch in samples for x, y in zip(*batch, strict=True)):
            with torch.no_grad(), hardware.autocast():
                loss = net(*fabric.to_device((x[None],)), targets=fabric.to_device(y[None]))
            text = data.decode(x[:SHOWN].tolist())
            print(f"sample {(args.step - 1) * t.batch_size + i}: loss {loss:.4f}  {text!r}")
        net.train()
        cfg.optim.grad_clip = None  # show the gradients as they are
        norms: dict[str, float] = {}

        def look(*_: object) -> None:
            norms.update({name: float(p.grad.norm()) for name, p in net.named_parameters() if p.grad is not None})

        optimizer.register_step_pre_hook(look)
        try:
            _, norm = training_step(fabric, model, optimizer, iter(samples), cfg, args.step)
        except NonFiniteError as error:  # before the optimizer was asked
            look()
            print(error)
            norm = torch.tensor(torch.nan)
        for name, size in sorted(norms.items(), key=lambda pair: -pair[1] if pair[1] == pair[1] else -torch.inf)[
            :SHOWN
        ]:
            print(f"gradient {size:.3e}  {name}")
        print(f"gradient {float(norm):.3e}  of all {len(norms)} parameters")


if __name__ == "__main__":
    main()
