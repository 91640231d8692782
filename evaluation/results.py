"""Results files, runs/NAME/evals/*.json: one kind of measure of one variant, as sums for each text, from which all else
is computed. The same settings replace their file; other settings never do."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from app.run_dir import read_file
from common.files import write_text
from evaluation.statistics import Sample, estimate

Size = Annotated[int, Field(ge=0, lt=2**63)]
Kind = Literal["lengths", "far_copies", "ruler", "by_position"]  # in the order of a report


class Variant(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """One way to read the weights of a run."""

    label: str  # "rope", "yarn at scale 8"
    pe: dict[str, Any]  # resolved options of the encoding
    scale: float
    zero_shot: bool  # read by another encoding or at another scale than it was trained with


class Measured(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """Sums over the scored tokens, one entry for each text: all lists are equally long, in the order of the texts."""

    name: str  # "text", a task's difficulty, "positions 0-31", "distance 256-511", "niah_single depth 0.50"
    length: int = Field(ge=1, lt=2**31)  # tokens the model reads
    nats: list[float]
    tokens: list[Size]
    bytes: list[Size]  # 0 where bytes mean nothing
    errors: list[Size]  # tokens that were not the most probable
    baseline_nats: list[float] | None = None  # far copies: cut to train_len; RULER: after the text in which it is wrong

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        if len({len(x) for _, x in self if isinstance(x, list)}) != 1:
            raise ValueError("the lists must have one entry for each text")
        return self


class Evaluation(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """One results file."""

    version: Literal[2] = 2
    kind: Kind
    run: str
    run_id: str
    seed: int  # of the training
    train_len: int = Field(ge=1)
    task: str | None  # None for text
    step: int  # optimizer step of the weights
    variant: Variant
    eval: dict[str, Any]  # all that decides the texts: what is equal here can be compared text by text
    provenance: dict[str, str | bool | None]  # see `training.provenance`
    skipped: list[int] = []  # lengths the encoding is not defined for
    measured: list[Measured]

    @property
    def file_name(self) -> str:
        """Equal for equal settings, different for others; the label may differ."""
        settings = [self.kind, self.variant.pe, self.variant.scale, self.eval, self.step]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^\w.]+", "-", f"{self.variant.pe.get('name')}", flags=re.ASCII)[:60]
        return f"{self.kind}-{name}-{self.variant.scale:g}-{digest}.json"

    def save(self, folder: Path) -> Path:
        """Write the file into `folder` whole or not at all, in place of one with the same settings."""
        folder.mkdir(exist_ok=True)
        path = folder / self.file_name
        write_text(path, self.model_dump_json() + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """ValueError if the file is missing, damaged or of another version: names the field and a remedy."""
        return read_file(path, cls, "delete it and measure again with scripts/evaluate.py")

    @property
    def unit(self) -> str:
        """Of what `sample` returns."""
        if self.kind == "ruler" or self.task:
            return "error in percent" if self.task else "answers found in percent"
        return "bits per byte" if any(any(m.bytes) for m in self.measured) else "bits per token"

    def sample(self, m: Measured, gain: bool = False) -> Sample:
        """One of the measures in `unit`; or by how many bits its baseline is worse: far copies and RULER."""
        nats = np.subtract(m.baseline_nats or math.nan, m.nats) if gain else m.nats
        values = np.array([nats]) / math.log(2)  # [1, T]
        units = np.array(m.bytes if any(m.bytes) else m.tokens)
        if self.kind == "ruler":
            return Sample(values if gain else 100.0 * np.equal([m.errors], 0), np.ones(len(units)))
        return Sample(100.0 * np.array([m.errors]), np.array(m.tokens)) if self.task else Sample(values, units)


def load_all(run: Path) -> list[Evaluation]:
    """All results of a run, in the order of their files. Raises ValueError for a damaged one."""
    return [Evaluation.load(path) for path in sorted((run / "evals").glob("*.json"))]


def objective(evaluations: Sequence[Evaluation]) -> float:
    """What a sweep may minimise: the measure of the final weights at the longest length, at the encoding's largest
    scale, averaged over the difficulties of a task; infinity if it diverged there."""
    measured = [e for e in evaluations if e.kind == "lengths"]
    last = max((e for e in measured if not e.variant.zero_shot), key=lambda e: e.step)
    own = [e for e in measured if (e.step, e.eval, e.variant.pe) == (last.step, last.eval, last.variant.pe)]
    best = max((e for e in own if e.measured), key=lambda e: e.variant.scale)
    longest = {m.name: m for m in sorted(best.measured, key=lambda m: m.length)}
    mean = float(np.mean([estimate(best.sample(m)).value for m in longest.values()]))
    return math.inf if math.isnan(mean) else mean
