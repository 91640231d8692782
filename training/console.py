"""What a run shows: a summary at its start, then a line for each logged step."""

from collections.abc import Mapping
from itertools import cycle, groupby, islice
from typing import Any

from data.base import Data
from model import position
from model.gpt import GPT
from model.position.base import Scaled
from training.distributed import world_size
from training.hardware import Hardware


def describe(cfg: Any, net: GPT, data: Data, hardware: Hardware, memory: str, size: Mapping[str, Any]) -> None:
    """Print what is about to run. `size`: the counts of `net`, as in training.json."""
    t, ranks = cfg.trainer, world_size()
    counts = "{total:,} parameters ({embedding:,} embedding, {position:,} position)".format_map(size["parameters"])
    print(
        f"run {cfg.name}: {t.max_steps} steps of {t.batch_size} x {cfg.train_len} tokens, in micro-batches of "
        f"{t.batch_size // t.grad_accum_steps // ranks} on {ranks} process{'es' * (ranks > 1)}",
        *(f"  of these {s.steps} of {t.batch_size * cfg.train_len // s.train_len} x {s.train_len}" for s in cfg.stages),
        *data.describe(cfg.train_len),
        f"model: {counts}, {size['flops_per_token'] / 1e6:.1f} MFLOP a token",
        f"position encoding: {cfg.pe['name']}; layers: {layers(cfg.pe, len(net.encodings))}",
        *dict.fromkeys(line for pe in net.distinct_encodings if isinstance(pe, Scaled) for line in pe.describe()),
        f"memory: {memory}",
        f"device {hardware.device}, precision {hardware.precision}, compile {str(hardware.compile).lower()}",
        sep="\n",
    )


def layers(pe: Mapping[str, Any], n_layer: int) -> str:
    """The encodings of the layers, the first layer's first: "rope (window 64) x3, nope x1"."""
    parts, found = position.parts(pe), []
    for name, same in groupby(islice(cycle(pe.get("pattern", [""])), n_layer)):
        window = parts[name].get("window")
        found.append(parts[name]["name"] + (f" (window {window})" if window else "") + f" x{len([*same])}")
    return ", ".join(found)


def show(row: dict[str, Any], cfg: Any) -> None:
    """Print a row of metrics.jsonl, with the time that the other steps will take."""
    steps, speed = cfg.trainer.max_steps, row["tokens_per_s"]
    minutes = (steps - row["step"]) * cfg.trainer.batch_size * cfg.train_len / speed / 60
    text = f"step {row['step']}/{steps}  loss {row['train/loss']:.3f}  lr {row['lr']:.2e}  {speed:,.0f} tokens/s"
    text += f"  val loss {row['val/loss']:.3f}" if "val/loss" in row else ""
    print(f"{text}  {minutes:.1f} minutes left", flush=True)
