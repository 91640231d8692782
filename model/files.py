"""Files that are whole or not there, whatever happens while they are written."""

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` once it is complete and on the disk.

    Until then the old file stays, whatever happens: a full disk, a killed process or a machine that stops. Where
    `path` is a link, the link is replaced, and what it points to is not touched.

    Raises:
        OSError: names `path` and the reason.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # x: never through a link that came with somebody else's folder
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)  # the new name
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _named(error, path) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, as `atomic_write` does."""
    with atomic_write(path) as file:
        file.write(text.encode())


def append(path: Path, text: str) -> None:
    """Add to the end of a file. Raises OSError, which names `path` and the reason."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _named(error, path) from error


def refuse_link(path: Path) -> Path:
    """`path`, unless it is a symbolic link: a run directory of somebody else must not reach files outside of it.

    Raises:
        ValueError: it is a link.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link, which is not followed: replace it by a copy of the file")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if it is missing, a link or damaged."""
    try:
        values = json.loads(refuse_link(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} cannot be read (it is no JSON object)")
    return values


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk, where the system can tell."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which that of a full disk lacks."""
    return OSError(error.errno, f"cannot write {path}: {error.strerror}")
