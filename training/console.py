"""What a run prints: a summary when it starts, then a line for each logged step."""

from collections.abc import Mapping
from itertools import cycle, groupby, islice
from typing import Any

from conf.schema import Config
from data.base import Data
from model import position
from model.gpt import GPT
from model.position.base import Scaled
from training.distributed import world_size
from training.hardware import Hardware


def describe(cfg: Config, net: GPT, data: Data, hardware: Hardware, memory: str, size: Mapping[str, Any]) -> None:
    """Print what is about to run.

    Args:
        memory: what it takes, in words.
        size: the counts of `net`, as in training.json.
    """
    t, ranks = cfg.trainer, world_size()
    micro_batch = t.batch_size // t.grad_accum_steps // ranks
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    print(f"run {cfg.name}: {t.max_steps} steps of {t.batch_size} x {cfg.train_len} tokens, in micro-batches of "
          f"{micro_batch} on {processes}")  # fmt: skip
    for stage in cfg.stages:
        print(f"  of these {stage.steps} of {cfg.step_tokens // stage.train_len} x {stage.train_len}")
    print(*data.describe(cfg.train_len), sep="\n")
    counts = "{total:,} parameters ({embedding:,} embedding, {position:,} position)".format_map(size["parameters"])
    print(f"model: {counts}, {size['flops_per_token'] / 1e6:.1f} MFLOP a token")
    print(f"position encoding: {cfg.pe['name']}; layers: {layers(cfg.pe, len(net.encodings))}")
    descriptions: list[str] = []
    for pe in net.distinct_encodings:
        if isinstance(pe, Scaled):
            descriptions += pe.describe()
    for line in dict.fromkeys(descriptions):  # each once
        print(line)
    print(f"memory: {memory}")
    print(f"device {hardware.device}, precision {hardware.precision}, compile {str(hardware.compile).lower()}")


def layers(pe: Mapping[str, Any], n_layer: int) -> str:
    """The encodings of the layers, the first layer's first: "rope (window 64) x3, nope x1"."""
    parts = position.parts(pe)
    runs = []
    for name, same in groupby(islice(cycle(pe.get("pattern", [""])), n_layer)):
        text = str(parts[name]["name"])
        window = parts[name].get("window")
        if window:
            text += f" (window {window})"
        runs.append(f"{text} x{len(list(same))}")
    return ", ".join(runs)


def show(row: Mapping[str, Any], cfg: Config) -> None:
    """Print a row of metrics.jsonl, with the time that the remaining steps will take."""
    steps, speed = cfg.trainer.max_steps, row["tokens_per_s"]
    text = f"step {row['step']}/{steps}  loss {row['train/loss']:.3f}  lr {row['lr']:.2e}  {speed:,.0f} tokens/s"
    if "val/loss" in row:
        text += f"  val loss {row['val/loss']:.3f}"
    if speed:  # 0.0 after a process was suspended for hours
        minutes = (steps - row["step"]) * cfg.step_tokens / speed / 60
        text += f"  {minutes:.1f} minutes left"
    print(text, flush=True)
