"""A Llama of 95 kB for any engine to load, its forward pass in float64, and the check of a server that has it."""

import json
import random
import urllib.request
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from .engines import lengths
from .faults import Fault, explain, faulty
from .rope import settings, turns

# By name in a layer of transformers.
SHAPES = {
    "input_layernorm": (32,),
    "self_attn.q_proj": (64, 32),
    "self_attn.k_proj": (32, 32),
    "self_attn.v_proj": (32, 32),
    "self_attn.o_proj": (32, 64),
    "post_attention_layernorm": (32,),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
NEW = 8  # tokens to write after a prompt


@cache
def weights() -> dict[str, np.ndarray]:
    """Return the weights by their names in transformers, float32: the same numbers on every machine.

    They are large, so that positions decide which token is likely.
    """
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (len(CHARACTERS), 32), "model.norm": (32,)}
    for layer in (0, 1):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
    generator = random.Random(0)  # Python promises that its numbers stay
    tensors = {}
    for name, shape in shapes.items():
        numbers = np.array([generator.random() - 0.5 for _ in range(np.prod(shape))])
        scaled = 1 + numbers if len(shape) == 1 else 5 * numbers / np.sqrt(shape[-1])
        tensors[f"{name}.weight"] = scaled.reshape(shape).astype(np.float32)
    return tensors


def logits(tokens: Sequence[int], rotation: np.ndarray, interleaved: bool = False) -> np.ndarray:
    """Return the logits [T, 64] of a text, in which queries and keys are rotated by `rotation` [T, D / 2]."""
    w = {name.removesuffix(".weight"): tensor.astype(float) for name, tensor in weights().items()}
    pairs = np.arange(32).reshape(16, 2).T if interleaved else np.arange(32).reshape(2, 16)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def rotated(x: np.ndarray) -> np.ndarray:
        x = x.reshape(len(tokens), -1, 32)  # [T, H, D]
        return (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * rotation[:, None]

    x = w["model.embed_tokens"][list(tokens)]  # [T, C]
    for layer in ("model.layers.0.", "model.layers.1."):
        h = norm(x, layer + "input_layernorm")
        q = rotated(h @ w[layer + "self_attn.q_proj"].T)
        k = rotated(h @ w[layer + "self_attn.k_proj"].T)[:, 0]
        scores = np.einsum("ihp,jp->hij", q, k.conj()).real / np.sqrt(32)
        shares = np.tril(np.exp(scores - scores.max(-1, keepdims=True)))
        heads = shares / shares.sum(-1, keepdims=True) @ (h @ w[layer + "self_attn.v_proj"].T)  # [H, T, D]
        x = x + heads.swapaxes(0, 1).reshape(len(x), -1) @ w[layer + "self_attn.o_proj"].T
        h = norm(x, layer + "post_attention_layernorm")
        gate = h @ w[layer + "mlp.gate_proj"].T
        x = x + gate / (1 + np.exp(-gate)) * (h @ w[layer + "mlp.up_proj"].T) @ w[layer + "mlp.down_proj"].T
    return norm(x, "model.norm") @ w["model.embed_tokens"].T


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and the tokenizer. Needs safetensors."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(), folder / "model.safetensors", {"format": "pt"})
    model = {"type": "BPE", "vocab": dict(zip(CHARACTERS, range(64), strict=True)), "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "decoder": {"type": "Fuse"}}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def prompt(length: int) -> list[int]:
    """Return tokens that seldom repeat what came before."""
    return [(7 * i * i + 3 * i + i // 5) % len(CHARACTERS) for i in range(length)]


def ask(url: str, config: dict[str, Any]) -> list[Any]:
    """Send all prompts to a server, at the address of its completions.

    Returns:
        For each what it is called, settings, number of tokens, the tokens with what follows them, and the log
        probabilities of the last ones.

    Raises:
        ValueError: the server returns no log probabilities, or tokens that the tiny model lacks.
    """
    items = []
    for length in lengths(64):
        s = settings(config, length=length)
        # Where the rotation changes with the length of the text, nothing says what a cache should hold.
        new = 1 if s["rope_type"] in ("dynamic", "longrope") else NEW
        options = {"max_tokens": new, "temperature": 0, "logprobs": 1, "echo": True, "ignore_eos": True}
        body = {"model": "ropecheck", "prompt": prompt(length), **options}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            said = json.load(answer)["choices"][0].get("logprobs") or {}
        # As vLLM and SGLang say it, or as llama.cpp does; some say nothing of the prompt.
        tokens = said.get("tokens") or [entry["token"] for entry in said.get("content", ())]
        values = said.get("token_logprobs") or [entry["logprob"] for entry in said.get("content", ())]
        written = [CHARACTERS.find(token) for token in tokens[-new:]]
        if len(written) < new or min(written) < 0:
            raise ValueError(f"{url} answered {tokens[-new:]} with log probabilities, not {new} of the model's tokens")
        text = prompt(length) + written
        items.append(("the tiny model", s, length, text, np.array(values[1 - len(text) :], dtype=float)))
    return items


def difference(tolerance: float, is_decode: bool, faults: Sequence[Fault], item: Any) -> float:
    """Return the largest difference of log probabilities from an engine with faults, in tolerances.

    Args:
        is_decode: the faults are in decode alone, and all log probabilities count, rather than those of the prefill.
    """
    _, s, length, tokens, values = item
    prefill = faulty(() if is_decode else faults, s)
    rotation = [turns(prefill, range(length))]
    # Tokens that follow are rotated one by one, each at the length that the text then has.
    rotation += [turns(faulty(faults, s | {"length": i + 1}), [i]) for i in range(length, len(tokens))]
    scores = logits(tokens, np.concatenate(rotation), prefill["interleaved"])[:-1]
    chosen = scores[np.arange(len(scores)), tokens[1:]]
    off = abs((chosen - np.log(np.exp(scores).sum(-1)))[-len(values) :] - values)
    # The first token that follows is of the prefill too.
    counted = off if is_decode else off[: len(off) - (len(tokens) - length) + 1]
    return float(np.nanmax(counted)) / tolerance


def check(url: str, config: dict[str, Any], tolerance: float = 0.05) -> list[str]:
    """Return lines about how a server disagrees with the configuration of the tiny model that it has."""
    items = ask(url, config)
    wrong = explain(items, partial(difference, tolerance, False))
    decode = explain(items, partial(difference, tolerance, True)) if not wrong else []
    return wrong + [f"prefill is right, decode is not: {line}" for line in decode]
