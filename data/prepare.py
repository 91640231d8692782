"""Preparation: documents are tokenised once, into memory-mapped files that a manifest describes.

    <folder>/manifest.json        counts, hashes, tokenizer, split: written last
    <folder>/{train,val}.bin      token ids, uint16 or uint32; every document ends in the end-of-text token
    <folder>/{train,val}.offsets  int64 [documents + 1]: where each document begins, and the end

A document goes to validation if the hash of its id (its path, or its row) is below `val_fraction`, so that it stays
where it is when others are added. Where no hash is, the lowest one goes. A training document whose text equals that of
a validation document is left out, and so is the repetition of one within validation: nothing validates on what it was
trained on, and nothing counts twice. Repetitions within training stay. Empty documents are skipped.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from data.tokenizer import Tokenizer

FORMAT = 1
CHUNK_BYTES = 2**24  # of text tokenised at a time, which bounds the memory
HASHED_BYTES = 2**28  # a larger file is checked by its size alone when it is opened


class Source(Protocol):
    """Documents in a fixed order."""

    fingerprint: str  # changes when the documents may have

    def ids(self) -> Iterable[str]:
        """The names that decide which documents are for validation."""

    def documents(self, wanted: Callable[[str], bool]) -> Iterator[bytes]:
        """The text, UTF-8, of those documents whose id is wanted; read when asked for."""


@dataclass(frozen=True)
class Split:
    """The tokens of one split, on disk. Opened at each use: a handle would be copied into worker processes."""

    name: str
    folder: Path
    dtype: str
    documents: int
    tokens: int  # with the end-of-text tokens
    bytes: int  # of text
    sha256: str  # of the token file

    def stream(self) -> np.ndarray:
        """All tokens, [tokens]."""
        return np.memmap(self.folder / f"{self.name}.bin", self.dtype, "r")

    def offsets(self) -> np.ndarray:
        """Where each document begins in the stream, and the end: int64 [documents + 1]."""
        return np.memmap(self.folder / f"{self.name}.offsets", np.int64, "r")


@dataclass(frozen=True)
class Prepared:
    """An opened folder."""

    folder: Path
    train: Split
    val: Split
    repeated: int  # documents left out because validation has their text
    not_utf8: int  # documents in which bytes had to be replaced


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    *,
    cache_dir: str,
    label: str,
    val_fraction: float,
    workers: int,
    progress: bool = False,
) -> Prepared:
    """The prepared folder of these documents, made if it is not there.

    It is written under another name and renamed when complete, under a lock: killing it does no harm, and of several
    processes one works while the others wait.

    Args:
        label: first part of the folder's name.
        workers: threads that tokenise. Their number does not change the files.

    Raises:
        ValueError: the documents cannot be split, the folder cannot be written, or it does not fit the request.
    """
    request = json.dumps([FORMAT, source.fingerprint, tokenizer.hash, val_fraction])
    fingerprint = hashlib.sha256(request.encode()).hexdigest()
    folder = Path(cache_dir) / f"{label}-{tokenizer.label}-{fingerprint[:12]}"
    partial = folder.with_name(folder.name + ".partial")
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                if not folder.exists():
                    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                    partial.mkdir()
                    try:
                        _write(partial, source, tokenizer, val_fraction, workers, progress, fingerprint)
                        partial.rename(folder)
                    except BaseException:
                        shutil.rmtree(partial, ignore_errors=True)
                        raise
    except OSError as error:
        raise ValueError(f"data.cache_dir={cache_dir} cannot hold the prepared data: {error}") from None
    return _open(folder, tokenizer, fingerprint)


def _score(document: str) -> float:
    """The hash of a document's id, in [0, 1)."""
    return int.from_bytes(hashlib.sha256(document.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


def _write(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    val_fraction: float,
    workers: int,
    progress: bool,
    fingerprint: str,
) -> None:
    count, lowest = 0, 1.0
    for document in source.ids():
        count, lowest = count + 1, min(lowest, _score(document))
    if count < 2:
        raise ValueError(f"the data has {count} documents, but training and validation need one each: add files")
    limit = max(val_fraction, lowest)
    writer = _Writer(folder, tokenizer, workers)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("documents"))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("tokenising", total=count)
        # validation first: training then knows what to leave out
        val = writer.write("val", source.documents(lambda d: _score(d) <= limit), lambda n: bar.advance(task, n))
        train = writer.write("train", source.documents(lambda d: _score(d) > limit), lambda n: bar.advance(task, n))
    for split, other in ((val, train), (train, val)):
        if not split["documents"]:
            raise ValueError(
                f"of {count} documents {other['documents']} are for {other['name']} and none is for {split['name']} "
                f"(empty and repeated ones do not count): add documents, or change data.val_fraction={val_fraction:g}"
            )
    manifest = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "tokenizer": {"name": tokenizer.label, "vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash},
        "dtype": writer.dtype,
        "split": {"rule": "validation: sha256 of the document's id, as a fraction, <= limit", "limit": limit},
        "train": train,
        "val": val,
        "repeated": writer.repeated,
        "not_utf8": writer.not_utf8,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


class _Writer:
    """Tokenises documents into the files of a split, and keeps what was seen in validation."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, workers: int) -> None:
        self.folder, self.tokenizer, self.workers = folder, tokenizer, workers
        self.dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self.token_bytes = tokenizer.token_bytes.numpy()
        self.seen: set[bytes] = set()
        self.repeated = self.not_utf8 = 0

    def write(self, name: str, documents: Iterable[bytes], advance: Callable[[int], Any]) -> dict[str, Any]:
        """Write the split `name` and return its part of the manifest."""
        digest, itemsize = hashlib.sha256(), np.dtype(self.dtype).itemsize
        n, tokens, size = 0, 0, 0
        with (
            ThreadPoolExecutor(self.workers) as pool,  # tiktoken releases the interpreter's lock
            open(self.folder / f"{name}.bin", "wb") as stream,
            open(self.folder / f"{name}.offsets", "wb") as offsets,
        ):
            offsets.write(np.int64(0).tobytes())
            for chunk in _chunks(documents):
                fresh = [raw for raw in chunk if self._is_new(raw, name)]
                for packed, covered, is_utf8 in pool.map(self._pack, fresh):
                    stream.write(packed)
                    digest.update(packed)
                    n, tokens, size = n + 1, tokens + len(packed) // itemsize, size + covered
                    offsets.write(np.int64(tokens).tobytes())
                    self.not_utf8 += not is_utf8
                advance(len(chunk))
            for file in (stream, offsets):  # the folder's final name must not reach the disk before its contents
                file.flush()
                os.fsync(file.fileno())
        return {"name": name, "documents": n, "tokens": tokens, "bytes": size, "sha256": digest.hexdigest()}

    def _is_new(self, raw: bytes, name: str) -> bool:
        key = hashlib.sha256(raw).digest()[:16]
        if key in self.seen:
            self.repeated += 1
            return False
        if name == "val":
            self.seen.add(key)
        return bool(raw)

    def _pack(self, raw: bytes) -> tuple[bytes, int, bool]:
        """The tokens of a document as they are written, the bytes of text they stand for, and if it was UTF-8."""
        text = raw.decode("utf-8", "replace")
        clean = text.encode()
        ids = self.tokenizer.encode(text)
        covered = int(self.token_bytes[ids].sum())
        if covered != len(clean):
            raise ValueError(
                f"data.pattern leaves out text: a document of {len(clean)} bytes became tokens of {covered}; "
                f"end it with an alternative that matches everything, such as |[\\s\\S]"
            )
        return np.append(ids, self.tokenizer.eot).astype(self.dtype).tobytes(), covered, clean == raw


def _chunks(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk, size = [], 0
    for raw in documents:
        chunk.append(raw)
        size += len(raw) + 64  # many tiny documents are a chunk as well
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _open(folder: Path, tokenizer: Tokenizer, fingerprint: str) -> Prepared:
    def refuse(reason: str) -> ValueError:
        return ValueError(f"{folder} does not hold what it should: {reason}. Delete the folder, and it is made anew")

    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise refuse(f"its format is {manifest['format']}, this version reads {FORMAT}")
        if manifest["tokenizer"]["hash"] != tokenizer.hash:
            raise refuse(f"it was made with another vocabulary than that of data.tokenizer={tokenizer.label}")
        if manifest["fingerprint"] != fingerprint:
            raise refuse("it was made from other documents or with other options")
        train, val = (Split(folder=folder, dtype=manifest["dtype"], **manifest[name]) for name in ("train", "val"))
        result = Prepared(folder, train, val, manifest["repeated"], manifest["not_utf8"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise refuse(f"manifest.json cannot be read ({type(error).__name__}: {error})") from None
    for split in (train, val):
        stream = folder / f"{split.name}.bin"
        sizes = {
            stream: split.tokens * np.dtype(split.dtype).itemsize,
            stream.with_suffix(".offsets"): 8 * split.documents + 8,
        }
        for path, size in sizes.items():
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise refuse(f"{path.name} has {found} bytes instead of {size}")
        if stream.stat().st_size <= HASHED_BYTES and hashlib.sha256(stream.read_bytes()).hexdigest() != split.sha256:
            raise refuse(f"{stream.name} has changed since it was written")
    return result
