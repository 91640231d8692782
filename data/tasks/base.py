"""What the tasks share: random numbers that depend on a sample's index alone, and from them batches and eval sets."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data.base import IGNORE_INDEX, Data, EvalSet, hash_texts
from data.sampler import splitmix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
MOST = 2**16  # of options that are numbers
PAD = "-"  # fills what a sequence leaves free at its end; never scored
Draw = Callable[..., list[np.ndarray]]  # numbers of columns -> uniforms, [B, columns] each
Sequences = tuple[np.ndarray, np.ndarray]  # inputs and targets, int64 [B, length]


def uniforms(stream: str, indices: Sequence[int], *columns: int) -> list[np.ndarray]:
    """Numbers in [0, 1), float64 [len(indices), sum of columns], split into parts of so many columns.

    Row i depends on `stream` and indices[i] alone, and begins alike for any number of columns: SplitMix64, OOPSLA 2014.
    """
    key = np.uint64(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big"))
    with np.errstate(over="ignore"):
        states = splitmix(key + splitmix(np.asarray(indices, dtype=np.uint64)))  # [n]
        bits = splitmix(states[:, None] + np.arange(1, sum(columns) + 1, dtype=np.uint64) * _GOLDEN)
    return np.split((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53, np.cumsum(columns)[:-1], axis=1)


def smallest(draws: np.ndarray, n: int) -> np.ndarray:
    """Places of the `n` smallest numbers in each row of `draws`, the smallest first: [rows, n]."""
    few = np.argpartition(draws, n - 1, axis=1)[:, :n]
    return np.take_along_axis(few, np.argsort(np.take_along_axis(draws, few, axis=1), axis=1), axis=1)


def choose(draws: np.ndarray, n: int) -> np.ndarray:
    """Places of `n` of the columns in each row of `draws`, ascending, each choice equally probable: [rows, n]."""
    return np.sort(smallest(draws, n), axis=1)


def next_tokens(tokens: np.ndarray, is_target: np.ndarray) -> Sequences:
    """Inputs and targets of sequences [B, length + 1]: each target is the next token, where that one is a target."""
    return tokens[:, :-1], np.where(is_target[..., 1:], tokens[:, 1:], IGNORE_INDEX)


@dataclass(kw_only=True, eq=False)
class Task(Data):
    """Base class of the tasks: sequences of a few symbols, made on the fly. The fields of a subclass are its options.

    A sample is a pure function of (options, seed, split, index); in validation and test the seed plays no part.
    """

    task: ClassVar[str]
    difficulties: ClassVar[tuple[str, ...]]  # names of the eval sets; the first is also what it is trained on
    version: ClassVar[int] = 1  # to be raised when the samples of the same options change

    @property
    @abstractmethod
    def vocab(self) -> list[str]:
        """The symbol of each token id. None contains a space."""

    @abstractmethod
    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        """Inputs and targets, int64 [B, length], made of the numbers that `draw` gives; IGNORE_INDEX: not a target."""

    def check(self, **ranges: tuple[float, float]) -> None:
        """Raises ValueError if an option lies outside of its range, (low, high)."""
        for option, (low, high) in ranges.items():
            if not low <= (value := getattr(self, option)) <= high:
                raise ValueError(f"data.{option}={value} must be between {low} and {high}")

    def check_length(self, length: int, possible: bool, needs: str) -> None:
        """Raises ValueError if a sequence of `length` tokens is not possible."""
        if not possible:
            raise ValueError(f"{self.task} needs {needs}, not {length}: choose train_len and eval.lengths accordingly")

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    def batch(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> tuple[Tensor, Tensor]:
        """The samples `indices` of a stream of random numbers: inputs and targets, int64 [len(indices), length]."""
        inputs, targets = self.sequences(partial(uniforms, stream, indices), length, difficulty)
        return torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(targets)

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        return self.batch(f"train/{seed}", indices, length, self.difficulties[0])

    def validation(self, length: int, tokens: int) -> EvalSet:
        return self._eval_set("validation", self.difficulties[0], length, max(1, tokens // length))

    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        return [self._eval_set("test", name, length, sequences) for name in self.difficulties for length in lengths]

    def _eval_set(self, split: str, difficulty: str, length: int, n: int) -> EvalSet:
        stream = f"{split}/{difficulty}/{length}"
        texts = hash_texts(self.task, self.version, asdict(self), stream, n)
        return EvalSet(difficulty, length, n, lambda a, b: self.batch(stream, range(a, b), length, difficulty), texts)

    def identity(self) -> dict[str, Any]:
        return self.tokenizer_identity() | {"options": asdict(self), "version": self.version}

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"task": self.task, "vocab": self.vocab}

    def describe(self, length: int) -> list[str]:
        return [f"task: {self.task}, {self.vocab_size} symbols, tested on {', '.join(self.difficulties)}"]

    def encode(self, text: str) -> list[int]:
        """Token ids of symbols separated by spaces."""
        ids = {symbol: i for i, symbol in enumerate(self.vocab)}
        if unknown := [symbol for symbol in text.split() if symbol not in ids]:
            raise ValueError(f"{unknown[0]!r} is not a symbol of this task; there is: {' '.join(ids)}")
        return [ids[symbol] for symbol in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(self.vocab.__getitem__, ids))
