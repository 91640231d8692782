"""The text sources: the standard library's code, the user's files, datasets of the `datasets` library."""

import glob
import hashlib
import itertools
import os
import re
import sysconfig
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from data.prepare import Source
from data.stream import TextData

# pydoc_data is one file of help text: 6 % of the library, and 40 % of the split it falls into. encodings has 70 tables
# of characters that look alike: training would know those in validation.
_NOT_CODE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings", "__pycache__"}


@dataclass(kw_only=True, eq=False)
class StdlibCode(TextData):
    """Source files of the running Python's standard library, without its tests and tables of characters."""

    label = "code"

    tokenizer: str = "train:2048"

    def source(self) -> Source:
        return read_files(stdlib_files())


@dataclass(kw_only=True, eq=False)
class TextFiles(TextData):
    """The user's plain text files. One longer than `document_bytes` is cut at line ends, into several documents."""

    label = "text"

    files: str | Annotated[list[str], Field(min_length=1)]  # glob patterns; ** matches any number of folders
    document_bytes: Annotated[int, Field(ge=64)] = 2**17

    def source(self) -> Source:
        patterns = [self.files] if isinstance(self.files, str) else self.files
        return read_files(matching_files(patterns), self.document_bytes)


@dataclass(kw_only=True, eq=False)
class HuggingFace(TextData):
    """A dataset of the `datasets` library, each row a document."""

    label = "hf"

    path: str  # an id on the hub, or the format of local files: parquet, json, text, arrow
    data_files: str | list[str] | None = None  # paths or glob patterns of local files
    subset: str | None = None  # name of a configuration of the dataset
    split: str = "train"  # where the documents are taken from; validation is split off by our own rule
    text_field: str = "text"  # column that holds the text
    revision: str | None = None  # commit, branch or tag on the hub; give one to keep the data as they are

    def source(self) -> Source:
        import datasets  # takes seconds, so only where it is used

        try:
            rows = datasets.load_dataset(
                self.path, self.subset, split=self.split, data_files=self.data_files, revision=self.revision
            )
        except Exception as error:  # the library, the hub and the network have many
            cause = error.__cause__ or error  # the error that says why, of "occurred while generating the dataset"
            reason = str(cause).strip().split("\n")[0][:300]
            raise ValueError(
                f"data.path={self.path} could not be loaded ({type(cause).__name__}: {reason}). Check data.path, "
                f"data.subset={self.subset}, data.split={self.split}, the network, and that each file has rows; "
                f"offline, use local files: data.path=parquet (or json, text, arrow) data.data_files=GLOB"
            ) from None
        text_column = rows.features.get(self.text_field)
        if getattr(text_column, "dtype", "") not in ("string", "large_string", "string_view"):
            has = ", ".join(f"{name} ({getattr(kind, 'dtype', kind)})" for name, kind in rows.features.items())
            raise ValueError(f"data.text_field={self.text_field} is no column of text in {self.path}: it has {has}")
        rows = rows.select_columns([self.text_field])  # other columns, such as images, would be decoded in vain

        def documents() -> Iterator[tuple[str, bytes]]:
            batches = (batch[self.text_field] for batch in rows.iter(batch_size=1000))
            for number, text in enumerate(itertools.chain.from_iterable(batches)):
                yield str(number), (text or "").encode("utf-8", "replace")

        # The rows are a copy of the files, which no longer changes.
        return Source(documents, lambda: rows._fingerprint)


def read_files(files: Iterable[tuple[str, Path]], document_bytes: int | None = None) -> Source:
    """Return each file as a document, or as several if it is longer than `document_bytes`, in the order of their ids.

    Documents of one file share its id, so that all are for training or all for validation: they are too much alike to
    be on both sides. Those of a single file have ids of their own, since each side needs some.

    Args:
        files: id and path of each file.
        document_bytes: None: each file is one document.
    """
    files = sorted(files)

    def documents() -> Iterator[tuple[str, bytes]]:
        for name, path in files:
            for i, piece in enumerate(_pieces(path, document_bytes)):
                yield (f"{name}#{i}" if len(files) == 1 else name), piece

    def fingerprint() -> str:
        # Sizes and times stand for the contents, which would take long to hash at every start. What a run records is
        # the hash of the prepared splits, which is exact.
        digest = hashlib.sha256(f"{document_bytes}\n".encode())
        for name, path in files:
            status = path.stat()
            digest.update(f"{name!r} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    return Source(documents, fingerprint)


def _pieces(path: Path, document_bytes: int | None) -> Iterator[bytes]:
    """Yield the bytes of each document in a file.

    A document begins at the first line end at or after a multiple of `document_bytes`. A line that reaches beyond the
    next multiple is cut there, or just before the character that would be cut. A byte order mark is no text.
    """
    with path.open("rb") as file:
        beginning = file.read(1024)
        if b"\0" in beginning:
            raise ValueError(f"data: {path} has NUL bytes, as UTF-16 and binary files do: convert or omit it")
        file.seek(len(BOM_UTF8) if beginning.startswith(BOM_UTF8) else 0)
        total = os.fstat(file.fileno()).st_size
        size = min(document_bytes or total, total) or 1
        for start in range(0, total, size):
            # The document before has ended here: perhaps beyond `start`, and beyond start + size only if `size` is
            # smaller than `TextFiles` allows.
            position = file.tell()
            piece = file.read(max(0, start + size - position)) + file.readline(size)
            piece = _whole_characters(piece, file.peek(1)[:1])
            file.seek(position + len(piece))
            yield piece


def _whole_characters(piece: bytes, following: bytes) -> bytes:
    """Return `piece` without the start of a UTF-8 character that goes on in `following`, the next byte of the file."""
    # A character begins with a byte 11xxxxxx and goes on with one to three bytes 10xxxxxx; ASCII is 0xxxxxxx. The first
    # byte of a piece stays, so that no piece is empty.
    if re.match(rb"[\x80-\xBF]", following):
        return piece[:1] + re.sub(rb"[\xC0-\xFF][\x80-\xBF]{0,2}\Z", b"", piece[1:])
    return piece


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """Yield the Python files of the standard library, without those in _NOT_CODE: (relative path, path)."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_CODE
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file():
                yield path.relative_to(root).as_posix(), path


def matching_files(patterns: list[str]) -> list[tuple[str, Path]]:
    """Find the files that match glob patterns, each file once.

    Returns:
        The id and the path of each file. The id is the path below the folder that all patterns start with, so that a
        document stays in its split when the folder moves.

    Raises:
        ValueError: a pattern matches no file.
    """
    paths: list[Path] = []
    folders = []
    for pattern in patterns:
        path = Path(pattern).expanduser().absolute()
        # What exists is meant as it stands: a file "a[1].txt".
        names = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
        files = [Path(name) for name in names if os.path.isfile(name)]
        if not files:
            remedy = "a folder's files are data.files='FOLDER/**/*', and [[] stands for a bracket"
            raise ValueError(f"data.files={pattern} matches no file (seen from {Path.cwd()}); {remedy}")
        paths += files
        # The last part, the file's own, always belongs to the id.
        without_wildcards = itertools.takewhile(lambda part: not re.search(r"[*?[]", part), path.parts[:-1])
        folders.append(Path(*without_wildcards))
    folder = os.path.commonpath(folders)
    # Links may give a file several names. The first in the alphabet counts, on any file system.
    name_of: dict[Path, str] = {}
    for path in sorted(paths):
        name_of.setdefault(path.resolve(), path.relative_to(folder).as_posix())
    return [(name, path) for path, name in name_of.items()]
