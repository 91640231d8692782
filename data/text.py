"""Text: documents packed into one stream of tokens, and the sources that have them."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data import sources
from data.base import IGNORE, Data, Slice
from data.prepare import Prepared, Source, Split, prepare
from data.sampler import permute
from data.tokenizer import Tokenizer


class TextData(Data):
    """Base of the text sources.

    Training reads a split as a circle of tokens, documents one after the other with the end-of-text token between
    them, cut into windows that may cross from one document into the next, as GPT-2 was trained. An epoch sees each
    window once, in an order of its own, and begins cutting at a place of its own; its remainder of less than one
    window is left out. Targets are the inputs shifted by one token.

    Args:
        tokenizer: bytes, a named encoding of tiktoken, or a vocabulary file; see `data.tokenizer.Tokenizer`.
        pattern: for a vocabulary file, the regular expression that cuts text into pieces.
        val_fraction: share of the documents that are for validation, about; see `data.prepare`.
        cache_dir: where prepared data are kept.
        workers: threads that tokenise; 0: one for each core.

    Raises:
        ValueError: an option out of range.
    """

    label: str

    def __init__(
        self,
        *,
        tokenizer: str = "bytes",
        pattern: str | None = None,
        val_fraction: float = 0.1,
        cache_dir: str = "prepared",
        workers: int = 0,
    ) -> None:
        if not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction={val_fraction:g} must be between 0 and 1: the share for validation")
        if workers < 0:
            raise ValueError(f"data.workers={workers} must be at least 1, or 0 for one thread on each core")
        self._tokenizer = tokenizer, pattern
        self.val_fraction, self.cache_dir = val_fraction, cache_dir
        self.workers = workers or os.cpu_count() or 1
        self.prepared: Prepared | None = None

    @abstractmethod
    def source(self, progress: bool) -> Source:
        """The documents."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(*self._tokenizer)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def token_bytes(self) -> Tensor:
        return self.tokenizer.token_bytes

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def prepare(self, progress: bool = False) -> None:
        if self.prepared is None:
            self.prepared = prepare(
                self.source(progress),
                self.tokenizer,
                cache_dir=self.cache_dir,
                label=self.label,
                val_fraction=self.val_fraction,
                workers=self.workers,
                progress=progress,
            )

    def identity(self) -> dict[str, Any]:
        train, val = self._split("train"), self._split("val")
        return self.tokenizer_identity() | {"train_sha256": train.sha256, "val_sha256": val.sha256}

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.hash}

    def describe(self) -> list[str]:
        assert self.prepared is not None
        lines = [f"data: {self.prepared.folder}"]
        both = self.prepared.train, self.prepared.val
        for s in both:
            lines.append(f"  {s.name}: {s.documents:,} documents, {s.tokens:,} tokens, {s.bytes / 1e6:,.1f} MB")
        ratio = sum(s.bytes for s in both) / sum(s.tokens for s in both)
        lines.append(f"  tokenizer: {self.tokenizer.label}, {self.vocab_size:,} tokens, {ratio:.2f} bytes per token")
        if self.prepared.repeated:
            lines.append(f"  left out: {self.prepared.repeated:,} documents that repeat one of validation")
        if self.prepared.not_utf8:
            lines.append(f"  not UTF-8: {self.prepared.not_utf8:,} documents, their bad bytes replaced by U+FFFD")
        return lines

    def _split(self, name: str, length: int = 0) -> Split:
        """A split, if it has at least one window of `length` tokens."""
        assert self.prepared is not None, "call prepare() first"
        split: Split = getattr(self.prepared, name)
        if split.tokens <= length:
            raise ValueError(
                f"the {name} split has {split.tokens:,} tokens in {split.documents:,} documents: too few for one "
                f"window of {length:,} and its targets; use more text, a lower train_len or another data.val_fraction"
            )
        return split

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        split = self._split("train", length)
        windows = split.tokens // length  # in an epoch
        epochs, position = np.divmod(np.asarray(indices, dtype=np.int64), windows)
        starts = np.empty_like(position)
        for epoch in np.unique(epochs):
            phase, *keys = np.random.SeedSequence([seed, int(epoch)]).generate_state(5, np.uint64)
            now = epochs == epoch
            starts[now] = int(phase) % split.tokens + length * permute(position[now], windows, keys)
        return _cut(split, starts, length)

    def validation(self, length: int, tokens: int) -> Slice:
        """Windows of `length`, spread evenly over the split where `tokens` does not allow for all."""
        split = self._split("val", length)
        windows = (split.tokens - 1) // length
        n = min(windows, max(1, tokens // length))
        starts = np.arange(n) * windows // n * length
        return Slice("text", length, n, partial(_cut_some, split, starts, length, length))

    def slices(self, lengths: Sequence[int], *, scored: int, sequences: int) -> list[Slice]:
        """Segments that lie within one validation document and do not overlap, taken in turn from all documents.

        Where the documents have fewer than `sequences`, all there are.

        Raises:
            ValueError: no validation document is long enough, or `scored` exceeds a length.
        """
        longest = max(lengths)
        if not 1 <= scored <= min(lengths):
            raise ValueError(f"eval.scored={scored} must be between 1 and the shortest length, {min(lengths)}")
        split = self._split("val")
        offsets = np.asarray(split.offsets())
        sizes = np.diff(offsets) - 1  # without the end-of-text token
        room = (sizes - 1) // longest  # segments in each document
        if not room.any():
            raise ValueError(
                f"no validation document has {longest + 1:,} tokens, which a context of {longest:,} needs: the longest "
                f"of {split.documents:,} has {sizes.max():,}; lower eval.lengths or train_len, or use longer documents"
            )
        # in an order of their own, lest a few sequences are all of documents that the alphabet puts first
        shuffled = permute(np.arange(len(room)), len(room), [1, 2, 3, 4])
        starts = np.empty(0, dtype=np.int64)
        for turn in range(room.max()):
            starts = np.append(starts, offsets[shuffled[room[shuffled] > turn]] + turn * longest)
            if len(starts) >= sequences:
                break
        ends = starts[:sequences] + longest
        return [Slice("text", n, len(ends), partial(_cut_some, split, ends - n, n, scored)) for n in lengths]

    def whole(self, length: int, sequences: int) -> Slice:
        (part,) = self.slices([length], scored=length, sequences=sequences)
        return part


def _cut(split: Split, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [len(starts), length], of windows of the circle of tokens."""
    at = (starts[:, None] + np.arange(length + 1)) % split.tokens
    block = torch.from_numpy(np.asarray(split.stream()[at], dtype=np.int64))  # [B, length + 1]
    return block[:, :-1].contiguous(), block[:, 1:].clone()  # of one window, contiguous() would share memory


def _cut_some(
    split: Split, starts: np.ndarray, length: int, scored: int, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Windows start..stop-1, of which the last `scored` targets count."""
    x, y = _cut(split, starts[start:stop], length)
    y[:, : length - scored] = IGNORE
    return x, y


class StdlibCode(TextData):
    """The source files of the running Python's standard library, without its tests: text that every machine has.

    Its contents depend on the Python version; a run records their hash.
    """

    label = "code"

    def source(self, progress: bool) -> Source:
        return sources.Files(sources.stdlib_files())


class TextFiles(TextData):
    """The user's plain text files.

    Args:
        files: a glob pattern or several; ** stands for any number of folders.
        document_bytes: a longer file counts as several documents of about this size, cut at line ends. It lets a single
            file be split into training and validation, and bounds the memory.

    Raises:
        ValueError: files is missing, or an option is out of range.
    """

    label = "text"

    def __init__(self, *, files: str | list[str] | None = None, document_bytes: int = 2**17, **options: Any) -> None:
        super().__init__(**options)
        if not files:
            raise ValueError("data.files is missing: give a pattern, as in data.files='corpus/**/*.txt'")
        if document_bytes < 1:
            raise ValueError(f"data.document_bytes={document_bytes} must be at least 1")
        self.files, self.document_bytes = [files] if isinstance(files, str) else files, document_bytes

    def source(self, progress: bool) -> Source:
        return sources.Files(sources.matching_files(self.files), self.document_bytes)


class HuggingFace(TextData):
    """A dataset of the `datasets` library.

    Args:
        path: its id on the hub, or the format of local files: parquet, json, text, arrow.
        data_files: paths or glob patterns, for local files.
        subset: name of a configuration of the dataset.
        split: split to take the documents from; validation is split off by our own rule.
        text_field: column that holds the text.
        revision: commit, branch or tag on the hub; give one to keep the data as they are.

    Raises:
        ValueError: path is missing.
    """

    label = "hf"

    def __init__(
        self,
        *,
        path: str | None = None,
        data_files: str | list[str] | None = None,
        subset: str | None = None,
        split: str = "train",
        text_field: str = "text",
        revision: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not path:
            raise ValueError(
                "data.path is missing: a dataset on the hub, or parquet, json, text or arrow for local files"
            )
        self.path = path
        self.dataset = {
            "data_files": data_files,
            "subset": subset,
            "split": split,
            "text_field": text_field,
            "revision": revision,
        }

    def source(self, progress: bool) -> Source:
        return sources.Rows(self.path, **self.dataset, progress=progress)  # type: ignore[arg-type]
