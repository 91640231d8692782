"""Run directories with made-up numbers, written through the classes that write real ones."""

import json
import math
import random
from functools import cache
from pathlib import Path

import yaml

import conf.cli
from conf.rundir import RunDir
from conf.schema import Config, check
from evaluation.results import PositionBin, Results, Row, Score, Training, make_row
from evaluation.retrieval import Cell, Passkey
from model import position

LENGTHS = (0.5, 1, 2, 4, 8)
SLICES = ("train", "dense", "sparse")


@cache
def config(*overrides: str) -> Config:
    return check(conf.cli.compose(*overrides))


def write_run(
    folder: Path,
    *overrides: str,
    seed: int = 0,
    name: str | None = None,
    identity: str | None = None,
    task: str | None = None,
    finished: bool = True,
    steps: int = 20,
) -> Path:
    """The run of train.py with `overrides`, in `folder`; unfinished runs stop half way. Returns its directory."""
    cfg = config(*overrides).model_copy(deep=True)
    stem = f"{cfg.pe['name']}-{task or cfg.data['name']}"
    cfg.seed, cfg.runs_dir, cfg.name = seed, str(folder), name or f"{stem}-s{seed}"
    cfg.data["name"] = task or cfg.data["name"]
    run = RunDir(cfg)
    rng = random.Random(f"{overrides} {seed}")
    level = 2 + 0.1 * (sum(map(ord, cfg.pe["name"])) % 7) + 0.02 * rng.random()
    run.path.mkdir(parents=True)
    files = {
        "config.yaml": yaml.safe_dump(cfg.model_dump(), sort_keys=False),
        "data.json": json.dumps({"sha256": identity or task}),
        "environment.json": json.dumps(
            {
                "python": "3.11.7",
                "packages": {"torch": "2.13.0", "lightning": "2.6.6"},
                "processor": "a processor",
                "cores": 2,
                "git_commit": "0123456789abcdef",
                "git_changed": False,
            }
        ),
        "metrics.jsonl": "".join(
            json.dumps(
                {"step": step, "tokens": 4096 * step, "train/loss": level + 3 / step + 0.1 * rng.random()}
                | ({"val/loss": level + 3 / step} if step % 5 == 0 else {})
            )
            + "\n"
            for step in range(1, (steps if finished else steps // 2) + 1)
        ),
    }
    for file, text in files.items():
        (run.path / file).write_text(text)
    if not finished:
        return run.path
    pe = position.build(cfg.pe, cfg.model.shape(cfg.train_len))
    lengths = [round(ratio * cfg.train_len) for ratio in cfg.eval.lengths]
    rows, bins, skipped = [], [], {}
    for reading in pe.readings():
        defined = [n for n in lengths if reading.max_len is None or n <= reading.max_len]
        if len(defined) < len(lengths):
            skipped[reading.label] = [n for n in lengths if n not in defined]
        for length in defined:
            worse = 0.3 * level % 0.4 * max(0.0, math.log2(length / cfg.train_len))
            for i, slice_name in enumerate(SLICES if task else ("text",)):
                rows.append(row(reading.label, slice_name, length, cfg.train_len, level + worse, i, rng, task))
        for i in range(0 if task else 64):
            width = max(defined) / 64
            bins.append(
                PositionBin(
                    reading=reading.label, start=round(i * width), stop=round((i + 1) * width),
                    loss=level + 2 / (i + 1) + 0.05 * rng.random(), tokens=512,
                )
            )  # fmt: skip
    Results(
        run=str(cfg.name), encoding=cfg.pe["name"], data=cfg.data["name"], seed=seed, train_len=cfg.train_len,
        validation=rows[0], lengths=rows, by_position=bins, skipped=skipped,
        training=Training(
            steps=steps, tokens=4096 * steps, seconds=10.0, tokens_per_s=8000 + 1000 * rng.random(),
            parameters={"total": 820_480, "embedding": 32_768, "position": 0}, flops_per_token=5_000_000,
            peak_memory_mb=600 + 50 * rng.random(), device="cpu", precision="32-true",
        ),
    ).save(run.results)  # fmt: skip
    return run.path


def write_passkey(run: Path, seed: int) -> None:
    """passkey.json of two readings at two lengths and three depths."""
    cells = [
        Cell(
            reading=reading, length=length, ratio=length / 256, depth=depth, trials=20, exact=0.05 * seed,
            gain=depth + 0.3 * seed + length / 1000, gain_error=0.1,
        )
        for reading in ("scale 1, as trained", "scale 4")
        for length in (256, 512)
        for depth in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    results = Passkey(run=run.name, encoding="yarn", data="code", seed=0, train_len=256, skipped={}, cells=cells)
    results.save(run / "passkey.json")


def row(
    reading: str, name: str, length: int, train_len: int, loss: float, i: int, rng: random.Random, task: str | None
) -> Row:
    score = Score(nats=8192 * loss, tokens=8192, bytes=0 if task else 12_000, sequences=128)
    if task:
        score.wrong = min(8192, int(8192 * (0.01 + 0.04 * i) * length / train_len * (0.5 + rng.random())))
        score.wrong_sequences = min(128, score.wrong // 20)
    return make_row(score, reading, name, length, train_len, task)
