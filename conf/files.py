"""Writing files that are whole or do not exist, and reading files without following links."""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import yaml

PATIENCE = 6  # seconds that a lock is waited for: workers of a killed process may hold it for five
LONGEST = 86_400  # seconds that preparing a large corpus may take


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write to, which replaces `path` once it is complete and on the disk.

    Until then the old file stays, whatever happens: a full disk, a killed process or a machine that stops.

    Raises:
        OSError: names `path` and the reason.
        ValueError: see `refuse_link`. A device would be replaced for the whole machine.
    """
    refuse_link(path)
    # A name of its own for each writer: two programs may write the same page at once. What a killed process leaves in a
    # run, `directory.lock` and `checkpoints.prune` find by this pattern, ".*.tmp".
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # Renaming is atomic, but only what is on the disk survives a machine that stops: the content is synced before the
    # rename, and the folder, which holds the new name, after it.
    try:
        with temporary.open("xb") as file:  # x: never through a link that came with somebody else's folder
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:  # that of a full disk does not name the file
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Lock `folder`, and yield an empty folder beside it, which the caller renames to `folder` once it is complete.

    The folder beside it has a fixed name, so that killed processes leave at most one, which the next call removes.
    Other processes that want to fill `folder` wait for the lock, so the caller looks again whether `folder` exists.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    # Where no file can be made, as in /proc, this raises, and FileLock would try forever. It is not the file of the
    # lock: where a file system has no flock, that one locks by being there.
    probe = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    probe.touch()
    probe.unlink()
    with _locked(folder):
        # A process that was killed may have left it.
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()  # an error if it is a link: nothing is written through one
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _locked(folder: Path) -> contextlib.AbstractContextManager:
    """Lock `folder`, which others may be filling; says so if it must wait. Raises ValueError: it waited for LONGEST."""
    from filelock import FileLock, Timeout  # here, since a mistake on the command line is answered without it

    lock = folder.with_name(f".{folder.name}.lock")
    for seconds in (PATIENCE, LONGEST):
        with contextlib.suppress(Timeout):
            return FileLock(lock, timeout=seconds).acquire()
        print(f"waiting for another process that is writing {folder}; if there is none, delete {lock}", file=sys.stderr)
    raise ValueError(f"{lock} has been held for a day or more: if no process is writing {folder}, delete it")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file, as `atomic_write` does."""
    with atomic_write(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, as `atomic_write` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, values: Any) -> None:
    """Write a whole JSON file, as `atomic_write` does."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with a checksum of them all: a number that changed on a disk would be a wrong result."""
    return {**values, "checksum": checksum(values)}


def unsealed(values: Mapping[str, Any], remedy: str = "") -> dict[str, Any]:
    """Return what was `sealed`. Values of older versions have no checksum.

    Raises ValueError, whose message ends in the `remedy`: it has changed.
    """
    # The caller's own values stay as they are.
    values = dict(values)
    recorded = values.pop("checksum", None)
    if recorded not in (None, checksum(values)):
        raise ValueError(f"its checksum does not match its values{remedy}")
    return values


def checksum(values: Any) -> str:
    """The same hexadecimal digits for equal plain values, whatever the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def refuse_link(path: Path) -> Path:
    """Return `path`, which need not exist, if it is a plain file or a folder.

    Raises:
        ValueError: it is a symbolic link, through which a run of somebody else would reach files outside of it; or a
            named pipe, a socket or a device, which a program that opens it would wait for without end.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:  # whoever opens it says why
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path} is a link, a pipe or a device, which is not followed: replace it with a plain file")
    return path


def refuse_links(folder: Path) -> None:
    """Call `refuse_link` for everything below a folder, except for what wandb keeps in a folder of its own."""
    for path in folder.rglob("*"):
        if "wandb" not in path.relative_to(folder).parts[:-1]:
            refuse_link(path)


def own_file(path: Path) -> Path:
    """Return the file at `path`, links resolved, if it lies in the folder of `path` or in the blobs of the hub's cache.

    Raises:
        ValueError: it is a link to anywhere else.
    """
    # The cache of the hub holds files in MODEL/blobs, and links to them in MODEL/snapshots/REVISION.
    file = path.resolve()
    folder = path.parent.resolve()
    blobs = folder.parent.parent / "blobs"
    if file.parent not in (folder, blobs):
        raise ValueError(f"{path} is a link out of its folder, which is not followed: replace it with a copy")
    return file


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    """Copy files into a folder, which is made if needed.

    Raises:
        ValueError: one is a link, see `own_file`.
    """
    for path in paths:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / path.name, own_file(path).read_bytes())


def hub_folder(source: str, patterns: Sequence[str]) -> Path:
    """Return the folder `source`, or one with the files of that model on the Hugging Face hub.

    Args:
        patterns: the files to download, unless the hub's cache has them.

    Raises:
        ValueError: there is neither such a folder nor such a model.
    """
    if not source:
        raise ValueError("hf: needs a folder or the name of a model, as in hf:OWNER/NAME")
    if Path(source).is_dir():
        return Path(source)
    announce(f"fetching {source} from the Hugging Face hub, unless it is cached")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns)))
    except Exception as error:  # whatever the network brings
        raise ValueError(
            f"hf:{source} is not a local folder and was not found on the hub: "
            f"check the name; a restricted model needs `hf auth login`; offline, give a folder ({error})"
        ) from None


@functools.cache
def announce(what: str) -> None:
    """Print, once in a process, what is read or fetched next: a configuration of somebody else may have chosen it."""
    print(what, flush=True)


def read_text(path: Path) -> str:
    """Return the text of a small file.

    Raises:
        ValueError: it is missing, a link, or no UTF-8.
        OSError: it cannot be read, as by this user. It may be whole: no remedy may be one that loses it.
    """
    try:
        return refuse_link(path).read_bytes().decode()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # that of an OSError, without the path
        raise ValueError(f"{path} cannot be read ({reason})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError, OSError: see `read_text`; or it is no JSON, or no object.
    """
    values = _parsed(path, json.loads)
    if not isinstance(values, dict):
        raise ValueError(f"{path} cannot be read (it is not a JSON object)")
    return values


def read_yaml(path: Path) -> Any:
    """Return the values in a YAML file.

    Raises:
        ValueError, OSError: see `read_text`; or it is no YAML.
    """
    return _parsed(path, yaml.safe_load)


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    """Return the text of a file as `parse` reads it. Raises ValueError, OSError: see `read_text`; or `parse` fails."""
    text = read_text(path)
    try:
        return parse(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None


def printable(text: object) -> str:
    """Return a text, such as a path, with escapes like \\x1b in place of unprintable characters but line ends and tabs.

    The name of a folder may come from anybody. A terminal would obey its control characters, and characters that are no
    UTF-8 cannot be written.
    """
    characters = []
    for character in str(text):
        if not character.isprintable() and character not in "\n\t":
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def sha256(path: Path) -> str:
    """Return the checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk, where the system can tell."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
