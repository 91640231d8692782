"""Prepared files: exact, repeatable, safe to kill, and refused when they do not fit."""

import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
from corpora import documents_of, prepared, write_corpus, write_vocabulary

from data import prepare
from data.tokenizer import Tokenizer


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def source(corpus, tmp_path):
    return prepared(corpus, tmp_path / "cache")


def test_every_document_once_and_in_one_split(corpus, source):
    contents = [path.read_bytes() for path in corpus.rglob("*.txt")]
    expected = [content.decode("utf-8", "replace") for content in contents if content]
    train = documents_of(source, "train")
    val = documents_of(source, "val")
    assert sorted(train + val) == sorted(expected)
    assert not set(train) & set(val)
    assert len(val) >= 2
    assert sum(split.not_utf8 for split in source.prepared.values()) == 1
    (named,) = [split for split in source.prepared.values() if split.not_utf8]
    assert "latin.txt" in named.first_not_utf8
    assert str(named).endswith(f"1 not UTF-8, the first: {named.first_not_utf8}")
    assert source.prepared["train"].bytes == sum(len(t.encode()) for t in train)


@pytest.mark.parametrize("n_merges", [2, 2**16])
def test_token_bytes_and_dtype(corpus, tmp_path, n_merges):
    unused = [b"%d!" % i for i in range(n_merges - 2)]
    tokenizer = write_vocabulary(tmp_path / "v.tiktoken", [b"ro", b"rope", *unused])
    dtype = np.uint16 if n_merges == 2 else np.uint32
    source = prepared(corpus, tmp_path / "cache", tokenizer=tokenizer)
    for split in source.prepared.values():
        stream = split.stream()
        assert stream.dtype == dtype
        assert stream[-1] == source.encoder.eot == 256 + n_merges
        sizes = source.token_bytes[np.asarray(stream, dtype=np.int64)]
        assert sizes.sum() == split.bytes
        assert split.bytes > split.tokens


def test_the_same_files_for_any_size_of_batch(corpus, tmp_path, monkeypatch):
    tokenizer = write_vocabulary(tmp_path / "v.tiktoken")
    once = prepared(corpus, tmp_path / "once", tokenizer=tokenizer)
    monkeypatch.setattr(prepare, "DOCUMENTS", 3)
    again = prepared(corpus, tmp_path / "again", tokenizer=tokenizer)
    assert again.identity() == once.identity()
    old_folder = once.prepared["train"].folder
    new_folder = again.prepared["train"].folder
    assert new_folder != old_folder
    for name in ("train.bin", "val.bin", "train.files", "val.files", "manifest.json"):
        assert (new_folder / name).read_bytes() == (old_folder / name).read_bytes()


def test_moved_new_and_changed_documents(corpus, source, tmp_path):
    moved = prepared(shutil.copytree(corpus, tmp_path / "elsewhere"), tmp_path / "cache")
    assert moved.identity() == source.identity()
    before = documents_of(source, "val")
    (corpus / "part1" / "new.txt").write_text("a new document")
    more = prepared(corpus, tmp_path / "cache")
    after = set(documents_of(more, "val"))
    # A new document moves no other.
    assert set(before) <= after
    assert after <= {*before, "a new document"}
    (corpus / "part0" / "00.txt").write_text("something else")
    assert prepared(corpus, tmp_path / "cache").identity() != more.identity()


def test_copies_of_validation_documents_are_left_out(corpus, source, tmp_path):
    text = documents_of(source, "val")[0]
    for i in range(10):
        (corpus / f"copy{i}.txt").write_bytes(text.encode())
        (corpus / f"empty{i}.txt").write_bytes(b"")
    more = prepared(corpus, tmp_path / "cache")
    assert documents_of(more, "val").count(text) == 1
    assert text not in documents_of(more, "train")
    assert sum(split.repeated for split in more.prepared.values()) == 10


def test_a_folder_that_does_not_fit_is_refused(corpus, source, tmp_path):
    folder = source.prepared["val"].folder
    manifest = (folder / "manifest.json").read_bytes()
    val = (folder / "val.bin").read_bytes()
    damages = (
        ("manifest.json", None, "No such file.*manifest.json"),
        ("manifest.json", manifest[:50], "JSONDecodeError"),
        ("manifest.json", b'{"train": 1, "val": 1}', "TypeError"),
        ("train.bin", bytes(100), "the train split has changed"),
        ("val.bin", None, "No such file.*val.bin"),
        ("val.bin", bytes(len(val)), "val split has changed"),
        ("val.files", None, "No such file.*val.files"),
        ("val.files", bytes(4), "val split has changed"),
    )
    for name, content, message in damages:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{folder} is damaged.*{message}.*Delete the folder"):
            prepared(corpus, tmp_path / "cache")
        shutil.rmtree(folder)
        assert prepared(corpus, tmp_path / "cache").identity() == source.identity()


def test_killed_and_run_again_by_two(corpus, source, tmp_path, monkeypatch):
    cache = tmp_path / "killed"
    fork = multiprocessing.get_context("fork")

    def exit_codes(n):
        processes = [fork.Process(target=prepared, args=(corpus, cache)) for _ in range(n)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]

    def die(tokenizer, texts):
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", die)
        assert exit_codes(1) == [-signal.SIGKILL]
    assert list(cache.glob("*.partial/val.bin"))
    assert not list(cache.glob("*/manifest.json"))
    assert exit_codes(2) == [0, 0]
    assert prepared(corpus, cache).identity() == source.identity()
    folders = [path.name for path in cache.iterdir() if path.is_dir()]
    assert folders == [source.prepared["val"].folder.name]


def test_too_few_documents_and_no_room_for_them(tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    for huge in (2**17, 10**20):
        with pytest.raises(ValueError, match=r"1 documents for val, 0 documents for train.*lower data\.document_bytes"):
            prepared(folder, tmp_path / "cache", document_bytes=huge)
    assert not any(p.is_dir() for p in (tmp_path / "cache").iterdir())
    (folder / "b.txt").write_text("two")
    # However small the fraction, at least one document validates.
    tiny = prepared(folder, tmp_path / "cache", val_fraction=1e-9)
    assert [split.documents for split in tiny.prepared.values()] == [1, 1]
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*a.txt cannot hold the prepared data"):
        prepared(folder, folder / "a.txt")
    for cache in ("/proc", "/proc/ropewalk"):  # where no file can be made
        with pytest.raises(ValueError, match=rf"data\.cache_dir={cache} cannot hold the prepared data"):
            prepared(folder, cache)
