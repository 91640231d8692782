"""Prepared files: exact, repeatable, safe to kill, and refused when they or their documents have changed."""

import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
from corpora import documents_of, prepared, write_corpus, write_vocabulary

from data import prepare
from data.prepare import Source
from data.text import read_files
from data.tokenizer import Tokenizer


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def source(corpus, tmp_path):
    return prepared(corpus, tmp_path / "cache")


def test_every_document_once_and_in_one_split(corpus, source):
    """But for those without text, which are counted."""
    contents = [path.read_bytes() for path in corpus.rglob("*.txt")]
    expected = [content.decode("utf-8", "replace") for content in contents if content]
    train = documents_of(source, "train")
    val = documents_of(source, "val")

    assert sorted(train + val) == sorted(expected)  # which are all different
    assert len(val) >= 2
    assert sum(split.without_text for split in source.prepared.values()) == 1
    assert sum(split.not_utf8 for split in source.prepared.values()) == 1
    assert all("repeated ones and" in str(split) for split in source.prepared.values())


@pytest.mark.parametrize(
    ("n_merges", "dtype"),
    [
        (2, np.uint16),
        pytest.param(2**16, np.uint32, marks=pytest.mark.long),
    ],
)
def test_tokens_have_the_bytes_of_the_text_and_a_type_that_holds_them(corpus, tmp_path, n_merges, dtype):
    unused = [b"%d!" % i for i in range(n_merges - 2)]
    tokenizer = write_vocabulary(tmp_path / "v.tiktoken", [b"ro", b"rope", *unused])
    source = prepared(corpus, tmp_path / "cache", tokenizer=tokenizer)

    for split in source.prepared.values():
        stream = split.stream()
        sizes = source.token_bytes[stream.astype(np.int64)]

        assert stream.dtype == dtype
        assert stream[-1] == source.encoder.eot == 256 + n_merges
        assert sizes.sum() == split.bytes > split.tokens


def test_a_moved_corpus_is_the_same_data_and_a_changed_one_is_not(corpus, source, tmp_path):
    cache = tmp_path / "cache"

    assert prepared(shutil.copytree(corpus, tmp_path / "elsewhere"), cache).identity() == source.identity()

    (corpus / "part1" / "new.txt").write_text("a new document")
    more = prepared(corpus, cache)
    val = documents_of(more, "val")

    assert set(val) - {"a new document"} == set(documents_of(source, "val"))  # a new document moves no other

    (corpus / "part0" / "00.txt").write_text("something else")

    assert prepared(corpus, cache).identity() != more.identity()


COPIES = {
    "the same": lambda text: text,
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "CR": lambda text: text.replace("\n", "\r"),
    "a line end more": lambda text: text + "\n",
    "a byte order mark": lambda text: "\ufeff" + text,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_left_out_whatever_its_line_ends(tmp_path, kind):
    """In training it would be known text of the validation split."""
    for i in range(20):
        text = f"{i} rope\nwalk\n\n{'and so on ' * i}\n"
        (tmp_path / f"{i}.txt").write_text(text, newline="")
        (tmp_path / f"{i}-copy.txt").write_text(COPIES[kind](text), newline="")
    source = prepared(tmp_path, tmp_path / "cache")
    train, val = ([text.split()[0] for text in documents_of(source, name)] for name in ("train", "val"))

    assert len(set(val)) == len(val) >= 2
    assert not set(train) & set(val)
    assert sum(split.repeated for split in source.prepared.values()) == 40 - len(train + val)


@pytest.mark.parametrize(
    ("encoding", "text", "message"),
    [
        ("gb18030", "绳子走在码头上", "UTF-8.* convert"),
        ("shift_jis", "縄は岸壁を歩く", "UTF-8.* convert"),
        ("koi8-r", "канат", "UTF-8.* convert"),
        ("utf-16", "绳子走在码头上", r"\d\.txt has NUL bytes or another mark of UTF-16 .* convert"),
    ],
)
def test_text_of_another_encoding_is_refused(tmp_path, encoding, text, message):
    """It would train as characters that stand for nothing."""
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes((text * (i + 9)).encode(encoding))
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, tmp_path / "cache")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    root = tmp_path_factory.mktemp("intact")
    return prepared(write_corpus(root / "corpus", documents=9), root / "cache")


DAMAGES = {
    "another bit": lambda content: bytes([content[0] ^ 4]) + content[1:],
    "shorter": lambda content: content[:-2],
    "longer": lambda content: content + content[-2:],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["manifest.json", "train.bin", "train.files", "val.bin", "val.files"])
def test_a_damaged_file_is_refused(intact, name, damage):
    """None may give other numbers in silence."""
    path = intact.prepared["val"].folder / name
    content = path.read_bytes()
    path.write_bytes(DAMAGES[damage](content))

    with pytest.raises(ValueError, match=rf"{path.parent} is damaged .*{name}.*delete the folder"):
        prepared(None, intact.cache_dir, files=intact.files)

    path.write_bytes(content)


@pytest.mark.parametrize(
    ("write", "made"),
    [
        (prepare.prepare, Tokenizer()),
        (prepare.trained_tokenizer, 258),
    ],
)
def test_documents_that_change_while_they_are_read_are_refused(corpus, tmp_path, write, made):
    """Their numbers would shift: pieces of one file would be in both splits, and others in none."""
    whole = read_files([(path.name, path) for path in corpus.rglob("*.txt")], 256)
    log = corpus / "part0" / "00.txt"

    def documents():
        for document in whole.documents():
            yield document
            with log.open("a") as file:
                file.write("another line\n")

    growing = Source(documents, whole.fingerprint)

    with pytest.raises(ValueError, match="the documents changed while being read: try again"):
        write(growing, made, prefix=tmp_path / "cache" / "text", val_fraction=0.3)

    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_preparing_that_was_killed_is_done_again_once_by_two_processes(corpus, source, tmp_path, monkeypatch):
    cache = tmp_path / "killed"
    fork = multiprocessing.get_context("fork")

    def exit_codes(n):
        processes = [fork.Process(target=prepared, args=(corpus, cache)) for _ in range(n)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]

    with monkeypatch.context() as patch:
        patch.setattr(
            Tokenizer,
            "encode",
            lambda *_: os.kill(os.getpid(), signal.SIGKILL),
        )
        assert exit_codes(1) == [-signal.SIGKILL]

    assert list(cache.glob("*.partial/val.bin"))
    assert exit_codes(2) == [0, 0]

    assert prepared(corpus, cache).identity() == source.identity()
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [source.prepared["val"].folder.name]


def test_each_split_needs_a_document(tmp_path):
    (tmp_path / "0.txt").write_text("one")

    with pytest.raises(ValueError, match=r"1 documents for validation and 0 for training.*lower data\.document_bytes"):
        prepared(tmp_path, tmp_path / "cache", document_bytes=10**20)
