"""Tokenizers: bytes, the named encodings of tiktoken, and vocabulary files in tiktoken's format."""

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tiktoken
import torch

from conf.files import refuse_link

END = "<|endoftext|>"

# How text is cut into pieces before merging. A vocabulary file does not say, so as GPT-4 and Llama 3 do.
FILE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_PATTERN = r"[\s\S]{1,64}"  # any would do: bytes do not merge
BYTES = {bytes([i]): i for i in range(256)}  # {token: rank} of the vocabulary "bytes"
SHORTEN = "a document may have a run of blanks or letters that is too long: shorten it, or data.document_bytes"


class Tokenizer:
    """A vocabulary of byte strings, and a token between documents.

    Text that looks like a special token is encoded as ordinary text. Tokenizers of published models, and training a
    vocabulary, are in `data.hf_tokenizer`.

    Args:
        name: "bytes", an encoding of tiktoken ("gpt2", "cl100k_base", ...), or a vocabulary file in tiktoken's format:
            a line for each token with its bytes in base64 and its rank.

    Raises:
        ValueError: the encoding or the file is missing or damaged.
    """

    def __init__(self, name: str = "bytes") -> None:
        self.name = name
        self.encoding = _load(name)
        self.files = [Path(name)] if Path(name).is_file() else []  # a run keeps them, to decode its tokens anywhere
        self.label = self.encoding.name  # fit for the name of a file
        self.eot = self.encoding.eot_token  # id of the token between documents
        self.bos: int | None = None  # id of the token that begins every text, if there is one
        self.vocab_size = self.encoding.n_vocab  # including unused ids
        # tiktoken has no public access to these three (as of 0.14).
        self.ranks = self.encoding._mergeable_ranks
        self.pattern = self.encoding._pat_str
        special = self.encoding._special_tokens

        self.pieces = [b""] * self.vocab_size  # bytes of each token, b"" for unused ids
        for piece, i in self.ranks.items():
            self.pieces[i] = piece
        # Counted before the special tokens have pieces: they stand for no bytes of a text.
        self.token_bytes = torch.tensor([len(piece) for piece in self.pieces])  # int64 [vocab_size]
        for special_token, i in special.items():
            self.pieces[i] = special_token.encode()

        # The hash covers everything that decides the ids of a text: runs and results are compared by it.
        special_ids = set(special.values())
        lines = [f"{self.pattern}\n{self.eot}\n"]
        lines += [f"{i} {i in special_ids:d} {piece.hex()}\n" for i, piece in enumerate(self.pieces)]
        self.hash = hashlib.sha256("".join(lines).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, unsigned integers [tokens]. Lone surrogates, which UTF-8 lacks, are replaced."""
        if self.name == "bytes":
            return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts]
        with panics_are_errors(self.name):
            batch = self.encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.array(ids, np.uint32) for ids in batch]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; unused ids become nothing."""
        # The network's vocabulary may be padded beyond the tokenizer's, so an id may be too large.
        pieces = [self.pieces[i] for i in ids if i < self.vocab_size]
        return b"".join(pieces).decode("utf-8", "replace")


@contextmanager
def panics_are_errors(name: str, remedy: str = SHORTEN) -> Iterator[None]:
    """Raise ValueError where a tokenizer's library panics in Rust, which `except Exception` would not catch."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"data.tokenizer={name} failed ({reason}): {remedy}") from None


def _load(name: str) -> tiktoken.Encoding:
    """Load the encoding of this name, or the vocabulary file at this path."""
    if name == "bytes":
        return _encoding(name, BYTE_PATTERN, BYTES)
    published = tiktoken.list_encoding_names()
    if name not in published:
        return _encoding(Path(name).stem, FILE_PATTERN, _read_ranks(name, published))
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network brings
        reason = str(error).split("(Caused by")[-1].strip(" ()")[:200]
        raise ValueError(
            f"data.tokenizer={name} could not be loaded ({type(error).__name__}: {reason}). Offline, use "
            f"data.tokenizer=bytes, set TIKTOKEN_CACHE_DIR to a folder that has it cached, or name a local file: "
            f"data.tokenizer=FILE.tiktoken"
        ) from None


def _encoding(label: str, pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """Make an encoding of a vocabulary. The token between documents gets the id after the last one."""
    special = {END: max(ranks.values()) + 1}
    return tiktoken.Encoding(label, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _read_ranks(path: str, published: list[str]) -> dict[bytes, int]:
    """Read a vocabulary file. Raises ValueError if it is missing or damaged."""
    # tiktoken's own reader caches by path, and would miss that a file has changed.
    ranks: dict[bytes, int] = {}
    try:
        # The user's file may be a link, so it is resolved. What `refuse_link` still refuses are pipes and devices:
        # reading one would wait for a writer, or never end.
        lines = [line for line in refuse_link(Path(path).resolve()).read_bytes().splitlines() if line]
        for line in lines:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        missing = len(BYTES.keys() - ranks.keys())
        if missing:
            raise ValueError(f"it lacks {missing} of the 256 single-byte tokens")
        distinct = set(ranks.values())
        if len(distinct) < len(lines) or min(distinct) < 0:
            raise ValueError("ranks must be distinct and not negative")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.tokenizer={path} is neither bytes nor {', '.join(published)} nor "
            f"a vocabulary file (lines with a token in base64 and its rank): {error}"
        ) from None
    return ranks
