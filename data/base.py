"""The data interface: what training and evaluation ask of a source of token sequences."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from conf import plugins
from model.layout import IGNORE_INDEX as IGNORE_INDEX


@dataclass(frozen=True)
class EvalSet:
    """A fixed set of sequences of one length, to be scored."""

    name: str  # "text", or a difficulty of a task
    length: int  # tokens read in each sequence
    n: int  # sequences
    # (start, stop) -> inputs and targets of sequences start..stop-1, each int64 [stop - start, length]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    texts_hash: str = ""  # identifies the scored tokens: results are compared text by text only if it is equal
    documents: Sequence[int | str] | None = None  # the document each sequence is from; None: each has its own
    text_start: int | None = None  # id of the token that each sequence begins with, whatever part of a text it is


def check_tokens(x: Tensor, y: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless all inputs and targets are tokens of the vocabulary; a target may be IGNORE_INDEX.

    The embedding may be padded beyond the vocabulary, and then other ids would be read without an error.
    """
    for name, ids in (("an input", x), ("a target", y[y != IGNORE_INDEX])):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise ValueError(f"{name} of the data is token {outside[0]}, but `vocab_size` is {vocab_size}: correct it")


def hash_texts(*parts: Any) -> str:
    """Hash plain values to 16 hex digits, for `EvalSet.texts_hash`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Data(ABC):
    """Base class of all sources of token sequences.

    Options are fields. `build_data` checks them by their annotations; the constructor checks what these cannot say. It
    raises ValueError, with the remedy, and does no slow work.
    """

    task: ClassVar[str | None] = None  # name of a task, which is measured by its errors; None for text
    document_end: int | None = None  # id of the token after which attention starts afresh; None: it never does
    text_start: int | None = None  # id of the token that every sequence and prompt begins with; None: there is none

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def token_bytes(self) -> Tensor | None:
        """Bytes that each token stands for, float64 [vocab_size]: 0 for special ones. None: bytes mean nothing."""
        return None

    def prepare(self) -> None:
        """Do the slow work, such as tokenising. A second call is cheap.

        Raises:
            ValueError: the data cannot be read, or the prepared data cannot be written.
        """
        return None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Plain values recorded with a run: equal for equal data on any machine, different for different data."""

    @abstractmethod
    def tokenizer_identity(self) -> dict[str, Any]:
        """The part of `identity` that decides what a token id means. It needs no `prepare`."""

    def tokenizer_files(self) -> list[Path]:
        """Files that a run keeps, so that its tokens can be decoded without the data."""
        return []

    def describe(self, length: int) -> list[str]:
        """Lines of the start-up message, for training on sequences of `length` tokens."""
        return []

    @abstractmethod
    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples, int64 [len(indices), length]: a pure function of the arguments."""

    @abstractmethod
    def validation(self, length: int, tokens: int) -> EvalSet:
        """Sequences with at most `tokens` targets (but at least one sequence). No target occurs twice."""

    @abstractmethod
    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        """Eval sets for length extrapolation: up to `sequences` sequences at each of the `lengths`.

        Text: the last `target_tokens` targets of sequence i are the same tokens at every length, with more or less
        context; the longest length decides which. Task: one set for each difficulty and length.
        """

    def optimum(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The loss of the best possible predictor of inputs and targets [B, T], in nats; None where nobody knows it.

        Of text alone, since tasks are measured by their errors. float64 [B, T], 0 where a target is not scored: a
        deterministic function of the texts and the options.
        """
        return None

    def fully_scored(self, length: int, sequences: int) -> EvalSet:
        """Sequences of text in which every target is scored. Of a task few tokens are predictable."""
        (eval_set,) = self.eval_sets([length], target_tokens=length, sequences=sequences)
        return eval_set

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises ValueError if the vocabulary cannot express it."""

    def prompt(self, text: str) -> list[int]:
        """Token ids of a text for a model to read: those of `encode`, after the token that texts begin with."""
        start = [] if self.text_start is None else [self.text_start]
        return start + self.encode(text)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text that token ids stand for."""


def build_data(options: Mapping[str, Any]) -> Data:
    """Build the source that a `data` configuration describes. Raises ValueError, with a line for each mistake.

    Args:
        options: `_target_`, such as "data.text.TextFiles", a display `name`, and the class's options.
    """
    cls, own_options = plugins.resolve(options, Data, "data", "data")  # type: ignore[type-abstract]
    return cls(**plugins.checked(cls, own_options, "data"))
