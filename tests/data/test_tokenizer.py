"""Tokenizers: nothing is lost, nothing is special in a document, and a bad vocabulary is refused."""

import json
import random
import unicodedata

import numpy as np
import pytest
import tokenizers as lib
import torch
import transformers
from conftest import edit
from corpora import documents_of, prepared, write_corpus, write_vocabulary
from hypothesis import example, given
from hypothesis import strategies as st

from data.hf_tokenizer import HFTokenizer, pre_tokenizer
from data.tokenizer import FILE_PATTERN, Tokenizer
from ropewalk.evaluation.measures.far_copies import only
from ropewalk.hf.tokenizers import write

BYTES = Tokenizer("bytes")


def encoded(tokenizer, texts) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode(texts)]


@given(st.text())
@example("<|endoftext|>")
@example("\r\n\x00 é 漢字 👩‍👩‍👧" * 30)
def test_the_byte_tokens_of_any_text_are_its_bytes(text):
    (ids,) = encoded(BYTES, [text])

    assert bytes(ids) == text.encode()
    assert BYTES.decode(ids) == text


def test_the_byte_vocabulary_has_one_more_token_which_ends_a_text():
    assert (BYTES.vocab_size, BYTES.eot, BYTES.bos) == (257, 256, None)
    assert BYTES.token_bytes.tolist() == [1] * 256 + [0]
    assert BYTES.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert encoded(BYTES, ["a\ud800b"]) == [list(b"a?b")]  # UTF-8 has no lone surrogates


def test_a_vocabulary_file_gives_the_ids_of_its_ranks(tmp_path):
    path = write_vocabulary(tmp_path / "tiny.tiktoken", skip=4)
    tokenizer = Tokenizer(path)
    the, after_blank, end = range(261, 264)
    texts = ["the then<|endoftext|>", "then, the end: é", "", "the"]

    ids = encoded(tokenizer, texts)

    assert ids[0][:3] == [the, after_blank, ord("n")]
    assert ids[2:] == [[], [the]]
    assert tokenizer.eot == end not in ids[0]
    assert [tokenizer.decode(of_text) for of_text in ids] == texts
    assert tokenizer.token_bytes[:256].eq(1).all()
    assert tokenizer.token_bytes[256:].tolist() == [0, 0, 0, 0, 2, 3, 4, 0]
    assert tokenizer.decode([104, 257, 105, 10**6]) == "hi"  # unused ids decode to nothing
    assert Tokenizer(path).hash == tokenizer.hash != BYTES.hash


@pytest.mark.parametrize("line", ["!! 3", "YWI= 7", "YWI= -1"])
def test_what_is_no_vocabulary_is_refused_at_once(tmp_path, line):
    """A line that is no base64, a rank of another, and a negative one."""
    path = tmp_path / "v.tiktoken"
    write_vocabulary(path)
    path.write_text(f"{path.read_text()}{line}\n")

    with pytest.raises(ValueError, match=r"v\.tiktoken is neither bytes nor gpt2, .* nor a vocabulary file"):
        Tokenizer(str(path))


WORDS = ["rope", " walk", "ing", "  ", "\n", "\t", "é", "e\u0301", "漢字", "👩‍👩‍👧", "'ll", "1234"]
SPECIAL_WORDS = ["\x00", "<tool>", "<|end|>", "</s>"]
BEGIN_AND_END = {
    "llama3": ("<|begin|>", "<|end|>"),
    "qwen": ("<|begin|>", "<|end|>"),
    "llama2": ("<s>", "</s>"),
}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # of Llama 2, for what its vocabulary lacks


def byte_level_bpe(kind):
    """The steps of Llama 3 and Qwen, and the trainer of their vocabulary."""
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(FILE_PATTERN)
    tokenizer.decoder = lib.decoders.ByteLevel()
    if kind == "qwen":
        tokenizer.normalizer = lib.normalizers.NFC()
    alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, lib.trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=600)


def sentencepiece_bpe():
    """The steps of Llama 2, and the trainer of its vocabulary."""
    tokenizer = lib.Tokenizer(lib.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    normalizers = [
        lib.normalizers.Prepend("▁"),
        lib.normalizers.Replace(" ", "▁"),
    ]
    decoders = [
        lib.decoders.Replace("▁", " "),
        lib.decoders.ByteFallback(),
        lib.decoders.Fuse(),
        lib.decoders.Strip(" ", 1, 0),
    ]
    tokenizer.normalizer = lib.normalizers.Sequence(normalizers)
    tokenizer.decoder = lib.decoders.Sequence(decoders)
    return tokenizer, lib.trainers.BpeTrainer(special_tokens=BYTE_TOKENS, vocab_size=600)


def published(kind, folder, **changes):
    """A small tokenizer.json in `folder`, with the steps of a published one; returns it as `tokenizers` reads it.

    `changes` replace parts of the file.
    """
    is_llama2 = kind == "llama2"
    begin, end = BEGIN_AND_END[kind]
    tokenizer, trainer = sentencepiece_bpe() if is_llama2 else byte_level_bpe(kind)
    tokenizer.train_from_iterator([*WORDS, *SPECIAL_WORDS] * 3, trainer)
    tokenizer.add_special_tokens(["<unk>", begin, end] if is_llama2 else [begin, end])
    tokenizer.add_tokens([] if is_llama2 else ["<tool>"])

    # What encodes a text here, and must not where documents are encoded.
    special_tokens = [(begin, tokenizer.token_to_id(begin))]
    tokenizer.post_processor = lib.processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special_tokens)
    tokenizer.enable_truncation(3)

    values = json.loads(tokenizer.to_str())
    added = values["added_tokens"]
    values["added_tokens"] = [token for token in added if token["content"] not in BYTE_TOKENS]
    values["model"]["ignore_merges"] = kind == "llama3"
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))

    theirs = lib.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    return theirs


def random_texts(pieces, n):
    """Texts of up to 11 of the pieces."""
    rng = random.Random(0)
    sizes = [rng.randrange(12) for _ in range(n)]
    return ["".join(rng.choices(pieces, k=size)) for size in sizes]


@pytest.mark.parametrize("kind", BEGIN_AND_END)
def test_published_tokenizers_are_read_as_their_library_does(kind, tmp_path):
    theirs = published(kind, tmp_path)
    ours = HFTokenizer(str(tmp_path))
    begin, end = BEGIN_AND_END[kind]

    assert ours.eot == theirs.token_to_id(end)
    assert ours.bos == theirs.token_to_id(begin)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1

    characters = map(chr, range(32, 383))
    texts = random_texts([*WORDS, *SPECIAL_WORDS, *characters], 1_000)
    encodings = theirs.encode_batch(texts, add_special_tokens=False)
    for text, ids, encoding in zip(texts, encoded(ours, texts), encodings, strict=True):
        written = unicodedata.normalize("NFC", text) if kind == "qwen" else text
        blank = kind == "llama2" and text != ""  # before a text

        assert ours.eot not in ids
        assert ids == encoding.ids or end in text
        assert ours.decode(ids) == theirs.decode(ids) == written
        assert ours.token_bytes[ids].sum() == len(written.encode()) + blank


@pytest.mark.long
@pytest.mark.parametrize("name", ["bytes", "v.tiktoken", "qwen", "llama2"])
def test_an_exported_tokenizer_gives_transformers_the_ids_of_training(name, tmp_path):
    if name in BEGIN_AND_END:
        published(name, tmp_path)
        ours = HFTokenizer(str(tmp_path))
    else:
        merges = [b".r", b"ro", b"op", b"rop", b"ope", b" w", b"alk", b"al", b" walk", b"12", "é".encode()]
        ours = Tokenizer(name if name == "bytes" else write_vocabulary(tmp_path / name, merges))
    texts = random_texts([*WORDS, "\x00", "<tool>", *"ropewalk 12."], 300)
    ids = encoded(ours, texts)
    out = tmp_path / "out"
    out.mkdir()

    write(ours, out, bos=ours.bos)

    theirs = transformers.AutoTokenizer.from_pretrained(out)

    assert theirs.eos_token_id == ours.eot
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ids
    assert encoded(HFTokenizer(str(out)), texts) == ids


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_an_explicit_flag_decides_whether_a_text_has_a_beginning(tmp_path, own, flag):
    """As of DeepSeek's models, whose tokenizer.json does not put it there. An export has it in every version."""
    folder = tmp_path / "in"
    out = tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    begin, _ = BEGIN_AND_END["llama3"]
    theirs = published("llama3", folder, **({} if own else {"post_processor": None}))
    edit(folder / "tokenizer_config.json", bos_token=begin)
    if flag is not None:
        edit(folder / "tokenizer_config.json", add_bos_token=flag, tokenizer_class="LlamaTokenizerFast")
    expected = theirs.token_to_id(begin) if (own if flag is None else flag) else None

    ours = HFTokenizer(str(folder))
    write(ours, out, bos=ours.bos)

    assert ours.bos == expected
    readers = [
        lambda: transformers.AutoTokenizer.from_pretrained(out)("rope")["input_ids"],
        lambda: lib.Tokenizer.from_file(str(out / "tokenizer.json")).encode("rope").ids,  # as older versions do
    ]
    for read in readers:
        assert (read()[0] == theirs.token_to_id(begin)) == (expected is not None)


UNKNOWN = "the bytes of its tokens are unknown"
NO_END = "no special token that ends a text.*eos_token in"
# The file, the values that are changed in it, and the reason.
CHANGES = [
    ("tokenizer.json", {"decoder": None}, UNKNOWN),
    ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, UNKNOWN),
    ("tokenizer.json", {"model": {}}, r"tokenizer\.json cannot be read"),
    ("tokenizer_config.json", {"eos_token": "x"}, NO_END),
    ("tokenizer_config.json", {"eos_token": None}, NO_END),
]


@pytest.mark.parametrize(("file", "changes", "message"), CHANGES)
def test_a_published_tokenizer_that_cannot_be_used_is_named_with_the_reason(tmp_path, file, changes, message):
    published("llama3", tmp_path)
    edit(tmp_path / file, **changes)

    with pytest.raises(ValueError, match=rf"data\.tokenizer=hf:{tmp_path}.*{message}"):
        HFTokenizer(str(tmp_path))


def test_a_vocabulary_is_trained_on_the_training_split_alone(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    val = documents_of(prepared(corpus, tmp_path / "plain"), "val")
    for path in corpus.rglob("*.txt"):
        text = path.read_bytes().decode("utf-8", "replace")
        word = " zzzz" if text in val else " walking"
        path.write_text(text + word * 99, newline="")

    # Twice from the text, and once from what the first has made.
    encoders = [prepared(corpus, tmp_path / cache, tokenizer="train:300").encoder for cache in ("a", "b", "a")]
    first, *others = encoders

    assert {other.hash for other in others} == {first.hash}
    assert (first.vocab_size, first.eot) == (300, 299)
    assert b" walking" in first.pieces
    assert b"zz" not in first.pieces


@pytest.mark.parametrize("size", ["", "256", "many", "5000"])
def test_a_size_that_cannot_be_trained_is_an_error(tmp_path, size):
    corpus = write_corpus(tmp_path / "corpus", documents=5)
    with pytest.raises(ValueError, match=rf"data\.tokenizer=train:{size}: (train: needs a number|.* ask for fewer)"):
        prepared(corpus, tmp_path / "a", tokenizer=f"train:{size}")


NO_MARKS = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}


@pytest.mark.parametrize(
    ("kind", "changes", "same"),
    [
        ("llama3", {"normalizer": {"type": "Lowercase"}}, True),
        ("llama3", {"normalizer": NO_MARKS}, False),
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
    n_bytes = sum(split.bytes for split in source.prepared.values())
    val = source.prepared["val"]
    stream = val.stream().astype(np.int64)

    assert n_bytes == len("".join(texts).encode())
    assert source.token_bytes[stream].sum().item() == pytest.approx(val.bytes)
    assert (source.encoder.token_bytes[stream].sum() == val.bytes) == same


def test_windows_and_prompts_begin_as_the_tokenizer_begins_texts(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", documents=10)
    published("llama3", tmp_path)
    options = {"tokenizer": f"hf:{tmp_path}", "val_fraction": 0.4}
    source = prepared(corpus, tmp_path / "cache", **options)
    plain = prepared(corpus, tmp_path / "cache", **options, bos="none")
    start = source.encoder.bos

    assert source.decode([start]) == "<|begin|>"
    assert source.token_bytes[start] == 0
    assert source.prompt("rope") == [start, *plain.prompt("rope")]
    assert source.identity() == plain.identity() | {"bos": start}

    part = source.validation(16, 64)

    assert part.text_start == start
    assert part.texts_hash != plain.validation(16, 64).texts_hash

    for read in (
        lambda data: data.train_batch(range(4), 16, 0),
        lambda data: data.validation(16, 64).batch(0, 4),
    ):
        x, y = read(source)
        expected_x, expected_y = read(plain)
        expected_x[:, 0] = start
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)

    cut, _ = only(part, slice(3, 6)).batch(0, 4)  # also where a part of a text is read alone

    assert cut[:, 0].tolist() == [start] * len(x)
    assert torch.equal(cut[:, 1:], x[:, 4:6])
