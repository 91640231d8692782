"""Tokenizers: what all of them have, and bytes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

END = "<|endoftext|>"  # of vocabularies of our own


class Tokenizer:
    """Bytes, and a token between documents. `data.hf_tokenizer` has the other tokenizers.

    Text that looks like a special token is encoded as ordinary text.
    """

    def __init__(self) -> None:
        self.name = "bytes"
        self.label = "bytes"  # fit for the name of a file
        self.files: list[Path] = []  # a run keeps them, to decode its tokens anywhere
        self.eot = 256  # id of the token between documents
        self.bos: int | None = None  # id of the token that begins every text, if there is one
        self.vocab_size = 257  # including unused ids
        # Bytes of a text that each token stands for, int64 [vocab_size]; special tokens stand for none.
        self.token_bytes = torch.tensor([1] * 256 + [0])
        # Decides the ids of a text: runs and results are compared by it.
        self.hash = "9cecaba4e2f1c4102087f97e9d50cffa4ccf4a254b853791a2094f5ad6480076"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, unsigned integers [tokens]. Lone surrogates, which UTF-8 lacks, are replaced."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; unused ids become nothing."""
        # The network's vocabulary may be padded beyond the tokenizer's, so an id may be too large.
        pieces = [END.encode() if i == self.eot else bytes([i]) for i in ids if i < self.vocab_size]
        return b"".join(pieces).decode("utf-8", "replace")
