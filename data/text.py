"""The text sources: the standard library's code, the user's files, datasets of the Hugging Face hub."""

import glob
import hashlib
import itertools
import os
import re
import sysconfig
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from conf.files import announce
from data import tables
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
    """A dataset of the Hugging Face hub, or local files of tables. Each row is a document."""

    label = "hf"

    path: str  # OWNER/NAME of a dataset on the hub, or the format of local files: parquet, json, csv, arrow
    data_files: str | list[str] | None = None  # paths or glob patterns: of local files, or within the dataset
    subset: str | None = None  # name of a configuration of the dataset
    split: str = "train"  # where the documents are taken from; validation is split off by our own rule
    text_field: str = "text"  # column that holds the text
    revision: str | None = None  # commit, branch or tag on the hub; give one to keep the data as they are

    def source(self) -> Source:
        patterns = [self.data_files] if isinstance(self.data_files, str) else self.data_files or []
        if self.path == "text":
            raise ValueError("data.path=text would drop line ends: for plain text use data=text data.files=GLOB")
        return self._of_files(patterns) if self.path in tables.FORMATS else self._of_hub(patterns)

    def _of_files(self, patterns: list[str]) -> Source:
        """The rows of local files. Raises ValueError: an option is the hub's, or a file has no such column of text."""
        for key in ("subset", "split", "revision"):
            if getattr(self, key) not in (None, "train"):
                raise ValueError(
                    f"data.{key}={getattr(self, key)} is for a dataset on the hub; "
                    f"data.path={self.path} reads all rows of data.data_files"
                )
        if not patterns:
            raise ValueError(f"data.path={self.path} reads local files: name them with data.data_files=GLOB")
        files = sorted(matching_files(patterns, "data.data_files"))
        for _, path in files:  # a column that is missing shows before anything is written
            next(tables.read(path, self.path, self.text_field), None)

        def documents() -> Iterator[tuple[str, bytes]]:
            of_files = (tables.read(path, self.path, self.text_field) for _, path in files)
            return _numbered(itertools.chain.from_iterable(of_files))

        return Source(documents, partial(_fingerprint, files, self.text_field), f"{self.path} files {patterns}")

    def _of_hub(self, patterns: list[str]) -> Source:
        """The rows of a dataset on the hub. Raises ValueError: there is none, or it is of another format."""
        # A run may come from somebody else. `datasets` has formats that can run code, such as pandas with its pickles,
        # and reads any address; which ones differs among its versions.
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.path) or Path(self.path).exists():
            raise ValueError(
                f"data.path={self.path} is neither OWNER/NAME on the hub nor {', '.join(tables.FORMATS)}; "
                "for local files give their format, as in data.path=parquet data.data_files=GLOB"
            )
        for pattern in patterns:
            if re.search(r"^[/~]|:|\.\.|\\", pattern):
                raise ValueError(f"data.data_files={pattern} is not a path within the dataset {self.path}")
        announce(f"data: fetching {self.path} from the Hugging Face hub, unless it is cached")
        import datasets  # takes seconds, so only where it is used

        try:
            builder = datasets.load_dataset_builder(
                self.path, self.subset, data_files=patterns or None, revision=self.revision
            )
            # The last one reads what an earlier call has cached.
            kind = type(builder).__module__.rpartition(".")[2]
            if kind not in (*tables.FORMATS, "cache"):
                raise ValueError(
                    f"its files are {kind}, but only these can be read: {', '.join(tables.FORMATS)}; "
                    "for plain text, download the files and use data=text"
                )
            builder.download_and_prepare()
            rows = builder.as_dataset(self.split)
        except Exception as error:  # the library, the hub and the network have many
            cause = error.__cause__ or error  # the error that says why, of "occurred while generating the dataset"
            reason = str(cause).strip().split("\n\n")[0][:500]
            raise ValueError(
                f"data.path={self.path} could not be loaded ({type(cause).__name__}: {reason}). Check data.path, "
                f"data.subset={self.subset}, data.split={self.split} and the network; "
                f"offline, use local files: data.path=parquet (or json, csv, arrow) data.data_files=GLOB"
            ) from None
        tables.check_column(self.text_field, rows.data.schema)
        rows = rows.select_columns([self.text_field])  # other columns, such as images, would be decoded in vain

        def documents() -> Iterator[tuple[str, bytes]]:
            batches = (batch[self.text_field] for batch in rows.iter(batch_size=1000))
            return _numbered(itertools.chain.from_iterable(batches))

        # The rows are a copy of the files, which no longer changes.
        return Source(documents, lambda: rows._fingerprint, self.path)


def _numbered(texts: Iterable[str | None]) -> Iterator[tuple[str, bytes]]:
    """Yield the number and the text of each row, none as an empty one. Bytes that were no UTF-8 are as they were."""
    for number, text in enumerate(texts):
        try:
            raw = (text or "").encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # halves of characters, which JSON can write: no UTF-8 either
            raw = (text or "").encode("utf-8", "surrogatepass")
        yield str(number), raw


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
                # Of an empty file the only piece, which is counted. Later ones are empty where a line went on for long.
                if piece or i == 0:
                    yield (f"{name}#{i}" if len(files) == 1 else name), piece

    return Source(documents, partial(_fingerprint, files, document_bytes), f"{len(files)} files such as {files[0][1]}")


def _fingerprint(files: Iterable[tuple[str, Path]], options: object) -> str:
    # Sizes and times stand for the contents, which would take long to hash at every start. What a run records is the
    # hash of the prepared splits, which is exact.
    digest = hashlib.sha256(f"{options}\n".encode())
    for name, path in files:
        status = path.stat()
        digest.update(f"{name!r} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _pieces(path: Path, document_bytes: int | None) -> Iterator[bytes]:
    """Yield the bytes of each document in a file.

    A document begins at the first line end at or after a multiple of `document_bytes`. A line that reaches beyond the
    next multiple is cut there, or just before the character that would be cut. A byte order mark is no text.
    """
    with path.open("rb") as file:
        beginning = file.read(1024)
        if b"\0" in beginning or beginning.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise ValueError(
                f"data: {path} has NUL bytes or another mark of UTF-16 or binary files: convert or omit it"
            )
        file.seek(len(BOM_UTF8) if beginning.startswith(BOM_UTF8) else 0)
        total = os.fstat(file.fileno()).st_size
        size = min(document_bytes or total, total) or 1
        for start in range(0, total or 1, size):
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


def matching_files(patterns: list[str], key: str = "data.files") -> list[tuple[str, Path]]:
    """Find the files that match glob patterns, each file once.

    Args:
        key: of the option that has the patterns, for the message.

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
            raise ValueError(
                f"{key}={pattern} matches no file (relative to {Path.cwd()}); "
                f"for all files in a folder write {key}='FOLDER/**/*'; [[] matches a bracket"
            )
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
