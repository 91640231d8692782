"""Tokenizers: nothing is lost, nothing is special in a document, and a bad vocabulary is refused."""

import json
import os
import random
import unicodedata

import pytest
import tiktoken
import tokenizers as lib
import transformers
from corpora import documents_of, prepared, write_corpus, write_vocabulary
from hypothesis import example, given
from hypothesis import strategies as st

from data.hf_tokenizer import HFTokenizer
from data.tokenizer import FILE_PATTERN, Tokenizer
from ropewalk.hf.tokenizers import write

BYTES = Tokenizer("bytes")


def encoded(tokenizer, texts) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode(texts)]


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
    tokenizer = Tokenizer(path)
    texts = ["the then<|endoftext|>", "then, the end: é", "", "the"]
    ids = encoded(tokenizer, texts)
    assert ids[0][:3] == [257, 258, ord("n")]
    assert ids[2] == []
    assert ids[3] == [257]
    assert tokenizer.eot == 259
    assert 259 not in ids[0]
    assert tokenizer.vocab_size == 260
    assert tokenizer.token_bytes[[0, 256, 257, 258, 259]].tolist() == [1, 2, 3, 4, 0]
    assert list(map(tokenizer.decode, ids)) == texts
    assert Tokenizer(path).hash == tokenizer.hash
    assert Tokenizer(path).hash != BYTES.hash

    # Unused ids decode to nothing.
    with_gap = Tokenizer(write_vocabulary(tmp_path / "tiny.tiktoken", skip=4))
    assert with_gap.vocab_size == 264
    assert with_gap.decode([104, 257, 105]) == "hi"
    assert with_gap.token_bytes[257] == 0


ONE_BAD = {
    "YQ==": "unpack",
    "!! 3": "base64",
    "Yg== b": "invalid literal",
    "YWI= 7": "different",
    "YWI= -1": "between",
    "YWI= 100000000000": "between 0 and 4,194,304",
}


def test_bad_vocabularies_are_refused_with_the_remedy(tmp_path, monkeypatch):
    path = tmp_path / "bad.tiktoken"
    for line, message in ONE_BAD.items():
        write_vocabulary(path)
        path.write_text(f"{path.read_text()}{line}\n")
        with pytest.raises(ValueError, match=rf"data\.tokenizer=.*is neither .* nor a vocabulary file .*{message}"):
            Tokenizer(str(path))
    path.write_text("YQ== 0\n")
    with pytest.raises(ValueError, match=r"lacks 255 of the 256 single bytes"):
        Tokenizer(str(path))
    with pytest.raises(ValueError, match=r"gpt-2 is neither bytes nor gpt2, .* nor a vocabulary file.*No such file"):
        Tokenizer("gpt-2")
    # To open a named pipe would wait for ever, as to read a device may.
    os.mkfifo(tmp_path / "pipe.tiktoken")
    for endless in (str(tmp_path / "pipe.tiktoken"), "/dev/zero"):
        with pytest.raises(ValueError, match=r"nor a vocabulary file .* it is not a plain file"):
            Tokenizer(endless)

    def refuse(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(ValueError, match=r"gpt2 could not be loaded.*no route.*tokenizer=bytes.*TIKTOKEN_CACHE_DIR"):
        Tokenizer("gpt2")


WORDS = ["rope", " walk", "ing", "  ", "\n", "\t", "é", "e\u0301", "漢字", "👩‍👩‍👧", "'ll", "1234"]
WORDS += ["\x00", "<tool>", "<|end|>", "</s>"]
END = {"gpt2": "<|end|>", "llama3": "<|end|>", "qwen": "<|end|>", "llama2": "</s>"}


def byte_level_bpe(kind):
    """The steps of GPT-2, Llama 3 and Qwen, and the trainer of their vocabulary."""
    byte_level = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind != "gpt2":
        split = lib.pre_tokenizers.Split(lib.Regex(FILE_PATTERN), "isolated")
        without_regex = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        byte_level = lib.pre_tokenizers.Sequence([split, without_regex])
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.normalizer = lib.normalizers.NFC() if kind == "qwen" else None
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = lib.decoders.ByteLevel()
    alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, lib.trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=600)


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # for what the vocabulary lacks


def sentencepiece_bpe():
    """The steps of Llama 2, and the trainer of its vocabulary."""
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.normalizer = lib.normalizers.Sequence(
        [
            lib.normalizers.Prepend("▁"),
            lib.normalizers.Replace(" ", "▁"),
        ]
    )
    tokenizer.decoder = lib.decoders.Sequence(
        [
            lib.decoders.Replace("▁", " "),
            lib.decoders.ByteFallback(),
            lib.decoders.Fuse(),
            lib.decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer, lib.trainers.BpeTrainer(special_tokens=BYTE_TOKENS, vocab_size=600)


def published(kind, folder):
    """A small tokenizer.json in `folder`, with the steps of a published one; returns it as `tokenizers` reads it."""
    if kind == "llama2":
        tokenizer, trainer = sentencepiece_bpe()
        special = ["<unk>", "<s>", "</s>"]
        begin = "<s>"
        ordinary = []
    else:
        tokenizer, trainer = byte_level_bpe(kind)
        special = ["<|begin|>", "<|end|>"]
        begin = "<|begin|>"
        ordinary = ["<tool>"]
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(ordinary)

    # What encodes a text here, and must not where documents are encoded.
    tokenizer.post_processor = lib.processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 1)])
    tokenizer.enable_truncation(3)

    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] not in BYTE_TOKENS]
    values["model"]["ignore_merges"] = kind == "llama3"
    if kind == "llama2":
        values["model"] |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END[kind]}}))

    theirs = lib.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    return theirs


def random_texts(pieces, n):
    """Texts of up to 11 of the pieces."""
    rng = random.Random(0)
    return ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(n)]


@pytest.mark.parametrize("kind", END)
def test_published_tokenizers_are_read_as_their_library_does(kind, tmp_path):
    theirs = published(kind, tmp_path)
    ours = HFTokenizer(str(tmp_path))
    end = theirs.token_to_id(END[kind])
    assert ours.eot == end
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.decode([end]) == END[kind]

    texts = random_texts([*WORDS, *map(chr, range(32, 383))], 3_000)
    ids_of_texts = encoded(ours, texts)
    their_ids = [encoding.ids for encoding in theirs.encode_batch(texts, add_special_tokens=False)]
    for text, ids, expected in zip(texts, ids_of_texts, their_ids, strict=True):
        assert end not in ids
        assert ids == expected or END[kind] in text
        written = unicodedata.normalize("NFC", text) if kind == "qwen" else text
        assert ours.decode(ids) == theirs.decode(ids) == written
        bytes_of_text = len(written.encode())
        if kind == "llama2" and text:
            bytes_of_text += 1  # the space before a text
        assert ours.token_bytes[ids].sum() == bytes_of_text

    again = exported(ours, tmp_path / "copy")
    assert HFTokenizer(str(tmp_path / "copy")).hash == ours.hash
    assert again(texts[:99], add_special_tokens=False)["input_ids"] == their_ids[:99]
    assert again.eos_token_id == end


def exported(encoder, folder):
    """A tokenizer in the files of an export, as transformers opens it."""
    folder.mkdir()
    write(encoder, folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["bytes", "v.tiktoken"])
def test_our_tokenizers_are_those_of_an_export(name, tmp_path):
    merges = [b"ro", b"op", b"rop", b"ope", b" w", b"alk", b"al", b" walk", b"12", "é".encode()]
    ours = Tokenizer(name if name == "bytes" else write_vocabulary(tmp_path / name, merges))
    theirs = exported(ours, tmp_path / "out")
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == ours.eot

    texts = random_texts([*WORDS, *"ropewalk 12"], 1000)
    ids = encoded(ours, texts)
    assert theirs(texts)["input_ids"] == ids
    assert theirs.batch_decode(ids) == texts
    assert encoded(HFTokenizer(str(tmp_path / "out")), texts) == ids


def test_published_tokenizers_that_cannot_be_used(tmp_path):
    published("gpt2", tmp_path)
    path = tmp_path / "tokenizer.json"
    config = tmp_path / "tokenizer_config.json"
    undecoded = json.dumps(json.loads(path.read_text()) | {"decoder": None})
    # Each change comes on top of those before it.
    for change, message in (
        (lambda: path.write_text(undecoded), "the bytes of its tokens are unknown"),
        (lambda: config.write_text('{"eos_token": "x"}'), "no special token that ends"),
        (config.unlink, "no special token that ends a text.*eos_token in"),
        (lambda: path.write_text("{"), r"tokenizer\.json cannot be read"),
        (lambda: path.rename(tmp_path / "tokenizer.model"), r"has tokenizer\.model alone.*save_pretrained"),
        ((tmp_path / "tokenizer.model").unlink, r"has no tokenizer\.json"),
    ):
        change()
        with pytest.raises(ValueError, match=rf"data\.tokenizer=hf:{tmp_path}.*{message}"):
            HFTokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"eos_token": 5}',
        '{"eos_token": {"content": [1]}}',
        '{"eos_token_id": "x"}',
        '{"eos_token_id": ["x"]}',
        '{"eos_token_id": -1}',
        '{"eos_token_id": true}',
        '{"eos_token_id": 1e3}',
    ],
)
def test_a_bad_end_token_is_an_error_that_names_the_file(tmp_path, name, text):
    published("gpt2", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{name}"):
        HFTokenizer(str(tmp_path))


def test_a_token_that_is_not_byte_level(tmp_path):
    published("gpt2", tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["model"]["vocab"]["漢"] = 999
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="the bytes of its tokens are unknown"):
        HFTokenizer(str(tmp_path))


def test_a_vocabulary_is_trained_on_the_training_split(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    val = documents_of(prepared(corpus, tmp_path / "plain"), "val")
    for path in corpus.rglob("*.txt"):
        text = path.read_bytes().decode("utf-8", "replace")
        word = " zzzz" if text in val else " walking"
        path.write_text(text + word * 99, newline="")

    # Twice from the text, and once from what the first has made.
    sources = [prepared(corpus, tmp_path / cache, tokenizer="train:300") for cache in ("a", "b", "a")]
    first = sources[0]
    for source in sources:
        assert source.encoder.hash == first.encoder.hash
        for name in ("train", "val"):
            assert source.prepared[name].sha256 == first.prepared[name].sha256
    assert first.prepared["train"].sha256 != first.prepared["val"].sha256

    encoder = first.encoder
    assert encoder.vocab_size == 300
    assert encoder.eot == 299
    assert encoder.label == "bpe-300"
    assert b" walking" in encoder.pieces
    assert b"zz" not in encoder.pieces

    for bad, message in (
        ("train:", "give train: a number of tokens"),
        ("train:256", "give train: a number of tokens"),
        ("train:many", "give train: a number of tokens"),
        ("train:5000", r"this text gives no more than \d+ tokens: ask for fewer"),
    ):
        with pytest.raises(ValueError, match=rf"data\.tokenizer={bad}: {message}"):
            prepared(corpus, tmp_path / "a", tokenizer=bad)
