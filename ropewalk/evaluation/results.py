"""Results files, runs/NAME/evals/*.json: one kind of measure of one variant, as sums for each text.

Everything else is computed from these sums. Measuring again with the same settings replaces a file; other settings
make another file.
"""

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from conf.files import refuse_link, write_text
from ropewalk.evaluation.statistics import Sample, by_document, grouping
from ropewalk.run.directory import read_file

MAX_COUNT = 2**40  # of anything in a text: what is more would not fit into an archive either
NonNegative = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
# The quantities. A longer reach is no merit by itself; it comes first in a table.
LOWER_IS_BETTER = {"loss": True, "error": True, "found": False, "gain": False, "share": False}


class Variant(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """One way to read the weights of a run."""

    label: str  # "rope", "yarn at scale 8"
    pe: dict[str, Any]  # resolved options of the encoding
    scale: float
    zero_shot: bool  # read by another encoding or at another scale than it was trained with


# One number of one part of a measure at one length: what the part is, as in `PartResult`; its label as "part";
# "quantity" ("loss", "error", "found", "gain" or "share") and "unit"; what the number is computed from, as "sample",
# and its "value"; "optimum_sample" and "optimum" of the best possible predictor of the same texts, None and NaN where
# it is not known; how many "texts" and "documents", and "grouping", the numbers of the texts' documents as bytes.
Number = dict[str, Any]


class PartResult(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """Sums over the scored tokens, one entry for each text: all lists are equally long, in the order of the texts."""

    # "text", the task of the data, or a task of RULER.
    task: str = "text"
    # The eval set of a task; for reach what is shared, and where; in older files "key" or "other" tokens.
    difficulty: str | None = None
    # Of RULER's needle: 0 at the start of the context, 1 at its end.
    depth: float | None = Field(None, ge=0, le=1)
    # The smallest and the largest distance of a copy or of what is read, or position in the text, in tokens.
    span: tuple[NonNegative, NonNegative] | None = None
    # For far copies: whether the token is the same as after the earlier words.
    continuation: Literal["same", "other"] | None = None
    # Tokens that the model reads.
    length: int = Field(ge=1, lt=2**31)
    nats: list[float]
    tokens: list[NonNegative]
    # 0 if bytes mean nothing.
    bytes: list[NonNegative]
    # Tokens that were not the most probable.
    errors: list[NonNegative]
    # For far copies: with the text cut to train_len. For RULER: after text in which the answer is wrong.
    baseline_nats: list[float] | None = None
    # For lengths: of the best possible predictor; None if it is not known.
    optimum_nats: list[float] | None = None
    # For reach: the share that comes from these distances, in percent.
    reach: list[float] | None = None
    # The document that each text is from; None: every text has its own.
    documents: list[int | str] | None = None

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        if any(isinstance(values, list) and len(values) != len(self.nats) for values in self.__dict__.values()):
            raise ValueError("the lists must have one entry for each text")
        return self

    @property
    def part(self) -> str:
        """The label in tables and figures: "text", "sparse", "256-511", "niah_single depth 0.50"."""
        if self.span:
            first, last = self.span
            return f"{first}-{last} {self.continuation or ''}".strip()
        if self.depth is not None:
            return f"{self.task} depth {self.depth:.2f}"
        return self.difficulty or self.task

    def sample(self, values: Sequence[float] | np.ndarray, units: Sequence[float] | np.ndarray) -> Sample:
        """Return `values` and `units`, one for each text, as a sample of documents.

        Raises ValueError: a value is more than any text can have.
        """
        sums = np.array([values], dtype=float)
        if np.abs(sums[np.isfinite(sums)]).max(initial=0) >= 100 * MAX_COUNT:  # errors are in percent
            raise ValueError(f"{self.part} at {self.length} has more than any text can have")
        return by_document(Sample(sums, np.array(units)), self.documents)

    def number(self, quantity: str, unit: str, sample: Sample, optimum: Sample | None = None) -> Number:
        """Return the mean of a sample of this part as a row.

        Args:
            quantity, unit: what the number is, as in "loss" and "bits per byte".
            sample: by document; its units are not all 0.
            optimum: of the best possible predictor of the same texts; None: it is not known.
        """
        # A table needs one type in a column: NaN and "" stand for None.
        first, last = self.span or (math.nan, math.nan)
        return {
            "task": self.task,
            "difficulty": self.difficulty or "",
            "depth": math.nan if self.depth is None else self.depth,
            "span_start": first,
            "span_end": last,
            "continuation": self.continuation or "",
            "part": self.part,
            "length": self.length,
            "quantity": quantity,
            "unit": unit,
            "sample": sample,
            "value": sample.values.sum() / sample.units.sum(),
            "optimum_sample": optimum,
            "optimum": math.nan if optimum is None else optimum.values.sum() / optimum.units.sum(),
            "texts": len(self.nats),
            "documents": sample.units.size,
            "grouping": grouping(self.documents, len(self.nats)).tobytes(),
        }


class Evaluation(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """One results file."""

    version: Literal[3] = 3
    # The name of a measure: one of `ropewalk.evaluation.evaluator.MEASURES`, of the lab's, or of a user's own.
    kind: str = Field(pattern="^[a-z][a-z0-9_]{0,60}$")
    run: str
    run_id: str
    # Of the training.
    seed: int
    train_len: int = Field(ge=1, lt=2**31)
    # None for text.
    task: str | None
    # The optimizer step of the weights.
    step: NonNegative
    variant: Variant
    # All settings that decide the texts: results for which they are equal can be compared text by text.
    eval: dict[str, Any]
    # See `ropewalk.run.provenance`.
    provenance: dict[str, str | bool | None]
    # Lengths that the encoding is not defined for.
    skipped: list[int] = []
    measured: list[PartResult]
    # A hash of all the rest, in files alone; older versions wrote none.
    checksum: str = ""

    @property
    def file_name(self) -> str:
        """The name of the file: equal for equal settings, different for others."""
        # Without the label and the provenance, so that another version of the code replaces its own results.
        variant = self.variant
        settings = json.dumps([self.kind, variant.pe, variant.scale, self.eval, self.step], sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        name = re.sub(r"[^\w.]+", "-", str(variant.pe.get("name")), flags=re.ASCII)[:60]
        return f"{self.kind}-{name}-{variant.scale:g}-{digest}.json"

    def save(self, folder: Path) -> Path:
        """Write the file into `folder` whole or not at all, in place of one with the same settings."""
        folder.mkdir(exist_ok=True)
        path = folder / self.file_name
        written = self.model_copy(update={"checksum": self._hash()})
        write_text(path, written.model_dump_json() + "\n")
        return path

    def _hash(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"checksum"}).encode()).hexdigest()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises ValueError: the file is missing, damaged or of another version. Names the field and a remedy.
        """
        remedy = "delete it and measure again with scripts/evaluate.py"
        evaluation = read_file(path, cls, remedy)
        if evaluation.checksum and evaluation.checksum != evaluation._hash():
            raise ValueError(f"{path} is damaged: its numbers are not those that were written; {remedy}")
        return evaluation.model_copy(update={"checksum": ""})

    def numbers(self) -> list[Number]:
        """Return every number that was measured. For RULER the means over its tasks come first."""
        rows: list[Number] = []
        for part in self.measured:
            if any(part.tokens):  # the others have no mean
                rows += self.numbers_of(part)
        if self.kind == "ruler":
            return [*_means_over_tasks(rows), *rows]
        return rows

    def numbers_of(self, m: PartResult) -> list[Number]:
        """Return the numbers of one part, the main one first."""
        once = np.ones(len(m.nats))  # each text counts once
        if m.reach is not None and m.span is not None:
            # The distance takes the place of the length.
            at_distance = m.model_copy(update={"length": m.span[0], "span": None})
            return [at_distance.number("share", "percent", m.sample(m.reach, once))]
        if self.task:
            wrong = 100.0 * np.array(m.errors)
            return [m.number("error", "error in percent", m.sample(wrong, m.tokens))]
        if self.kind == "ruler":
            # An answer is found if every token of it is the most probable one.
            found = 100.0 * np.equal(m.errors, 0)
            rows = [m.number("found", "answers found in percent", m.sample(found, once))]
            unit, units = "bits per answer", once  # of the gain below: its name, and how many of it each text has
        else:
            # One unit for the whole file: a part may happen to have no token with bytes.
            in_bytes = any(any(part.bytes) for part in self.measured)
            unit = "bits per byte" if in_bytes else "bits per token"
            units = np.array(m.bytes if any(m.bytes) else m.tokens)
            loss = m.sample(np.array(m.nats) / math.log(2), units)
            optimum = None if m.optimum_nats is None else m.sample(np.array(m.optimum_nats) / math.log(2), units)
            rows = [m.number("loss", unit, loss, optimum)]
        # With a baseline there is also the gain over it.
        if m.baseline_nats is not None:
            gain = np.subtract(m.baseline_nats, m.nats) / math.log(2)
            rows.append(m.number("gain", unit, m.sample(gain, units)))
        return rows


def _means_over_tasks(rows: Sequence[Number]) -> Iterator[Number]:
    """Yield the mean over RULER's tasks for each length and quantity, text by text.

    The depths of a task are averaged first, so that every task counts the same.
    """
    by_depth: dict[tuple[int, str, str], dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        what = row["length"], row["quantity"], row["unit"]
        by_depth[what][row["task"]].append(row["sample"].values)
    for (length, quantity, unit), tasks in by_depth.items():
        of_tasks = [np.mean(depths, axis=0) for depths in tasks.values()]  # [1, T] each
        values = np.mean(of_tasks, axis=0)  # [1, T]
        mean = {"task": "mean", "part": "mean", "depth": math.nan, "length": length, "quantity": quantity, "unit": unit}
        # The rest is the same in all rows: every task has as many texts, each is a document, none has an optimum.
        yield rows[0] | mean | {"sample": Sample(values, np.ones(values.size)), "value": values.sum() / values.size}


def result_files(run: Path) -> list[Path]:
    """The results files of a run, sorted. Raises ValueError: their folder is a link; OSError: it cannot be read."""
    folder = refuse_link(run / "evals")
    # Not `glob`, which finds nothing where this user may not read.
    names = os.listdir(folder) if folder.exists() else []
    return [folder / name for name in sorted(names) if name.endswith(".json")]


def load_all(run: Path) -> list[Evaluation]:
    """Read all results of a run, in the order of their files. Raises ValueError: one is damaged."""
    return list(map(Evaluation.load, result_files(run)))
