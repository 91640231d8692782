"""The schema of results.json, version 1.

Losses are means over the scored tokens, in nats. Additions keep the version; a change of meaning raises it.
"""

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table

from conf.rundir import write_atomically

VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Row(_Part):
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


class PositionBin(_Part):
    """Loss of the tokens at positions start <= position < stop of one pass at the longest length."""

    reading: str
    start: int
    stop: int
    loss: float
    tokens: int


class Training(_Part):
    steps: int
    tokens: int
    seconds: float  # of training steps alone, summed over interruptions
    tokens_per_s: float
    parameters: dict[str, int]
    flops_per_token: int
    peak_memory_mb: float  # of the device, or of the process on a CPU
    device: str
    precision: str


class Results(_Part):
    """Everything measured on one run."""

    version: Literal[1] = 1
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

    def save(self, path: Path) -> None:
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Raises ValueError if the file is missing, damaged or of another version."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path} is not a results file of version {VERSION}: {where} {first['msg']}") from None

    def table(self) -> Table:
        """For the terminal: a line for each length, a column for each reading."""
        labels = list(dict.fromkeys([*(row.reading for row in self.lengths), *self.skipped]))
        bits = all(row.bits_per_byte is not None for row in self.lengths)
        unit = "bits per byte" if bits else "loss"
        table = Table(title=f"{self.run}: {unit} of the same tokens by context length", title_justify="left")
        for heading in ("length", "x train_len", "tokens", *labels):
            table.add_column(heading, justify="right")
        rows = {(row.reading, row.length): row for row in self.lengths}
        for length in sorted({n for _, n in rows} | {n for lengths in self.skipped.values() for n in lengths}):
            found = [rows.get((label, length)) for label in labels]
            tokens = next((f"{row.tokens:,}" for row in found if row), "")
            values = ["no position" if not r else f"{r.bits_per_byte if bits else r.loss:.3f}" for r in found]
            table.add_row(str(length), f"{length / self.train_len:g}", tokens, *values)
        return table


def make_row(
    reading: str, slice_name: str, length: int, train_len: int, score: "tuple[float, int, int]", n: int
) -> Row:
    """A row from summed (nats, tokens, bytes); 0 bytes means that bytes mean nothing here."""
    nats, tokens, n_bytes = score
    loss = nats / tokens
    return Row(
        reading=reading,
        slice=slice_name,
        length=length,
        ratio=length / train_len,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=nats / math.log(2) / n_bytes if n_bytes else None,
        tokens=tokens,
        sequences=n,
    )
