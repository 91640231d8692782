"""The data interface: what training and evaluation ask of a source of token sequences."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

IGNORE = -100  # a target that is not scored, as torch's cross_entropy has it


@dataclass(frozen=True)
class Slice:
    """Sequences of one length and difficulty, to be scored.

    Attributes:
        name: "text", or the difficulty of a task.
        length: tokens read in each sequence.
        n: sequences.
        batch: (start, stop) -> sequences start..stop-1 as inputs and targets, each int64 [stop - start, length];
            targets are IGNORE where nothing is scored.
    """

    name: str
    length: int
    n: int
    batch: Callable[[int, int], tuple[Tensor, Tensor]]


class Data(ABC):
    """Base class of every source.

    A constructor only checks its options. `prepare` does what takes time; what concerns the sequences may be called
    after it. A source is sent to worker processes, so it must pickle.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids: all are below it."""

    task: ClassVar[str | None] = None
    """The task's name if errors are what counts, None for text."""

    @property
    def token_bytes(self) -> Tensor | None:
        """Bytes that each token stands for, int64 [vocab_size], 0 for special tokens; None where bytes mean nothing."""
        return None

    def prepare(self, progress: bool = False) -> None:
        """Make ready, with a progress bar if asked. Repeating it costs little.

        Raises:
            ValueError: what the user has to change.
        """
        return None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Recorded with a run: equal for equal data on any machine, different for different data."""

    def describe(self) -> list[str]:
        """Lines for the start-up message."""
        return []

    @abstractmethod
    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        """The training samples with these global indices: inputs and targets, int64 [len(indices), length].

        A pure function of its arguments: no sample depends on its neighbours, on the process or on earlier calls.
        """

    @abstractmethod
    def validation(self, length: int, tokens: int) -> Slice:
        """Fixed sequences of `length` tokens with `tokens` targets at most (but one sequence), each target once."""

    @abstractmethod
    def slices(self, lengths: Sequence[int], *, scored: int, sequences: int) -> list[Slice]:
        """What length extrapolation is measured on: up to `sequences` sequences at each of the `lengths`.

        In text the last `scored` targets of sequence i are the same tokens at every length, with more or less context;
        a task has a slice for each of its difficulties at each length.
        """

    def whole(self, length: int, sequences: int) -> Slice | None:
        """Sequences with every target scored, for the loss by position; None where only some tokens are predictable."""
        return None

    def tokenizer_identity(self) -> dict[str, Any]:
        """The part of `identity` that is known without the text."""
        return {}

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises ValueError if it cannot be written in them."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text that token ids stand for."""
