"""Results files, runs/NAME/evals/*.json: one kind of measure of one variant, as sums for each text.

Everything else is computed from these sums. The same settings replace their file; other settings never do.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from app.run_dir import read_file
from common.files import write_text
from evaluation.statistics import Sample, by_document, estimate

Size = Annotated[int, Field(ge=0, lt=2**63)]
Kind = Literal["lengths", "far_copies", "ruler", "by_position"]  # in the order of a report
LOWER_IS_BETTER = {"loss": True, "error": True, "found": False, "gain": False}  # the quantities


class Variant(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """One way to read the weights of a run."""

    label: str  # "rope", "yarn at scale 8"
    pe: dict[str, Any]  # resolved options of the encoding
    scale: float
    zero_shot: bool  # read by another encoding or at another scale than it was trained with


class Part(NamedTuple):
    """A part of a measure: what is asked of the network."""

    task: str = "text"  # "text", the task of the data, a task of RULER, or "mean" over the tasks of RULER
    difficulty: str = ""  # the eval set of a task
    depth: float = math.nan  # of RULER's needle: 0 at the start of the context, 1 at its end
    first: float = math.nan  # tokens: the smallest and the largest distance of a copy, or position in the text
    last: float = math.nan
    continuation: str = ""  # far copies: whether the token is the "same" as after the earlier words, or an "other"

    @property
    def name(self) -> str:
        """Label of the part in tables and figures: "text", "sparse", "256-511", "niah_single depth 0.50"."""
        if not math.isnan(self.first):
            return f"{self.first:.0f}-{self.last:.0f} {self.continuation}".strip()
        if not math.isnan(self.depth):
            return f"{self.task} depth {self.depth:.2f}"
        return self.difficulty or self.task


class Row(NamedTuple):
    """One number of one part at one length, with what it is computed from."""

    part: Part
    length: int
    quantity: str  # "loss", "error", "found" or "gain"
    unit: str
    sample: Sample
    optimum: Sample | None = None  # of the best possible predictor of the same texts; None where nobody knows it


class Measured(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """Sums over the scored tokens, one entry for each text: all lists are equally long, in the order of the texts."""

    task: str = "text"  # "text", the task of the data, or a task of RULER
    difficulty: str | None = None  # the eval set of a task
    depth: float | None = Field(None, ge=0, le=1)  # of RULER's needle: 0 at the start of the context, 1 at its end
    span: tuple[Size, Size] | None = None  # smallest and largest distance of a copy, or position, in tokens
    continuation: Literal["same", "other"] | None = None  # far copies: as after the earlier words, or not
    length: int = Field(ge=1, lt=2**31)  # tokens the model reads
    nats: list[float]
    tokens: list[Size]
    bytes: list[Size]  # 0 where bytes mean nothing
    errors: list[Size]  # tokens that were not the most probable
    baseline_nats: list[float] | None = None  # far copies: cut to train_len; RULER: after the text in which it is wrong
    optimum_nats: list[float] | None = None  # lengths: of the best possible predictor; None where nobody knows it
    documents: list[int | str] | None = None  # the document each text is from; None: every text has its own

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        sizes = {len(values) for values in self.__dict__.values() if isinstance(values, list)}
        if len(sizes) != 1:
            raise ValueError("the lists must have one entry for each text")
        return self

    @property
    def part(self) -> Part:
        depth = math.nan if self.depth is None else self.depth
        first, last = self.span or (math.nan, math.nan)
        return Part(self.task, self.difficulty or "", depth, first, last, self.continuation or "")

    def sample(self, values: Sequence[float] | np.ndarray, units: Sequence[float] | np.ndarray) -> Sample:
        """`values` and `units`, one for each text, as a sample of documents."""
        return by_document(Sample(np.array([values]), np.array(units)), self.documents)


class Evaluation(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """One results file."""

    version: Literal[3] = 3
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
        """The evaluation in a file.

        Raises ValueError: the file is missing, damaged or of another version. Names the field and a remedy.
        """
        return read_file(path, cls, "delete it and measure again with scripts/evaluate.py")

    def rows(self) -> list[Row]:
        """Every number that was measured. Of RULER the means over its tasks come first."""
        rows = [row for m in self.measured for row in self.rows_of(m)]
        if self.kind == "ruler":
            return [*_means_over_tasks(rows), *rows]
        return rows

    def rows_of(self, m: Measured) -> list[Row]:
        """The numbers of one part, the main one first."""
        if self.kind == "ruler":
            # An answer is found if every token of it is the most probable one. Each answer counts once.
            once = np.ones(len(m.errors))
            found = 100.0 * np.equal(m.errors, 0)
            rows = [Row(m.part, m.length, "found", "answers found in percent", m.sample(found, once))]
            gain_unit, gain_units = "bits per answer", once
        elif self.task:
            wrong = 100.0 * np.array(m.errors)
            return [Row(m.part, m.length, "error", "error in percent", m.sample(wrong, m.tokens))]
        else:
            in_bytes = any(any(entry.bytes) for entry in self.measured)
            unit = "bits per byte" if in_bytes else "bits per token"
            units = np.array(m.bytes if any(m.bytes) else m.tokens)
            optimum = None
            if m.optimum_nats is not None:
                optimum = m.sample(np.array(m.optimum_nats) / math.log(2), units)
            rows = [Row(m.part, m.length, "loss", unit, m.sample(np.array(m.nats) / math.log(2), units), optimum)]
            gain_unit, gain_units = unit, units
        if m.baseline_nats is not None:
            gain = np.subtract(m.baseline_nats, m.nats) / math.log(2)
            rows.append(Row(m.part, m.length, "gain", gain_unit, m.sample(gain, gain_units)))
        return rows


def _means_over_tasks(rows: Sequence[Row]) -> Iterator[Row]:
    """For each length and quantity of RULER: the mean over the tasks, of each over its depths, text by text."""
    by_depth: dict[tuple[int, str, str], dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_depth[row.length, row.quantity, row.unit][row.part.task].append(row.sample.values)
    for (length, quantity, unit), tasks in by_depth.items():
        of_tasks = [np.mean(depths, axis=0) for depths in tasks.values()]
        values = np.mean(of_tasks, axis=0)  # [1, T]
        yield Row(Part("mean"), length, quantity, unit, Sample(values, np.ones(values.size)))


def load_all(run: Path) -> list[Evaluation]:
    """All results of a run, in the order of their files. Raises ValueError for a damaged one."""
    return [Evaluation.load(path) for path in sorted((run / "evals").glob("*.json"))]


def objective(evaluations: Sequence[Evaluation]) -> float:
    """The number that a sweep may minimise: the loss or error of the final weights at the longest length.

    It is read at the encoding's largest scale, and averaged over the difficulties of a task; infinity if it diverged.
    """
    of_lengths = [e for e in evaluations if e.kind == "lengths"]
    last = max((e for e in of_lengths if not e.variant.zero_shot), key=lambda e: e.step)
    settings = last.step, last.eval, last.variant.pe
    own = [e for e in of_lengths if e.measured and (e.step, e.eval, e.variant.pe) == settings]
    best = max(own, key=lambda e: e.variant.scale)
    longest = {m.part: m for m in sorted(best.measured, key=lambda m: m.length)}
    values = [estimate(best.rows_of(m)[0].sample).value for m in longest.values()]
    mean = float(np.mean(values))
    return math.inf if math.isnan(mean) else mean
