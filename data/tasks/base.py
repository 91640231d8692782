"""What the tasks share: numbers that depend on a sample's index alone, and from them batches, slices and symbols."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data.base import IGNORE, Data, Slice
from data.sampler import splitmix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
PAD = "-"  # the symbol that fills what a sequence leaves free at its end; never scored


def uniforms(stream: str, indices: Sequence[int], columns: int) -> np.ndarray:
    """Numbers in [0, 1), float64 [len(indices), columns]: row i depends on `stream` and indices[i] alone, and begins
    alike for any number of columns.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), each row from a state of its own. A generator object for each row
    would cost more than the training step that waits for it.
    """
    key = np.uint64(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big"))
    with np.errstate(over="ignore"):
        states = splitmix(key + splitmix(np.asarray(indices, dtype=np.uint64)))  # [n]
        counter = np.arange(1, columns + 1, dtype=np.uint64) * _GOLDEN
        bits = splitmix(states[:, None] + counter)  # [n, columns]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(draws: np.ndarray, n: int) -> np.ndarray:
    """`n` of the columns of each row of `draws`, every choice as probable: bool of the same shape."""
    chosen = np.zeros(draws.shape, dtype=bool)
    np.put_along_axis(chosen, np.argsort(draws, axis=1)[:, :n], True, axis=1)
    return chosen


class Task(Data):
    """Base class of the tasks: sequences of a few symbols, made on the fly.

    A sample is a pure function of (options, seed, split, index). The splits draw from streams of different names;
    those of validation and test do not know the run's seed, so every run is measured on the same sequences.

    Attributes of a member:
        task: its name.
        difficulties: names of the slices it is tested on; the first is what it is trained on.
        version: to be raised when the samples of the same options change.
    """

    difficulties: ClassVar[tuple[str, ...]]
    version: ClassVar[int] = 1

    @property
    @abstractmethod
    def symbols(self) -> list[str]:
        """The vocabulary: symbol i has token id i. None contains a space."""

    @abstractmethod
    def sequences(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> tuple[Any, Any]:
        """Tokens int64 [len(indices), length], and bool of the same shape: which of them are to be predicted.

        There may be one token more: it is predicted, but never read.

        Raises:
            ValueError: no sequence of this length exists.
        """

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def batch(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [len(indices), length]: each target is the next input, or IGNORE."""
        tokens, scored = self.sequences(stream, indices, length, difficulty)
        inputs = np.ascontiguousarray(tokens[:, :length])
        targets = np.full_like(inputs, IGNORE)
        following = tokens.shape[1] - 1
        np.copyto(targets[:, :following], tokens[:, 1:], where=scored[:, 1:])
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        return self.batch(f"train/{seed}", indices, length, self.difficulties[0])

    def validation(self, length: int, tokens: int) -> Slice:
        n = max(1, tokens // length)
        return self._slice("validation", self.difficulties[0], length, n)

    def slices(self, lengths: Sequence[int], *, scored: int, sequences: int) -> list[Slice]:
        """Each difficulty at each length; what is scored is the task's own affair."""
        return [self._slice("test", name, length, sequences) for name in self.difficulties for length in lengths]

    def _slice(self, split: str, difficulty: str, length: int, n: int) -> Slice:
        stream = f"{split}/{difficulty}/{length}"
        return Slice(difficulty, length, n, partial(_between, self, stream, length, difficulty))

    def identity(self) -> dict[str, Any]:
        return self.tokenizer_identity() | {"options": vars(self), "version": self.version}

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"task": self.task, "symbols": self.symbols}

    def describe(self) -> list[str]:
        tested = ", ".join(self.difficulties)
        return [f"task: {self.task}, {self.vocab_size} symbols, tested on the slices {tested}"]

    def encode(self, text: str) -> list[int]:
        """Token ids of symbols separated by spaces. Raises ValueError at an unknown symbol."""
        ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        unknown = [symbol for symbol in text.split() if symbol not in ids]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a symbol of this task; there is: {' '.join(ids)}")
        return [ids[symbol] for symbol in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.symbols[i] for i in ids)


def _between(task: Task, stream: str, length: int, difficulty: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
    return task.batch(stream, range(start, stop), length, difficulty)
