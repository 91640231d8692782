"""Documents packed into one stream of tokens, and the windows of it that training and evaluation read."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data.base import IGNORE_INDEX, Data, EvalSet, hash_texts
from data.prepare import Source, Split, prepare
from data.sampler import feistel_permutation
from data.tokenizer import Tokenizer


@dataclass(kw_only=True, eq=False)
class TextData(Data):
    """Base class of the text sources.

    A split is one stream of tokens: its documents, each followed by the end-of-text token. Training joins the stream
    end to start and cuts it into windows of `length` tokens, which may cross document boundaries, as in GPT-2. Each
    epoch starts cutting at another token and visits every window once, in another order; less than one window is left
    over. Targets are the inputs shifted by one token.
    """

    label: ClassVar[str]  # first part of the prepared folder's name

    tokenizer: str = "bytes"  # or a named encoding of tiktoken, or a vocabulary file; see data.tokenizer.Tokenizer
    pattern: str | None = None  # for a vocabulary file, the regular expression that cuts text into pieces
    val_fraction: float = 0.1  # approximate share of the documents used for validation; see data.prepare
    cache_dir: str = "prepared"  # folder of the prepared data
    workers: int = 0  # threads that tokenise; 0: one for each core
    prepared: dict[str, Split] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise ValueError(
                f"data.val_fraction={self.val_fraction:g} must be between 0 and 1, the share of validation"
            )
        if not 0 <= self.workers <= 1024:
            raise ValueError(f"data.workers={self.workers} must be 1 to 1024, or 0 for one on each core")

    @abstractmethod
    def source(self, progress: bool) -> Source:
        """The documents."""

    @cached_property
    def encoder(self) -> Tokenizer:
        return Tokenizer(self.tokenizer, self.pattern)

    @property
    def vocab_size(self) -> int:
        return self.encoder.vocab_size

    @property
    def token_bytes(self) -> Tensor:
        return self.encoder.token_bytes

    def encode(self, text: str) -> list[int]:
        return self.encoder.encode(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoder.decode(ids)

    def prepare(self, progress: bool = False) -> None:
        if not self.prepared:
            source, prefix = self.source(progress), Path(self.cache_dir) / self.label
            workers = self.workers or os.cpu_count() or 1
            self.prepared = prepare(source, self.encoder, prefix, self.val_fraction, workers=workers, progress=progress)

    def identity(self) -> dict[str, Any]:
        return self.tokenizer_identity() | {f"{name}_sha256": self._split(name).sha256 for name in ("train", "val")}

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"tokenizer": self.encoder.hash}

    def describe(self) -> list[str]:
        train, val = self._split("train"), self._split("val")
        lines = [f"data: {train.folder}"]
        for s in (train, val):
            lines.append(f"  {s.name}: {s.documents:,} documents, {s.tokens:,} tokens, {s.bytes / 1e6:,.1f} MB")
        ratio = (train.bytes + val.bytes) / (train.tokens + val.tokens)
        lines.append(f"  tokenizer: {self.encoder.label}, {self.vocab_size:,} tokens, {ratio:.2f} bytes per token")
        if repeated := train.repeated + val.repeated:
            lines.append(f"  left out: {repeated:,} documents that repeat one of validation")
        if not_utf8 := train.not_utf8 + val.not_utf8:
            lines.append(f"  not UTF-8: {not_utf8:,} documents, their bad bytes replaced by U+FFFD")
        return lines

    def _split(self, name: str, length: int = 0) -> Split:
        """A split; ValueError unless it has a window of `length` tokens and its targets."""
        assert self.prepared, "call prepare() first"
        split = self.prepared[name]
        if split.tokens <= length:
            raise ValueError(
                f"the {name} split has {split.tokens:,} tokens in {split.documents:,} documents: too few for one "
                f"window of {length:,} and its targets; use more text, a lower train_len or another data.val_fraction"
            )
        return split

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        split = self._split("train", length)
        n = split.tokens // length  # windows in an epoch
        epochs, windows = np.divmod(np.asarray(indices, dtype=np.int64), n)
        starts = np.empty_like(windows)
        for epoch in np.unique(epochs):
            phase, *keys = np.random.SeedSequence([seed, int(epoch)]).generate_state(5, np.uint64)
            rows = epochs == epoch
            starts[rows] = int(phase) % split.tokens + length * feistel_permutation(windows[rows], n, keys)
        return _gather_windows(split, starts, length)

    def validation(self, length: int, tokens: int) -> EvalSet:
        """Windows of `length`, spread evenly over the split if `tokens` does not allow for all."""
        split = self._split("val", length)
        windows = (split.tokens - 1) // length
        n = min(windows, max(1, tokens // length))
        return _eval_set(split, np.arange(n) * windows // n * length + length, length, length)

    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        """The ends of segments that lie within one validation document and do not overlap.

        Segments have the longest of the lengths, which alone decides where they are; they are taken from all documents
        in turn. If the documents have fewer than `sequences`, all there are. ValueError if there are none.
        """
        longest, shortest = max(lengths), min(lengths)
        if not 1 <= target_tokens <= shortest:
            raise ValueError(f"eval.target_tokens={target_tokens} must be at least 1 and at most {shortest}, a length")
        split = self._split("val")
        offsets = np.asarray(split.offsets())
        sizes = np.diff(offsets) - 1  # without the end-of-text token
        segments = (sizes - 1) // longest  # in each document
        if not segments.any():
            raise ValueError(
                f"no validation document has {longest + 1:,} tokens, which a context of {longest:,} needs: the longest "
                f"of {split.documents:,} has {sizes.max():,}; lower eval.lengths or train_len, or use longer documents"
            )
        # shuffled, so that few sequences are not all from documents whose names come first in the alphabet
        order = feistel_permutation(np.arange(len(sizes)), len(sizes), [1, 2, 3, 4])
        starts = np.empty(0, dtype=np.int64)
        for turn in range(segments.max()):
            starts = np.append(starts, offsets[order[segments[order] > turn]] + turn * longest)
            if len(starts) >= sequences:
                break
        return [_eval_set(split, starts[:sequences] + longest, length, target_tokens) for length in lengths]

    def fully_scored(self, length: int, sequences: int) -> EvalSet:
        return self.eval_sets([length], target_tokens=length, sequences=sequences)[0]


def _eval_set(split: Split, ends: np.ndarray, length: int, target_tokens: int) -> EvalSet:
    """Windows whose last target is token `ends` of the stream; the last `target_tokens` targets are scored."""

    def batch(start: int, stop: int) -> tuple[Tensor, Tensor]:
        x, y = _gather_windows(split, ends[start:stop] - length, length)
        y[:, : length - target_tokens] = IGNORE_INDEX
        return x, y

    return EvalSet("text", length, len(ends), batch, hash_texts(split.sha256, target_tokens, ends.tolist()))


def _gather_windows(split: Split, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [len(starts), length], of windows of the stream joined end to start."""
    index = (starts[:, None] + np.arange(length + 1)) % split.tokens
    block = torch.from_numpy(np.asarray(split.stream()[index], dtype=np.int64))  # [B, length + 1]
    return block[:, :-1].contiguous(), block[:, 1:].clone()  # with one window, contiguous() would share memory
