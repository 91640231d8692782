"""Base class of the tasks: random numbers that depend on a sample's index alone, batches and eval sets from them."""

import hashlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from data.base import IGNORE_INDEX, Data, EvalSet, hash_texts
from data.sampler import splitmix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
MAX_OPTION = 2**16  # the largest value of options that are numbers
Size = Annotated[int, Field(ge=1, le=MAX_OPTION)]
Symbols = Annotated[int, Field(ge=2, le=MAX_OPTION)]  # how many different ones
Share = Annotated[float, Field(ge=0, le=1)]
PAD = "-"  # fills what a sequence leaves free at its end; never scored
Draw = Callable[..., list[np.ndarray]]  # numbers of columns -> uniforms, [B, columns] each
Sequences = tuple[np.ndarray, np.ndarray]  # inputs and targets, int64 [B, length]


def uniforms(stream: str, indices: Sequence[int], *columns: int) -> list[np.ndarray]:
    """Random numbers in [0, 1): float64 [len(indices), n] for each n in `columns`.

    Row i depends on `stream` and indices[i] alone, and begins with the same numbers however many columns there are.
    The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    # The name of the stream is hashed to a key, key and index to the state of a row, and number j of the row is the
    # j-th output of SplitMix64 from that state on. uint64 wraps around, which numpy would warn of.
    key = np.uint64(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big"))
    with np.errstate(over="ignore"):
        states = splitmix(key + splitmix(np.asarray(indices, dtype=np.uint64)))  # [n]
        bits = splitmix(states[:, None] + np.arange(1, sum(columns) + 1, dtype=np.uint64) * _GOLDEN)
    numbers = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53  # a float64 holds 53 bits
    return np.split(numbers, np.cumsum(columns)[:-1], axis=1)


def argsmallest(draws: np.ndarray, n: int) -> np.ndarray:
    """Places of the `n` smallest numbers in each row of `draws`, the smallest first: [rows, n]."""
    # Sorting only the n chosen ones saves most of the time where a text chooses few of many keys.
    places = np.argpartition(draws, n - 1, axis=1)[:, :n]  # in any order
    order = np.argsort(np.take_along_axis(draws, places, axis=1), axis=1)
    return np.take_along_axis(places, order, axis=1)


def choose(draws: np.ndarray, n: int) -> np.ndarray:
    """Places of `n` of the columns in each row of `draws`, ascending, each choice equally probable: [rows, n]."""
    return np.sort(argsmallest(draws, n), axis=1)


def next_tokens(tokens: np.ndarray, is_target: np.ndarray) -> Sequences:
    """Inputs and targets for predicting the next token, where that is a target.

    Args:
        tokens: int64 [B, length + 1].
        is_target: bool [B, length + 1] or [length + 1].
    """
    targets = np.where(is_target[..., 1:], tokens[:, 1:], IGNORE_INDEX)
    return tokens[:, :-1], targets


@dataclass(kw_only=True, eq=False)
class Generated(Data):
    """Base class of texts of a few symbols, made on the fly. The fields of a subclass are its options.

    A text is a pure function of (options, seed, split, index); in validation and test the seed plays no part.
    """

    version: ClassVar[int] = 1  # raised when the texts of the same options change

    @property
    @abstractmethod
    def vocab(self) -> list[str]:
        """The symbol of each token id. None contains a space."""

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    def identity(self) -> dict[str, Any]:
        return self.tokenizer_identity() | {"options": asdict(self), "version": self.version}

    def check_length(self, length: int, possible: bool, needs: str) -> None:
        """Raise ValueError, which says what these texts need, if one of `length` tokens is not possible."""
        if not possible:
            raise ValueError(
                f"{type(self).__name__} needs {needs}, not {length}: choose train_len and eval.lengths accordingly"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of symbols separated by spaces. Raises ValueError: names a symbol that does not exist."""
        id_of = {symbol: i for i, symbol in enumerate(self.vocab)}
        for symbol in text.split():
            if symbol not in id_of:
                raise ValueError(f"{symbol!r} is not a symbol of this data; its symbols are: {' '.join(id_of)}")
        return [id_of[symbol] for symbol in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The symbols of token ids, separated by spaces."""
        vocab = self.vocab
        return " ".join(vocab[i] for i in ids)


@dataclass(kw_only=True, eq=False)
class Task(Generated):
    """Base class of the tasks, each with eval sets of several difficulties."""

    task: ClassVar[str]
    difficulties: ClassVar[tuple[str, ...]]  # names of the eval sets; the first is also what it is trained on

    @abstractmethod
    def sequences(self, draw: Draw, length: int, difficulty: str) -> Sequences:
        """Inputs and targets, int64 [B, length], made from random numbers. Raises ValueError: see `check_length`.

        Args:
            draw: numbers of columns -> random numbers in [0, 1), float64 [B, columns] each; see `uniforms`.
            length: tokens of a sequence.
            difficulty: one of `difficulties`.

        Returns:
            Inputs, and targets that are IGNORE_INDEX where nothing is scored.
        """

    def batch(self, stream: str, indices: Sequence[int], length: int, difficulty: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the samples `indices` of a stream of random numbers: int64 [len(indices), length]."""
        inputs, targets = self.sequences(partial(uniforms, stream, indices), length, difficulty)
        return torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(targets)

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        return self.batch(f"train/{seed}", indices, length, self.difficulties[0])

    def validation(self, length: int, tokens: int) -> EvalSet:
        return self._eval_set("validation", self.difficulties[0], length, max(1, tokens // length))

    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        parts = itertools.product(self.difficulties, lengths)
        return [self._eval_set("test", difficulty, length, sequences) for difficulty, length in parts]

    def _eval_set(self, split: str, difficulty: str, length: int, n: int) -> EvalSet:
        # The length is in the stream's name, so the texts of one length do not depend on which others are measured.
        stream = f"{split}/{difficulty}/{length}"

        def batch(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return self.batch(stream, range(start, stop), length, difficulty)

        return EvalSet(difficulty, length, n, batch, hash_texts(self.task, self.version, asdict(self), stream, n))

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"task": self.task, "vocab": self.vocab}
