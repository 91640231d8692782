"""Files that are whole or not there, whatever happens while they are written."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writing with the file's name, which that of a full disk lacks."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` once it is complete and on the disk.

    Until then the old file stays, whatever happens: a full disk, a killed process or a machine that stops. A link is
    replaced, not followed. Raises OSError, which names `path` and the reason.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with _naming(path):
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:  # x: never through a link that came with somebody else's folder
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync(path.parent)  # the new name
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, as `atomic_write` does."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, values: Any) -> None:
    """Write a whole JSON file, as `atomic_write` does."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def append(path: Path, text: str) -> None:
    """Add to the end of a file. Raises OSError, which names `path` and the reason."""
    with _naming(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def refuse_link(path: Path) -> Path:
    """`path`, unless it is a symbolic link (ValueError): a run of somebody else must not reach files outside of it."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, which is not followed: replace it by a copy of the file")
    return path


def refuse_links(folder: Path) -> None:
    """`refuse_link` of everything below a folder, but for the links that wandb makes in a folder of its own."""
    for path in folder.rglob("*"):
        if "wandb" not in path.relative_to(folder).parts[:-1]:
            refuse_link(path)


def own_file(path: Path) -> Path:
    """The file that `path` is, unless it is a link out of its folder and not into the store of the hub's cache."""
    found, home = path.resolve(), path.parent.resolve()
    if found.parent not in (home, home.parent.parent / "blobs"):
        raise ValueError(f"{path} is a link out of its folder, which is not followed: replace it by a copy of the file")
    return found


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    """Copy files into a folder, which is made if it is not there. Raises ValueError: one is a link, see `own_file`."""
    for path in paths:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / path.name) as file:
            file.write(own_file(path).read_bytes())


def hub_folder(source: str, patterns: Sequence[str]) -> Path:
    """The folder `source`, or one with the files of that model on the Hugging Face hub which match the patterns: they
    are downloaded unless its cache has them. Raises ValueError: there is neither."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns)))
    except Exception as error:  # whatever the network brings
        remedy = "check the name; a restricted model needs `hf auth login`; offline, give a folder"
        raise ValueError(
            f"hf:{source} is no local folder, and was not found on the hub either: {remedy} ({error})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if it is missing, a link or damaged."""
    try:
        values = json.loads(refuse_link(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
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
