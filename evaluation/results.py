"""The schema of results.json, version 1.

Losses are means over the scored tokens, in nats. Additions keep the version; a change of meaning raises it.
"""

import math
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table

from conf.rundir import write_atomically

VERSION = 1


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Saved(Part):
    """A file of results."""

    version: Literal[1] = 1

    def save(self, path: Path) -> None:
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ValueError if the file is missing, damaged or of another version."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path} is not a results file of version {VERSION}: {where} {first['msg']}") from None


class Row(Part):
    """One way of reading, at one length."""

    reading: str  # a label of PositionEncoding.readings: "as trained", "scale 4", ...
    slice: str  # what was read: "text", or a task's difficulty
    length: int  # tokens the model reads
    ratio: float  # length / train_len
    loss: float
    perplexity: float  # exp(loss), for a token of this tokenizer
    bits_per_byte: float | None  # comparable between tokenizers; None where bytes mean nothing
    tokens: int  # that were scored
    sequences: int
    task: str | None = None  # its name; None for text
    error: float | None = None  # percent of the scored tokens that are wrong; None for text
    sequence_error: float | None = None  # percent of the sequences in which any is


class PositionBin(Part):
    """Loss of the tokens at positions start <= position < stop of one pass at the longest length."""

    reading: str
    start: int
    stop: int
    loss: float
    tokens: int


class Training(Part):
    steps: int
    tokens: int
    seconds: float  # of training steps alone, summed over interruptions
    tokens_per_s: float
    parameters: dict[str, int]
    flops_per_token: int
    peak_memory_mb: float  # of the device, or of the process on a CPU
    device: str
    precision: str


class Results(Saved):
    """Everything measured on one run."""

    run: str
    encoding: str
    data: str
    seed: int
    train_len: int
    skipped: dict[str, list[int]] = {}  # reading -> lengths it is not defined for
    validation: Row  # the validation of the training, on the final weights
    lengths: list[Row]
    by_position: list[PositionBin] = []
    training: Training | None = None

    def table(self) -> Table:
        """For the terminal: a line for each length, and in a task for each slice; a column for each reading."""
        labels = list(dict.fromkeys([*(row.reading for row in self.lengths), *self.skipped]))
        slices = list(dict.fromkeys(row.slice for row in self.lengths))
        several = len(slices) > 1
        task = self.validation.task
        unit = "error in percent" if task else "bits per byte" if self.in_bits else "loss"
        what = "by slice and length" if task else "of the same tokens by context length"
        table = Table(title=f"{self.run}: {unit} {what}", title_justify="left")
        for heading in ("slice", "length", "x train_len", "tokens", *labels):
            if heading != "slice" or several:
                table.add_column(heading, justify="left" if heading == "slice" else "right")
        rows = {(row.reading, row.slice, row.length): row for row in self.lengths}
        lengths = sorted({row.length for row in self.lengths} | {n for found in self.skipped.values() for n in found})
        for name in slices:
            for length in lengths:
                found = [rows.get((label, name, length)) for label in labels]
                tokens = next((f"{row.tokens:,}" for row in found if row), "")
                values = ["no position" if row is None else self.format(row) for row in found]
                first = [name] if several else []
                table.add_row(*first, str(length), f"{length / self.train_len:g}", tokens, *values)
        return table

    @property
    def in_bits(self) -> bool:
        return all(row.bits_per_byte is not None for row in self.lengths)

    def measure(self, row: Row) -> float:
        """What a row is judged by: its error in percent, its bits per byte, or where bytes mean nothing its loss."""
        if row.error is not None:
            return row.error
        return row.bits_per_byte if self.in_bits and row.bits_per_byte is not None else row.loss

    def format(self, row: Row) -> str:
        return f"{self.measure(row):.{3 if row.error is None else 2}f}"


@dataclass
class Score:
    """Sums over scored tokens."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0  # 0: bytes mean nothing here
    wrong: int = 0  # tokens that were not the most probable
    sequences: int = 0
    wrong_sequences: int = 0  # with any of them

    def __add__(self, other: "Score") -> "Score":
        return Score(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def make_row(score: Score, reading: str, slice_name: str, length: int, train_len: int, task: str | None = None) -> Row:
    """A row from sums; errors belong to tasks alone."""
    loss = score.nats / score.tokens
    return Row(
        reading=reading,
        slice=slice_name,
        length=length,
        ratio=length / train_len,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=score.nats / math.log(2) / score.bytes if score.bytes else None,
        tokens=score.tokens,
        sequences=score.sequences,
        task=task,
        error=100 * score.wrong / score.tokens if task else None,
        sequence_error=100 * score.wrong_sequences / score.sequences if task else None,
    )


def task_rows(results: Results, step: int) -> list[dict[str, Any]]:
    """The errors of a task as lines of metrics.jsonl: one for each reading, slice and length."""
    return [
        {
            "step": step, "task": row.task, "reading": row.reading, "slice": row.slice, "length": row.length,
            "error": row.error, "sequence_error": row.sequence_error, "n": row.tokens,
        }
        for row in results.lengths
        if row.task
    ]  # fmt: skip
