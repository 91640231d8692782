"""The rows of metrics.jsonl, and what training.json says of a complete training."""

from typing import Any

from conf.schema import Config
from model.gpt import GPT
from model.position.network import metrics_of
from ropewalk.app.run_dir import RunDir, Validation, read_metrics, read_training
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
    """Raise ValueError if rows do not fit the newest checkpoint, or a trained run has none: nothing must be lost."""
    rows = 0
    if run.metrics.exists():
        rows = sum(row["step"] <= progress.step for row in read_metrics(run.path))
    was_trained = (run.path / "training.json").is_file() and read_training(run.path).steps > 0
    if rows != progress.rows or (was_trained and not progress.step):
        problem = f"has {rows} rows up to step {progress.step}, and its newest checkpoint counts {progress.rows}"
        remedy = "restore the files, or delete the run and train anew; scripts/evaluate.py measures a trained model"
        raise ValueError(f"checkpoints or rows are missing: metrics.jsonl {problem}: {remedy}")
