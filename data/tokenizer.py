"""Tokenizers, all through tiktoken: bytes, its named encodings, and a vocabulary file of the user's."""

import base64
import difflib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import regex
import tiktoken
import torch

END = "<|endoftext|>"
MAX_RANK = 2**22

# How text is cut into pieces before merging if a vocabulary file does not say: as GPT-4 and Llama 3 do.
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
        pattern: for a vocabulary file, the regular expression of the pieces that are never merged; default GPT-4's.

    Raises:
        ValueError: no such encoding or file, a bad file, or a download that failed.
    """

    def __init__(self, name: str = "bytes", pattern: str | None = None) -> None:
        known = ["bytes", *tiktoken.list_encoding_names()]
        is_file = name not in known and (name.endswith(".tiktoken") or Path(name).is_file())
        if pattern is not None and not is_file:
            raise ValueError(f"data.pattern belongs to a vocabulary file, not to data.tokenizer={name}; drop it")
        self.label = Path(name).stem if is_file else name  # fit for a file name
        if name == "bytes":
            # nothing merges, and merging is tried within a piece only, so short pieces are fast
            self.encoding = _encoding(name, {bytes([i]): i for i in range(256)}, r"[\s\S]{1,64}")
        elif is_file:
            self.encoding = _encoding(self.label, _read_ranks(name), PATTERN if pattern is None else pattern)
        elif name in known:
            self.encoding = _download(name)
        else:
            hint = "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(name, known, n=1))
            raise ValueError(
                f"data.tokenizer={name}: there is no such encoding or file{hint or '; known: ' + ', '.join(known)}"
            )
        has_end = END in self.encoding.special_tokens_set
        self.eot = self.encoding.eot_token if has_end else self.encoding.n_vocab  # id of the token between documents
        self.vocab_size = max(self.encoding.n_vocab, self.eot + 1)  # including unused ids
        self.pieces: list[bytes] = []
        sizes, digest = [], hashlib.sha256(f"{self.encoding._pat_str}\n{self.eot}\n".encode())
        for i in range(self.vocab_size):
            special = i == self.eot or self.encoding.is_special_token(i)
            try:
                piece = self.encoding.decode_single_token_bytes(i)
            except KeyError:  # an unused id, or the end of text that we added
                piece = END.encode() if i == self.eot else b""
            self.pieces.append(piece)
            sizes.append(0 if special else len(piece))
            digest.update(b"%d %d %s\n" % (i, special, piece.hex().encode()))
        self.token_bytes = torch.tensor(sizes)  # int64 [vocab_size], 0 for special tokens and unused ids
        self.hash = digest.hexdigest()  # of all that decides on the ids of a text

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, uint32 [tokens]. Lone surrogates, which no encoding has, become question marks."""
        return self.encoding.encode_to_numpy(text.encode("utf-8", "replace").decode(), disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; unused ids become nothing."""
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def _encoding(name: str, ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    try:
        if regex.match(pattern, ""):
            raise ValueError("it matches the empty string")  # tiktoken would panic
        special = {END: max(ranks.values()) + 1}
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except (ValueError, regex.error) as error:
        raise ValueError(f"data.pattern={pattern!r} is no regular expression for tiktoken: {error}") from None


def _read_ranks(path: str) -> dict[bytes, int]:
    """The vocabulary in a file. tiktoken's own reader caches by path and would miss that the file has changed."""
    try:
        pairs = [line.split() for line in Path(path).read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        missing = sum(bytes([i]) not in ranks for i in range(256))
        if missing:
            raise ValueError(f"it lacks {missing} of the 256 single bytes")
        if len(set(ranks.values())) < len(pairs) or not 0 <= min(ranks.values()) <= max(ranks.values()) < MAX_RANK:
            raise ValueError(f"ranks must be different and between 0 and {MAX_RANK:,}")
    except (OSError, ValueError) as error:
        form = "lines with a token in base64 and its rank"
        raise ValueError(f"data.tokenizer={path} is no vocabulary file ({form}): {error}") from None
    return ranks


def _download(name: str) -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network brings
        reason = str(error).split("(Caused by")[-1].strip(" ()")[:200]
        raise ValueError(
            f"data.tokenizer={name} could not be loaded ({type(error).__name__}: {reason}). Offline, use "
            f"data.tokenizer=bytes, set TIKTOKEN_CACHE_DIR to a folder that has it cached, or name a local file: "
            f"data.tokenizer=FILE.tiktoken"
        ) from None
