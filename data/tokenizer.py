"""Tokenizers: bytes, the named encodings of tiktoken, and a vocabulary file of the user's."""

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tiktoken
import torch

END = "<|endoftext|>"
MAX_RANK = 2**22

# How text is cut into pieces before merging. A vocabulary file does not say, so as GPT-4 and Llama 3 do.
FILE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_PATTERN = r"[\s\S]{1,64}"  # any would do: bytes do not merge


class Tokenizer:
    """A vocabulary of byte strings and a token between documents. Text like a special token is encoded as ordinary.

    `name` is "bytes", an encoding of tiktoken ("gpt2", "cl100k_base", ...), or a vocabulary file in tiktoken's format:
    a line for each token with its bytes in base64 and its rank. ValueError if it is missing or bad. Tokenizers of
    published models, and training a vocabulary: see data.hf_tokenizer.
    """

    def __init__(self, name: str = "bytes") -> None:
        self.name = name
        self.encoding = encoding = _load(name)
        self.files = [Path(name)] if Path(name).is_file() else []  # what a run keeps, to read its tokens anywhere
        self.label = encoding.name  # fit for the name of a file
        self.eot = encoding.eot_token  # id of the token between documents
        self.vocab_size = encoding.n_vocab  # including unused ids
        tokens = {i: token for token, i in encoding._mergeable_ranks.items()}
        special = {i: token.encode() for token, i in encoding._special_tokens.items()}
        self.pieces = [special.get(i, tokens.get(i, b"")) for i in range(self.vocab_size)]
        # bytes of each token, int64 [vocab_size], 0 for special tokens and unused ids
        self.token_bytes = torch.tensor([len(tokens.get(i, b"")) for i in range(self.vocab_size)])
        digest = hashlib.sha256(f"{encoding._pat_str}\n{self.eot}\n".encode())
        for i, piece in enumerate(self.pieces):
            digest.update(b"%d %d %s\n" % (i, i in special, piece.hex().encode()))
        self.hash = digest.hexdigest()  # of all that decides on the ids of a text
        self.ranks, self.pattern = encoding._mergeable_ranks, encoding._pat_str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, unsigned integers [tokens]. Lone surrogates, which UTF-8 lacks, are replaced."""
        if self.name == "bytes":
            return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts]
        batch = self.encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.array(ids, np.uint32) for ids in batch]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; unused ids become nothing."""
        return b"".join(self.pieces[i] for i in ids if i < self.vocab_size).decode("utf-8", "replace")


def _load(name: str) -> tiktoken.Encoding:
    known = tiktoken.list_encoding_names()
    if name not in known:
        is_bytes = name == "bytes"
        ranks = {bytes([i]): i for i in range(256)} if is_bytes else _read_ranks(name, known)
        pattern, special = BYTE_PATTERN if is_bytes else FILE_PATTERN, {END: max(ranks.values()) + 1}
        return tiktoken.Encoding(Path(name).stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network brings
        reason = str(error).split("(Caused by")[-1].strip(" ()")[:200]
        raise ValueError(
            f"data.tokenizer={name} could not be loaded ({type(error).__name__}: {reason}). Offline, use "
            f"data.tokenizer=bytes, set TIKTOKEN_CACHE_DIR to a folder that has it cached, or name a local file: "
            f"data.tokenizer=FILE.tiktoken"
        ) from None


def _read_ranks(path: str, known: list[str]) -> dict[bytes, int]:
    """The vocabulary in a file. tiktoken's own reader caches by path and would miss that the file has changed."""
    try:
        pairs = [line.split() for line in Path(path).read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        if missing := sum(bytes([i]) not in ranks for i in range(256)):
            raise ValueError(f"it lacks {missing} of the 256 single bytes")
        if len(set(ranks.values())) < len(pairs) or not 0 <= min(ranks.values()) <= max(ranks.values()) < MAX_RANK:
            raise ValueError(f"ranks must be different and between 0 and {MAX_RANK:,}")
    except (OSError, ValueError) as error:
        file = f"a vocabulary file (lines with a token in base64 and its rank): {error}"
        raise ValueError(f"data.tokenizer={path} is neither bytes nor {', '.join(known)} nor {file}") from None
    return ranks
