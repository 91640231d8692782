"""Engines: functions that rotate, and models of transformers."""

import json
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .faults import Fault, explain, faulty
from .rope import FULL, settings, turns

# From a configuration, positions, the last of which is the length of the text less 1, and the kind of layer to
# cos and sin, [T, D] or [T, D / 2] in the order of pairs; or to the frequencies [D / 2] and the attention factor.
Engine = Callable[[dict[str, Any], list[int], str], Any]

# Configurations of small models whose original length is 64 tokens, by kind of layer, in the spelling of transformers 4
# (rope_scaling) and in that of 5 (rope_parameters); and the numbers that they must give.
GOLDEN = json.loads(Path(__file__).with_name("vectors.json").read_text())
CASES = [(case["name"], case["config"], case["kind"]) for case in GOLDEN["cases"]]


def lengths(original: int) -> list[int]:
    """Return the lengths of text to check: one token; below, at and above the original length; and twice that."""
    return [1, original // 2, original, original + 1, 2 * original]


def check(engine: Engine, cases: Sequence[tuple[str, dict[str, Any], str]], tolerance: float = 1e-4) -> list[str]:
    """Return lines about how an engine disagrees with the settings.

    Args:
        cases: name, configuration, kind of layer. Those that the engine refuses by any error are printed; where it
            refuses all, that is a ValueError.
        tolerance: largest difference of cos and sin times the attention factor.
    """
    items = []
    refused = {}
    for name, config, kind in cases:
        s = settings(config, kind)
        # At the end once more, after a longer text.
        for length in [*lengths(s["original"]), s["original"] + 1]:
            positions = sorted({0, 1, 2, 3, length // 2, length - 1} & set(range(length)))
            try:
                first, second = engine(config, positions, kind)
            except Exception as error:
                refused[name] = repr(error)
                break
            first = np.asarray(first, dtype=float)
            if first.ndim == 1:
                angles = np.outer(positions, first)
                first, second = np.cos(angles) * second, np.sin(angles) * second
            rotation = (first + 1j * np.asarray(second)).reshape(len(positions), -1)
            s = s | {"length": length, "so_far": max(length, s["so_far"])}
            items.append((name, s, positions, rotation))
    for name, reason in refused.items():
        print(f"{name} is not checked, the engine refuses it: {reason}")
    if not items:
        raise ValueError("the engine refuses all cases")
    return explain(items, partial(difference, tolerance))


def difference(tolerance: float, faults: Sequence[Fault], item: Any) -> float:
    """Return the largest difference from an engine with faults, in tolerances."""
    _, s, positions, rotation = item
    expected = turns(faulty(faults, s), positions)
    pairs = expected.shape[1]
    if rotation.shape[1] not in (pairs, 2 * pairs):
        return math.inf
    # An angle in float32 loses digits as it grows.
    rounding = 1 + 0.01 * np.array(positions)[:, None]
    return float(np.max(abs(rotation[:, :pairs] - expected) / rounding)) / tolerance


def of_transformers(name: str) -> tuple[Engine, list[tuple[str, dict[str, Any], str]]]:
    """Return what rotates in a model of the installed transformers, and its cases.

    Args:
        name: a class, such as LlamaForCausalLM, with all cases of its model type; or a folder with a config.json.
    """
    cases = CASES
    if Path(name).is_dir():
        config = json.loads((Path(name) / "config.json").read_text())
        cases = [(name, config, kind) for kind in sorted(set(config.get("layer_types") or [FULL]))]
        name = config["architectures"][0]
    cls = getattr(import_module("transformers"), name)
    return partial(rotate, cls), [case for case in cases if case[1]["model_type"] == cls.config_class.model_type]


def rotate(cls: Any, config: dict[str, Any], positions: list[int], kind: str) -> Any:
    """Return the cos and sin that reach attention in a model class of transformers, of any version since 4.48."""
    torch = import_module("torch")
    model, inputs = small_model(cls, json.dumps(config))
    model(torch.zeros(1, len(positions), dtype=torch.long), position_ids=torch.tensor([positions]))
    return inputs[kind]["position_embeddings"]


@cache
def small_model(cls: Any, config_json: str) -> tuple[Any, dict[str, Any]]:
    """Return a model of small matrices with the layers and heads of a configuration.

    Returns:
        The model; and by kind of layer what its attention got last.
    """
    config = json.loads(config_json)
    dim = settings(config)["head_dim"]
    sizes = {"hidden_size": dim, "head_dim": dim, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = cls(cls.config_class(**config | sizes | {"intermediate_size": 8, "vocab_size": 8})).eval()
    inputs: dict[str, Any] = {}
    kinds = config.get("layer_types") or [FULL] * config["num_hidden_layers"]
    for layer, kind in zip(model.model.layers, kinds, strict=True):
        inputs[kind] = {}
        keep = partial(lambda kept, module, args, kwargs: kept.update(kwargs), inputs[kind])
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    return model, inputs
