"""Files are whole or not there, also when several programs write one of them."""

import errno
import fcntl
import json
import os

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from conf import files
from conf.files import atomic_write, sealed, unsealed, whole_folder, write_text


@pytest.fixture
def page(tmp_path):
    """A file, alone in its folder."""
    path = tmp_path / "page.html"
    path.write_text("old")
    yield path
    assert os.listdir(tmp_path) == ["page.html"]


def test_of_two_writers_of_a_file_the_last_to_end_wins(page):
    with atomic_write(page) as first:
        first.write(b"first, and longer")
        write_text(page, "second")
        assert page.read_text() == "second"
    assert page.read_text() == "first, and longer"


def test_an_error_leaves_the_old_file_and_nothing_else(page):
    with pytest.raises(RuntimeError, match="lost"), atomic_write(page) as file:  # noqa: PT012
        file.write(b"new")
        raise RuntimeError("lost")
    assert page.read_text() == "old"


def test_a_device_or_pipe_is_never_replaced(tmp_path):
    """As root `out=/dev/null` would make it a plain file for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(ValueError, match="pipe is a link, a pipe or a device"):
        write_text(pipe, "text")

    assert pipe.is_fifo()


def test_a_link_is_neither_replaced_nor_followed(page, tmp_path_factory):
    """Replaced by root, /dev/stdout would be a plain file for the whole machine; followed, it leads out of a run."""
    far = page.rename(tmp_path_factory.mktemp("far") / "page.html")
    page.symlink_to(far)
    with pytest.raises(ValueError, match=r"page\.html is a link"):
        write_text(page, "near")
    assert page.is_symlink()
    assert far.read_text() == "old"


def fill(folder):
    with whole_folder(folder) as unfinished:
        (unfinished / "file").write_text("whole")
        if not folder.exists():
            unfinished.replace(folder)
    return os.listdir(folder)


def test_a_file_system_without_flock_has_locks_too(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert fill(tmp_path / "a") == fill(tmp_path / "a") == ["file"]


def test_whoever_waits_says_for_what_and_not_for_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "PATIENCE", 0)
    monkeypatch.setattr(files, "LONGEST", 0)
    held = tmp_path / ".a.lock"
    with FileLock(held), pytest.raises(ValueError, match=r"\.a\.lock has been held .*: if no process .* delete"):
        fill(tmp_path / "a")
    assert f"waiting for another process that is writing {tmp_path / 'a'}" in capsys.readouterr().err


SIMPLE = st.none() | st.integers() | st.floats() | st.text()


@settings(max_examples=30)
@given(st.dictionaries(st.text(), SIMPLE | st.lists(st.booleans())))
def test_sealed_values_come_back_from_json_and_changed_ones_do_not(values):
    values.pop("checksum", None)
    stored = json.loads(json.dumps(sealed(values)))
    assert repr(unsealed(stored)) == repr(values)
    with pytest.raises(ValueError, match="checksum"):
        unsealed(stored | {"one more": 1})
    assert repr(unsealed(values)) == repr(values)  # of older versions
