"""Files are whole or not there, also when several programs write one of them."""

import gzip
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.files import atomic_write, read_bytes, sealed, unsealed, write_text


@pytest.fixture
def page(tmp_path):
    """A file, alone in its folder."""
    path = tmp_path / "page.html"
    path.write_text("old")
    yield path
    assert os.listdir(tmp_path) == ["page.html"]


def test_of_two_who_write_a_file_at_once_the_last_to_end_has_written_it(page):
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


@pytest.mark.parametrize("opener", [open, gzip.open])
def test_what_seems_to_have_no_end_is_not_read(tmp_path, opener):
    """A hole of a file, or zeros that compress a thousandfold, would take all memory."""
    with opener(tmp_path / "file", "wb") as written:
        written.write(bytes(1000))
    assert len(read_bytes(tmp_path / "file", 1000, opener)) == 1000
    with pytest.raises(ValueError, match="more than"):
        read_bytes(tmp_path / "file", 999, opener)


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
