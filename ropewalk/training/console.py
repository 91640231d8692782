"""The console output of a run: a summary when it starts, then a line for each logged step."""

from collections.abc import Mapping
from typing import Any

from conf.schema import Config
from data.base import Data
from model.gpt import GPT
from model.position.base import Scaled
from ropewalk.training.distributed import world_size
from ropewalk.training.hardware import Hardware


def describe(cfg: Config, net: GPT, data: Data, hardware: Hardware, size: Mapping[str, Any]) -> None:
    """Print a summary of a run that is about to start.

    Args:
        cfg: its configuration.
        net: its network.
        data: its data, prepared.
        hardware: its device and precision.
        size: the counts of `net`, as in training.json.
    """
    t = cfg.trainer
    ranks = world_size()
    micro_batch = t.batch_size * t.context_parallel // t.grad_accum_steps // ranks
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    print(f"run {cfg.name}: {t.max_steps} steps of {t.batch_size} x {cfg.train_len} tokens, in micro-batches of "
          f"{micro_batch} on {processes}")  # fmt: skip
    for number, stage in enumerate(cfg.stages):
        when = "then" if number else "first"
        print(f"  {when} {stage.steps} steps of {cfg.step_tokens // stage.train_len} x {stage.train_len} tokens")
    print(*data.describe(cfg.train_len), sep="\n")
    counts = "{total:,} parameters ({embedding:,} embedding, {position:,} position)".format_map(size["parameters"])
    print(f"model: {counts}, {size['flops_per_token'] / 1e6:.1f} MFLOP a token")
    print(f"position encoding: {cfg.pe['name']}", *cfg.pe.get("pattern", []))
    # Encodings of a pattern may differ only in their window, and then describe their scaling alike: print it once.
    descriptions = [line for pe in net.distinct_encodings if isinstance(pe, Scaled) for line in pe.describe()]
    for line in dict.fromkeys(descriptions):
        print(line)
    used = f"compile {hardware.compile}, kernels {hardware.kernels}".lower()
    print(f"device {hardware.device}, precision {hardware.precision}, {used}")


def show(row: Mapping[str, Any], cfg: Config) -> None:
    """Print a row of metrics.jsonl, with the time that the remaining steps will take."""
    steps = cfg.trainer.max_steps
    speed = row["tokens_per_s"]
    text = f"step {row['step']}/{steps}  loss {row['train/loss']:.3f}  lr {row['lr']:.2e}  {speed:,.0f} tokens/s"
    if "val/loss" in row:
        text += f"  val loss {row['val/loss']:.3f}"
    # The speed is rounded, and 0.0 after a process was suspended for hours; the first step alone says little of it.
    if speed and row["step"] > 1:
        tokens_left = (steps - row["step"]) * cfg.step_tokens
        text += f"  {tokens_left / speed / 60:.1f} minutes left"
    print(text, flush=True)
