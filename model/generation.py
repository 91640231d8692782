"""Text from a trained network, token by token through the key-value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.cache import Cache
from model.gpt import GPT
from model.position.layer import check_length
from model.position.network import Encodings

COLDEST = 1e-20  # logits divided by less could overflow, and only the most probable token has a chance anyway


@torch.inference_mode()
def generate(
    net: GPT, idx: Tensor, max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None, seed: int = 0,
    chunk: int = 1024, encodings: Encodings | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Continue the prompts `idx` int64 [B, T]: yield the next token of each, int64 [B], one step after the other.

    Args:
        max_new_tokens: at least 1.
        temperature: divides the logits; at least 0. With 0 the most probable token is taken.
        top_k: keep the k most probable tokens, at least 1.
        chunk: tokens of the prompt to read in one pass, which bounds the memory.
        encodings: one for each layer, instead of the network's own, as of `model.position.network.for_length`.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or a text longer than the encoding is defined for.
    """
    check_ids(idx, net.vocab_size)
    for pe in encodings or net.encodings:
        check_length(pe, idx.size(1) + max_new_tokens)
    generator = torch.Generator(idx.device).manual_seed(seed)
    # The prompt is read into the cache first, a chunk at a time. Then each pass reads the one token just drawn. The
    # last token needs no pass, since nothing follows it.
    cache = Cache()
    for piece in idx.split(chunk, dim=1):
        hidden = net.hidden_states(piece, encodings=encodings, cache=cache)
    for i in range(max_new_tokens):
        logits = net.head(hidden[:, -1])[:, : net.vocab_size].float()
        token = _sample(logits, temperature, top_k, generator)  # [B]
        yield token
        if i + 1 < max_new_tokens:
            hidden = net.hidden_states(token[:, None], encodings=encodings, cache=cache)


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token for each row of `logits` [B, V]: int64 [B]."""
    if temperature < COLDEST:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        lowest_kept = logits.topk(top_k).values[:, -1:]  # [B, 1]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def check_ids(idx: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless there are token ids, and all within the vocabulary."""
    if idx.numel() == 0:
        raise ValueError("the prompt is empty: give at least one token")
    bad = idx[(idx < 0) | (idx >= vocab_size)]
    if len(bad):
        raise ValueError(f"token id {bad[0]} is outside the vocabulary 0..{vocab_size - 1}: another tokenizer?")
