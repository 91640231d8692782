"""Preparation: documents are tokenised once, into memory-mapped files that a manifest describes.

    <folder>/manifest.json        counts, hashes, tokenizer, split: written last
    <folder>/{train,val}.bin      token ids, uint16 or uint32; every document ends in the end-of-text token
    <folder>/{train,val}.offsets  int64 [documents + 1]: where each document begins, and the end

A document is for validation if the hash of its id (its path, or its row) is at most `val_fraction`; if there is none,
the document with the lowest hash is. So adding documents moves no other. A training document with the text of one of
validation is left out, and so are repetitions within validation: nothing is validated on what was trained on, and
nothing counts twice. Repetitions within training stay. Empty documents are skipped.
"""

import hashlib
import itertools
import json
import os
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import track

from data.tokenizer import Tokenizer

FORMAT = 2
HASHED_BYTES = 2**28  # of larger files only the size is checked when they are opened

Read = Callable[[], bytes]  # reads a document: UTF-8 text


class Source(NamedTuple):
    """Documents in a fixed order."""

    fingerprint: str  # changes when the documents may have changed
    documents: Iterable[tuple[str, Read]]  # the id of each, and what reads it; iterated several times


@dataclass(frozen=True)
class Split:
    """One split on disk. Files are opened at each use, so that no handle is copied into worker processes."""

    folder: Path
    name: str
    dtype: str
    documents: int
    tokens: int  # including end-of-text tokens
    bytes: int  # of text
    repeated: int  # documents left out because validation has their text
    not_utf8: int  # documents in which bytes had to be replaced
    sha256: str  # of the token file

    def stream(self) -> np.ndarray:
        """All tokens, [tokens]."""
        return np.memmap(self.folder / f"{self.name}.bin", self.dtype, "r")

    def offsets(self) -> np.ndarray:
        """Where each document begins in the stream, and the end: int64 [documents + 1]."""
        return np.memmap(self.folder / f"{self.name}.offsets", np.int64, "r")


def prepare(
    source: Source, tokenizer: Tokenizer, prefix: Path, val_fraction: float, *, workers: int, progress: bool = False
) -> dict[str, Split]:
    """The splits "train" and "val" of these documents, from a folder that is made if it is not there.

    It is written under another name and renamed when complete, under a lock. So a kill does no harm, and of several
    processes one works while the others wait. Its path begins with `prefix`. The files do not depend on `workers`, the
    number of threads. ValueError if there is nothing to split, or the folder cannot be written or has been changed.
    """
    request = json.dumps([FORMAT, source.fingerprint, tokenizer.hash, val_fraction])
    fingerprint = hashlib.sha256(request.encode()).hexdigest()
    folder = prefix.with_name(f"{prefix.name}-{tokenizer.label}-{fingerprint[:12]}")
    partial_folder = folder.with_name(folder.name + ".partial")
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                shutil.rmtree(partial_folder, ignore_errors=True)  # left by a process that was killed
                try:
                    if not folder.exists():
                        partial_folder.mkdir()
                        manifest = _write(partial_folder, source, tokenizer, val_fraction, workers, progress)
                        text = json.dumps({"fingerprint": fingerprint, **manifest}, indent=2) + "\n"
                        (partial_folder / "manifest.json").write_text(text)
                        partial_folder.rename(folder)
                finally:
                    shutil.rmtree(partial_folder, ignore_errors=True)
    except OSError as error:
        raise ValueError(f"data.cache_dir={prefix.parent} cannot hold the prepared data: {error}") from None
    return _open(folder, fingerprint)


def _write(
    folder: Path, source: Source, tokenizer: Tokenizer, val_fraction: float, workers: int, progress: bool
) -> dict[str, Any]:
    """Write both splits; returns their part of the manifest."""
    hashes = array("d", (_unit_hash(name) for name, _ in source.documents))
    limit = max(val_fraction, min(hashes, default=0.0))
    console, seen = Console(stderr=True), set[bytes]()
    splits = {}
    for name in ("val", "train"):  # validation first: training leaves out what it has
        chosen = [(h <= limit) == (name == "val") for h in hashes]
        texts = itertools.compress((read for _, read in source.documents), chosen)
        shown = track(texts, f"tokenising {name}", sum(chosen), console=console, transient=True, disable=not progress)
        splits[name] = _write_split(folder, name, shown, tokenizer, workers, seen)
    if not all(split["documents"] for split in splits.values()):
        counts = ", ".join(f"{split['documents']} documents for {name}" for name, split in splits.items())
        raise ValueError(
            f"the data has {counts} (empty and repeated ones do not count), but each needs one: add documents, change "
            f"data.val_fraction={val_fraction:g}, or lower data.document_bytes, so that a long file counts as several"
        )
    vocabulary = {"name": tokenizer.label, "vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash}
    return {"tokenizer": vocabulary, "val_limit": limit, **splits}


def _unit_hash(document: str) -> float:
    """The hash of a document's id, in [0, 1)."""
    return int.from_bytes(hashlib.sha256(document.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


def _write_split(
    folder: Path, name: str, documents: Iterable[Read], tokenizer: Tokenizer, workers: int, seen: set[bytes]
) -> dict[str, Any]:
    """Write one split without the texts in `seen`, to which those of validation are added; returns Split's fields."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    digest, offsets = hashlib.sha256(), array("q", [0])
    counts = {"bytes": 0, "repeated": 0, "not_utf8": 0}
    with open(folder / f"{name}.bin", "wb") as tokens, open(folder / f"{name}.offsets", "wb") as starts:
        for key, ids, size, is_utf8 in _in_threads(workers, partial(_tokenise, tokenizer), documents):
            if key in seen:
                counts["repeated"] += 1
            elif size:
                packed = ids.astype(dtype).tobytes()
                tokens.write(packed)
                digest.update(packed)
                offsets.append(offsets[-1] + len(ids))
                counts["bytes"] += size
                counts["not_utf8"] += not is_utf8
                if name == "val":
                    seen.add(key)
        offsets.tofile(starts)
        for file in (tokens, starts):  # the folder's final name must not reach the disk before its contents
            file.flush()
            os.fsync(file.fileno())
    sizes = {"documents": len(offsets) - 1, "tokens": offsets[-1]}
    return {"name": name, "dtype": dtype.name, **sizes, **counts, "sha256": digest.hexdigest()}


def _tokenise(tokenizer: Tokenizer, read: Read) -> tuple[bytes, np.ndarray, int, bool]:
    """A document's hash, its token ids with the end of text, the bytes they stand for, and whether it was UTF-8."""
    raw = read()
    text = raw.decode("utf-8", "replace")
    clean = text.encode()
    ids = tokenizer.encode(text)
    size = int(tokenizer.token_bytes.numpy()[ids].sum())
    if size != len(clean):
        raise ValueError(
            f"data.pattern leaves out text: a document of {len(clean)} bytes became tokens of {size}; "
            f"end it with an alternative that matches everything, such as |[\\s\\S]"
        )
    return hashlib.sha256(raw).digest()[:16], np.append(ids, tokenizer.eot), size, clean == raw


def _in_threads(workers: int, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """map() in threads, with few items at a time in memory. tiktoken releases the interpreter's lock."""
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _open(folder: Path, fingerprint: str) -> dict[str, Split]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["fingerprint"] != fingerprint:
            raise ValueError("it was made from other documents, with another vocabulary or with other options")
        splits = {name: Split(folder, **manifest[name]) for name in ("train", "val")}
        for name, split in splits.items():
            stream = folder / f"{name}.bin"
            as_written = len(split.stream()) == split.tokens and len(split.offsets()) == split.documents + 1
            if as_written and stream.stat().st_size <= HASHED_BYTES:
                as_written = hashlib.sha256(stream.read_bytes()).hexdigest() == split.sha256
            if not as_written:
                raise ValueError(f"the {name} split has changed since it was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} is damaged ({reason}). Delete the folder to have it made again") from None
    return splits
