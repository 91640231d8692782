"""Three kinds of engines: functions that rotate, models of transformers, servers."""

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .faults import Fault, Item, explain, faulty
from .rope import FULL, lengths, settings, turns
from .tiny import CHARACTERS, logits, prompt

# From a configuration, positions, the last of which is the length of the text less 1, and the kind of layer to
# cos and sin, [T, D / 2], or [T, D] where each is there twice; or to the frequencies [D / 2] and the attention factor.
Engine = Callable[[dict[str, Any], list[int], str], Any]
Case = tuple[str, dict[str, Any], str]  # name, configuration, kind of layer

# Configurations of small models whose original length is 64 tokens, by kind of layer, in the spelling of transformers 4
# (rope_scaling) and in that of 5 (rope_parameters); and the numbers that they must give.
GOLDEN = json.loads(Path(__file__).with_name("vectors.json").read_text())
CASES: list[Case] = [(case["name"], case["config"], case["kind"]) for case in GOLDEN["cases"]]
NEW = 8  # tokens that a server writes after a prompt


def check(engine: Engine, cases: Sequence[Case], tolerance: float = 1e-4) -> list[str]:
    """Return lines about how an engine disagrees with the settings. Prints which cases it refuses, by any error.

    Args:
        tolerance: largest difference of cos and sin times the attention factor.

    Raises:
        ValueError: the engine refuses all cases.
    """
    items: list[Item] = []
    refused: dict[str, list[str]] = {}
    for name, config, kind in cases:
        s = settings(config, kind)
        try:
            items += [(name, text, partial(difference, tolerance, text, *seen)) for text, *seen in rotations(engine, s)]
        except Exception as error:
            refused.setdefault(f"{type(error).__name__}: {error}", []).append(name)
    for reason, names in refused.items():
        print(f"not checked, as the engine refuses it ({reason}): {', '.join(dict.fromkeys(names))}")
    if not items:
        raise ValueError("the engine refuses all cases")
    return explain(items)


def rotations(engine: Engine, s: dict[str, Any]) -> Iterator[Any]:
    """Yield settings, positions [T] and their rotation, complex [T, D / 2] or [T, D], in texts of all lengths."""
    # At the end once more, after a longer text.
    for length in [*lengths(s["original"]), s["original"] + 1]:
        positions = sorted({0, 1, 2, 3, length // 2, length - 1} & set(range(length)))
        first, second = (np.asarray(part, float) for part in engine(s["config"], positions, s["kind"]))
        rotation = first + 1j * second
        if first.ndim == 1:
            rotation = np.exp(1j * np.outer(positions, first)) * second
        s = s | {"length": length, "so_far": max(length, s["so_far"])}
        yield s, positions, rotation.reshape(len(positions), -1)


def difference(
    tolerance: float, s: dict[str, Any], positions: list[int], rotation: np.ndarray, faults: Sequence[Fault]
) -> float:
    """Return the largest difference from an engine with faults, in tolerances."""
    expected = turns(faulty(faults, s), positions)
    pairs = expected.shape[1]
    # All numbers may be there twice: a whole list after the other, or side by side.
    layouts = {pairs: [rotation], 2 * pairs: [rotation[:, :pairs], rotation[:, ::2]]}
    # An angle in float32 loses digits as it grows.
    rounding = tolerance * (1 + 0.01 * np.array(positions)[:, None])
    return min((np.max(abs(seen - expected) / rounding) for seen in layouts.get(rotation.shape[1], ())), default=np.inf)


def of_transformers(name: str) -> list[Case]:
    """Return the cases of a model of the installed transformers.

    Args:
        name: a class, such as LlamaForCausalLM; or a folder with a config.json.
    """
    if Path(name).exists():
        text = (Path(name) / "config.json").read_text()
        # The kinds of layers may follow from other settings, such as Gemma 3's sliding_window_pattern.
        model_config = import_module("transformers").AutoConfig.for_model(**json.loads(text))
        kinds = getattr(model_config, "layer_types", None) or [FULL]
        return [(name, json.loads(text), kind) for kind in sorted(set(kinds))]
    model_type = getattr(import_module("transformers"), name).config_class.model_type
    cases = [case for case in CASES if ("layer_types" in case[1]) == (model_type == "gemma3_text")]
    return [(case, config | {"model_type": model_type}, kind) for case, config, kind in cases]


def rotate(config: dict[str, Any], positions: list[int], kind: str) -> Any:
    """Return the cos and sin that reach attention in a model of transformers, of any version since 4.48."""
    torch = import_module("torch")
    model, seen = small_model(json.dumps(config), kind)
    model(torch.zeros(1, len(positions), dtype=torch.long), position_ids=torch.tensor([positions]))
    return seen["position_embeddings"]


@cache
def small_model(config_json: str, kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a model of small matrices up to the first layer of a kind, and what the attention of that one got last."""
    transformers = import_module("transformers")
    config = json.loads(config_json)
    kinds = config.get("layer_types") or [kind]
    depth = kinds.index(kind) + 1
    config |= {
        "hidden_size": settings(config)["head_dim"],
        "head_dim": settings(config)["head_dim"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 8,
        "pad_token_id": None,
        "num_hidden_layers": depth,
        "layer_types": kinds[:depth],
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    seen: dict[str, Any] = {}
    attention = model.model.layers[-1].self_attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    return model, seen


def ask(url: str, length: int, new: int) -> tuple[list[int], list[float]]:
    """Ask a server that has the tiny model, at the address of its completions, to go on with a prompt of some tokens.

    Returns:
        The tokens of the prompt and the new ones; and the log probabilities of the last of them, or none.

    Raises:
        ValueError: the server does not answer with tokens of the tiny model.
    """
    text = "".join(CHARACTERS[token] for token in prompt(length))
    asked = {"model": "tiny", "prompt": text, "max_tokens": new, "temperature": 0.0, "logprobs": True, "echo": True}
    request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    written = [CHARACTERS.find(character) for character in choice["text"][-new:]]
    if len(choice["text"]) not in (new, length + new) or min(written) < 0:
        raise ValueError(f"{url} went on with {choice['text']!r}, not with {new} tokens of the tiny model")
    # As vLLM and SGLang say it, or as MLX does; some say nothing of the prompt, or nothing.
    said = choice.get("logprobs") or {}
    values = said.get("token_logprobs") or [entry["logprob"] for entry in said.get("content") or ()]
    is_whole = len(values) in (new, length + new)  # some leave one out, and it is not known which
    return prompt(length) + written, values[1 - length - new :] if is_whole else []


def check_server(url: str, config: dict[str, Any], tolerance: float = 0.05) -> list[str]:
    """Return lines about how a server disagrees with the configuration of the tiny model that it has.

    Args:
        tolerance: largest difference of log probabilities.
    """
    texts: list[Any] = []
    for length in lengths(64):
        s = settings(config, length=length)
        # Where the rotation changes with the length of the text, nothing says what a cache should hold.
        new = 1 if s["rope_type"] in ("dynamic", "longrope") else NEW
        texts.append((s, *ask(url, length, new)))
    if not texts[0][2]:
        print("the server returns no log probabilities, or too few: only which tokens it writes is checked")
    for part in ("prefill", "decode"):
        name = f"the tiny model in {part}"
        lines = explain([(name, s, partial(surprise, tolerance, part, s, *seen)) for s, *seen in texts])
        if lines:
            return lines
    return []


def surprise(
    tolerance: float, part: str, s: dict[str, Any], tokens: list[int], values: list[float], faults: Sequence[Fault]
) -> float:
    """Return the largest difference of log probabilities from an engine with faults in a part, in tolerances.

    Without log probabilities, by how much another token would have been likelier than the one that was written.
    """
    length = s["length"]
    prefill = faulty(faults if part == "prefill" else (), s)
    rotation = [turns(prefill, range(length))]
    # Tokens that follow are rotated one by one, each at the length that the text then has.
    for i in range(length, len(tokens)):
        rotation.append(turns(faulty(faults, s | {"length": i + 1}), [i]))
    scores = logits(tokens, np.concatenate(rotation), prefill["interleaved"])[:-1]
    chosen = scores[np.arange(len(scores)), tokens[1:]]
    off = (scores.max(-1) - chosen)[length - 1 :]
    if values:
        off = abs((chosen - np.log(np.exp(scores).sum(-1)))[-len(values) :] - np.array(values, float))
    # The first new token is of the prefill too.
    counted = off if part == "decode" else off[: len(off) - len(tokens) + length + 1]
    return float(np.max(counted)) / tolerance
