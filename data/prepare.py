"""Preparation: documents are tokenised once, into memory-mapped files that a manifest describes.

    <folder>/manifest.json    counts, hashes, tokenizer
    <folder>/{train,val}.bin  token ids, uint16 or uint32; every document ends in the end-of-text token
    <folder>/bpe-N.tiktoken   in a folder of its own: a vocabulary trained on the corpus

A document is for validation if the hash of its id (its path, or its row) is at most `val_fraction`, or the lowest of
all: adding documents moves no other, unless validation holds only that lowest one. A document with the text of one of
validation is left out, and so are empty ones. Repetitions within training stay.
"""

import hashlib
import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import track
from torch import Tensor

from data import hf_tokenizer
from data.tokenizer import Tokenizer

FORMAT = 2
SAMPLED_BYTES = 2**27  # of a corpus, to train a vocabulary on
HASHED_BYTES = 2**28  # of larger files only the size is checked when they are opened
DOCUMENTS = 256  # that are tokenised at a time


class Source(NamedTuple):
    """Documents in a fixed order: a hash that changes with them, and what yields the id and the text of each, anew."""

    fingerprint: str
    documents: Callable[[], Iterator[tuple[str, bytes]]]


class Pool(NamedTuple):
    """Documents of a split that training takes windows from."""

    shortest: int  # tokens of each, without the end-of-text token
    share: float  # of the training windows
    starts: np.ndarray  # of each document in the stream, int64 [documents]
    bounds: np.ndarray  # where each begins in the pool, and the end: int64 [documents + 1]

    @property
    def tokens(self) -> int:
        return int(self.bounds[-1])

    def __str__(self) -> str:
        return f"{len(self.starts):,} documents from {self.shortest:,} tokens on, {self.tokens:,} tokens"


@dataclass(frozen=True)
class Split:
    """One split on disk."""

    folder: Path
    name: str
    dtype: str
    documents: int
    tokens: int  # including end-of-text tokens
    bytes: int  # of text
    repeated: int  # documents left out because validation has their text
    not_utf8: int  # documents in which bytes had to be replaced
    sha256: str  # of the token file

    def __str__(self) -> str:
        size = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.bytes / 1e6:,.1f} MB"
        return f"{self.name}: {size}; {self.repeated:,} repeated ones left out, {self.not_utf8:,} not UTF-8"

    def stream(self) -> np.ndarray:
        """All tokens, [tokens]."""
        return np.memmap(self.folder / f"{self.name}.bin", self.dtype, "r")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each document begins in the stream, and the end: int64 [documents + 1]."""
        stream, size = self.stream(), 2**26  # tokens compared at a time
        found = (np.flatnonzero(stream[i : i + size] == stream[-1]) + i for i in range(0, self.tokens, size))
        return np.append(0, np.concatenate([*found]) + 1)  # the end-of-text token is nowhere else

    def pool(self, shortest: int = 0, longest: float = math.inf, share: float = 1.0) -> "Pool":
        """The documents of `shortest` to `longest` - 1 tokens, without their end-of-text tokens."""
        if not shortest and longest == math.inf:  # all, without a look at the stream
            return Pool(shortest, share, np.zeros(1, np.int64), np.array([0, self.tokens]))
        sizes = np.diff(self.offsets)
        chosen = (sizes > shortest) & (sizes <= longest)
        return Pool(shortest, share, self.offsets[:-1][chosen], np.append(0, sizes[chosen].cumsum()))

    def windows(self, starts: np.ndarray, length: int, pool: "Pool | None" = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [len(starts), length], of windows of a pool, by default all documents, joined end
        to start."""
        pool = pool or self.pool()
        place = (starts[:, None] + np.arange(length + 1)) % pool.tokens
        document = pool.bounds.searchsorted(place, side="right") - 1
        index = pool.starts[document] + place - pool.bounds[document]
        block = torch.from_numpy(self.stream()[index].astype(np.int64))  # [B, length + 1]
        return block[:, :-1].contiguous(), block[:, 1:].clone()  # with one window, contiguous() would share memory


def prepare(
    source: Source, tokenizer: Tokenizer, prefix: Path, val_fraction: float, progress: bool = False
) -> dict[str, Split]:
    """The splits "train" and "val" of these documents, from a folder that is made if it is not there.

    Its path begins with `prefix`. It is written under another name and renamed when complete, under a lock: a kill does
    no harm. ValueError if there is nothing to split, or the folder cannot be written or has been changed.
    """
    name = f"{prefix.name}-{tokenizer.label}"
    request = [source.fingerprint, tokenizer.hash, val_fraction]
    return _open(_made(prefix.with_name(name), request, lambda f: _write(f, source, tokenizer, val_fraction, progress)))


def trained_tokenizer(source: Source, size: int, prefix: Path, val_fraction: float) -> Path:
    """A vocabulary file of `size` tokens, trained on the training split of these documents, or a share of it that has
    about SAMPLED_BYTES. It is made if it is not there; ValueError as for `prepare`, and for too little text."""
    name = f"bpe-{size}.tiktoken"

    def write(folder: Path) -> None:
        hashes, sizes, for_val = _split(source, val_fraction)
        share = min(1.0, SAMPLED_BYTES / max(1, sizes.sum()))
        chosen = ~for_val & (hashes >= np.quantile(hashes, 1 - share)) if len(hashes) else for_val
        texts = (text.decode("utf-8", "replace") for text in _texts(source, chosen, "reading", sys.stderr.isatty()))
        hf_tokenizer.train(texts, size, folder / name)

    folder = prefix.with_name(f"{prefix.name}-train-{size}")
    return _made(folder, [source.fingerprint, size, val_fraction], write) / name


def _made(prefix: Path, request: list[Any], write: Callable[[Path], None]) -> Path:
    """The folder that `write` fills, unless it is there; its path begins with `prefix` and tells requests apart."""
    fingerprint = hashlib.sha256(json.dumps([FORMAT, *request]).encode()).hexdigest()[:12]
    folder = prefix.with_name(f"{prefix.name}-{fingerprint}")
    partial = folder.with_name(folder.name + ".partial")
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
                try:
                    if not folder.exists():
                        partial.mkdir()
                        write(partial)
                        partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ValueError(f"data.cache_dir={prefix.parent} cannot hold the prepared data: {error}") from None
    return folder


def _split(source: Source, val_fraction: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each document: the hash of its id, in [0, 1); its bytes; whether it is for validation."""
    digests = ((hashlib.sha256(name.encode("utf-8", "surrogateescape")), text) for name, text in source.documents())
    rows = ((int.from_bytes(digest.digest()[:6], "big") / 2**48, len(text)) for digest, text in digests)
    table = np.fromiter(rows, [("hash", float), ("bytes", np.int64)])
    hashes = table["hash"]
    return hashes, table["bytes"], hashes <= max(val_fraction, hashes.min(initial=1.0))


def _texts(source: Source, chosen: np.ndarray, what: str, progress: bool) -> Iterable[bytes]:
    texts = (text for _, text in itertools.compress(source.documents(), chosen))
    console = Console(stderr=True)
    return track(texts, what, chosen.sum(), console=console, transient=True, disable=not progress)


def _write(folder: Path, source: Source, tokenizer: Tokenizer, val_fraction: float, progress: bool) -> None:
    *_, for_val = _split(source, val_fraction)
    seen = set[bytes]()
    manifest: dict[str, Any] = {"tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash}}
    for name, chosen in (("val", for_val), ("train", ~for_val)):  # training leaves out what validation has
        texts = _texts(source, chosen, f"tokenising {name}", progress)
        manifest[name] = _write_split(folder, name, filter(None, texts), tokenizer, seen)
    counts = {name: manifest[name]["documents"] for name in ("val", "train")}
    if not all(counts.values()):
        raise ValueError(
            f"the data has {counts['val']} documents for val, {counts['train']} documents for train (empty and "
            f"repeated ones do not count), but each needs one: add documents, change data.val_fraction="
            f"{val_fraction:g}, or lower data.document_bytes, so that a long file counts as several"
        )
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _write_split(
    folder: Path, name: str, documents: Iterator[bytes], tokenizer: Tokenizer, seen: set[bytes]
) -> dict[str, Any]:
    """Write one split without the texts in `seen`, to which those of validation are added; returns Split's fields."""
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    counts = dict.fromkeys(("documents", "tokens", "bytes", "repeated", "not_utf8"), 0)
    with open(folder / f"{name}.bin", "wb") as stream:
        while batch := list(itertools.islice(documents, DOCUMENTS)):
            texts = []
            for raw in batch:
                key = hashlib.sha256(raw).digest()[:16]
                if key in seen:
                    counts["repeated"] += 1
                    continue
                if name == "val":
                    seen.add(key)
                texts.append(raw.decode("utf-8", "replace"))
                counts["bytes"] += len(texts[-1].encode())
                counts["not_utf8"] += texts[-1].encode() != raw
            for ids in tokenizer.encode(texts):
                np.append(ids, tokenizer.eot).astype(dtype).tofile(stream)
                counts["documents"] += 1
                counts["tokens"] += len(ids) + 1
    return {"name": name, "dtype": dtype, **counts, "sha256": _sha256(folder / f"{name}.bin")}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(folder: Path) -> dict[str, Split]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        splits = {name: Split(folder, **manifest[name]) for name in ("train", "val")}
        for name, split in splits.items():
            file = folder / f"{name}.bin"
            hashed = file.stat().st_size <= HASHED_BYTES
            if len(split.stream()) != split.tokens or (hashed and _sha256(file) != split.sha256):
                raise ValueError(f"the {name} split has changed since it was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} is damaged ({reason}). Delete the folder to have it made again") from None
    return splits
