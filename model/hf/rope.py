"""Rotary settings of transformers, and the `pe` options that mean the same.

A scaling of transformers is at work at every length: `train_scale` here is its factor. What is translated, either way,
is compared with transformers' own frequencies; settings that it understands otherwise are refused.
"""

import math
from importlib import import_module
from typing import Any

import torch

from model import position
from model.hf.architectures import Architecture
from model.position import PositionEncoding, Shape
from model.position.rotary import PRope, Rotary, inverse_frequencies
from model.position.scaled_rotary import NTK, DynamicNTK, Linear, Llama3, LongRope, ScaledRotary, Yarn

_ORIGINAL = "original_max_position_embeddings"
_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL)
_YARN = ("factor", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned")
_TYPES: dict[str, tuple[str, type[Rotary], tuple[str, ...], tuple[str, ...]]] = {
    # rope_type: our name and class, settings that both call the same, others that it may have besides those of all
    "default": ("rope", Rotary, (), ()),
    "linear": ("linear", Linear, (), ("factor",)),
    "dynamic": ("dynamic_ntk", DynamicNTK, (), ("factor",)),
    "yarn": ("yarn", Yarn, ("beta_fast", "beta_slow"), _YARN),
    "llama3": ("llama3", Llama3, ("low_freq_factor", "high_freq_factor"), ("factor",)),
    "longrope": ("longrope", LongRope, ("short_factor", "long_factor"), ("factor", "attention_factor")),
    "proportional": ("p_rope", PRope, (), ("factor",)),
}


def read(config: Any, arch: Architecture, shape: Shape) -> tuple[dict[str, Any], float]:
    """The `pe` options for a configuration of transformers; and a factor for the rotated channels of its weights.

    The factor is 1 unless a part of the channels is rotated: transformers sharpens that part alone, while a logit scale
    of ours is for all channels.

    Raises:
        ValueError: names the settings that have no counterpart here.
    """
    said = {key: value for key, value in config.rope_parameters.items() if value is not None or key == "truncate"}
    kind, part = said["rope_type"], float(said.get("partial_rotary_factor", 1.0))
    if kind not in _TYPES:
        raise ValueError(f"rope_type={kind!r} cannot be read; these can: {', '.join(_TYPES)}")
    name, cls, same, others = _TYPES[kind]
    if unknown := sorted(said.keys() - {*_ALL, *same, *others}):
        raise ValueError(f"{unknown[0]}={said[unknown[0]]!r} means nothing to rope_type={kind!r}: remove it")
    factor = float(said.get("factor", 1.0))
    options: dict[str, Any] = {}
    if cls is PRope:
        options = {"proportion": part, "factor": factor}
    elif part != 1 and not arch.partial:
        raise ValueError(f"partial_rotary_factor={part:g} cannot be honoured: {arch.name} rotates whole heads")
    elif part != 1:
        options = {"partial_rotary_factor": part}
    if issubclass(cls, ScaledRotary):
        original = said.get(_ORIGINAL) or getattr(config, _ORIGINAL, None) or shape.train_len
        factor = factor if "factor" in said else shape.train_len / original
        if cls is LongRope and factor <= 1:  # its divisors are at work all the same, as they are at no scale of 1 here
            factor = max(2.0, *said["long_factor"])
        if factor == cls.unscaled:
            name, cls = "rope", Rotary
        else:
            options |= {"scale": factor, "train_scale": factor, "original_len": original}
            options |= {key: said[key] for key in same if said.get(key)}  # for transformers 0 means the default too
            options |= {} if said.get("truncate", True) else {"ramp": "unrounded"}
    options |= {"name": name, "_target_": f"{cls.__module__}.{cls.__name__}", "base": float(said["rope_theta"])}
    sharpening = _frequencies(config, arch).attention_scaling
    for_all = 1.0 if "partial_rotary_factor" in options else sharpening
    pe = position.build(options, shape)[0]
    if isinstance(pe, Yarn | LongRope) and not math.isclose(pe.logit_scale, for_all**2, rel_tol=1e-9):
        options["attention_factor"] = for_all
        pe = position.build(options, shape)[0]
    check(pe, config, arch)
    return options, sharpening / for_all


def _frequencies(config: Any, arch: Architecture) -> Any:
    """The module of transformers that holds a model's frequencies."""
    module = import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    return getattr(module, f"{arch.name.removesuffix('ForCausalLM')}RotaryEmbedding")(config)


def check(pe: PositionEncoding, config: Any, arch: Architecture) -> None:
    """Raise ValueError unless transformers, by `config`, rotates and sharpens as `pe` does, at all lengths."""
    assert isinstance(pe, Rotary)
    theirs = _frequencies(config, arch)
    logit_scale = theirs.attention_scaling**2 if pe.rotary_dim == pe.head_dim else 1.0  # else it is for a part alone
    same = math.isclose(pe.logit_scale, logit_scale, rel_tol=1e-6)
    original = getattr(pe, "original_len", pe.train_len)
    for length in (original, original + 1, 4 * original):  # some frequencies change with the length
        theirs(torch.empty(0), torch.tensor([[length - 1]]))
        ours = pe.frequencies(length).float()
        same &= ours.shape == theirs.inv_freq.shape and torch.allclose(ours, theirs.inv_freq, rtol=1e-5, atol=0)
    if not same:
        raise ValueError(
            f"by rope_parameters={config.rope_parameters} {arch.name} does not rotate and sharpen as "
            f"{type(pe).__name__} does here, with a logit scale of {pe.logit_scale:g}"
        )


def write(pe: PositionEncoding, train_len: int) -> dict[str, Any]:
    """The settings of transformers for `pe` at its active scale.

    `train_len` is recorded as max_position_embeddings, or the length that `pe` reaches at a scale it was not trained
    at. Frequencies for which transformers has no name are written as divisors of their own, as LongRoPE has them.

    Raises:
        ValueError: the encoding does more than rotate by frequencies.
    """
    hooks = ("embed", "tables", "state", "rotate", "bias", "attend")
    if not isinstance(pe, Rotary) or any(getattr(type(pe), hook) is not getattr(Rotary, hook) for hook in hooks):
        raise ValueError(
            f"the encoding {type(pe).__name__} cannot be exported, because transformers lacks it; it has pe=learned, "
            f"and what rotates by frequencies (rope, linear, ntk, yarn and the like)"
        )
    base, scale, length, original = pe.base, pe.active_scale, train_len, getattr(pe, "original_len", train_len)
    kind, same = {cls: (kind, same) for kind, (_, cls, same, _) in _TYPES.items()}.get(type(pe), ("longrope", ()))
    partial = pe.rotary_dim != pe.head_dim
    settings: dict[str, Any] = {"factor": scale}
    if type(pe) is Rotary or (isinstance(pe, ScaledRotary) and scale == pe.unscaled):
        kind, settings = "default", {}
    elif type(pe) is NTK:
        kind, settings, base = "default", {}, base * scale ** (pe.rotary_dim / (pe.rotary_dim - 2))
    elif isinstance(pe, PRope):
        settings = {"partial_rotary_factor": pe.proportion} | ({} if pe.factor == 1 else {"factor": pe.factor})
    elif kind == "longrope" or partial or getattr(pe, "ramp", "") == "paper":
        plain, kind = inverse_frequencies(pe.rotary_dim, base), "longrope"
        short, long = ((plain / pe.frequencies(original + more)).tolist() for more in (0, 1))
        settings |= {"short_factor": short, "long_factor": long, "attention_factor": math.sqrt(pe.logit_scale)}
    else:
        settings |= {key: getattr(pe, key) for key in same}
        if isinstance(pe, Yarn):
            settings |= {"attention_factor": math.sqrt(pe.logit_scale), "truncate": pe.ramp == "code"}
    if kind == "dynamic":
        length = original  # from which it counts
    elif isinstance(pe, ScaledRotary) and scale not in (pe.unscaled, pe.scales[0]):
        length = max(train_len, math.ceil(pe.stretch * original))
    if partial and kind != "proportional":
        settings["partial_rotary_factor"] = pe.partial_rotary_factor
    fields = {"max_position_embeddings": length, "rope_parameters": {"rope_type": kind, "rope_theta": base} | settings}
    return fields if kind in ("default", "proportional") else fields | {_ORIGINAL: original}
