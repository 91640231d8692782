"""Tokenizers: nothing is lost, nothing is special in a document, and a bad vocabulary is refused."""

import pickle

import pytest
import tiktoken
from corpora import write_vocabulary
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.tokenizer import Tokenizer

BYTES = Tokenizer("bytes")


@settings(deadline=None)
@given(st.text())
@example("<|endoftext|>")
@example("\r\n\x00 é 漢字 👩‍👩‍👧" * 30)
def test_bytes_are_the_bytes_of_the_text(text):
    ids = BYTES.encode(text).tolist()
    assert bytes(ids) == text.encode()
    assert BYTES.decode(ids) == text


def test_bytes_vocabulary():
    assert (BYTES.vocab_size, BYTES.eot, BYTES.label) == (257, 256, "bytes")
    assert BYTES.token_bytes.tolist() == [1] * 256 + [0]
    assert BYTES.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert BYTES.encode("a\ud800b").tolist() == list(b"a?b")


def test_vocabulary_file(tmp_path):
    path = write_vocabulary(tmp_path / "tiny.tiktoken")
    own = Tokenizer(path)
    assert own.encode("the then<|endoftext|>").tolist()[:3] == [257, 258, ord("n")]
    assert own.eot == 259 not in own.encode("<|endoftext|>")
    assert own.vocab_size == 260
    assert own.token_bytes[[0, 256, 257, 258, 259]].tolist() == [1, 2, 3, 4, 0]
    assert own.decode(own.encode("then, the end: é")) == "then, the end: é"
    assert pickle.loads(pickle.dumps(own)).encode("the then").tolist() == own.encode("the then").tolist()
    single = Tokenizer(path, pattern=r"[\s\S]")
    assert single.encode("the").tolist() == list(b"the")
    assert len({own.hash, single.hash, BYTES.hash}) == 3
    assert Tokenizer(path).hash == own.hash


def test_a_changed_file_is_read_anew_and_unused_ids_decode_to_nothing(tmp_path):
    before = Tokenizer(write_vocabulary(tmp_path / "v.tiktoken"))
    after = Tokenizer(write_vocabulary(tmp_path / "v.tiktoken", skip=4))
    assert (before.vocab_size, after.vocab_size) == (260, 264)
    assert before.hash != after.hash
    assert after.decode([104, 257, 105]) == "hi"
    assert after.token_bytes[257] == 0


ONE_BAD = {"YQ==": "unpack", "!! 3": "base64", "Yg== b": "invalid literal", "YWI= 7": "different", "YWI= -1": "between"}


@pytest.mark.parametrize(("line", "message"), [*ONE_BAD.items(), ("YWI= 100000000000", "between 0 and 4,194,304")])
def test_bad_vocabulary_files(tmp_path, line, message):
    path = tmp_path / "bad.tiktoken"
    write_vocabulary(path)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ValueError, match=rf"data\.tokenizer=.*is no vocabulary file \(lines with a token.*{message}"):
        Tokenizer(str(path))
    for content in ("", "YQ== 0\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"lacks 25[56] of the 256 single bytes"):
            Tokenizer(str(path))


def test_other_bad_requests(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.tiktoken is no vocabulary file.*No such file"):
        Tokenizer("missing.tiktoken")
    with pytest.raises(ValueError, match="did you mean gpt2"):
        Tokenizer("gpt-2")
    with pytest.raises(ValueError, match=r"data\.pattern belongs to a vocabulary file"):
        Tokenizer("bytes", pattern="x")
    for pattern in ("(", "", r"\w*"):  # tiktoken panics at the last two
        with pytest.raises(ValueError, match=r"data\.pattern='.*' is no regular expression"):
            Tokenizer(write_vocabulary(tmp_path / "v.tiktoken"), pattern=pattern)


def test_a_download_that_fails_names_the_remedy(monkeypatch):
    def refuse(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(ValueError, match=r"gpt2 could not be loaded.*no route.*tokenizer=bytes.*TIKTOKEN_CACHE_DIR"):
        Tokenizer("gpt2")


def test_a_named_encoding_without_end_of_text_gets_one(monkeypatch):
    bare = tiktoken.Encoding(
        "bare", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: bare)
    own = Tokenizer("gpt2")
    assert (own.eot, own.vocab_size, own.token_bytes[256]) == (256, 257, 0)
