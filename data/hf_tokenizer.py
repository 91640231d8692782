"""The library `tokenizers`: reading tokenizer.json of published models, and training a vocabulary."""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from conf.files import announce, hub_folder, read_json
from data.tokenizer import FILE_PATTERN, Tokenizer, panics_are_errors

FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
LONGEST_PIECE = 1000  # characters of a piece of text that a vocabulary is trained on
PROBE = "Rope 1é漢\n\t<x>"  # a text that every tokenizer must be able to express

# Byte-level vocabularies write bytes as printable characters (GPT-2): a printable one as itself, the others, in
# ascending order, as the characters from 256 on.
CHARACTER_OF: dict[int, str] = {}
_others = itertools.count(256)
for _byte in range(256):
    _is_printable = chr(_byte).isprintable() and chr(_byte) != " "
    CHARACTER_OF[_byte] = chr(_byte if _is_printable else next(_others))
BYTE_OF = {character: byte for byte, character in CHARACTER_OF.items()}


class HFTokenizer(Tokenizer):
    """The tokenizer.json in a folder, or of a model on the Hugging Face hub, with its special and added tokens.

    `encode` puts no token at the start of a text; `bos` is the one that its files put there.

    Args:
        source: a folder, or the id of a model on the hub.

    Raises:
        ValueError: a file is missing or damaged, no token ends a text, or the tokens are neither byte-level nor like
            SentencePiece's, so that the bytes they stand for are unknown.
    """

    def __init__(self, source: str) -> None:
        self.name = f"hf:{source}"
        folder = hub_folder(source, FILES)
        self.files = [folder / name for name in FILES if (folder / name).is_file()]
        values, self.backend = _read(folder, self.name)
        self.vocab_size = max(self.backend.get_vocab().values(), default=0) + 1
        self.label = f"{type(self.backend.model).__name__.lower()}-{self.vocab_size}"  # such as bpe-50257
        self.eot = _end_token(folder, self.backend, self.name)
        self.pieces, self.token_bytes = _byte_pieces(self.backend, self.vocab_size)
        # Its normaliser may change a text, such as to lower case: `TextData.token_bytes` makes up for that. But the
        # bytes of its tokens must spell out exactly what the normaliser leaves. That of SentencePiece writes "▁" for a
        # space.
        normalizer = self.backend.normalizer
        expected = PROBE if normalizer is None else normalizer.normalize_str(PROBE).replace("▁", " ")
        (ids,) = self.encode([PROBE])
        written = super().decode(ids)
        if written.strip(" ") != expected.strip(" "):  # SentencePiece puts a space before a text
            raise ValueError(
                f"data.tokenizer={self.name}: the bytes of its tokens are unknown: "
                "choose one that is byte-level (GPT-2, Llama 3, Qwen), or has byte fallback (Llama 2)"
            )
        # If its own steps put a token before each text, that is the first id.
        with_special = self.backend.encode(PROBE).ids
        self.own_bos = None if with_special[0] == ids[0] else with_special[0]
        self.bos = self._chosen_bos(folder)
        content = json.dumps([values, self.eot], sort_keys=True)
        self.hash = hashlib.sha256(content.encode()).hexdigest()

    def _chosen_bos(self, folder: Path) -> int | None:
        """The token that begins texts. The tokenizer's own steps put it there unless its configuration says otherwise.

        Of DeepSeek's models the configuration alone says so.
        """
        values = _config(folder, "tokenizer_config.json")
        wanted = values.get("add_bos_token")
        token = self.backend.token_to_id(str(_text(values.get("bos_token"))))
        if not isinstance(wanted, bool) or wanted == (self.own_bos is not None) or (wanted and token is None):
            return self.own_bos
        announce(f"{self.name}: add_bos_token={wanted} in tokenizer_config.json overrides tokenizer.json")
        return token if wanted else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, uint32 [tokens]. Lone surrogates, which UTF-8 lacks, are replaced."""
        valid = [text.encode("utf-8", "replace").decode() for text in texts]
        with panics_are_errors(self.name):
            encodings = self.backend.encode_batch_fast(valid, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens by their names."""
        return str(self.backend.decode([*ids], skip_special_tokens=False))


def train(texts: Iterable[str], size: int, path: Path) -> None:
    """Train byte-level BPE and write it as a vocabulary file in tiktoken's format. The same texts give the same file.

    Args:
        texts: the texts to train on.
        size: number of tokens, with the one between documents.
        path: the file to write.

    Raises:
        ValueError: there is too little text for so many tokens, or the library fails on a text.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    # The second pattern cuts long pieces: the time for one grows with the square of its length, and nothing is learned
    # of base64 or a wall of blanks.
    bpe.pre_tokenizer = pre_tokenizer(FILE_PATTERN, rf"[\s\S]{{1,{LONGEST_PIECE}}}")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=[*BYTE_OF], show_progress=False)
    with panics_are_errors(f"train:{size}"):
        bpe.train_from_iterator(texts, trainer)
    ranks = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if len(ranks) < size - 1:
        raise ValueError(
            f"data.tokenizer=train:{size}: this text gives no more than {len(ranks) + 1} tokens: "
            "ask for fewer, or give more text"
        )
    # The library names tokens by printable characters; tiktoken's format wants their bytes in base64, then the rank.
    lines = [f"{base64.b64encode(_byte_level(token)).decode()} {rank}\n" for token, rank in ranks]
    path.write_text("".join(lines))


def pre_tokenizer(*patterns: str) -> Any:
    """Cut texts by regular expressions, one after another, then name the bytes of each piece by `CHARACTER_OF`."""
    cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([*cuts, as_bytes])


def _read(folder: Path, name: str) -> tuple[dict[str, Any], Any]:
    """The values in tokenizer.json, without padding and truncation, and the library's tokenizer made of them."""
    # Padding and truncation are settings of whoever saved the file. They would change the tokens of our texts.
    try:
        values = json.loads((folder / "tokenizer.json").read_bytes()) | {"padding": None, "truncation": None}
        with panics_are_errors(name, "restore the file"):  # a panic is no Exception, so it would pass the one below
            backend = tokenizers.Tokenizer.from_str(json.dumps(values))
    except FileNotFoundError:
        raise ValueError(
            f"data.tokenizer={name} has no tokenizer.json: "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it"
        ) from None
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"data.tokenizer={name}: tokenizer.json cannot be read: {error}") from None
    backend.encode_special_tokens = True  # text that looks like a special token is ordinary text
    return values, backend


def _end_token(folder: Path, backend: Any, name: str) -> int:
    """The id of the token that ends a text, from the first file that names a usable one, by its text or its id."""
    for file in ("tokenizer_config.json", "generation_config.json", "config.json"):
        values = _config(folder, file)
        # Somebody else's file may have anything in both places. Anything but a token or its id is passed over.
        token = _text(values.get("eos_token"))
        # The file names the token by its text, or else by its id.
        end: Any = backend.token_to_id(str(token)) if token else values.get("eos_token_id")
        if isinstance(end, list):  # several tokens may end a text; the first one is ours
            end = end[0] if end else None
        is_id = type(end) is int and 0 <= end < 2**32  # what the library takes
        text = backend.id_to_token(end) if is_id else None
        # Usable: it exists, and ordinary text never gives it. Otherwise it would not mark the end of a document.
        if text is not None and end not in backend.encode(text, add_special_tokens=False).ids:
            return end
    raise ValueError(
        f"data.tokenizer={name} has no special token that ends a text: "
        f"name one as eos_token in {folder}/tokenizer_config.json"
    )


def _config(folder: Path, name: str) -> dict[str, Any]:
    """The values in one of the files beside tokenizer.json; none if it is missing."""
    path = folder / name
    return read_json(path.resolve()) if path.is_file() else {}  # files in the hub's cache are links


def _text(token: Any) -> Any:
    """The text of a token in such a file, where it may stand with its options."""
    return token.get("content") if isinstance(token, dict) else token


def _byte_pieces(backend: Any, vocab_size: int) -> tuple[list[bytes], torch.Tensor]:
    """The bytes of each token, b"" for unused ids, and how many count as text: int64 [vocab_size], 0 if special."""
    # The file has names of tokens, not their bytes. There are two kinds: byte-level names have a printable character
    # for each byte; those of SentencePiece are text, with "▁" for a space and <0xNN> for a byte. The names of added
    # tokens are text in both.
    byte_level = "ByteLevel" in repr(backend.decoder)
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * vocab_size
    sizes = [0] * vocab_size
    for token, i in backend.get_vocab().items():
        if i in added:
            pieces[i] = token.encode()
        elif byte_level:
            pieces[i] = _byte_level(token)
        else:
            pieces[i] = token.replace("▁", " ").encode()
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            if byte:
                pieces[i] = bytes.fromhex(byte[1])
        is_special = i in added and added[i].special
        sizes[i] = 0 if is_special else len(pieces[i])
    return pieces, torch.tensor(sizes)


def _byte_level(token: str) -> bytes:
    """The bytes of a byte-level name of a token. One with other characters is taken as it is, as the library does."""
    if set(token) - BYTE_OF.keys():
        return token.encode()
    return bytes(BYTE_OF[character] for character in token)
