"""What a run says of itself: at its start, in the rows of metrics.jsonl, and in training.json."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from conf.schema import Config
from data.base import Data
from model.gpt import GPT
from model.position.base import Scaled
from ropewalk.run.directory import RunDir, read_metrics, read_training
from ropewalk.run.processes import rank_zero_only, world_size
from ropewalk.training.checkpoints import Progress
from ropewalk.training.hardware import Hardware


def training_row(progress: Progress, cfg: Config) -> dict[str, Any]:
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


def validation_row(validation: dict[str, Any], metrics: dict[str, Tensor]) -> dict[str, Any]:
    """What `validate` has measured; and `metrics` of the encodings, of the texts that this rank read for it."""
    measured = {f"val/{name}": validation[name] for name in ("loss", "bits_per_byte", "error")}
    measured |= {f"position/{name}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in measured.items() if value is not None}


def record(progress: Progress, cfg: Config, hardware: Hardware, validation: dict[str, Any]) -> dict[str, Any]:
    """What training.json says about a complete training."""
    tokens = progress.step * cfg.step_tokens
    return {
        "steps": progress.step,
        "tokens": tokens,
        "seconds": round(progress.seconds, 1),
        "tokens_per_s": round(tokens / max(progress.seconds, 1e-3), 1),
        "validation": validation,
        "peak_memory_mb": round(progress.peak_memory / 2**20, 1),
        "device": hardware.device,
        "precision": hardware.precision,
    }


@rank_zero_only
def check_rows(run: RunDir, progress: Progress) -> None:
    """Raise ValueError if the rows do not fit the newest checkpoint, or a trained run has no checkpoint."""
    # A run that was killed before its first checkpoint has later rows: it is trained anew, and writes them again.
    n_rows = 0
    if run.metrics.exists():
        n_rows = sum(row["step"] <= progress.step for row in read_metrics(run.path))
    # A run of 0 steps is complete without a checkpoint.
    was_trained = (run.path / "training.json").is_file() and read_training(run.path)["steps"] > 0
    problem = ""
    if was_trained and not progress.step:
        problem = "the run was trained, and has no checkpoint"
    elif n_rows != progress.rows:
        problem = f"metrics.jsonl has {n_rows} rows up to step {progress.step}, the checkpoint has {progress.rows}"
    if problem:
        raise ValueError(
            f"checkpoints or rows are missing: {problem}: "
            "restore the files, or delete the run and train again; scripts/evaluate.py measures a trained model"
        )


def print_summary(cfg: Config, net: GPT, data: Data, hardware: Hardware, size: Mapping[str, Any]) -> None:
    """Print a summary of a run that is about to start.

    Args:
        cfg: its configuration.
        net: its network.
        data: its data, prepared.
        hardware: its device and precision.
        size: the counts of `net`, as in training.json.
    """
    t = cfg.trainer
    print(f"run {cfg.name}: {t.max_steps} steps of {t.batch_size} x {cfg.train_len} tokens, processes: {world_size()}")
    for line in data.describe(cfg.train_len):
        print(line)
    counts = "{total:,} parameters ({embedding:,} embedding, {position:,} position)".format_map(size["parameters"])
    print(f"model: {counts}, {size['flops_per_token'] / 1e6:.1f} MFLOP a token")
    print(f"position encoding: {cfg.pe['name']}", *cfg.pe.get("pattern", []))
    # Encodings of a pattern may differ only in their window, and then describe their scaling alike: print it once.
    descriptions = [line for pe in net.distinct_encodings if isinstance(pe, Scaled) for line in pe.describe()]
    for line in dict.fromkeys(descriptions):
        print(line)
    used = f"compile {hardware.compile}, kernels {hardware.kernels}".lower()
    print(f"device {hardware.device}, precision {hardware.precision}, {used}")
