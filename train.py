"""Train a small GPT with the position encoding of your choice, then measure how far beyond its training length it goes.

python train.py pe=yarn                       on the standard library's source, with what this machine has
python train.py pe=cope train_len=512 trainer.max_steps=1000 name=cope-512
python train.py --help                        every group and key
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import conf.cli
import data as data_sources
from conf.parent import begin, keep_tokenizer
from conf.rundir import RunDir, read_metrics
from conf.schema import Config
from data.base import Data
from data.sampler import BatchSampler, micro_batch, train_loader
from evaluation import lengths, loggers
from evaluation.results import Results, Training, task_rows
from model import processes, store
from model.gpt import GPT
from model.machine import Machine, peak_memory, tune_cpu


def train(cfg: Config) -> Results:
    """Train, evaluate and report the run that `cfg` describes; continue it, or only report it, as far as it has come.

    Raises:
        ValueError, OSError: with the remedy. What a user can get wrong is found before the run directory is touched.
    """
    t = cfg.trainer
    machine = Machine.choose(**t.model_dump(include={"accelerator", "precision", "compile"}))
    t.precision = machine.precision  # type: ignore[assignment]  # recorded: a run may not continue in another
    t.devices = processes.devices(t.devices, num_nodes=t.num_nodes, device=machine.device)
    micro_batch(t.batch_size, t.accumulate, t.devices * t.num_nodes)  # or an error
    with processes.joined(t.devices, num_nodes=t.num_nodes, strategy=t.strategy, device=machine.device):
        return train_together(cfg, machine)


def train_together(cfg: Config, machine: Machine) -> Results:
    """The same on one of several processes, which all do this: what writes files waits for the first of them."""
    run = RunDir(cfg)
    run.check()
    if run.complete:
        print(f"{run.path} is complete: overwrite=true trains it again, scripts/evaluate.py evaluates it anew")
        return report(Results.load(run.results))

    if machine.device == "cpu":
        tune_cpu()
    data = data_sources.build(cfg.data)
    data.prepare(progress=processes.first())
    run.check_data(data.identity())
    net = GPT(cfg.model, cfg.pe, vocab_size=data.vocab_size, train_len=cfg.train_len, seed=cfg.seed).to(machine.device)
    describe(cfg, net, data, machine)
    source = cfg.init_from
    if source and run.continues:
        source = None  # all that it gave is in the checkpoint, and it may be gone
    if source:
        fresh = begin(net, data, source, partial=cfg.init_partial)
        print(f"beginning with the weights of {source}" + (f"; left fresh: {', '.join(fresh)}" if fresh else ""))
    mirror = loggers.build(run, net.n_parameters())
    data.train_batch([0], cfg.train_len, cfg.seed)
    evaluate(net, data, cfg, limit=1)  # a dry run, so that it cannot fail after hours of training

    with run.lock(), mirror:
        run.make(data.identity())
        if source:
            processes.once(keep_tokenizer)(source, run.path)
        fit(net, data, cfg, run, machine, mirror.update)
        processes.once(store.save)(net, run.path, pe=cfg.pe, tokenizer=data.identity())
        results = complete(evaluate(net, data, cfg, progress=print), net, cfg, run, machine, mirror)
    return report(results)


@processes.once
def complete(results: Results, net: GPT, cfg: Config, run: RunDir, machine: Machine, mirror: loggers.Mirror) -> Results:
    """Write down what was measured, and what the training took."""
    from evaluation import figures  # takes a second to import

    results.training = training_summary(net, cfg, run, machine)
    figure = run.path / "figures" / "extrapolation.png"
    figures.draw(results, figure)
    run.append_metrics(task_rows(results, cfg.trainer.max_steps))
    mirror.publish(results, [figure])
    results.save(run.results)  # last: with it the run is complete
    return results


def describe(cfg: Config, net: GPT, data: Data, machine: Machine) -> None:
    """Print what is about to run."""
    counts, t = net.n_parameters(), cfg.trainer
    print(f"run {cfg.name}: {t.max_steps} steps of {t.batch_size} x {cfg.train_len} tokens")
    for line in data.describe():
        print(line)
    print(
        f"model: {counts['total']:,} parameters ({counts['embedding']:,} embedding, {counts['position']:,} position), "
        f"{net.flops_per_token(cfg.train_len) / 1e6:.1f} MFLOP a token"
    )
    # one with parameters, where some have none: it knows its device
    encoding = next((pe for pe in net.encodings if any(True for _ in pe.parameters())), net.encodings[0])
    with torch.autocast(machine.device, torch.bfloat16, enabled=machine.precision.startswith("bf16")):  # as in training
        lines = encoding.describe()
    for line in lines or [f"position encoding: {cfg.pe['name']}"]:
        print(line)
    for line in machine.describe():
        print(line)
    if processes.count() > 1:
        each = micro_batch(t.batch_size, t.accumulate, processes.count())
        print(f"{processes.count()} processes, each with {t.accumulate} x {each} sequences of a batch")


def fit(net: GPT, data: Data, cfg: Config, run: RunDir, machine: Machine, mirror: Callable[[], None]) -> None:
    """Train `net` in place to the last step, from the newest checkpoint of the run if there is one.

    Raises:
        SystemExit: it was stopped before, see `model.stop`.
    """
    from model.callbacks import ProgressLine, StepEnd
    from model.checkpoints import newest_checkpoint
    from model.stop import Stop

    t, stop = cfg.trainer, Stop(cfg.trainer.time_limit)
    checkpoint, done = processes.once(newest_checkpoint)(run.path / "checkpoints")
    run.truncate_metrics(done)
    if checkpoint:
        print(f"continuing {run.path} after step {done}")

    def validate() -> dict[str, float]:
        net.position_metrics()  # forgets what other evaluations saw
        row = lengths.validate(net, data, cfg)
        metrics = {f"position/{name}": value for name, value in lengths.position_metrics(net, data, cfg).items()}
        bits = {} if row.bits_per_byte is None else {"val/bits_per_byte": row.bits_per_byte}
        error = {} if row.error is None else {"val/error": row.error}
        return {"val/loss": row.loss} | bits | error | metrics

    at_step = StepEnd(
        metrics=run.metrics,
        checkpoints=run.path / "checkpoints",
        validate=validate,
        mirror=mirror,
        tokens_per_step=t.batch_size * cfg.train_len,
        max_steps=t.max_steps,
        log_every=t.log_every,
        val_every=t.val_every,
        checkpoint_every=t.checkpoint_every,
        checkpoint_minutes=t.checkpoint_minutes,
        keep=t.keep_checkpoints,
        stop=stop,
    )
    callbacks = [at_step, ProgressLine(at_step)]
    with stop.listening():
        loop(net, data, cfg, run, machine, callbacks=callbacks, checkpoint=checkpoint, done=done)
    if at_step.stopped:
        print(f"{at_step.stopped}: stopped after step {at_step.step}, the same command goes on")
        raise SystemExit(at_step.exit_code)


def loop(
    net: GPT,
    data: Data,
    cfg: Config,
    run: RunDir,
    machine: Machine,
    *,
    callbacks: list[Any],
    checkpoint: Path | None,
    done: int,
    last: int | None = None,
) -> None:
    """Train `net` in place from `checkpoint`, of step `done`, to step `last` or the end; the callbacks do the rest."""
    from model import trainer as engine

    t = cfg.trainer
    lit, strategy = engine.build_module(
        net,
        t.strategy,
        processes.count(),
        compile=machine.compile,
        seed=cfg.seed,
        max_steps=t.max_steps,
        **cfg.optim.model_dump(),
    )
    trainer = engine.build_trainer(
        run.path,
        machine,
        devices=t.devices,
        num_nodes=t.num_nodes,
        strategy=strategy,
        max_steps=last or t.max_steps,
        accumulate=t.accumulate,
        callbacks=callbacks,
    )
    sampler = BatchSampler(
        batch_size=t.batch_size,
        accumulate=t.accumulate,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        steps=t.max_steps,
        start_step=done,
    )
    loader = train_loader(
        data,
        sampler,
        length=cfg.train_len,
        seed=cfg.seed,
        num_workers=t.num_workers,
        pin_memory=machine.device == "cuda",
    )
    tries = machine.compile and t.strategy != "fsdp"  # a trial of the whole network may need more than a device has
    if tries and (failure := engine.compile_or_explain(net, machine, sampler.micro, cfg.train_len)):
        print(f"not compiled after all: {failure}")
    trainer.fit(lit, loader, ckpt_path=checkpoint, weights_only=True)
    lit.assemble()
    net.to(machine.device)  # Lightning takes the network back to the CPU


def evaluate(net: GPT, data: Data, cfg: Config, **options: Any) -> Results:
    """Validation and length extrapolation; `options` go to `evaluation.lengths.evaluate`."""
    measured = lengths.evaluate(net, data, cfg, **options)
    return Results(
        run=str(cfg.name),
        encoding=cfg.pe["name"],
        data=cfg.data["name"],
        seed=cfg.seed,
        train_len=cfg.train_len,
        validation=lengths.validate(net, data, cfg, options.get("limit")),
        lengths=measured.rows,
        by_position=measured.by_position,
        skipped=measured.skipped,
    )


def training_summary(net: GPT, cfg: Config, run: RunDir, machine: Machine) -> Training:
    """What the training took, from metrics.jsonl, so that interrupted runs count in full."""
    seconds, tokens = 0.0, 0
    for row in read_metrics(run.path):
        seconds += (row["tokens"] - tokens) / row["tokens_per_s"]
        tokens = row["tokens"]
    return Training(
        steps=cfg.trainer.max_steps,
        tokens=tokens,
        seconds=round(seconds, 1),
        tokens_per_s=round(tokens / seconds, 1),
        parameters=net.n_parameters(),
        flops_per_token=net.flops_per_token(cfg.train_len),
        peak_memory_mb=round(peak_memory(machine.device) / 2**20, 1),
        device=machine.device,
        precision=machine.precision,
    )


def report(results: Results) -> Results:
    """Print the results."""
    Console(width=None if sys.stdout.isatty() else 1000).print(results.table())  # a file has no width to keep to
    v = results.validation
    beside = "" if v.bits_per_byte is None else f", {v.bits_per_byte:.3f} bits per byte"
    beside += "" if v.error is None else f", {v.error:.2f} % wrong"
    print(f"validation loss {v.loss:.4f}{beside}, on {v.tokens:,} tokens at {v.length}")
    if t := results.training:
        print(f"trained {t.steps} steps, {t.tokens:,} tokens in {t.seconds:.0f} s: {t.tokens_per_s:,.0f} tokens/s")
    return results


def show(cfg: Config) -> None:
    """Write the page of a complete run. Jobs of a sweep have none of their own: scripts/report.py makes one of all."""
    from evaluation import page

    if processes.number() == 0:
        page.write_beside(RunDir(cfg).path)


if __name__ == "__main__":
    conf.cli.run(train, alone=show)
