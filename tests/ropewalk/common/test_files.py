"""Files are whole or not there, also when several programs write one of them."""

import multiprocessing
import os
from pathlib import Path

import pytest

from ropewalk.files import atomic_write, write_out, write_text


def write_pages(path, number):
    for _ in range(20):
        write_text(path, f"{number}" * 100_000)


def test_several_programs_may_write_one_file(tmp_path):
    """The file is always one of theirs, and whole."""
    page = tmp_path / "page.html"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_pages, args=(page, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert page.read_text() in {f"{number}" * 100_000 for number in range(3)}
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_killed_writers_left_is_removed_once_nobody_writes_it(tmp_path):
    page = tmp_path / "page[1].html"
    for name in (".page[1].html.0a.tmp", ".page[1].html.0b.tmp", ".page1.html.0c.tmp"):
        (tmp_path / name).write_text("half")
    os.utime(tmp_path / ".page[1].html.0a.tmp", (0, 0))
    write_text(page, "whole")
    assert sorted(os.listdir(tmp_path)) == [".page1.html.0c.tmp", ".page[1].html.0b.tmp", "page[1].html"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    with pytest.raises(RuntimeError, match="lost"), atomic_write(page) as file:  # noqa: PT012
        file.write(b"new")
        raise RuntimeError("lost")
    assert page.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError, match=r"cannot write .*missing/page\.html"):
        write_text(tmp_path / "missing" / "page.html", "text")


def test_a_device_or_pipe_is_never_replaced(tmp_path):
    """As root `out=/dev/null` would make it a plain file for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="pipe is a device, a pipe or a socket"):
        write_text(pipe, "text")
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]

    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_out(pipe, b"text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_file_behind_a_link_of_the_system_is_appended_to(tmp_path):
    """As /dev/stdout is where it is redirected to a file, which may have other output."""
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("a") as file:
        link = Path(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(ValueError, match="choose another name"):
            write_text(link, "text")
        write_out(link, b"text")
    assert log.read_text() == "before\ntext"


def test_a_link_of_anybody_else_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "far").write_text("far")
    for write in (write_text, lambda path, text: write_out(path, text.encode())):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "far")
        write(tmp_path / "link", "near")
        assert not (tmp_path / "link").is_symlink()
        assert (tmp_path / "far").read_text() == "far"
