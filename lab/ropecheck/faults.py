"""Faults that engines have had, and the search for those that explain what an engine did.

A fault is what it is called, with names of settings in braces, and a function that returns the settings that it
changes, or nothing where it does not show.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from .rope import FULL, SLIDING, attention_factor, inv_freq, settings

Fault = tuple[str, Callable[[dict[str, Any]], Any]]
# A name; settings of a text; and how far what the engine did there is from what one with some faults does, of which
# rounding explains 1.
Item = tuple[str, dict[str, Any], Callable[[Sequence[Fault]], float]]

NAMES = {
    "default": "RoPE",
    "linear": "linear scaling",
    "dynamic": "dynamic NTK",
    "yarn": "YaRN",
    "llama3": "Llama 3's scaling",
    "longrope": "LongRoPE",
    "proportional": "p-RoPE",
}
UNSCALED = {"rope_type": "default", "attention_factor": 1.0, "kept": np.inf}


def typed(s: dict[str, Any], *types: str, **changes: Any) -> Any:
    """Return changes for settings of some types."""
    return s["rope_type"] in types and changes


def other(s: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the other kind of layer."""
    return settings(s["config"], FULL if s["kind"] == SLIDING else SLIDING, s["length"]) | {"kind": s["kind"]}


FAULTS: tuple[Fault, ...] = (
    ("the scaling is ignored", lambda s: UNSCALED),
    ("{name} is off up to {original} tokens", lambda s: s["length"] <= s["original"] and UNSCALED),
    ("the scaling in rope_scaling is ignored", lambda s: not s["is_new"] and UNSCALED),
    ("the scaling in rope_parameters is ignored", lambda s: s["is_new"] and UNSCALED),
    ("rope_parameters is ignored, its base too", lambda s: s["is_new"] and UNSCALED | {"rope_theta": 1e4}),
    (
        "rope_parameters is ignored, the bases are Gemma 3's",
        lambda s: s["is_new"] and UNSCALED | {"rope_theta": 1e4 if s["kind"] == SLIDING else 1e6},
    ),
    ("the base is 10000 instead of {rope_theta:g}", lambda s: {"rope_theta": 1e4}),
    ("the base is 1000000 instead of {rope_theta:g}", lambda s: {"rope_theta": 1e6}),
    ("the base in rope_parameters is ignored: 10000", lambda s: s["is_new"] and {"rope_theta": 1e4}),
    ("the base in rope_parameters is ignored: 1000000", lambda s: s["is_new"] and {"rope_theta": 1e6}),
    ("local layers use the global base", lambda s: s["kind"] == SLIDING and {"rope_theta": other(s)["rope_theta"]}),
    (
        "local layers use the global scaling",
        lambda s: s["kind"] == SLIDING and other(s) | {"rope_theta": s["rope_theta"]},
    ),
    ("local layers use the global base and scaling", lambda s: s["kind"] == SLIDING and other(s)),
    ("global layers use the local base", lambda s: s["kind"] == FULL and {"rope_theta": other(s)["rope_theta"]}),
    (
        "the original length is max_position_embeddings, {max_position_embeddings}",
        lambda s: {"original": s["max_position_embeddings"]},
    ),
    ("the factor is applied twice", lambda s: typed(s, "linear", "yarn", "llama3", factor=s["factor"] ** 2)),
    (
        "frequencies are multiplied by the factor, not divided",
        lambda s: typed(s, "linear", "yarn", "llama3", factor=1 / s["factor"]),
    ),
    ("attention factor 1.0 instead of {attention_factor:.4g}", lambda s: {"attention_factor": 1.0}),
    (
        "the attention factor is applied twice, {attention_factor:.4g} squared",
        lambda s: {"attention_factor": s["attention_factor"] ** 2},
    ),
    (
        "the attention factor is YaRN's default instead of {attention_factor:.4g}",
        lambda s: typed(
            s, "yarn", "longrope", attention_factor=attention_factor({"rope_type": "yarn", "factor": s["factor"]})
        ),
    ),
    ("attention_factor is ignored", lambda s: typed(s, "longrope", attention_factor=attention_factor(s))),
    ("beta_fast and beta_slow are swapped", lambda s: {"beta_fast": s["beta_slow"], "beta_slow": s["beta_fast"]}),
    ("beta_fast and beta_slow are ignored: 32 and 1", lambda s: {"beta_fast": 32.0, "beta_slow": 1.0}),
    ("the limits of YaRN's ramp are not rounded", lambda s: {"truncate": False}),
    ("truncate=false is ignored", lambda s: {"truncate": True}),
    (
        "YaRN's ramp is linear in turns, as in the paper, not in the pair's index, as in the code",
        lambda s: typed(s, "yarn", rope_type="llama3", low_freq_factor=s["beta_slow"], high_freq_factor=s["beta_fast"]),
    ),
    (
        "YaRN's ramp is inverted: it divides the high frequencies",
        lambda s: typed(s, "yarn", change=lambda freqs: inv_freq(s | UNSCALED) * (1 + 1 / s["factor"]) - freqs),
    ),
    (
        "{name} is computed as linear scaling",
        lambda s: typed(s, "dynamic", "yarn", "llama3", "longrope", rope_type="linear", attention_factor=1.0),
    ),
    (
        "low_freq_factor and high_freq_factor are ignored: 1 and 4",
        lambda s: typed(s, "llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    (
        "the short list of LongRoPE above {original} tokens",
        lambda s: typed(s, "longrope", long_factor=s.get("short_factor")),
    ),
    (
        "the long list of LongRoPE up to {original} tokens",
        lambda s: typed(s, "longrope", short_factor=s.get("long_factor")),
    ),
    (
        "the base grows by the whole factor at every length",
        lambda s: typed(s, "dynamic", length=s["max_position_embeddings"] * (2 - 1 / s["factor"])),
    ),
    ("frequencies are those of the longest text so far", lambda s: {"length": max(s["length"], s["so_far"])}),
    (
        "partial_rotary_factor is ignored",
        lambda s: {"dim": s["head_dim"], "pairs": s["head_dim"] // 2, "kept": s["head_dim"] // 2},
    ),
    (
        "p-RoPE's exponents are those of the rotated channels, not of the head",
        lambda s: typed(s, "proportional", dim=2 * s["kept"]),
    ),
    ("rotates in the opposite direction", lambda s: {"change": np.negative}),
    (
        "frequencies are rounded to bfloat16",  # to 8 binary digits
        lambda s: {"change": lambda f: np.ldexp(np.round(np.frexp(f)[0] * 256) / 256, np.frexp(f)[1])},
    ),
    ("positions are one too large", lambda s: {"first": 1}),
    ("pairs of channels are (2i, 2i + 1), not (i, i + D/2)", lambda s: {"interleaved": True}),
)


def faulty(faults: Sequence[Fault], s: dict[str, Any]) -> dict[str, Any]:
    """Return the settings by which an engine with these faults rotates."""
    for _, change in faults:
        s = s | (change(s) or {})
    return s


def explain(items: Sequence[Item]) -> list[str]:
    """Return lines about items that disagree with their settings: the fewest faults that explain all of a name."""
    lines: dict[str, list[str]] = {}
    wrong = {name: s for name, s, error in reversed(items) if not error(()) <= 1}  # settings of the first by name
    for name, s in reversed(wrong.items()):
        errors = [error for other_name, _, error in items if other_name == name]
        candidates = [*combinations(FAULTS, 1), *combinations(FAULTS, 2)]
        found = [faults for faults in candidates if all(error(faults) <= 1 for error in errors)]
        words = [" and ".join(text for text, _ in faults) for faults in found if len(faults) == len(found[0])]
        line = ", or ".join(words[:3]) or "no fault known here explains that it is off in a text of {length} tokens"
        lines.setdefault(line.format(name=NAMES[s["rope_type"]], **s), []).append(name)
    return [f"{', '.join(names)}: {line}" for line, names in lines.items()]
