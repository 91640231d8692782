"""Documents from files and from the `datasets` library."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# pydoc_data is one file of help text: 6 % of the library, and 40 % of the split it falls into
_NOT_CODE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}


def stdlib_files() -> dict[str, Path]:
    """The Python files of the running interpreter's standard library, without its test suites: {relative path: path}.

    Raises:
        ValueError: there are none.
    """
    root = Path(sysconfig.get_path("stdlib")).resolve()
    found = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_CODE)
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if path.is_file():
                found[path.relative_to(root).as_posix()] = path
    if not found:
        raise ValueError(f"data=code: this Python has no source files in {root}; use data=text data.files=GLOB")
    return dict(sorted(found.items()))


def matching_files(patterns: list[str]) -> dict[str, Path]:
    """The files that match, each once: {path below the part of its pattern without wildcards: path}.

    So a document keeps its name, and with it its split, when the folder moves.

    Raises:
        ValueError: a pattern matches no file.
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


class Files:
    """Each file a document, or several where it is longer than `document_bytes`; those are cut at line ends."""

    def __init__(self, files: dict[str, Path], document_bytes: int | None = None) -> None:
        self.document_bytes = document_bytes
        self.files: dict[str, tuple[Path, list[str]]] = {}  # name -> path, ids of its documents
        digest = hashlib.sha256(f"{document_bytes}\n".encode())
        for name, path in files.items():
            status = path.stat()
            n = 1 if document_bytes is None else max(1, -(-status.st_size // document_bytes))
            self.files[name] = path, [name] if n == 1 else [f"{name}#{i}" for i in range(n)]
            digest.update(f"{name!r} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        self.fingerprint = digest.hexdigest()

    def ids(self) -> Iterator[str]:
        for _, ids in self.files.values():
            yield from ids

    def documents(self, wanted: Callable[[str], bool]) -> Iterator[bytes]:
        for path, ids in self.files.values():
            chosen = [wanted(i) for i in ids]
            if not any(chosen):
                continue
            try:
                with open(path, "rb") as file:
                    if len(ids) == 1:
                        yield file.read()
                        continue
                    assert self.document_bytes is not None
                    for i, keep in enumerate(chosen, 1):
                        piece = file.read(max(0, i * self.document_bytes - file.tell()))
                        piece += file.readline(self.document_bytes)  # a longer line is cut within
                        if keep:
                            yield piece
            except OSError as error:
                raise ValueError(f"data: {path} cannot be read: {error.strerror}") from None


class Rows:
    """Each row of a dataset a document, by the `datasets` library: from the hub, or local files of its formats.

    Raises:
        ValueError: it cannot be loaded, or its column `text_field` is missing or not text.
    """

    def __init__(
        self,
        path: str,
        *,
        subset: str | None,
        split: str,
        revision: str | None,
        data_files: str | list[str] | None,
        text_field: str,
        progress: bool,
    ) -> None:
        import datasets  # seconds to import, so only where it is used
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it logs each of its retries, half a minute of them
        if not progress:
            datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(path, subset, split=split, revision=revision, data_files=data_files)
        except Exception as error:  # the library, the hub and the network have many
            reason = str(error).strip().split("\n")[0][:300]
            raise ValueError(
                f"data.path={path} could not be loaded ({type(error).__name__}: {reason}). Check data.path, "
                f"data.subset={subset}, data.split={split} and the network; offline, use local files: "
                f"data.path=parquet (or json, text, arrow) data.data_files=GLOB"
            ) from None
        if text_field not in rows.column_names:
            known = ", ".join(rows.column_names)
            raise ValueError(f"data.text_field={text_field} is no column of {path}: it has {known}")
        kind = str(getattr(rows.features[text_field], "dtype", rows.features[text_field]))
        if kind not in ("string", "large_string"):
            raise ValueError(f"data.text_field={text_field} holds {kind}, not text")
        self.text_field = text_field
        self.rows: Any = rows.select_columns([text_field])
        self.fingerprint = self.rows._fingerprint

    def ids(self) -> Iterator[str]:
        return map(str, range(len(self.rows)))

    def documents(self, wanted: Callable[[str], bool]) -> Iterator[bytes]:
        row = 0
        for batch in self.rows.iter(batch_size=1000):
            for text in batch[self.text_field]:
                if wanted(str(row)):
                    yield (text or "").encode("utf-8", "replace")
                row += 1
