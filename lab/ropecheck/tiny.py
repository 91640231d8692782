"""A Llama of 54 kB for any engine to load, and its forward pass in float64."""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# By name in transformers. The last matrix of the MLP is 0, so that it adds nothing.
SHAPES = {
    "model.embed_tokens": (64, 32),
    "model.layers.0.input_layernorm": (32,),
    "model.layers.0.self_attn.q_proj": (64, 32),
    "model.layers.0.self_attn.k_proj": (32, 32),
    "model.layers.0.self_attn.v_proj": (32, 32),
    "model.layers.0.self_attn.o_proj": (32, 64),
    "model.layers.0.post_attention_layernorm": (32,),
    "model.layers.0.mlp.gate_proj": (48, 32),
    "model.layers.0.mlp.up_proj": (48, 32),
    "model.layers.0.mlp.down_proj": (32, 48),
    "model.norm": (32,),
}
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"  # each is a token
# What the library `tokenizers` asks for.
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "vocab": {character: i for i, character in enumerate(CHARACTERS)}, "merges": []},
}


@cache
def weights() -> dict[str, np.ndarray]:
    """Return the weights by their names in transformers, float32: the same numbers on every machine.

    They are large, so that positions decide which token is likely.
    """
    generator = random.Random(0)  # Python promises that its numbers stay
    tensors = {}
    for name, shape in SHAPES.items():
        numbers = np.array([generator.random() - 0.5 for _ in range(np.prod(shape))]).reshape(shape)
        gain = 0 if "down_proj" in name else 10
        tensors[f"{name}.weight"] = (gain * numbers / np.sqrt(shape[-1])).astype(np.float32)
    return tensors


def logits(tokens: Sequence[int], rotation: np.ndarray, interleaved: bool = False) -> np.ndarray:
    """Return the logits [T, 64] of a text, in which queries and keys are rotated by `rotation` [T, D / 2]."""
    w = {name.split(".")[-2]: tensor.astype(float) for name, tensor in weights().items()}
    pairs = np.arange(32).reshape(16, 2).T if interleaved else np.arange(32).reshape(2, 16)

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def rotated(x: np.ndarray) -> np.ndarray:
        x = x.reshape(len(tokens), -1, 32)  # [T, H, D]
        return (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * rotation[:, None]

    x = w["embed_tokens"][list(tokens)]  # [T, C]
    h = norm(x) * w["input_layernorm"]
    q = rotated(h @ w["q_proj"].T)
    k = rotated(h @ w["k_proj"].T)[:, 0]
    scores = np.einsum("ihp,jp->hij", q, k.conj()).real / np.sqrt(32)
    shares = np.tril(np.exp(scores - scores.max(-1, keepdims=True)))
    heads = shares / shares.sum(-1, keepdims=True) @ (h @ w["v_proj"].T)  # [H, T, D]
    x = x + heads.swapaxes(0, 1).reshape(len(x), -1) @ w["o_proj"].T
    return norm(x) * w["norm"] @ w["embed_tokens"].T


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and the tokenizer. Needs safetensors."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(), folder / "model.safetensors", {"format": "pt"})
    texts = {
        "config": config,
        "tokenizer": TOKENIZER,
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))


def prompt(length: int) -> list[int]:
    """Return tokens that seldom repeat what came before."""
    return [(7 * i * i + 3 * i + i // 5) % len(CHARACTERS) for i in range(length)]
