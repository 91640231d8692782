"""The text sources: the standard library's code, files of the user's, datasets of the `datasets` library."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data.prepare import Read, Source
from data.stream import TextData

__all__ = ["HuggingFace", "StdlibCode", "TextData", "TextFiles"]

# pydoc_data is one file of help text: 6 % of the library, and 40 % of the split it falls into
_NOT_CODE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}


class StdlibCode(TextData):
    """Source files of the running Python's standard library, without its tests: text that every machine has."""

    label = "code"

    def source(self, progress: bool) -> Source:
        return read_files(stdlib_files())


@dataclass(kw_only=True, eq=False)
class TextFiles(TextData):
    """Plain text files of the user's.

    Files longer than `document_bytes` are cut at line ends into documents of about this size. So a single file can be
    split into training and validation, and memory is bounded.
    """

    label = "text"

    files: str | list[str] | None = None  # required: a glob pattern or several; ** matches any number of folders
    document_bytes: int = 2**17

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise ValueError("data.files is missing: give a pattern, as in data.files='corpus/**/*.txt'")
        if self.document_bytes < 64:
            raise ValueError(f"data.document_bytes={self.document_bytes} must be at least 64")

    def source(self, progress: bool) -> Source:
        patterns = [self.files] if isinstance(self.files, str) else self.files or []
        return read_files(matching_files(patterns), self.document_bytes)


@dataclass(kw_only=True, eq=False)
class HuggingFace(TextData):
    """A dataset of the `datasets` library, each row a document."""

    label = "hf"

    path: str | None = None  # required: an id on the hub, or the format of local files: parquet, json, text, arrow
    data_files: str | list[str] | None = None  # paths or glob patterns of local files
    subset: str | None = None  # name of a configuration of the dataset
    split: str = "train"  # where the documents are taken from; validation is split off by our own rule
    text_field: str = "text"  # column that holds the text
    revision: str | None = None  # commit, branch or tag on the hub; give one to keep the data as they are

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("data.path is missing: a dataset on the hub, or the format of local files, as in parquet")

    def source(self, progress: bool) -> Source:
        import datasets  # takes seconds, so only where it is used
        from huggingface_hub.utils import logging

        assert self.path
        logging.set_verbosity_error()  # it logs each of its retries for half a minute
        if not progress:
            datasets.disable_progress_bars()
        options: dict[str, Any] = {"split": self.split, "data_files": self.data_files, "revision": self.revision}
        try:
            rows = datasets.load_dataset(self.path, self.subset, **options)
        except Exception as error:  # the library, the hub and the network have many
            reason = str(error).strip().split("\n")[0][:300]
            raise ValueError(
                f"data.path={self.path} could not be loaded ({type(error).__name__}: {reason}). Check data.path, "
                f"data.subset={self.subset}, data.split={self.split} and the network; offline, use local files: "
                f"data.path=parquet (or json, text, arrow) data.data_files=GLOB"
            ) from None
        columns = {name: str(getattr(kind, "dtype", kind)) for name, kind in rows.features.items()}
        if columns.get(self.text_field) not in ("string", "large_string"):
            known = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
            raise ValueError(f"data.text_field={self.text_field} is no column of text in {self.path}: it has {known}")
        rows = rows.select_columns([self.text_field])
        return Source(rows._fingerprint, Rows(rows, self.text_field))


@dataclass
class Rows:
    """The rows of a dataset as documents, of which column `field` is the text."""

    rows: Any
    field: str

    def __iter__(self) -> Iterator[tuple[str, Read]]:
        for i, batch in enumerate(self.rows.iter(batch_size=1000)):
            for j, text in enumerate(batch[self.field]):
                yield str(1000 * i + j), partial((text or "").encode, "utf-8", "replace")


def read_files(files: dict[str, Path], document_bytes: int | None = None) -> Source:
    """Each file as a document, or as several if it is longer than `document_bytes`."""
    digest, documents = hashlib.sha256(f"{document_bytes}\n".encode()), []
    for name, path in files.items():
        status = path.stat()
        digest.update(f"{name!r} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        size = max(1, min(status.st_size, document_bytes or status.st_size))
        n = max(1, -(-status.st_size // size))
        documents += [(f"{name}#{i}" if n > 1 else name, partial(_read_piece, path, i, size)) for i in range(n)]
    return Source(digest.hexdigest(), documents)


def _read_piece(path: Path, i: int, size: int) -> bytes:
    """A document: the file from its first line end at or after byte i * size to that at or after (i + 1) * size."""
    try:
        with open(path, "rb") as file:
            if b"\0" in file.read(1024):
                raise ValueError(
                    f"data: {path} has NUL bytes, as UTF-16 and binary files do: convert it, or leave it out"
                )
            start, stop = (_line_end(file, position, size) for position in (i * size, (i + 1) * size))
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        raise ValueError(f"data: {path} cannot be read: {error.strerror}") from None


def _line_end(file: BinaryIO, position: int, longest: int) -> int:
    file.seek(position)
    if position:
        file.readline(longest)  # a longer line is cut
    return file.tell()


def stdlib_files() -> dict[str, Path]:
    """The Python files of the running interpreter's standard library, without its tests: {relative path: path}."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    found: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_CODE
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        found |= {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    if not found:
        raise ValueError(f"data=code: this Python has no source files in {root}; use data=text data.files=GLOB")
    return dict(sorted(found.items()))


def matching_files(patterns: list[str]) -> dict[str, Path]:
    """The files that match, each once: {path below the part of its pattern without wildcards: path}.

    A document keeps its name, and so its split, when the folder moves. ValueError if a pattern matches nothing.
    """
    found: dict[str, Path] = {}
    known: set[Path] = set()
    for pattern in patterns:
        parts = Path(pattern).expanduser().parts
        fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
        root = Path(*parts[:fixed])
        names = glob.glob(os.path.join("", *parts[fixed:]), root_dir=root, recursive=True)
        files = {name: root / name for name in sorted(names) if (root / name).is_file()}
        if not files:
            hint = f"; a folder's files are data.files='{pattern.rstrip('/')}/**/*'" if Path(pattern).is_dir() else ""
            raise ValueError(f"data.files={pattern} matches no file (seen from {Path.cwd()}){hint}")
        for name, path in files.items():
            if path.resolve() not in known:
                known.add(path.resolve())
                found[name if name not in found else str(path)] = path
    return dict(sorted(found.items()))
