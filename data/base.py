"""The data interface: what training and evaluation ask of a source of token sequences."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

IGNORE_INDEX = -100  # a target that is not scored, as in torch's cross_entropy


@dataclass(frozen=True)
class EvalSet:
    """Fixed sequences of one length, to be scored."""

    name: str  # "text", or a difficulty of a task
    length: int  # tokens read in each sequence
    n: int  # sequences
    # (start, stop) -> inputs and targets of sequences start..stop-1, each int64 [stop - start, length]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    # hash of what decides the scored tokens: results may be compared sequence by sequence if and only if it is equal.
    # In text it is the same at every length of one `eval_sets` call.
    texts: str = ""


def hash_texts(*parts: Any) -> str:
    """A short hash of plain values, for `EvalSet.texts`: 16 hex digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Data(ABC):
    """Base class of all sources.

    The constructor only checks options: ValueError, with the remedy, if one is out of range. `prepare` does what takes
    time; call it before anything that needs sequences. Instances are sent to DataLoader workers, so they must pickle.
    """

    task: ClassVar[str | None] = None  # name of a task, which is measured by its errors; None for text

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def token_bytes(self) -> Tensor | None:
        """Bytes that each token stands for, int64 [vocab_size], 0 for special tokens; None where bytes mean nothing."""
        return None

    def prepare(self, progress: bool = False) -> None:
        """Make the sequences available; again is cheap. ValueError, with the remedy, if the data cannot be had."""
        return None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Plain values recorded with a run: equal for equal data on any machine, different for different data."""

    def tokenizer_identity(self) -> dict[str, Any]:
        """The part of `identity` that decides what a token id means; needs no `prepare`."""
        return {}

    def describe(self) -> list[str]:
        """Lines for the start-up message."""
        return []

    @abstractmethod
    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [len(indices), length], of the training samples with these global indices.

        A pure function of its arguments: no sample depends on its neighbours, on the process or on earlier calls.
        ValueError if there is no sample of this length.
        """

    @abstractmethod
    def validation(self, length: int, tokens: int) -> EvalSet:
        """Sequences with at most `tokens` targets (at least one sequence), each target once."""

    @abstractmethod
    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        """What length extrapolation is measured on: up to `sequences` sequences at each of the `lengths`.

        Text: the last `target_tokens` targets of sequence i are the same tokens at every length, with more or less
        context. They depend on the longest of the lengths, because every text must have that much context, but not on
        the others. Task: one set for each difficulty and length; no length affects another.
        """

    def fully_scored(self, length: int, sequences: int) -> EvalSet | None:
        """Sequences in which every target is scored, for the loss by position; None if few tokens are predictable."""
        return None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. ValueError if it cannot be written in them."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text that token ids stand for."""
