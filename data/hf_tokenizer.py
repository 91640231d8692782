"""The library `tokenizers`: reading tokenizer.json of published models, and training a vocabulary."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from common.files import hub_folder
from data.tokenizer import FILE_PATTERN, Tokenizer

FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
PROBE = "Rope 1é漢\n\t<x>"  # a text that every tokenizer must be able to write

# Byte-level vocabularies write bytes as printable characters (GPT-2): {character: byte}
_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


class HFTokenizer(Tokenizer):
    """The tokenizer.json in a folder, or of a model on the Hugging Face hub, with its special and added tokens.

    Texts get no token at their start. Raises ValueError: it is missing or damaged, has no end token, or its tokens are
    neither byte-level nor like SentencePiece's, so that their bytes cannot be told.
    """

    def __init__(self, source: str) -> None:
        self.name, folder = f"hf:{source}", hub_folder(source, [*FILES, "tokenizer.model"])
        self.files = [folder / name for name in FILES if (folder / name).is_file()]
        try:
            values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            values |= {"padding": None, "truncation": None}
            self.backend = backend = tokenizers.Tokenizer.from_str(json.dumps(values))
        except FileNotFoundError:
            name = "tokenizer.model alone" if (folder / "tokenizer.model").exists() else "no tokenizer.json"
            remedy = "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes tokenizer.json"
            raise ValueError(f"data.tokenizer={self.name} has {name}, which cannot be read: {remedy}") from None
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"data.tokenizer={self.name}: tokenizer.json cannot be read: {error}") from None
        backend.encode_special_tokens = True  # that is, as ordinary text
        added = backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        tokens = {i: token for token, i in backend.get_vocab().items()}
        self.vocab_size = max(tokens) + 1
        self.label = f"{values['model']['type'].lower()}-{self.vocab_size}"
        end = _end_token(folder, backend)
        if end is None or end in backend.encode(tokens[end], add_special_tokens=False).ids:
            remedy = f"name one as eos_token in {folder}/tokenizer_config.json"
            raise ValueError(f"data.tokenizer={self.name} has no special token that ends a text: {remedy}")
        self.eot = end
        byte_level = "ByteLevel" in json.dumps(values["decoder"])
        text_of = _byte_level if byte_level else _sentence_piece
        pieces = {i: token.encode() if i in added else text_of(token) for i, token in tokens.items()}
        self.pieces = [pieces.get(i, b"") for i in range(self.vocab_size)]
        self.token_bytes = torch.tensor([0 if i in special else len(piece) for i, piece in enumerate(self.pieces)])
        if b"".join(self.pieces[i] for i in self.encode([PROBE])[0]).removeprefix(b" ") != PROBE.encode():
            remedy = "choose one that is byte-level (GPT-2, Llama 3, Qwen), or has byte fallback (Llama 2)"
            raise ValueError(f"data.tokenizer={self.name}: the bytes of its tokens cannot be told: {remedy}")
        self.hash = hashlib.sha256(json.dumps([values, self.eot], sort_keys=True).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        batch = self.backend.encode_batch_fast(clean, add_special_tokens=False)
        return [np.array(found.ids, np.uint32) for found in batch]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([*ids], skip_special_tokens=False))


def train(texts: Iterable[str], size: int, path: Path) -> None:
    """Train byte-level BPE and write it as a vocabulary file of tiktoken: `size` tokens with the one between documents.

    The same texts give the same file. Raises ValueError if there is too little text for so many tokens.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = _steps(FILE_PATTERN)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=[*BYTE_OF], show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    ranks = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if len(ranks) < size - 1:
        remedy = "ask for fewer, or give more text"
        raise ValueError(f"data.tokenizer=train:{size}: this text gives no more than {len(ranks) + 1} tokens: {remedy}")
    lines = [f"{base64.b64encode(_byte_level(token)).decode()} {rank}\n" for token, rank in ranks]
    path.write_text("".join(lines))


def write(encoder: Tokenizer, folder: Path) -> None:
    """Write files with which transformers.AutoTokenizer reads texts as `encoder` does, one ending in its end token."""
    if isinstance(encoder, HFTokenizer):
        for path in encoder.files:
            if path.name != "config.json":
                (folder / path.name).write_bytes(path.read_bytes())
        path = folder / "tokenizer_config.json"
        # other classes of transformers would build the tokenizer anew, from its vocabulary and steps of their own
        values = json.loads(path.read_text()) if path.is_file() else {}
        values |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": encoder.decode([encoder.eot])}
        path.write_text(json.dumps(values, indent=2))
        return
    ranks = encoder.ranks
    names = {token: "".join(CHARACTER_OF[byte] for byte in token) for token in ranks}
    cuts = [(token, i) for token in sorted(ranks, key=ranks.__getitem__) for i in range(1, len(token))]
    pairs = [(token[:i], token[i:]) for token, i in cuts if token[:i] in ranks and token[i:] in ranks]
    end = encoder.decode([encoder.eot])
    vocab = {name: ranks[token] for token, name in names.items()}
    if encoder.eot != len(vocab):  # the id that it gets when it is added; a text that looks like it must not be it
        vocab[end] = encoder.eot
    bpe = tokenizers.models.BPE(vocab, [(names[a], names[b]) for a, b in pairs], ignore_merges=True)
    built = tokenizers.Tokenizer(bpe)
    built.pre_tokenizer = _steps(encoder.pattern)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens([end])
    built.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2))


def _steps(pattern: str) -> Any:
    """Cut texts by a regular expression, and write the pieces byte by byte."""
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), as_bytes]
    )


def _end_token(folder: Path, backend: Any) -> int | None:
    """The id of the token that ends a text, by whichever file of the folder tells."""
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        token, ids = said.get("eos_token"), said.get("eos_token_id")
        token = token.get("content") if isinstance(token, dict) else token
        found = backend.token_to_id(token) if token else ids[0] if isinstance(ids, list) else ids
        if found is not None and backend.id_to_token(found) is not None:
            return int(found)
    return None


def _byte_level(token: str) -> bytes:
    return bytes(BYTE_OF[character] for character in token)


def _sentence_piece(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
