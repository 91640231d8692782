"""The rows of metrics.jsonl, and what training.json says of a complete training."""

from typing import Any

from conf.schema import Config
from model.gpt import GPT
from model.position.network import metrics_of
from model.size import flops_per_token
from ropewalk.app.run_dir import RunDir, Validation, read_config, read_metrics
from ropewalk.training import distributed
from ropewalk.training.checkpoints import Progress
from ropewalk.training.distributed import rank_zero_only
from ropewalk.training.hardware import Hardware

Row = dict[str, Any]


def training_row(progress: Progress, cfg: Config) -> Row:
    """What the steps since the last row were like: their mean loss and speed."""
    tokens = cfg.step_tokens
    speed = (progress.step - progress.logged_step) * tokens / (progress.seconds - progress.logged_seconds)
    return {
        "step": progress.step,
        "tokens": progress.step * tokens,
        "seconds": round(progress.seconds, 3),
        "train/loss": progress.loss_sum / progress.loss_weight,
        "tokens_per_s": round(speed, 1),
    }


def utilisation(net: GPT, cfg: Config, tokens_per_s: float, peak_flops: float) -> float:
    """The share of `peak_flops` operations a second that a training at this speed does."""
    return tokens_per_s * flops_per_token(net, cfg.train_len) / peak_flops


def validation_row(validation: Validation) -> Row:
    """What a validation adds to a row."""
    measured = validation.model_dump(include={"loss", "bits_per_byte", "error"}, exclude_none=True)
    return {f"val/{name}": value for name, value in measured.items()}


def position_row(net: GPT) -> Row:
    """What the metrics of the encodings add to a row. Every rank calls it."""
    metrics = {name: float(value) for name, value in metrics_of(net.encodings).items()}
    # Each rank has seen its own part of the validation texts.
    ranks = distributed.gather(metrics)
    return {f"position/{name}": sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}


def record(progress: Progress, cfg: Config, hardware: Hardware, validation: Validation) -> dict[str, Any]:
    """What training.json says about a complete training."""
    tokens = progress.step * cfg.step_tokens
    return {
        "steps": progress.step,
        "tokens": tokens,
        "seconds": round(progress.seconds, 1),
        "tokens_per_s": round(tokens / max(progress.seconds, 1e-3), 1),
        "validation": validation.model_dump(),
        "peak_memory_mb": round(progress.peak_memory / 2**20, 1),
        "device": hardware.device,
        "precision": hardware.precision,
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
