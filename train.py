"""Train a small GPT with the position encoding of your choice, then measure how far beyond its training length it goes.

python train.py                               on the standard library's source, with what this machine has
python train.py pe=cope train_len=512 trainer.max_steps=1000 name=cope-512
python train.py --help                        every group and key
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from ropewalk.app.cli import run

    run("train", schema="conf.schema:Config")  # it checks the configuration, imports this file as `train`, calls `main`

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor

from conf.files import sealed, write_json
from conf.schema import Config
from data.base import IGNORE_INDEX, Data, build_data, check_tokens
from data.sampler import micro_batches
from model import serialization
from model.gpt import GPT
from model.layout import Layout
from model.position.network import Encodings, metrics_of
from model.size import flops_per_token, n_parameters
from ropewalk.app.configure import configure
from ropewalk.app.init_from import check_start, load_weights, made_of, vocab_size
from ropewalk.app.resolve import base_model, for_this_machine, original_len, with_windows_in_tokens
from ropewalk.evaluation.evaluator import Evaluator, is_measured
from ropewalk.evaluation.objective import objective
from ropewalk.report import loggers, page
from ropewalk.run import processes
from ropewalk.run.directory import RunDir, check_identity
from ropewalk.run.stop import EXIT_INTERRUPTED, EXIT_STOPPED, noting_signals, reasons_to_stop
from ropewalk.training import checkpoints, distributed, rows
from ropewalk.training.hardware import Hardware, peak_memory, tune
from ropewalk.training.optimizer import check_finite, clip_gradients, learning_rate, make_optimizer
from ropewalk.training.ranks import Ranks, assign
from ropewalk.training.schedule import Schedule, draw_positions
from ropewalk.training.screen import Screen

if TYPE_CHECKING:  # slow to import: `distributed.launch` does it, after the configuration is checked
    from lightning.fabric import Fabric


def train(cfg: Config) -> None:
    """Train, evaluate and report the run that `cfg` describes, or resume it at whatever stage it was interrupted.

    Every rank runs all of it; only rank zero writes files and prints.

    Args:
        cfg: as `configure` returns it.

    Raises:
        ValueError, OSError: with the remedy. Mistakes of a user are found before the run directory is touched.
        SystemExit: stopped early, see `ropewalk.run.stop`.
    """
    deadline = time.monotonic() + 60 * (cfg.trainer.time_limit or torch.inf)  # a process may train several runs
    cfg, hardware = for_this_machine(cfg)
    tune(hardware.device, deterministic=cfg.trainer.deterministic)
    with distributed.launch(cfg.trainer, hardware) as fabric:
        run = RunDir(cfg)
        run.check()
        check_start(run)
        if run.complete and is_measured(run.path, cfg):
            print(f"{run.path} is already trained and evaluated with these settings")
        else:
            finish(run, fabric, hardware, deadline)
        page.show_results(run)


def finish(run: RunDir, fabric: "Fabric", hardware: Hardware, deadline: float) -> None:
    """Train until `deadline`, a time of `time.monotonic`, and evaluate what is still missing of a run."""
    cfg = run.cfg
    # The vocabularies are compared before tokenising, which may take hours.
    data = build_data(cfg.data)
    base = base_model(cfg.init_from)
    vocabulary = vocab_size(data, base)
    data.prepare()
    identity = data.identity()
    if run.begun:
        check_identity(run.path, identity)

    # The device "meta" allocates nothing: with FSDP each rank only ever holds its shards.
    with torch.device("meta"):
        net = GPT(
            cfg.model, cfg.pe, vocab_size=vocabulary, train_len=cfg.train_len, checkpointing=cfg.trainer.checkpointing
        )
    size: dict[str, Any] = {
        "parameters": n_parameters(net),
        "flops_per_token": flops_per_token(net, cfg.train_len),
    }
    training = Training(fabric, cfg, hardware, data, net)
    hardware = training.hardware  # without kernels where a rank cannot use them
    net.init_weights(cfg.seed, assign)

    training.rehearse()
    rows.print_summary(cfg, net, data, hardware, size)
    logger = loggers.Trackers(run, size)

    with run.lock():
        # All that may be missing or damaged is read before anything is written: an error leaves the run as it is.
        progress = training.start(run, base)
        run.create(identity | made_of(base), data.tokenizer_files())
        run.truncate_metrics(progress.step)
        checkpoints.prune(run.checkpoints, newest=progress.step, keep=cfg.trainer.keep_checkpoints)
        with logger:
            # What the weights were worth before, unless some of them are new or none will change.
            if base and not progress.step and cfg.trainer.max_steps and not cfg.init_partial:
                training.evaluator.measure_start(run, with_windows_in_tokens(base, cfg.train_len))
            training.fit(run, logger, progress, deadline)

            # The final weights, what they are worth, and then the file that says that all is done.
            weights = checkpoints.on_cpu(net.state_dict())  # all ranks gather them; rank zero writes
            processes.on_rank_zero(
                lambda: serialization.save(
                    net, run.path, weights=weights, pe=cfg.pe, tokenizer=identity, original_len=original_len(cfg, base)
                )
            )
            validation = training.evaluator.validate()
            training.evaluator.measure(run, progress.step)
            if processes.is_rank_zero():
                # training.json marks the run as complete, so it must be its last file. Trackers show costs from it.
                costs = rows.record(progress, cfg, hardware, validation)
                write_json(run.path / "training.json", sealed(size | costs))
                logger.publish()


class Due(NamedTuple):
    """What there is to do after a step."""

    logging: bool
    validating: bool
    measuring: bool
    saving: bool
    showing: bool  # how far it is, on the screen
    stopping: bool


class Training:
    """A network, its optimizer and its data.

    Args:
        net: on the device "meta"; it gets memory where it is trained, but no values.
    """

    def __init__(self, fabric: "Fabric", cfg: Config, hardware: Hardware, data: Data, net: GPT) -> None:
        self.fabric = fabric
        self.cfg = cfg
        self.data = data
        self.net = net  # training calls `ranks.model`, this network as the strategy wraps it
        self.ranks = Ranks(fabric, net, cfg, hardware)
        self.optimizer = make_optimizer(net, cfg.optim)
        self.schedule = Schedule(cfg, net)
        # Its `kernels` are False if any rank cannot use them.
        self.hardware = distributed.install_kernels(self.schedule.encodings, hardware)
        # How texts lie in all batches is decided here. With a `document_end` (data.documents=mask) documents are read
        # apart, by kernels or else by `model.layout`. `ropewalk.app.resolve` has refused what does not go together.
        self.packing = distributed.packing_of(cfg.trainer, self.hardware, data.document_end, self.schedule.encodings)
        self.evaluator = Evaluator(net, data, cfg, self.hardware, self.packing)

    def rehearse(self) -> None:
        """Read a text of each kind that the run will need, so that an error comes now and not after hours."""
        for length in self.cfg.train_lengths:
            check_tokens(*self.data.train_batch([0], length, self.cfg.seed), self.net.vocab_size)
        self.data.validation(self.cfg.train_len, self.cfg.trainer.val_tokens).batch(0, 1)
        self.evaluator.rehearse()

    def start(self, run: RunDir, base: dict[str, Any]) -> checkpoints.Progress:
        """Load the newest whole checkpoint of the run; before its first one, the weights of the model `base`, if any.

        No file changes.

        Raises:
            ValueError: every checkpoint is damaged, rows are missing, or the weights do not fit.
        """
        cfg = self.cfg
        progress = checkpoints.Progress()
        if processes.on_rank_zero(lambda: run.begun):
            progress = checkpoints.resume(run.checkpoints, self.net, self.optimizer)
            rows.check_rows(run, progress)
            print(f"resuming {run.path} after step {progress.step}")
        if base and not progress.step:
            missing = load_weights(self.net, base, partial=cfg.init_partial)
            at_random = ", ".join(missing) or "none"
            print(f"starting from the weights of {cfg.init_from}; initialised at random: {at_random}")
            if cfg.init_optimizer:
                checkpoints.take_over(base["source"], self.net, self.optimizer)
        return progress

    def fit(self, run: RunDir, logger: loggers.Trackers, progress: checkpoints.Progress, deadline: float) -> None:
        """Train from the step after `progress` to the last one; log, validate, measure and save where they are due.

        Updates `progress`. After `deadline`, a time of `time.monotonic`, it stops early.

        Raises:
            ValueError: the loss, its gradient or a weight is infinite or NaN.
            SystemExit: stopped early.
        """
        cfg = self.cfg
        t = cfg.trainer
        batches = self.micro_batches(start_step=progress.step)
        # Since the last row: sums over the steps of what `step` returns.
        totals = torch.tensor([progress.loss_sum, progress.loss_weight], device=self.fabric.device)
        norms: list[Tensor] = []  # not yet checked for infinity and NaN
        started = saved = time.perf_counter()
        with noting_signals() as signals, Screen(cfg, self.evaluator.tokens()) as screen:
            for step in range(progress.step + 1, t.max_steps + 1):
                step_totals, norm = self.step(step, batches, self.schedule.at(step))
                totals += step_totals
                norms.append(norm)

                due = self.what_is_due(
                    step,
                    time.perf_counter() - saved,
                    told_to_stop=bool(reasons_to_stop(signals, deadline)),
                    showing=screen.is_due(),
                )
                if due.logging or due.measuring or due.saving or due.showing:
                    # A GPU only queues steps. Reading their norms waits for them, and then the clock is read.
                    check_finite(self.net, norms, step, cfg.optim)
                    norms.clear()
                    progress.step = step
                    progress.seconds += time.perf_counter() - started
                    progress.loss_sum, progress.loss_weight = totals.tolist()
                    progress.peak_memory = max(progress.peak_memory, peak_memory(self.hardware.device))
                    # The row comes before the checkpoint, which says how many rows there are.
                    if due.logging:
                        screen.show(self.log(run, logger, progress, norm, validating=due.validating))
                        totals.zero_()
                    elif due.showing:
                        screen.show(rows.training_row(progress, cfg))
                    if due.measuring:
                        self.evaluator.measure_or_sample(run, step, logger.sample)
                    if due.saving:
                        # The rows must reach the disk before the checkpoint that counts them.
                        run.sync()
                        checkpoints.save(run.checkpoints, self.net, self.optimizer, progress, keep=t.keep_checkpoints)
                        saved = time.perf_counter()
                    # The clock starts anew: validation, evaluation and checkpoints do not count as training.
                    started = time.perf_counter()

                # After the checkpoint, so that nothing is lost.
                if due.stopping:
                    break

            # Also after a signal during the last step or what followed it: all is saved, and measurements can wait.
            reasons = reasons_to_stop(signals, deadline)
            stopped, interrupted = processes.any_rank(bool(reasons), "SIGINT" in reasons)
            if stopped:
                reason = ", ".join(reasons) or "another process was told to stop"
                print(f"{reason}: stopped after step {progress.step}; rerun the same command to resume")
                raise SystemExit(EXIT_INTERRUPTED if interrupted else EXIT_STOPPED)

    def what_is_due(self, step: int, since_saved: float, *, told_to_stop: bool, showing: bool) -> Due:
        """What is due after `step`, `since_saved` seconds after the last checkpoint. All ranks call it."""
        t = self.cfg.trainer
        # Signals and clocks differ among ranks, but stopping and saving take all of them: if one rank must, all do.
        overdue = since_saved > 60 * t.checkpoint_minutes
        stopping, overdue, showing = processes.any_rank(told_to_stop, overdue, showing)
        last = step == t.max_steps
        validating = step % t.val_every == 0 or last
        return Due(
            logging=step % t.log_every == 0 or step == 1 or validating,
            validating=validating,
            measuring=self.evaluator.is_due(step),
            saving=step % t.checkpoint_every == 0 or last or overdue or stopping,
            showing=showing,
            stopping=stopping,
        )

    def micro_batches(self, start_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The texts that this rank reads or shares, once `start_step` steps are done.

        Yields:
            Inputs and targets, int64 [B, T], on the CPU. Targets that do not count, such as the first token of a
            document with data.documents=mask, are IGNORE_INDEX.
        """
        return micro_batches(
            self.data, self.cfg.batch_shape, self.cfg.seed, start_step=start_step,
            pin_memory=self.hardware.device == "cuda", grad_accum_steps=self.cfg.trainer.grad_accum_steps,
            rank=self.fabric.global_rank // self.packing.ranks_per_text,
            world_size=self.fabric.world_size // self.packing.ranks_per_text,
        )  # fmt: skip

    def step(self, step: int, batches: Iterator[tuple[Tensor, Tensor]], encodings: Encodings) -> tuple[Tensor, Tensor]:
        """Do optimizer step `step`, counted from 1, on the next micro-batches, read by the `encodings` of this step.

        The loss is the mean over all scored targets of the step; micro-batches may have different numbers of them.

        Returns:
            [loss x share of scored targets, share], means over micro-batches and ranks; and the gradient's norm before
            clipping, which `check_finite` looks at before anything is saved.
        """
        cfg = self.cfg
        n = cfg.trainer.grad_accum_steps
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr_scale"] * learning_rate(step - 1, cfg.optim, cfg.trainer.max_steps)

        totals = torch.zeros(2, device=self.fabric.device)
        for m in range(n):
            self.ranks.seed(cfg.seed, (step - 1) * n + m)
            with self.ranks.accumulating(last=m == n - 1):
                totals += self.backward(*next(batches), encodings)
        self.ranks.average_gradients()
        totals = self.fabric.all_reduce(totals, reduce_op="sum")  # type: ignore[assignment]

        # The gradient so far is that of the mean of loss x share. Dividing by the mean share makes it that of the mean
        # loss over all scored targets.
        norm = clip_gradients(self.ranks.model, n * self.fabric.world_size / totals[1], cfg.optim.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return totals / (n * self.fabric.world_size), norm

    def backward(self, x: Tensor, y: Tensor, encodings: Encodings) -> Tensor:
        """Add the gradient of one micro-batch, inputs `x` and targets `y` int64 [B, T] on the CPU, to those before.

        Returns:
            [loss x share of scored targets, this share].
        """
        t = self.cfg.trainer
        positions = draw_positions(t.positions, x.size(1), t.max_position, self.fabric.device)
        # Drawn positions are of whole texts: `ropewalk.app.resolve` refuses them with documents=mask and shared texts.
        layout = self.packing(x) if positions is None else Layout(positions)
        x, y = self.fabric.to_device((x, y))
        loss = self.ranks.model(x, layout, encodings=encodings, targets=y)
        share = (y != IGNORE_INDEX).float().mean()
        # A loss that is not finite may have a finite gradient. A NaN as its weight makes the gradient NaN, which every
        # rank's norm shows.
        weight = torch.where(loss.detach().isfinite(), share, torch.nan)
        self.fabric.backward(loss * weight / t.grad_accum_steps)
        return torch.stack((loss.detach() * share, share))

    def log(
        self, run: RunDir, logger: loggers.Trackers, progress: checkpoints.Progress, norm: Tensor, *, validating: bool
    ) -> dict[str, Any]:
        """Write a row of metrics.jsonl about the steps since the last one, show it in the tracker, and return it."""
        row = rows.training_row(progress, self.cfg)
        row |= {"lr": self.optimizer.param_groups[0]["lr"], "grad_norm": float(norm)}
        if validating:
            metrics_of(self.net.encodings)  # drops what the rehearsal and the measurements at eval.at have fed
            validation = self.evaluator.validate()  # feeds the metrics
            row |= rows.validation_row(validation, metrics_of(self.net.encodings))
        processes.on_rank_zero(lambda: run.append(row))
        logger.log(row)
        progress.begin_row()
        return row


def main(composed: DictConfig) -> float:
    """Train the run that Hydra has composed from conf/train.yaml. Returns its `objective`, for a search."""
    cfg = configure(composed)
    train(cfg)
    return objective(RunDir(cfg))
