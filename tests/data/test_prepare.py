"""Prepared files: exact, repeatable, safe to kill, and refused when they do not fit."""

import itertools
import json
import multiprocessing
import os
import shutil
import time

import numpy as np
import pytest
from corpora import text_files, write_corpus, write_vocabulary

from data import prepare as module


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def prepared(corpus, tmp_path):
    source = text_files(corpus, tmp_path / "cache")
    source.prepare()
    return source


def documents_of(source, name):
    """The texts of a split, from the files alone."""
    split = getattr(source.prepared, name)
    stream, offsets = split.stream(), split.offsets()
    assert [stream[end - 1] for end in offsets[1:]] == [source.tokenizer.eot] * split.documents
    return [source.decode(stream[a : b - 1].tolist()) for a, b in itertools.pairwise(offsets)]


def test_every_document_once_and_in_one_split(corpus, prepared):
    expected = sorted(p.read_bytes().decode("utf-8", "replace") for p in corpus.rglob("*.txt") if p.stat().st_size)
    train, val = documents_of(prepared, "train"), documents_of(prepared, "val")
    assert sorted(train + val) == expected
    assert not set(train) & set(val)
    assert len(val) >= 2
    assert prepared.prepared.not_utf8 == 1
    assert prepared.prepared.train.bytes == sum(len(t.encode()) for t in train)


def test_token_bytes_add_up(corpus, tmp_path):
    source = text_files(
        corpus, tmp_path / "cache", tokenizer=write_vocabulary(tmp_path / "v.tiktoken", (b"ro", b"rope"))
    )
    source.prepare()
    for split in (source.prepared.train, source.prepared.val):
        assert source.token_bytes[np.asarray(split.stream(), dtype=np.int64)].sum() == split.bytes
        assert split.tokens < split.bytes


def test_the_same_files_for_any_number_of_workers(corpus, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 500)
    for workers in (1, 3):
        again = text_files(corpus, tmp_path / f"cache{workers}", workers=workers)
        again.prepare()
        assert again.identity() == prepared.identity()
        for name in ("train.bin", "val.bin", "train.offsets", "manifest.json"):
            same = again.prepared.folder / name, prepared.prepared.folder / name
            assert same[0].read_bytes() == same[1].read_bytes()


def test_moved_touched_and_changed_documents(corpus, prepared, tmp_path):
    moved = text_files(shutil.copytree(corpus, tmp_path / "elsewhere"), tmp_path / "cache")
    moved.prepare()
    assert moved.identity() == prepared.identity()
    (corpus / "part0" / "00.txt").write_text("something else")
    changed = text_files(corpus, tmp_path / "cache")
    changed.prepare()
    assert changed.identity() != prepared.identity()


def test_a_new_document_moves_no_other(corpus, prepared, tmp_path):
    before = documents_of(prepared, "val")
    (corpus / "part1" / "new.txt").write_text("a new document")
    more = text_files(corpus, tmp_path / "cache")
    more.prepare()
    assert set(before) <= set(documents_of(more, "val")) <= {*before, "a new document"}


def test_copies_of_validation_documents_are_left_out(corpus, prepared, tmp_path):
    text = documents_of(prepared, "val")[0]
    for i in range(10):
        (corpus / f"copy{i}.txt").write_bytes(text.encode())
    source = text_files(corpus, tmp_path / "cache")
    source.prepare()
    assert documents_of(source, "val").count(text) == 1
    assert text not in documents_of(source, "train")
    assert source.prepared.repeated == 10
    assert "10 documents that repeat" in "\n".join(source.describe())


def test_dtype_follows_the_vocabulary(corpus, tmp_path):
    merges = [b"%d!" % i for i in range(2**16)]
    source = text_files(corpus, tmp_path / "cache", tokenizer=write_vocabulary(tmp_path / "big.tiktoken", merges))
    source.prepare()
    assert source.prepared.train.dtype == "uint32"
    assert source.train_batch([0], 8, 0)[0].max() < source.vocab_size
    eot = source.prepared.val.stream()[-1]
    assert eot == source.tokenizer.eot > 2**16


def test_a_pattern_that_drops_text_is_refused(corpus, tmp_path):
    options = {"tokenizer": write_vocabulary(tmp_path / "v.tiktoken"), "pattern": r"\w+"}
    with pytest.raises(ValueError, match=r"data\.pattern leaves out text"):
        text_files(corpus, tmp_path / "cache", **options).prepare()
    assert not any(p.is_dir() for p in (tmp_path / "cache").iterdir())


def _edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE = {
    "format": (lambda f: _edit_manifest(f, format=99), "format is 99"),
    "tokenizer": (lambda f: _edit_manifest(f, tokenizer={"hash": "x"}), "another vocabulary"),
    "fingerprint": (lambda f: _edit_manifest(f, fingerprint="x"), "other documents"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 50), "manifest.json cannot be read"),
    "truncated": (lambda f: os.truncate(f / "train.bin", 100), "train.bin has 100 bytes instead of"),
    "no offsets": (lambda f: (f / "val.offsets").unlink(), "val.offsets has 0 bytes"),
    "changed": (lambda f: (f / "val.bin").write_bytes(bytes((f / "val.bin").stat().st_size)), "val.bin has changed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_does_not_fit_is_refused(corpus, prepared, tmp_path, damage):
    change, message = DAMAGE[damage]
    folder = prepared.prepared.folder
    change(folder)
    again = text_files(corpus, tmp_path / "cache")
    with pytest.raises(ValueError, match=message) as error:
        again.prepare()
    assert str(folder) in str(error.value)
    assert "Delete the folder" in str(error.value)
    shutil.rmtree(folder)
    again.prepare()
    assert again.identity() == prepared.identity()


def prepare_it(corpus, cache, slow=False):
    if slow:
        module.CHUNK_BYTES = 1
        module.Tokenizer.encode = lambda self, text: time.sleep(0.05) or np.frombuffer(text.encode(), np.uint8)
    text_files(corpus, cache).prepare()


def start(*args):
    process = multiprocessing.get_context("fork").Process(target=prepare_it, args=args)
    process.start()
    return process


def test_killed_and_run_again_by_two(corpus, prepared, tmp_path):
    cache = tmp_path / "killed"
    process = start(corpus, cache, True)
    while not list(cache.glob("*.partial/train.bin")):  # validation is written, training begun
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not list(cache.glob("*/manifest.json"))
    both = [start(corpus, cache) for _ in range(2)]
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    again = text_files(corpus, cache)
    again.prepare()
    assert again.identity() == prepared.identity()
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [prepared.prepared.folder.name]


def test_too_few_documents(tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    with pytest.raises(ValueError, match="1 document"):
        text_files(folder, tmp_path / "cache").prepare()
    (folder / "b.txt").write_text("")
    with pytest.raises(ValueError, match="of 2 documents 1 are for"):
        text_files(folder, tmp_path / "cache").prepare()
    (folder / "b.txt").write_text("two")
    tiny = text_files(folder, tmp_path / "cache", val_fraction=1e-9)  # at least one document validates
    tiny.prepare()
    assert (tiny.prepared.train.documents, tiny.prepared.val.documents) == (1, 1)


def test_a_cache_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.cache_dir=.*file cannot hold the prepared data"):
        text_files(corpus, tmp_path / "file").prepare()


def test_write_corpus_is_repeatable(tmp_path):
    a, b = write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b")
    assert [p.read_bytes() for p in sorted(a.rglob("*.txt"))] == [p.read_bytes() for p in sorted(b.rglob("*.txt"))]
