"""Documents packed into one stream of tokens: which of its windows (`data.prepare.Split`) are read, and when."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from data.base import IGNORE_INDEX, Data, EvalSet, hash_texts
from data.hf_tokenizer import HFTokenizer
from data.prepare import Source, Split, prepare, trained_tokenizer
from data.sampler import feistel_permutation
from data.tokenizer import Tokenizer


@dataclass(kw_only=True, eq=False)
class TextData(Data):
    """Base class of the text sources.

    Training joins the end of the stream to its start and cuts it into windows, which may cross document boundaries, as
    in GPT-2. Each epoch starts cutting at another token and visits every window once, in another order.
    """

    label: ClassVar[str]  # first part of the prepared folder's name

    tokenizer: str = "bytes"  # or another of data.tokenizer.Tokenizer, hf:FOLDER_OR_HUB_ID, or train:TOKENS
    # Approximate share of the documents used for validation: see data.prepare.
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    cache_dir: str = "prepared"  # folder of the prepared data
    documents: Literal["cross", "mask"] = "cross"  # mask: attention does not look beyond the start of its document
    bos: Literal["auto", "none"] = "auto"  # auto: texts begin with the token that a published tokenizer puts there

    def __post_init__(self) -> None:
        kind, _, size = self.tokenizer.partition(":")
        if kind == "train" and not (size.isascii() and size.isdigit() and 257 < int(size) <= 2**20):
            raise ValueError(f"data.tokenizer={self.tokenizer}: train: needs a number of tokens, as in train:4096")

    @abstractmethod
    def source(self) -> Source:
        """The documents."""

    @cached_property
    def encoder(self) -> Tokenizer:
        """The tokenizer. A vocabulary of the data is trained first, unless it is in the cache."""
        kind, _, value = self.tokenizer.partition(":")
        if kind == "hf":
            return HFTokenizer(value)
        if kind == "train":
            prefix = Path(self.cache_dir, self.label)
            return Tokenizer(str(trained_tokenizer(self.source(), int(value), prefix, self.val_fraction)))
        return Tokenizer(self.tokenizer)

    @cached_property
    def prepared(self) -> dict[str, Split]:
        """The splits "train" and "val", prepared when they are first asked for."""
        return prepare(self.source(), self.encoder, Path(self.cache_dir, self.label), self.val_fraction)

    @property
    def vocab_size(self) -> int:
        return self.encoder.vocab_size

    @property
    def token_bytes(self) -> Tensor:
        """Bytes of each token, float64 [vocab_size]: over the validation split they add up to those of its texts.

        Where a tokenizer changes texts, such as to lower case, the bytes of all tokens are scaled alike.
        """
        # Bytes of text for each byte that tokens stand for: 1 unless texts are changed. Special tokens stand for none.
        val = self.prepared["val"]
        return self.encoder.token_bytes.double() * (val.bytes / max(val.token_bytes, 1))

    def encode(self, text: str) -> list[int]:
        return self.encoder.encode([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoder.decode(ids)

    def prepare(self) -> None:
        self._split("train")  # the first use of `prepared`

    def identity(self) -> dict[str, Any]:
        hashes = {f"{name}_sha256": self._split(name).sha256 for name in ("train", "val")}
        bos = {} if self.text_start is None else {"bos": self.text_start}
        return self.tokenizer_identity() | hashes | bos

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"tokenizer": self.encoder.hash}

    def tokenizer_files(self) -> list[Path]:
        return self.encoder.files

    @property
    def document_end(self) -> int | None:  # type: ignore[override]
        return self.encoder.eot if self.documents == "mask" else None

    @property
    def text_start(self) -> int | None:  # type: ignore[override]
        if self.bos == "none":
            return None
        if self.documents == "mask" and self.encoder.bos == self.encoder.eot:
            raise ValueError(f"data.documents=mask needs data.bos=none: {self.tokenizer} puts its end token first")
        return self.encoder.bos

    def describe(self, length: int) -> list[str]:
        return [f"data: {self._split('train').folder}", *(f"  {split}" for split in self.prepared.values())]

    def _split(self, name: str, length: int = 0) -> Split:
        """Return a split. Raises ValueError unless it has a window of `length` tokens and its targets."""
        split = self.prepared[name]
        if split.tokens <= length:
            raise ValueError(
                f"the {name} split has {split.tokens:,} tokens, too few for one window of {length:,} and its targets: "
                f"use more text, a lower train_len or another data.val_fraction"
            )
        return split

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        split = self._split("train", length)
        starts = _window_starts(np.asarray(indices, dtype=np.int64), split.tokens, length, seed)
        x, y = split.windows(starts, length)
        self._mark_starts(x, y)
        return x, y

    def _mark_starts(self, x: Tensor, y: Tensor) -> None:
        """Let each window begin as a text does and, with documents=mask, leave first tokens of documents out of `y`.

        Both tensors are changed in place.
        """
        # The start token takes the place of the window's first one, so that lengths stay. It is set before the mask:
        # where that first one ended a document, a text begins here all the same, and its first target counts.
        if self.text_start is not None:
            x[:, 0] = self.text_start
        # Where attention stays within a document, nothing in the end of one predicts the start of the next.
        if self.document_end is not None:
            y[x == self.document_end] = IGNORE_INDEX

    def validation(self, length: int, tokens: int) -> EvalSet:
        """Windows of `length`, spread evenly over the split if `tokens` does not allow for all."""
        split = self._split("val", length)
        # The windows do not overlap, so no target counts twice. The last token of the split is only a target.
        windows = (split.tokens - 1) // length
        n = min(windows, max(1, tokens // length))
        starts = np.arange(n) * windows // n * length
        return self._eval_set(starts + length, length, length)

    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        """Segments of the longest length, up to `sequences`, and at each other length the ends of the same segments.

        A segment lies within one validation document, and no two overlap. They are taken from all documents in turn.
        Pieces of one file count as one document of `EvalSet.documents`, since they are alike.

        Raises:
            ValueError: no document is long enough.
        """
        longest = max(lengths)
        split = self._split("val")
        offsets = split.offsets
        sizes = np.diff(offsets) - 1  # without the end-of-text token
        segments = (sizes - 1) // longest  # in each document
        if not (segments > 0).any():  # a document without tokens has -1
            raise ValueError(
                f"no validation document has {longest + 1:,} tokens, which a context of {longest:,} needs: the longest "
                f"of {split.documents:,} has {sizes.max():,}; lower eval.lengths or train_len, or use longer documents"
            )
        # Shuffled, so that a few sequences are not all from documents whose names come first in the alphabet.
        order = feistel_permutation(np.arange(len(sizes)), len(sizes), [1, 2, 3, 4])
        order = order[segments[order] > 0]  # there may be far more documents without a segment
        # First the first segment of each document that has one, then the second ones, and so on: otherwise one long
        # document could fill the set.
        chosen: list[tuple[int, int]] = []  # (document, the token at which its segment ends)
        for turn in range(segments.max()):
            more = order[segments[order] > turn]  # the documents that have another segment
            chosen += zip(more, offsets[more] + (turn + 1) * longest, strict=True)
            if len(chosen) >= sequences:
                break
        owners, ends = np.array(chosen[:sequences]).T  # int64 [texts] each
        documents = _documents_of_texts(split, owners)
        return [self._eval_set(ends, length, target_tokens, documents) for length in lengths]

    def _eval_set(
        self, ends: np.ndarray, length: int, target_tokens: int, documents: list[int] | None = None
    ) -> EvalSet:
        """Windows whose last target is token `ends` of the stream; the last `target_tokens` targets are scored."""
        split = self._split("val")

        def batch(start: int, stop: int) -> tuple[Tensor, Tensor]:
            x, y = split.windows(ends[start:stop] - length, length)
            y[:, : length - target_tokens] = IGNORE_INDEX
            self._mark_starts(x, y)
            return x, y

        parts: list[Any] = [split.sha256, target_tokens, ends.tolist()]
        if self.text_start is not None:
            parts.append({"bos": self.text_start})
        if self.document_end is not None:  # the first targets of documents are left out
            parts.append({"documents": self.documents})
        # Results that group the texts into other documents must not be paired with these: they need another hash. If
        # every text is a document of its own, nothing is grouped, and the hash stays as it was.
        if documents and len(set(documents)) < len(documents):
            parts.append(documents)
        return EvalSet("text", length, len(ends), batch, hash_texts(*parts), documents, self.text_start)


def _window_starts(indices: np.ndarray, tokens: int, length: int, seed: int) -> np.ndarray:
    """Where in a stream of `tokens` tokens the training windows of these numbers begin: int64, same shape."""
    n = tokens // length  # windows in an epoch
    epochs, windows = np.divmod(indices, n)
    starts = np.empty_like(windows)
    # Random numbers of seed and epoch choose the token at which cutting starts, and the order of the windows. So a
    # window is a function of its number alone, and a resumed run needs no state of the epoch that it is in.
    for epoch in np.unique(epochs):
        phase, *keys = np.random.SeedSequence([seed, int(epoch)]).generate_state(5, np.uint64)
        rows = epochs == epoch
        shuffled = feistel_permutation(windows[rows], n, keys)
        starts[rows] = int(phase) % tokens + length * shuffled
    return starts


def _documents_of_texts(split: Split, documents: np.ndarray) -> list[int] | None:
    """Return `EvalSet.documents` for texts from these documents of the split: the number of each text's file.

    If all texts are from one file, its pieces count as documents instead; if they are from one piece, each text counts
    as a document of its own, which is None.
    """
    for numbers in (split.files[documents], documents):
        if len(np.unique(numbers)) > 1:
            return numbers.tolist()
    return None
