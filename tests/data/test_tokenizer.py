"""Tokenizers: nothing is lost, nothing is special in a document, and a bad vocabulary is refused."""

import json
import os
import random
import unicodedata

import numpy as np
import pytest
import tokenizers as lib
import torch
import transformers
from corpora import documents_of, prepared, write_corpus, write_vocabulary
from hypothesis import example, given
from hypothesis import strategies as st

from data import hf_tokenizer
from data.hf_tokenizer import HFTokenizer
from data.tokenizer import FILE_PATTERN, Tokenizer
from ropewalk.evaluation.measures.cut import inputs_of
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
    assert (BYTES.vocab_size, BYTES.eot, BYTES.bos, BYTES.label) == (257, 256, None, "bytes")
    assert BYTES.token_bytes.tolist() == [1] * 256 + [0]
    assert BYTES.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert BYTES.encode(["a\ud800b"])[0].tolist() == list(b"a?b")


def test_vocabulary_file(tmp_path):
    path = write_vocabulary(tmp_path / "tiny.tiktoken", skip=4)
    tokenizer = Tokenizer(path)
    texts = ["the then<|endoftext|>", "then, the end: é", "", "the"]
    ids = encoded(tokenizer, texts)
    th, the, after_blank, end = range(260, 264)

    assert ids[0][:3] == [the, after_blank, ord("n")]
    assert ids[2:] == [[], [the]]
    assert tokenizer.eot == end not in ids[0]
    assert list(map(tokenizer.decode, ids)) == texts
    assert tokenizer.token_bytes[[0, 256, th, the, after_blank, end]].tolist() == [1, 0, 2, 3, 4, 0]
    assert tokenizer.decode([104, 257, 105, 10**6]) == "hi"  # unused ids decode to nothing
    assert Tokenizer(path).hash == tokenizer.hash != BYTES.hash


def sparse(path):
    """A file that seems to have 6 GB."""
    path.touch()
    os.truncate(path, 6 * 2**30)


def with_line(line):
    """What writes a vocabulary file with one more line."""

    def write(path):
        write_vocabulary(path)
        path.write_text(f"{path.read_text()}{line}\n")

    return write


BAD_LINES = ["YQ==", "!! 3", "Yg== b", "YWI= 7", "YWI= -1", "YWI= 100000000000"]
NO_VOCABULARIES = [os.mkfifo, sparse, lambda path: path.write_text("YQ== 0\n"), lambda path: None]


@pytest.mark.parametrize("write", [*map(with_line, BAD_LINES), *NO_VOCABULARIES])
def test_what_is_no_vocabulary_is_refused_at_once(tmp_path, write):
    write(tmp_path / "v.tiktoken")
    with pytest.raises(ValueError, match=r"v\.tiktoken is neither bytes nor gpt2, .* nor a vocabulary file"):
        Tokenizer(str(tmp_path / "v.tiktoken"))


@pytest.mark.long
def test_where_a_library_gives_up_is_an_error(tmp_path):
    """tiktoken's Rust code panics at a million blanks, and a panic is no Exception."""
    tokenizer = Tokenizer(write_vocabulary(tmp_path / "v.tiktoken"))
    with pytest.raises(ValueError, match=r"v\.tiktoken failed \(.*StackOverflow.*data\.document_bytes"):
        tokenizer.encode([" " * 1_500_000])


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
    normalizers = [lib.normalizers.Prepend("▁"), lib.normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = lib.normalizers.Sequence(normalizers)
    decoders = [lib.decoders.Replace("▁", " "), lib.decoders.ByteFallback(), lib.decoders.Fuse()]
    tokenizer.decoder = lib.decoders.Sequence([*decoders, lib.decoders.Strip(" ", 1, 0)])
    return tokenizer, lib.trainers.BpeTrainer(special_tokens=BYTE_TOKENS, vocab_size=600)


def published(kind, folder, **changes):
    """A small tokenizer.json in `folder`, with the steps of a published one; returns it as `tokenizers` reads it.

    `changes` replace parts of the file.
    """
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
    special_tokens = [(begin, tokenizer.token_to_id(begin))]
    tokenizer.post_processor = lib.processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special_tokens)
    tokenizer.enable_truncation(3)

    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] not in BYTE_TOKENS]
    values["model"]["ignore_merges"] = kind == "llama3"
    if kind == "llama2":
        values["model"] |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))
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

    assert ours.eot == theirs.token_to_id(END[kind])
    assert ours.bos == theirs.encode("rope").ids[0]
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1

    texts = random_texts([*WORDS, *map(chr, range(32, 383))], 1_000)
    ids_of_texts = encoded(ours, texts)
    their_ids = [encoding.ids for encoding in theirs.encode_batch(texts, add_special_tokens=False)]
    for text, ids, expected in zip(texts, ids_of_texts, their_ids, strict=True):
        assert ours.eot not in ids
        assert ids == expected or END[kind] in text
        written = unicodedata.normalize("NFC", text) if kind == "qwen" else text
        assert ours.decode(ids) == theirs.decode(ids) == written
        blank = kind == "llama2" and text != ""  # before a text
        assert ours.token_bytes[ids].sum() == len(written.encode()) + blank


@pytest.mark.long
@pytest.mark.parametrize("name", ["bytes", "v.tiktoken", "qwen", "llama2"])
def test_tokenizers_are_those_of_an_export(name, tmp_path):
    if name in END:
        published(name, tmp_path)
        ours = HFTokenizer(str(tmp_path))
    else:
        merges = [b"ro", b"op", b"rop", b"ope", b" w", b"alk", b"al", b" walk", b"12", "é".encode()]
        ours = Tokenizer(name if name == "bytes" else write_vocabulary(tmp_path / name, merges))
    out = tmp_path / "out"
    out.mkdir()
    write(ours, out)
    theirs = transformers.AutoTokenizer.from_pretrained(out)

    assert theirs.eos_token_id == ours.eot
    texts = random_texts([*WORDS[:-2], *"ropewalk 12"], 300)  # without the names of end tokens
    ids = encoded(ours, texts)
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ids
    assert encoded(HFTokenizer(str(out)), texts) == ids


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"decoder": None}, None, "the bytes of its tokens are unknown"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None, "the bytes of its tokens are unknown"),
        ({}, {"eos_token": "x"}, "no special token that ends a text.*eos_token in"),
        ({}, {}, "no special token that ends a text.*eos_token in"),
    ],
)
def test_published_tokenizers_that_cannot_be_used(tmp_path, changes, config, message):
    published("gpt2", tmp_path, **changes)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"data\.tokenizer=hf:{tmp_path}.*{message}"):
        HFTokenizer(str(tmp_path))


TOO_MANY = json.dumps({"model": {"type": "BPE", "vocab": {"a": 200_000_000}, "merges": []}})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (sparse, r"tokenizer\.json cannot be read"),
        (lambda path: path.write_text('{"model": {}}'), r"tokenizer\.json cannot be read"),
        (lambda path: path.write_text(TOO_MANY), "200,000,001 ids: at most 4,194,304"),
        (lambda path: path.rename(path.with_name("tokenizer.model")), r"tokenizer\.model alone"),
        (os.remove, r"no tokenizer\.json"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path, damage, message):
    published("gpt2", tmp_path)
    damage(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=rf"data\.tokenizer=hf:{tmp_path}.*{message}"):
        HFTokenizer(str(tmp_path))


ENDS = [-1, 10**30, True, [True], [0.5], {"content": [1]}, "", None, [], {"content": "x"}]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_any_end_token_is_an_id_or_an_error_that_names_a_file(tmp_path, file):
    theirs = published("gpt2", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    values = [[], 1, *({key: end} for key in ("eos_token", "eos_token_id") for end in ENDS)]

    for value in values:
        (tmp_path / file).write_text(json.dumps(value))
        with pytest.raises(ValueError, match=rf"{tmp_path}/\w*config\.json"):
            HFTokenizer(str(tmp_path))
    end = theirs.token_to_id("<|end|>")
    (tmp_path / file).write_text(json.dumps({"eos_token_id": [end, 7]}))
    assert HFTokenizer(str(tmp_path)).eot == end


def test_a_long_run_of_one_letter_is_cut_before_training(tmp_path):
    """Its time grows with the square of a piece. Uncut, each of 11 merges would double the longest token: 2,048."""
    path = tmp_path / "a.tiktoken"
    hf_tokenizer.train(["a" * 20_000], 268, path)
    assert max(map(len, Tokenizer(str(path)).ranks)) <= 1000


def test_a_vocabulary_is_trained_on_the_training_split(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    val = documents_of(prepared(corpus, tmp_path / "plain"), "val")
    for path in corpus.rglob("*.txt"):
        text = path.read_bytes().decode("utf-8", "replace")
        word = " zzzz" if text in val else " walking"
        path.write_text(text + word * 99, newline="")

    # Twice from the text, and once from what the first has made.
    first, *others = [prepared(corpus, tmp_path / cache, tokenizer="train:300") for cache in ("a", "b", "a")]

    assert {source.encoder.hash for source in others} == {first.encoder.hash}
    assert (first.encoder.vocab_size, first.encoder.eot) == (300, 299)
    assert b" walking" in first.encoder.pieces
    assert b"zz" not in first.encoder.pieces


@pytest.mark.parametrize("size", ["", "256", "many", "5000"])
def test_sizes_that_cannot_be_trained(tmp_path, size):
    corpus = write_corpus(tmp_path / "corpus", documents=5)
    with pytest.raises(ValueError, match=rf"data\.tokenizer=train:{size}: (give train: a number|.* ask for fewer)"):
        prepared(corpus, tmp_path / "a", tokenizer=f"train:{size}")


NO_MARKS = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}


@pytest.mark.parametrize(
    ("kind", "changes", "same"),
    [
        ("gpt2", {"normalizer": {"type": "Lowercase"}}, True),
        ("gpt2", {"normalizer": NO_MARKS}, False),
        ("llama2", {}, False),
    ],
    ids=["lower case", "without marks", "a blank before texts"],
)
def test_bits_per_byte_count_the_bytes_of_the_text(tmp_path, kind, changes, same):
    """Tokens may have other bytes than the text that they were made of."""
    corpus = write_corpus(tmp_path / "corpus")
    published(kind, tmp_path, **changes)
    source = prepared(corpus, tmp_path / "cache", tokenizer=f"hf:{tmp_path}")
    texts = [path.read_bytes().decode("utf-8", "replace") for path in corpus.rglob("*.txt")]
    val = source.prepared["val"]

    assert val.bytes + source.prepared["train"].bytes == sum(len(text.encode()) for text in texts)
    stream = val.stream().astype(np.int64)
    assert float(source.token_bytes[stream].sum()) == pytest.approx(val.bytes)
    assert (source.encoder.token_bytes[stream].sum() == val.bytes) == same


@pytest.mark.parametrize("bos", ["auto", "none"])
def test_windows_and_prompts_begin_as_the_tokenizer_begins_texts(tmp_path, bos):
    corpus = write_corpus(tmp_path / "corpus", documents=10)
    published("llama3", tmp_path)
    options = {"tokenizer": f"hf:{tmp_path}", "val_fraction": 0.4}
    source = prepared(corpus, tmp_path / "cache", **options, bos=bos)
    plain = prepared(corpus, tmp_path / "cache", **options, bos="none")
    start = source.encoder.bos
    is_first = bos == "auto"

    assert source.decode([start]) == "<|begin|>"
    assert source.token_bytes[start] == 0
    assert source.prompt("rope") == [start] * is_first + plain.prompt("rope")
    assert source.identity() == plain.identity() | ({"bos": start} if is_first else {})

    def batches(data):
        """And what identifies their texts."""
        parts = [data.validation(16, 64), *data.eval_sets([8, 16], target_tokens=4, sequences=4)]
        return [(*data.train_batch(range(4), 16, 0), ""), *((*part.batch(0, 4), part.texts_hash) for part in parts)]

    for (x, y, texts), (plain_x, plain_y, plain_texts) in zip(batches(source), batches(plain), strict=True):
        assert (x[:, 0] == start).all() == is_first
        assert torch.equal(x[:, 1:], plain_x[:, 1:])
        assert torch.equal(y, plain_y)
        assert texts == "" or (texts != plain_texts) == is_first

    # So does a part of a text that a measure reads alone.
    part = source.validation(16, 64)
    x, _ = part.batch(0, 4)
    window = inputs_of(x, slice(3, 7), part.text_start)
    assert (window[:, 0] == start).all() == is_first
    assert torch.equal(window[:, 1:], x[:, 4:7])


def test_a_tokenizer_that_puts_nothing_before_a_text_has_no_start(tmp_path):
    published("gpt2", tmp_path, post_processor=None)
    assert HFTokenizer(str(tmp_path)).bos is None
