"""Tokenizers, all through tiktoken: bytes, its named encodings, and a vocabulary file of the user's."""

import base64
import binascii
import difflib
import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

END = "<|endoftext|>"

DOWNLOAD_SECONDS = 60.0

# How text is cut into pieces before merging, where a vocabulary file does not say: as GPT-4 and Llama 3 have it.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A vocabulary of byte strings and a token between documents.

    Text that looks like a special token is encoded as ordinary text.

    Args:
        name: "bytes", a named encoding of tiktoken ("gpt2", "cl100k_base", ...), or a vocabulary file in tiktoken's
            format: a line for each token with its bytes in base64 and its rank.
        pattern: regular expression of the pieces that are never merged, for a vocabulary file; default GPT-4's.

    Attributes:
        label: short name, fit for a file name.
        vocab_size: number of token ids, unused ones among them.
        eot: id of the token between documents: <|endoftext|>, one more than there are where the encoding lacks it.
        token_bytes: bytes each token stands for, int64 [vocab_size], 0 for special tokens and unused ids.
        hash: SHA-256 of all that decides on the ids of a text.

    Raises:
        ValueError: no such encoding or file, a bad file, or a download that failed or took longer than a minute.
    """

    def __init__(self, name: str = "bytes", pattern: str | None = None) -> None:
        is_file = name not in _names() and (name.endswith(".tiktoken") or Path(name).is_file())
        if pattern is not None and not is_file:
            raise ValueError(f"data.pattern belongs to a vocabulary file, not to data.tokenizer={name}; drop it")
        self.label = Path(name).stem if is_file else name
        if name == "bytes":
            # pieces of 64 characters, because merging is tried within a piece and nothing merges
            self.encoding = _encoding(name, {bytes([i]): i for i in range(256)}, r"[\s\S]{1,64}")
        elif is_file:
            self.encoding = _encoding(self.label, _read_ranks(name), pattern or PATTERN)
        else:
            self.encoding = _named(name)
        has_end = END in self.encoding.special_tokens_set
        self.eot = self.encoding.eot_token if has_end else self.encoding.n_vocab
        self.vocab_size = max(self.encoding.n_vocab, self.eot + 1)
        self.pieces = [self._piece(i) for i in range(self.vocab_size)]
        self.token_bytes: Tensor = torch.tensor(
            [0 if self._special(i) else len(piece) for i, piece in enumerate(self.pieces)], dtype=torch.int64
        )
        digest = hashlib.sha256(f"{self.encoding._pat_str}\n{self.eot}\n".encode())
        for i, piece in enumerate(self.pieces):
            digest.update(b"%d %d %s\n" % (i, self._special(i), piece.hex().encode()))
        self.hash = digest.hexdigest()

    def _special(self, i: int) -> bool:
        return i == self.eot or self.encoding.is_special_token(i)

    def _piece(self, i: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(i)
        except KeyError:  # an unused id, or the end of text that we added
            return END.encode() if i == self.eot else b""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, uint32 [tokens]. Lone surrogates, which no encoding has, become question marks."""
        return self.encoding.encode_to_numpy(text.encode("utf-8", "replace").decode(), disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; unused ids are nothing."""
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def _names() -> list[str]:
    return ["bytes", *tiktoken.list_encoding_names()]


def _encoding(name: str, ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    special = {END: max(ranks.values()) + 1}
    try:
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as error:
        raise ValueError(f"data.pattern={pattern!r} is not a regular expression of tiktoken: {error}") from None


def _read_ranks(path: str) -> dict[bytes, int]:
    """The vocabulary in a file. tiktoken's own reader caches by path, and would miss that the file has changed."""
    ranks: dict[bytes, int] = {}
    where = f"data.tokenizer={path}"
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from None
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{where}, line {i}: expected a token in base64 and its rank, not {line[:40]!r}") from None
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(f"{where} lacks {len(missing)} of the 256 single bytes, which a vocabulary must have")
    if min(ranks.values()) < 0 or len(set(ranks.values())) < len(ranks):
        raise ValueError(f"{where} gives a rank that is negative, or one rank to two tokens")
    return ranks


def _named(name: str) -> tiktoken.Encoding:
    """A named encoding; tiktoken downloads it on first use."""
    known = _names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}, or a vocabulary file"
        raise ValueError(f"data.tokenizer={name}: there is no such encoding or file; {hint}")
    outcome: list[tiktoken.Encoding | Exception] = []

    def load() -> None:
        try:
            outcome.append(tiktoken.get_encoding(name))
        except Exception as error:  # whatever the network brings
            outcome.append(error)

    # tiktoken sets no timeout, so a silent firewall would stop us for ever; a daemon thread can be left behind
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    found = outcome[0] if outcome else TimeoutError(f"no answer within {DOWNLOAD_SECONDS:g} s")
    if isinstance(found, Exception):
        reason = str(found).split("(Caused by")[-1].strip(" ()")[:200]
        raise ValueError(
            f"data.tokenizer={name} could not be loaded ({type(found).__name__}: {reason}). Offline, use "
            f"data.tokenizer=bytes, set TIKTOKEN_CACHE_DIR to a folder that has it cached, or name a local file: "
            f"data.tokenizer=FILE.tiktoken"
        )
    return found
