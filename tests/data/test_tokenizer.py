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

from data.hf_tokenizer import HFTokenizer, write
from data.tokenizer import FILE_PATTERN, Tokenizer

BYTES = Tokenizer("bytes")


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
    changed = Tokenizer(write_vocabulary(tmp_path / "tiny.tiktoken", skip=4))  # its unused ids decode to nothing
    assert (changed.vocab_size, changed.decode([104, 257, 105]), changed.token_bytes[257]) == (264, "hi", 0)


ONE_BAD = {"YQ==": "unpack", "!! 3": "base64", "Yg== b": "invalid literal", "YWI= 7": "different", "YWI= -1": "between"}
ONE_BAD |= {"YWI= 100000000000": "between 0 and 4,194,304"}


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


def published(kind, folder):
    """A small tokenizer.json in `folder`, with the steps of a published one; returns it as `tokenizers` reads it."""
    pre, decoders, normal = lib.pre_tokenizers, lib.decoders, lib.normalizers
    built = lib.Tokenizer(lib.models.BPE())
    initial, special = pre.ByteLevel.alphabet(), ["<|begin|>", "<|end|>"]
    if kind == "llama2":
        initial, special = [], ["<unk>", "<s>", "</s>"]
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        built.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        built.decoder = decoders.Sequence(steps)
    else:
        fallback, cut = [], pre.Split(lib.Regex(FILE_PATTERN), "isolated")
        built.normalizer = normal.NFC() if kind == "qwen" else None
        own = pre.Sequence([cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
        built.pre_tokenizer = pre.ByteLevel(add_prefix_space=False) if kind == "gpt2" else own
        built.decoder = decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(initial_alphabet=initial, special_tokens=fallback, vocab_size=600)
    built.train_from_iterator(WORDS * 3, trainer)
    built.add_special_tokens(special)
    built.add_tokens([] if fallback else ["<tool>"])
    built.post_processor = lib.processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], 1)]
    )
    built.enable_truncation(3)
    values = json.loads(built.to_str())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] not in fallback]
    unknown = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} if fallback else {}
    values["model"] |= unknown | {"ignore_merges": kind == "llama3"}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END[kind]}}))
    theirs = lib.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    return theirs


@pytest.mark.parametrize("kind", END)
def test_published_tokenizers_are_read_as_their_library_does(kind, tmp_path):
    theirs, ours, rng = published(kind, tmp_path), HFTokenizer(str(tmp_path)), random.Random(0)
    end, pieces = theirs.token_to_id(END[kind]), [*WORDS, *map(chr, range(32, 383))]
    assert (ours.eot, ours.vocab_size) == (end, max(theirs.get_vocab().values()) + 1)
    texts = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(3_000)]
    found = [ids.tolist() for ids in ours.encode(texts)]
    expected, sizes = theirs.encode_batch(texts, add_special_tokens=False), ours.token_bytes.tolist()
    for text, ids, their in zip(texts, found, expected, strict=True):
        assert ids == their.ids or END[kind] in text
        written = unicodedata.normalize("NFC", text) if kind == "qwen" else text
        assert ours.decode(ids) == theirs.decode(ids) == written
        assert sum(sizes[i] for i in ids) == len(written.encode()) + (kind == "llama2" and text != "")
    assert not any(end in ids for ids in found)
    assert ours.decode([end]) == END[kind]
    again = exported(ours, tmp_path / "copy")
    assert HFTokenizer(str(tmp_path / "copy")).hash == ours.hash
    assert again(texts[:99], add_special_tokens=False)["input_ids"] == [their.ids for their in expected[:99]]
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
    theirs, rng = exported(ours, tmp_path / "out"), random.Random(0)
    texts = ["".join(rng.choices([*WORDS, *"ropewalk 12"], k=rng.randrange(12))) for _ in range(1000)]
    ids = [found.tolist() for found in ours.encode(texts)]
    assert theirs(texts)["input_ids"] == ids
    assert theirs.batch_decode(ids) == texts
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.eot)
    assert [found.tolist() for found in HFTokenizer(str(tmp_path / "out")).encode(texts)] == ids


def test_published_tokenizers_that_cannot_be_used(tmp_path):
    published("gpt2", tmp_path)
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    undecoded = json.dumps(json.loads(path.read_text()) | {"decoder": None})
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
@pytest.mark.parametrize("text", [
    "[1]", "{", '{"eos_token": 5}', '{"eos_token": {"content": [1]}}', '{"eos_token_id": "x"}',
    '{"eos_token_id": ["x"]}', '{"eos_token_id": -1}', '{"eos_token_id": true}', '{"eos_token_id": 1e3}',
])  # fmt: skip
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
        path.write_text(text + (" zzzz" if text in val else " walking") * 99, newline="")
    sources = [prepared(corpus, tmp_path / cache, tokenizer="train:300") for cache in ("a", "b", "a")]
    assert len({source.encoder.hash for source in sources}) == 1
    assert len({split.sha256 for source in sources for split in source.prepared.values()}) == 2
    own = sources[0].encoder
    assert (own.vocab_size, own.eot, own.label) == (300, 299, "bpe-300")
    assert b" walking" in own.pieces
    assert b"zz" not in own.pieces
    told = dict.fromkeys(("train:", "train:256", "train:many"), "give train: a number of tokens")
    for bad, message in (told | {"train:5000": r"this text gives no more than \d+ tokens: ask for fewer"}).items():
        with pytest.raises(ValueError, match=rf"data\.tokenizer={bad}: {message}"):
            prepared(corpus, tmp_path / "a", tokenizer=bad)
