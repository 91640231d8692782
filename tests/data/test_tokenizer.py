"""Tokenizers: nothing is lost, nothing is special in a document, and a bad vocabulary is refused."""

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
    ids = BYTES.encode([text])[0].tolist()
    assert bytes(ids) == text.encode()
    assert BYTES.decode(ids) == text


def test_bytes_vocabulary():
    assert (BYTES.vocab_size, BYTES.eot, BYTES.label) == (257, 256, "bytes")
    assert BYTES.token_bytes.tolist() == [1] * 256 + [0]
    assert BYTES.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert BYTES.encode(["a\ud800b"])[0].tolist() == list(b"a?b")


def test_vocabulary_file(tmp_path):
    path = write_vocabulary(tmp_path / "tiny.tiktoken")
    own = Tokenizer(path)
    texts = ["the then<|endoftext|>", "then, the end: é", "", "the"]
    ids = [found.tolist() for found in own.encode(texts)]
    assert ids[0][:3] == [257, 258, ord("n")]
    assert ids[2:] == [[], [257]]
    assert own.eot == 259 not in ids[0]
    assert own.vocab_size == 260
    assert own.token_bytes[[0, 256, 257, 258, 259]].tolist() == [1, 2, 3, 4, 0]
    assert [own.decode(found) for found in ids] == texts
    assert Tokenizer(path).hash == own.hash != BYTES.hash


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
    with pytest.raises(ValueError, match=rf"data\.tokenizer=.*is neither .* nor a vocabulary file .*{message}"):
        Tokenizer(str(path))
    path.write_text("YQ== 0\n")
    with pytest.raises(ValueError, match=r"lacks 255 of the 256 single bytes"):
        Tokenizer(str(path))


@pytest.mark.parametrize("name", ["missing.tiktoken", "gpt-2"])
def test_a_vocabulary_that_is_not_there(name):
    with pytest.raises(ValueError, match=rf"{name} is neither bytes nor gpt2, .* nor a vocabulary file.*No such file"):
        Tokenizer(name)


def test_a_download_that_fails_names_the_remedy(monkeypatch):
    def refuse(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(ValueError, match=r"gpt2 could not be loaded.*no route.*tokenizer=bytes.*TIKTOKEN_CACHE_DIR"):
        Tokenizer("gpt2")
