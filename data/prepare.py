"""Preparation: documents are tokenised once, into memory-mapped files that a manifest describes.

    <folder>/manifest.json    counts, hashes of all files, tokenizer; and a checksum of these values
    <folder>/{train,val}.bin  token ids, uint16 or uint32; every document ends in the end-of-text token
    <folder>/{train,val}.files  the number of each document's file, uint32
    <folder>/bpe-N.tiktoken   in a folder of its own: a vocabulary trained on the corpus

A document is for validation if the hash of its id (its path, or its row) is at most `val_fraction`, or the lowest of
all. So adding documents moves no other document, unless validation holds only the lowest one. Documents cut from one
file share its id, unless it is the only file: adding another to that one moves its pieces. A document whose text is
already in validation, perhaps with other line ends, is left out, and so are empty documents. Repetitions within
training stay.
"""

import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from conf.files import announce, read_json, sealed, sha256, unsealed, whole_folder, write_json
from data import hf_tokenizer
from data.tokenizer import Tokenizer

FORMAT = 8  # raised when the same documents and options give other files
SAMPLED_BYTES = 2**27  # of a corpus, to train a vocabulary on
HASHED_BYTES = 2**28  # when larger files are opened, only their size is checked
DOCUMENTS = 256  # tokenised at a time


class Source(NamedTuple):
    """Documents in a fixed order, which can be read any number of times."""

    # Yields an id, which decides the split, and the text of each. Documents that share an id follow each other.
    documents: Callable[[], Iterator[tuple[str, bytes]]]
    fingerprint: Callable[[], str]  # a hash that changes with the documents
    name: str = "documents"  # what is read, for a line that says so


@dataclass(frozen=True)
class Split:
    """One split on disk."""

    folder: Path
    name: str
    dtype: str
    documents: int
    tokens: int  # including end-of-text tokens
    bytes: int  # of text
    token_bytes: int  # that its tokens stand for: the same unless the tokenizer changes texts
    repeated: int  # documents left out because validation has their text
    without_text: int  # empty documents, and rows without one, which are left out
    not_utf8: int  # documents in which bytes had to be replaced
    sha256: str  # of the token file
    files_sha256: str  # of the file with the numbers of files

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.documents:,} documents, {self.tokens:,} tokens, {self.bytes / 1e6:,.1f} MB; "
            f"{self.repeated:,} repeated ones and {self.without_text:,} without text left out, "
            f"{self.not_utf8:,} not UTF-8"
        )

    def stream(self) -> np.ndarray:
        """All tokens, [tokens]."""
        return np.memmap(self.folder / f"{self.name}.bin", self.dtype, "r")

    @cached_property
    def offsets(self) -> np.ndarray:
        """The token at which each document begins, and the stream's end: int64 [documents + 1]."""
        # The stream ends in the end-of-text token, which occurs at ends of documents alone.
        stream = self.stream()
        return np.append(0, np.flatnonzero(stream == stream[-1]) + 1)

    @cached_property
    def files(self) -> np.ndarray:
        """The number of each document's file, int64 [documents]. Each piece of an only file counts as a file."""
        return np.fromfile(self.folder / f"{self.name}.files", "uint32").astype(np.int64)

    def windows(self, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
        """Read windows of the stream. After its end a window goes on at its start.

        Args:
            starts: the token at which each window begins, int64 [B].
            length: tokens of a window.

        Returns:
            Inputs and targets, int64 [B, length].
        """
        index = (starts[:, None] + np.arange(length + 1)) % self.tokens  # [B, length + 1]
        block = torch.from_numpy(self.stream()[index].astype(np.int64))
        return block[:, :-1].contiguous(), block[:, 1:].clone()  # with one window, contiguous() would share memory


def prepare(source: Source, tokenizer: Tokenizer, prefix: Path, val_fraction: float) -> dict[str, Split]:
    """Open the splits "train" and "val" of these documents, after writing them unless they exist.

    Args:
        source: the documents.
        tokenizer: encodes them.
        prefix: folder and beginning of the name of the prepared folder.
        val_fraction: approximate share of the documents for validation.

    Raises:
        ValueError: a split would be empty, the folder cannot be written, or its files have changed since.
    """
    write = partial(_write_splits, source=source, tokenizer=tokenizer, val_fraction=val_fraction)
    return _open(_prepared_folder(prefix, tokenizer.label, source, [tokenizer.hash, val_fraction], write))


def trained_tokenizer(source: Source, size: int, prefix: Path, val_fraction: float) -> Path:
    """Return a vocabulary file of `size` tokens, after training it on the training split unless it exists.

    Of a split with more than SAMPLED_BYTES, about as many bytes are used. The arguments are those of `prepare`.

    Raises:
        ValueError: as for `prepare`, or there is too little text for so many tokens.
    """
    name = f"bpe-{size}.tiktoken"

    def write(folder: Path) -> None:
        hashes, sizes, for_val = _assign(source, val_fraction)
        chosen = ~for_val
        # The sample is the documents with the highest hashes: it depends on their ids alone, and a larger val_fraction,
        # which takes the lowest, hardly changes it. Above this quantile lie about SAMPLED_BYTES of text.
        if sizes.sum() > SAMPLED_BYTES:
            chosen &= hashes >= np.quantile(hashes, 1 - SAMPLED_BYTES / sizes.sum())
        texts = (text.decode("utf-8", "replace") for _, text in _documents(source, chosen, "reading"))
        hf_tokenizer.train(texts, size, folder / name)

    return _prepared_folder(prefix, f"train-{size}", source, [size, val_fraction], write) / name


def _prepared_folder(
    prefix: Path, label: str, source: Source, request: list[Any], write: Callable[[Path], None]
) -> Path:
    """Return the complete folder that `write` has filled, now or in an earlier call with the same arguments.

    Args:
        prefix, label: beginning of the folder's path; a hash of the documents and the request is its end.
        request: plain values that decide what is written.
        write: called with an empty folder, unless the request has been served before.

    Raises:
        ValueError: a document cannot be read, the folder cannot be written, or the documents changed meanwhile.
    """
    fingerprint = source.fingerprint()
    digest = hashlib.sha256(json.dumps([FORMAT, fingerprint, *request]).encode()).hexdigest()
    folder = prefix.with_name(f"{prefix.name}-{label}-{digest[:12]}")
    try:
        if folder.exists():
            return folder
        with whole_folder(folder) as unfinished:
            if not folder.exists():  # another process may have made it while this one waited
                announce(f"data: reading {source.name}")
                write(unfinished)
                # Documents are read several times and told apart by their numbers. If a file grows meanwhile, a text
                # could be in both splits, or in none.
                if source.fingerprint() != fingerprint:
                    raise ValueError("the documents changed while being read: try again when nothing writes to them")
                unfinished.replace(folder)
    except OSError as error:
        raise ValueError(
            "the documents cannot be read, or the prepared data cannot be written to data.cache_dir="
            f"{prefix.parent}: {error}"
        ) from None
    return folder


def _assign(source: Source, val_fraction: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each document the hash of its id, in [0, 1), its size in bytes, and True if it is for validation."""
    # A document's own id decides its split, not its number or a random choice: other documents cannot move it.
    hashes = array("d")
    sizes = array("q")
    for name, text in source.documents():
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        hashes.append(int.from_bytes(digest[:6], "big") / 2**48)
        sizes.append(len(text))
    lowest = min(hashes, default=1.0)
    for_val = np.array(hashes) <= max(val_fraction, lowest)
    return np.array(hashes), np.array(sizes), for_val


def _documents(source: Source, chosen: np.ndarray, task: str) -> Iterable[tuple[str, bytes]]:
    """The id and the text of the chosen documents. A terminal shows a progress bar with the name of the task."""
    documents = itertools.compress(source.documents(), chosen)
    console = Console(stderr=True)
    return track(documents, task, chosen.sum(), console=console, transient=True, disable=not console.is_terminal)


def _write_splits(folder: Path, source: Source, tokenizer: Tokenizer, val_fraction: float) -> None:
    """Fill the folder. Raises ValueError if a split has no document."""
    *_, for_val = _assign(source, val_fraction)
    # Validation is written first, and training leaves out the texts in it: a text in both would be read in training and
    # then measured as if it were new.
    seen: set[bytes] = set()
    manifest: dict[str, Any] = {"tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash}}
    for name, chosen in (("val", for_val), ("train", ~for_val)):
        documents = _documents(source, chosen, f"tokenising {name}")
        manifest[name] = _write_split(folder, name, documents, tokenizer, seen)
    n_val = manifest["val"]["documents"]
    n_train = manifest["train"]["documents"]
    if not n_val or not n_train:
        raise ValueError(
            f"the data has {n_val} documents for validation and {n_train} for training (empty and "
            f"repeated ones do not count), but each needs at least one: add documents, change data.val_fraction="
            f"{val_fraction:g}, or lower data.document_bytes, so that a single long file counts as several"
        )
    write_json(folder / "manifest.json", sealed(manifest))


def _write_split(
    folder: Path, name: str, documents: Iterable[tuple[str, bytes]], tokenizer: Tokenizer, seen: set[bytes]
) -> dict[str, Any]:
    """Write one split, without the texts whose hashes are in `seen`. Those of validation are added to `seen`.

    Returns:
        The fields of `Split`, but for its folder.
    """
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    tokens_path = folder / f"{name}.bin"
    files_path = folder / f"{name}.files"
    fields = "documents", "tokens", "bytes", "token_bytes", "repeated", "without_text", "not_utf8"
    counts = dict.fromkeys(fields, 0)
    replaced = 0  # characters that stand for bytes which are no UTF-8
    characters = 0
    documents = iter(documents)
    last_id = None
    file_number = -1
    with tokens_path.open("wb") as stream, files_path.open("wb") as files:
        # Batches of documents, until one is empty.
        for batch in iter(lambda: list(itertools.islice(documents, DOCUMENTS)), []):
            texts = []
            file_numbers = []
            for identity, raw in batch:
                if not raw:
                    counts["without_text"] += 1
                    continue
                key = _key(raw)
                if key in seen:
                    counts["repeated"] += 1
                    continue
                if name == "val":
                    seen.add(key)
                # A document that is not UTF-8 is kept, with U+FFFD in place of its bad bytes, and counted.
                text = raw.decode("utf-8", "replace")
                encoded = text.encode()
                if encoded != raw:
                    counts["not_utf8"] += 1
                    replaced += text.count("\N{REPLACEMENT CHARACTER}")
                characters += len(text)
                texts.append(text)
                # Documents of one file share its id and follow each other, so that no table of all ids is needed.
                if identity != last_id:
                    file_number += 1
                    last_id = identity
                file_numbers.append(file_number)
                counts["bytes"] += len(encoded)
            np.array(file_numbers, dtype="uint32").tofile(files)
            for ids in tokenizer.encode(texts):
                np.append(ids, tokenizer.eot).astype(dtype).tofile(stream)
                counts["documents"] += 1
                counts["tokens"] += len(ids) + 1
                counts["token_bytes"] += int(tokenizer.token_bytes[ids.astype(np.int64)].sum())
    if replaced > characters / 2:
        raise ValueError(
            f"more than half of the text for {name} is not UTF-8: "
            "convert it, for example with iconv -f GB18030 -t UTF-8"
        )
    hashes = {"sha256": sha256(tokens_path), "files_sha256": sha256(files_path)}
    return {"name": name, "dtype": dtype, **counts, **hashes}


def _key(raw: bytes) -> bytes:
    """The same for texts that differ in their kind of line ends, or in blanks before or after them, alone."""
    unified = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").strip()
    return hashlib.sha256(unified).digest()[:16]


def _open(folder: Path) -> dict[str, Split]:
    """The splits in a prepared folder. Raises ValueError if its files are not as they were written."""
    splits = {}
    try:
        manifest = unsealed(read_json(folder / "manifest.json"))
        for name in ("train", "val"):
            split = Split(folder, **manifest[name])
            splits[name] = split
            _check(folder / f"{name}.bin", split.tokens * np.dtype(split.dtype).itemsize, split.sha256)
            _check(folder / f"{name}.files", split.documents * np.dtype("uint32").itemsize, split.files_sha256)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is damaged ({type(error).__name__}: {error}): delete the folder to have it prepared again"
        ) from None
    return splits


def _check(path: Path, size: int, digest: str) -> None:
    """Raise ValueError if a file has changed since it was written with this size and hash."""
    # Hashing a file of many GB would delay each start. Its size shows at least that it is complete.
    if path.stat().st_size != size or (size <= HASHED_BYTES and sha256(path) != digest):
        raise ValueError(f"{path.name} has changed since it was written")
