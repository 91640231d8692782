"""RoPE in float64 by the settings of a config.json, as transformers defines them."""

import math
from typing import Any

import numpy as np

FULL = "full_attention"
SLIDING = "sliding_attention"
DEFAULTS = {
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    # What only faults change.
    "so_far": 0,  # tokens in the longest text before
    "first": 0,  # position of the first token
    "change": np.positive,  # of the frequencies
    "interleaved": False,  # pairs of channels: (2i, 2i + 1) instead of (i, i + D / 2)
}


def lengths(original: int) -> list[int]:
    """Return the lengths of text to check: one token; below, at and above the original length; and twice that."""
    return [1, original // 2, original, original + 1, 2 * original]


def settings(config: dict[str, Any], kind: str = FULL, length: int = 1) -> dict[str, Any]:
    """Return the rotary settings of a kind of layer in a text of `length` tokens, with all that follows from them.

    Args:
        config: content of a config.json, with `rope_parameters` (transformers 5; also by kind of layer) or with
            `rope_theta` and `rope_scaling` (transformers 4; Gemma 3 has a `rope_local_base_freq` for sliding layers,
            and those of OLMo 3 have no scaling).

    Raises:
        KeyError: the configuration lacks a setting.
    """
    is_new = bool(config.get("rope_parameters"))
    given = _settings_of(kind, config["rope_parameters"]) if is_new else _older_settings(config, kind)
    config_without_none = {name: value for name, value in config.items() if value is not None}
    # None is the default, and so is 0 for beta_slow; but None is false for truncate.
    s: dict[str, Any] = (
        DEFAULTS | config_without_none | {name: value for name, value in given.items() if value or name == "truncate"}
    )
    s |= {"config": config, "is_new": is_new, "kind": kind, "length": length}
    s["rope_type"] = s.get("rope_type") or s.get("type", "default")
    s["original"] = s.get("original_max_position_embeddings") or s["max_position_embeddings"]
    s["factor"] = s.get("factor") or s["max_position_embeddings"] / s["original"]
    # The rotated part of a head stands alone in DeepSeek's attention.
    head_dim = s.get("qk_rope_head_dim") or s.get("head_dim") or s["hidden_size"] // s["num_attention_heads"]
    rotated = int(head_dim * s["partial_rotary_factor"])
    # The exponents of p-RoPE are those of the whole head.
    dim = head_dim if s["rope_type"] == "proportional" else rotated
    s |= {"head_dim": head_dim, "dim": dim, "pairs": dim // 2, "kept": rotated // 2}
    s["attention_factor"] = s.get("attention_factor") or attention_factor(s)
    return s


def _settings_of(kind: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the `rope_parameters` of a kind of layer. Raises KeyError: they are by kind, and it has none."""
    if FULL not in parameters and SLIDING not in parameters:
        return parameters
    given: dict[str, Any] = parameters[kind]
    if given is None:
        raise KeyError(kind)
    return given


def _older_settings(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the scaling of a kind of layer as transformers 4 writes it."""
    if kind == SLIDING and "rope_local_base_freq" in config:
        return {"rope_theta": config["rope_local_base_freq"]}
    if kind == SLIDING and config.get("model_type") == "olmo3":
        return {}
    given: dict[str, Any] = config.get("rope_scaling") or {}
    return given.get(kind, given)


def attention_factor(s: dict[str, Any]) -> float:
    """Return the attention factor of settings that do not name it."""
    log = math.log(max(s["factor"], 1))
    match s["rope_type"]:
        case "longrope":
            return math.sqrt(1 + log / math.log(s["original"]))
        case "yarn" if s.get("mscale") and s.get("mscale_all_dim"):  # DeepSeek
            return (1 + 0.1 * s["mscale"] * log) / (1 + 0.1 * s["mscale_all_dim"] * log)
        case "yarn":
            return 1 + 0.1 * log
    return 1.0


def inv_freq(s: dict[str, Any]) -> np.ndarray:
    """Return the frequencies [D / 2] in radians per token. Raises ValueError: their type is unknown."""
    base = s["rope_theta"]
    if s["rope_type"] == "dynamic":  # it grows with a text beyond the length of the model
        growth = 1 + s["factor"] * (max(s["length"] / s["max_position_embeddings"], 1) - 1)
        base = base * growth ** (s["dim"] / (s["dim"] - 2))
    index = np.arange(s["pairs"])
    plain = base ** (-2 * index / s["dim"]) * (index < s["kept"])

    # Each frequency keeps a share of itself; the rest is divided by the factor.
    factor = s["factor"]
    match s["rope_type"]:
        case "default" | "dynamic":
            kept: Any = 1.0
        case "linear" | "proportional":
            kept = 0.0
        case "longrope":
            kept = 0.0
            factor = np.array(s["long_factor"] if s["length"] > s["original"] else s["short_factor"])
        case "llama3":
            full_turns = s["original"] * plain / (2 * math.pi)
            kept = (full_turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        case "yarn":
            low, high = yarn_limits(s)
            kept = 1 - (index - low) / ((high - low) or 0.001)
        case unknown:
            raise ValueError(f"rope_type={unknown!r} is unknown here")
    kept = np.clip(kept, 0, 1)
    return plain * (kept + (1 - kept) / factor)


def yarn_limits(s: dict[str, Any]) -> tuple[float, float]:
    """Return the index of the last pair that YaRN keeps, and of the first that it divides by the factor."""
    # Pair i makes so many turns within the original length: original base^(-2i/D) = 2 pi turns, solved for i.
    tokens_per_radian = s["original"] / (2 * math.pi)
    low = s["dim"] / 2 * math.log(tokens_per_radian / s["beta_fast"], s["rope_theta"])
    high = s["dim"] / 2 * math.log(tokens_per_radian / s["beta_slow"], s["rope_theta"])
    if s["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    return max(low, 0), min(high, s["dim"] - 1)


def turns(s: dict[str, Any], positions: Any) -> np.ndarray:
    """Return the rotation of queries and of keys at positions [T], times the attention factor: complex [T, D / 2]."""
    # Faults may change the frequencies and the position of the first token.
    frequencies = s["change"](inv_freq(s))
    return s["attention_factor"] * np.exp(1j * np.outer(np.add(positions, s["first"]), frequencies))
