"""Train a small GPT with the position encoding of your choice, then measure how far beyond its training length it goes.

python train.py                               on the standard library's source, with what this machine has
python train.py pe=cope train_len=512 trainer.max_steps=1000 name=cope-512
python train.py --help                        every group and key
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from ropewalk.app.start import run

    run("train")

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from conf.schema import Config
from data.base import IGNORE_INDEX, Data, build_data
from data.sampler import micro_batches
from model import position, serialization
from model.gpt import GPT
from model.position.base import PositionEncoding
from ropewalk.app.cli import program
from ropewalk.app.run_dir import RunDir, Validation, check_identity, read_config, read_metrics, read_training
from ropewalk.app.sweep import configure
from ropewalk.app.trained import base_model, load_weights, original_len, vocab_size
from ropewalk.evaluation import loggers, results
from ropewalk.evaluation.measures import lengths
from ropewalk.files import append, sync, write_json
from ropewalk.report import page, terminal
from ropewalk.training import checkpoints, distributed
from ropewalk.training.checkpoints import Progress
from ropewalk.training.console import describe, show
from ropewalk.training.distributed import any_rank, is_rank_zero, on_rank_zero, rank_zero_only
from ropewalk.training.hardware import (
    Hardware,
    allow_graphs,
    check_memory,
    explain_compile_errors,
    measured_flops,
    peak_memory,
    tune,
)
from ropewalk.training.optimizer import check_finite, clip_gradients, learning_rate, make_optimizer
from ropewalk.training.positions import draw_positions, draw_window
from ropewalk.training.sharding import assign, average_unsharded_gradients
from ropewalk.training.stop import INTERRUPTED, STOPPED, Stop

if TYPE_CHECKING:  # takes seconds to import, so ropewalk.training.distributed does it when the configuration is checked
    from lightning.fabric import Fabric

Row = dict[str, Any]  # of metrics.jsonl


def train(cfg: Config) -> float:
    """Train, evaluate and report the run that `cfg` describes, or resume it at whatever stage it was interrupted.

    Args:
        cfg: as `configure` returns it, with nothing left open.

    Returns:
        The number that a sweep may minimise: see `results.objective`.

    Raises:
        ValueError, OSError: with the remedy. Mistakes of a user are found before the run directory is touched.
        SystemExit: stopped early, see `ropewalk.training.stop`.
    """
    t = cfg.trainer
    hardware = Hardware.resolve(accelerator=t.accelerator, precision=t.precision, compile=t.compile, kernels=t.kernels)
    tune(hardware.device, deterministic=t.deterministic)
    with distributed.launch(t, hardware) as fabric:
        run = train_on(fabric, cfg, hardware)
        return report(run)


def train_on(fabric: "Fabric", cfg: Config, hardware: Hardware) -> RunDir:
    """Train and evaluate as `train` does. Runs on every rank; only rank zero writes files and prints."""
    run = RunDir(cfg)
    run.check()
    if run.complete and lengths.is_measured(run.path, cfg):
        print(f"{run.path} is complete and measured at these lengths:\noverwrite=true trains it again")
        return run

    # Tokenising may take hours: compare the vocabulary with that of the base model before it, not after.
    data = build_data(cfg.data)
    base = base_model(cfg.init_from)
    vocabulary = vocab_size(data, base)
    data.prepare(progress=is_rank_zero())
    identity = data.identity()
    if run.begun:
        check_identity(run.path, identity)

    # The device "meta" allocates nothing, so a network that is too large is refused before it takes any memory.
    with torch.device("meta"):
        net = GPT(cfg.model, cfg.pe, vocab_size=vocabulary, train_len=cfg.train_len)
    counts = net.n_parameters()
    size = {"parameters": counts, "flops_per_token": net.flops_per_token(cfg.train_len)}
    memory = check_memory(cfg, hardware, parameters=counts["total"], vocab_size=vocabulary)
    training = Training(fabric, cfg, hardware, data, net)
    net.init_weights(cfg.seed, assign)

    # With a checkpoint the base model's weights are no longer needed, and must not replace the trained ones.
    resumed = on_rank_zero(lambda: run.begun and any(checkpoints.steps_in(run.checkpoints)))
    if base and not resumed:
        missing = load_weights(net, base, partial=cfg.init_partial)
        print(f"starting from the weights of {cfg.init_from}; initialised at random: {', '.join(missing) or 'none'}")
    describe(cfg, net, data, hardware, memory, size)
    if cfg.init_optimizer and not resumed:
        training.load_checkpoint_of(Path(str(cfg.init_from)))
    training.rehearse()
    logger = loggers.Tracker(run, size)

    with run.lock():
        # All that may be missing or damaged is read before anything is written: an error leaves the run as it is.
        progress = training.resume(run)
        run.create(identity, data.tokenizer_files())
        run.truncate_metrics(progress.step)
        newest, keep = progress.step, cfg.trainer.keep_checkpoints
        on_rank_zero(lambda: checkpoints.prune(run.checkpoints, newest=newest, keep=keep))
        with logger:
            training.fit(run, logger, progress)

            # The final weights, what they are worth, and then the file that says that all is done.
            weights = checkpoints.on_cpu(net.state_dict())  # all ranks gather them; rank zero writes
            description: dict[str, Any] = {"pe": cfg.pe, "tokenizer": identity, "original_len": original_len(cfg, base)}
            on_rank_zero(lambda: serialization.save(net, run.path, weights=weights, **description))
            validation = lengths.validate(net, data, cfg, hardware.autocast)
            lengths.measure(net, data, cfg, hardware, run.path, run_id=run.run_id, step=progress.step)
            if is_rank_zero():
                logger.publish()
                # training.json marks the run as complete, so it must be the last file.
                write_json(run.path / "training.json", size | training.record(progress, validation))
                logger.attach_page()
    return run


@dataclass
class Due:
    """The work that follows an optimizer step."""

    validating: bool
    logging: bool
    measuring: bool
    saving: bool
    stopping: bool
    interrupted: bool  # by Ctrl-C, which has an exit code of its own

    @property
    def anything(self) -> bool:
        return self.logging or self.measuring or self.saving


@dataclass
class Training:
    """A network, its optimizer and its data. `model` is `net` on its device, wrapped by Fabric's strategy.

    Args:
        net: if it is on the device "meta", its parameters then lie where they are trained, without values.
    """

    fabric: "Fabric"
    cfg: Config
    hardware: Hardware
    data: Data
    net: GPT

    def __post_init__(self) -> None:
        self.net.checkpointing = self.cfg.trainer.checkpointing
        self.net.document_end = self.data.document_end
        self.net.context_parallel = distributed.context_parallel(self.cfg.trainer, self.hardware)
        distributed.allow_kernels_alike(self.net, self.hardware)
        self.peak_flops = measured_flops(self.hardware.device)  # now, while the device has room
        # Each stage gets graphs of its own, so that resuming within a stage changes no bit. Of a network in shards the
        # blocks alone are compiled: see `ropewalk.training.sharding`.
        if self.hardware.compile:
            allow_graphs(len(self.cfg.stages) + 1)
            if self.cfg.trainer.strategy != "fsdp":
                self.net.compile_parts(graphs=self.hardware.graphs)
        # Of a sharded network each rank materialises its part: see `shard`.
        if self.net.embedding.weight.is_meta and self.cfg.trainer.strategy != "fsdp":
            self.net.materialise("cpu")
        self.model: Any = self.fabric.setup_module(self.net)
        self.optimizer = make_optimizer(self.net, self.cfg.optim)
        self.kept_gradients: set[torch.nn.Parameter] = set()

    def load_checkpoint_of(self, base: Path) -> None:
        """Load weights and optimizer state of the newest checkpoint of another run. ValueError if it has none."""
        # The weights too: the moments belong to those of the checkpoint.
        if not checkpoints.resume(base / "checkpoints", self.net, self.optimizer).step:
            raise ValueError(f"init_optimizer=true needs a checkpoint, and {base} has none: leave it out")

    def rehearse(self) -> None:
        """Read a text of each kind that the run will need, so that an error comes now and not after hours."""
        for length in self.cfg.train_lengths:
            self.data.train_batch([0], length, self.cfg.seed)
        self.data.validation(self.cfg.train_len, self.cfg.trainer.val_tokens).batch(0, 1)
        list(lengths.evaluate(self.net, self.data, self.cfg, None, hardware=self.hardware))

    def resume(self, run: RunDir) -> Progress:
        """Load the newest checkpoint of a run that has begun. Only reads: no file changes.

        Raises:
            ValueError: checkpoints or rows are missing or damaged.
        """
        if not on_rank_zero(lambda: run.begun):  # a new run, or one in place of the old
            return Progress()
        progress = checkpoints.resume(run.checkpoints, self.net, self.optimizer)
        check_rows(run, progress)
        complete = run.complete
        if progress.step:
            ending = ": trained to the end, some measurements are missing" if complete else ""
            print(f"continuing {run.path} after step {progress.step}{ending}")
        return progress

    def fit(self, run: RunDir, logger: Any, progress: Progress) -> None:
        """Train from the step after `progress` to the last one; log, validate, measure and save where they are due.

        Updates `progress`.

        Raises:
            ValueError: the loss, its gradient or a weight is infinite or NaN.
            SystemExit: stopped early.
        """
        fabric, cfg, net = self.fabric, self.cfg, self.net
        grad_accum_steps = cfg.trainer.grad_accum_steps
        n_context = cfg.trainer.context_parallel  # ranks that read the same micro-batches
        batches = micro_batches(
            self.data, cfg.batch_shape, cfg.seed, start_step=progress.step, pin_memory=fabric.device.type == "cuda",
            grad_accum_steps=grad_accum_steps, rank=fabric.global_rank // n_context,
            world_size=fabric.world_size // n_context,
        )  # fmt: skip

        encodings = self.stage_encodings()
        totals = torch.tensor([progress.loss_sum, progress.loss_weight], device=fabric.device)  # since the last row
        norms: list[Tensor] = []  # not yet checked for infinity and NaN
        started = saved = time.perf_counter()
        with explain_compile_errors(), Stop(cfg.trainer.time_limit) as stop, self.checkpoint_writer(run) as writer:
            for step in range(progress.step + 1, cfg.trainer.max_steps + 1):
                window = draw_window(cfg.trainer.short_window, seed=cfg.seed, step=step)
                with net.with_encodings(encodings[cfg.stage_of(step - 1)]), net.with_window(window):
                    step_totals, norm = self.step(step, batches)
                totals += step_totals / (grad_accum_steps * fabric.world_size)  # alike for any number of ranks
                norms.append(norm)

                due = self.due(step, stop, saved)
                if due.anything:
                    # Steps are only queued on a GPU. Reading their norms waits for them, so the time is read after it.
                    check_finite(net, norms, step, cfg.optim)
                    norms.clear()
                    progress.step = step
                    progress.seconds += time.perf_counter() - started
                    progress.loss_sum, progress.loss_weight = totals.tolist()
                    progress.peak_memory = max(progress.peak_memory, peak_memory(self.hardware.device))
                    # The row comes before the checkpoint, which says how many rows there are.
                    if due.logging:
                        self.log(run, logger, progress, norm, validating=due.validating)
                        totals.zero_()
                    if due.measuring:
                        lengths.measure(net, self.data, cfg, self.hardware, run.path, run_id=run.run_id, step=step)
                    if due.saving:
                        # A checkpoint must not be ahead of the rows that it counts, even if the machine stops right
                        # after it.
                        sync(run.metrics)
                        writer.save(net, self.optimizer, progress)
                        saved = time.perf_counter()
                    # The clock starts anew: validation, evaluation and checkpoints do not count as training.
                    started = time.perf_counter()

                # After the checkpoint, so that nothing is lost.
                if due.stopping:
                    writer.wait()
                    reason = stop.reason or "another process was told to stop"
                    print(f"{reason}: stopped after step {step}; rerun the same command to resume")
                    raise SystemExit(INTERRUPTED if due.interrupted else STOPPED)

    def stage_encodings(self) -> list[list[PositionEncoding]]:
        """The encodings of all layers in each stage and, as the last entry, the network's own, for after the stages."""
        # An encoding derives tables and scales from the training length in its constructor. So that a stage trains as
        # a run of its length would, it gets encodings of its own, which take over the network's parameters.
        stages = []
        for stage in self.cfg.stages:
            shape = position.Shape.of(self.cfg.model, stage.train_len)
            stages.append(position.build_encodings(stage.pe, shape))
        return [*stages, self.net.encodings]

    def step(self, step: int, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Do optimizer step `step`, counted from 1, on the next micro-batches.

        The loss is the mean over all scored targets of the step; micro-batches may have different numbers of them.

        Returns:
            [sum of loss x share of scored targets, sum of the shares] over micro-batches and ranks; and the norm of
            the gradient before clipping. If that is not finite, the step changes no weight.
        """
        fabric, cfg, n = self.fabric, self.cfg, self.cfg.trainer.grad_accum_steps
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr_scale"] * learning_rate(step - 1, cfg.optim, cfg.trainer.max_steps)

        totals = torch.zeros(2, device=fabric.device)
        for m in range(n):
            # Dropout and random positions are seeded by the run's seed and the micro-batch, mixed by odd constants: a
            # resumed run repeats them without saved random state. Micro-batches are numbered over all ranks, as in
            # `micro_batches`, so that the number of ranks does not matter either.
            micro_batch = ((step - 1) * n + m) * fabric.world_size + fabric.global_rank
            mixed = cfg.seed * 0x9E3779B1 + micro_batch * 0x85EBCA77
            torch.manual_seed(mixed % 2**63)
            if self.hardware.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            # DDP averages gradients over ranks once, after the last micro-batch. FSDP does so after each: unreduced
            # gradients are whole tensors, and would fill the device.
            accumulating = m < n - 1 and cfg.trainer.strategy != "fsdp"
            with fabric.no_backward_sync(self.model, enabled=accumulating):
                totals += self.backward(*next(batches))

        # So far the gradient is that of the mean of loss x share over micro-batches and ranks. Divided by the mean
        # share it is that of the mean loss over all scored targets.
        totals = fabric.all_reduce(totals, reduce_op="sum")  # type: ignore[assignment]
        average_unsharded_gradients(self.net)
        norm = clip_gradients(self.model, n * fabric.world_size / totals[1], cfg.optim.grad_clip)
        # Fused AdamW skips the step where found_inf is 1, as under a GradScaler, without the CPU waiting for the norm.
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.hardware.graphs)
        return totals, norm

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the gradient of one micro-batch to those before.

        Args:
            x: inputs, int64 [B, T], on the CPU.
            y: targets, int64 [B, T], on the CPU.

        Returns:
            [loss x share of scored targets, this share].
        """
        t = self.cfg.trainer
        documents = self.net.documents(x)
        x, y = self.fabric.to_device((x, y))
        positions = draw_positions(t.positions, x.size(1), t.max_position, x.device)
        loss = self.model(x, targets=y, positions=positions, documents=documents)
        share = (y != IGNORE_INDEX).float().mean()
        # A loss that is not finite may have a finite gradient. Weighted by NaN the gradient shows it: in the norm, so
        # on every rank.
        weight = torch.where(loss.detach().isfinite(), share, math.nan)
        self.fabric.backward(loss * weight / t.grad_accum_steps)
        if self.hardware.graphs:
            self.keep_gradients()
        return torch.stack((loss.detach() * share, share))

    def keep_gradients(self) -> None:
        """Give each parameter's first gradient memory of its own, to which later ones are added.

        A first gradient lies in memory of a CUDA graph, which the next micro-batch overwrites.
        """
        for p in self.net.parameters():
            if p.grad is not None and p not in self.kept_gradients:
                p.grad = p.grad.clone()
                self.kept_gradients.add(p)

    def due(self, step: int, stop: Stop, saved: float) -> Due:
        """Return what is due after `step`, if the last checkpoint was saved at the time `saved`. All ranks agree."""
        t = self.cfg.trainer
        last = step == t.max_steps
        late = time.perf_counter() - saved > 60 * t.checkpoint_minutes
        stopping = bool(stop) and not last
        # Signals and clocks differ among ranks, but saving and stopping take all of them: if one rank must, all do.
        stopping, interrupted, late = any_rank(stopping, stop.reason == "SIGINT", late)
        validating = step % t.val_every == 0 or last
        return Due(
            validating=validating,
            logging=step % t.log_every == 0 or validating or step == 1,
            measuring=step in self.cfg.eval.at,
            saving=step % t.checkpoint_every == 0 or last or late or stopping,
            stopping=stopping,
            interrupted=interrupted,
        )

    def log(self, run: RunDir, logger: Any, progress: Progress, norm: Tensor, *, validating: bool) -> None:
        """Write a row of metrics.jsonl about the steps since the last one, print it, and show it in the tracker."""
        step, tokens = progress.step, self.cfg.step_tokens
        speed = (step - progress.logged_step) * tokens / (progress.seconds - progress.logged_seconds)
        row: Row = {
            "step": step,
            "tokens": step * tokens,
            "train/loss": progress.loss_sum / progress.loss_weight,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": float(norm),
            "tokens_per_s": round(speed, 1),
        }
        if self.peak_flops:
            flops = speed * self.net.flops_per_token(self.cfg.train_len)
            row["utilisation"] = flops / (self.peak_flops * self.fabric.world_size)
        if validating:
            row |= self.validation_row()
        if is_rank_zero():
            append(run.metrics, json.dumps(row) + "\n")
            logger.log(row)
            show(row, self.cfg)
        progress.rows += 1
        progress.logged_step = step
        progress.logged_seconds = progress.seconds
        progress.loss_sum = progress.loss_weight = 0.0

    def checkpoint_writer(self, run: RunDir) -> checkpoints.Writer:
        """What saves the checkpoints of a run. A GPU trains on meanwhile; a CPU would only share its cores."""
        t = self.cfg.trainer
        background = self.hardware.device == "cuda"
        return checkpoints.Writer(
            run.checkpoints, keep=t.keep_checkpoints, parts=t.checkpoint_parts, background=background
        )

    def validation_row(self) -> Row:
        """Validate, and return what that adds to a row of metrics.jsonl."""
        self.net.position_metrics()  # drops what the rehearsal and the measurements at eval.at have fed
        validation = lengths.validate(self.net, self.data, self.cfg, self.hardware.autocast)
        row: Row = {
            "val/loss": validation.loss,
            "val/bits_per_byte": validation.bits_per_byte,
            "val/error": validation.error,
        }
        metrics = {name: float(value) for name, value in self.net.position_metrics().items()}
        # Each rank has seen its own part of the validation texts.
        ranks = distributed.gather(metrics)
        for name in ranks[0]:
            row[f"position/{name}"] = sum(rank[name] for rank in ranks) / len(ranks)
        return {name: value for name, value in row.items() if value is not None}

    def record(self, progress: Progress, validation: Validation) -> dict[str, Any]:
        """Return what training.json says about a complete training."""
        tokens = progress.step * self.cfg.step_tokens
        return {
            "steps": progress.step,
            "tokens": tokens,
            "seconds": round(progress.seconds, 1),
            "tokens_per_s": round(tokens / max(progress.seconds, 1e-3), 1),
            "validation": validation.model_dump(),
            "peak_memory_mb": round(progress.peak_memory / 2**20, 1),
            "device": self.hardware.device,
            "precision": self.hardware.precision,
        }


@rank_zero_only
def check_rows(run: RunDir, progress: Progress) -> None:
    """Raise ValueError if the rows of a run and its newest checkpoint do not belong together: see `Progress`."""
    steps = []
    if run.metrics.exists():
        steps = [row["step"] for row in read_metrics(run.path)]
    # The interval between checkpoints may change when a run is resumed, so the first checkpoint was due after the
    # longer of the two at the latest.
    old_interval = read_config(run.path)["trainer"]["checkpoint_every"]
    first = max(old_interval, run.cfg.trainer.checkpoint_every)
    if run.complete:
        first = 0
    progress.check_rows(steps, first)


@rank_zero_only
def report(run: RunDir) -> float:
    """Print the results of a complete run, and write its page. Returns the number that a sweep may minimise."""
    terminal.show(run.path, run.cfg)
    record = read_training(run.path)
    validation = record.validation
    losses = f"validation loss {validation.loss:.4f} nats per token"
    if validation.bits_per_byte is not None:
        losses += f", {validation.bits_per_byte:.3f} bits per byte"
    if validation.error is not None:
        losses += f", {validation.error:.2f} % wrong"
    print(f"{losses}, on {validation.tokens:,} tokens in windows of {validation.length}")
    speed = f"{record.seconds:.0f} s: {record.tokens_per_s:,.0f} tokens/s"
    print(f"trained {record.steps} steps, {record.tokens:,} tokens in {speed}")
    print(f"to look at: {page.write_beside(run.path)}")
    return results.objective(results.load_all(run.path))


@program("config")
def main(composed: DictConfig) -> float:
    return train(configure(composed))
