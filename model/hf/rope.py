"""Rotary settings of transformers, and the `pe` options that mean the same: both ways their frequencies are compared.

A scaling of transformers is at work at every length: `train_scale` here is its factor.
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
_TYPES: dict[str, tuple[str, type[Rotary]]] = {  # rope_type: our name and class
    "default": ("rope", Rotary),
    "linear": ("linear", Linear),
    "dynamic": ("dynamic_ntk", DynamicNTK),
    "yarn": ("yarn", Yarn),
    "llama3": ("llama3", Llama3),
    "longrope": ("longrope", LongRope),
    "proportional": ("p_rope", PRope),
}
_SAME = ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
_KNOWN = {  # settings; `finetuned`, of the first YaRN models, says nothing about the rotation
    *_SAME, _ORIGINAL, "type", "rope_type", "rope_theta", "factor", "attention_factor", "mscale", "mscale_all_dim",
    "truncate", "partial_rotary_factor", "finetuned",
}  # fmt: skip


def read(config: Any, arch: Architecture, shape: Shape) -> dict[str, Any]:
    """The `pe` options for a configuration of transformers.

    Raises ValueError: names the settings that have no counterpart here.
    """
    said = {key: value for key, value in config.rope_parameters.items() if value is not None or key == "truncate"}
    kind, factor = said["rope_type"], float(said.get("factor", 1.0))
    if unknown := sorted(said.keys() - _KNOWN):
        raise ValueError(f"rope_parameters: {', '.join(unknown)} cannot be honoured: remove it if it changes nothing")
    if kind not in _TYPES:
        raise ValueError(f"rope_type={kind!r} cannot be read; these can: {', '.join(_TYPES)}")
    name, cls = _TYPES[kind]
    part = float(said.get("partial_rotary_factor", 1.0))
    options: dict[str, Any] = {} if part == 1 else {"partial_rotary_factor": part}
    if cls is PRope:
        options = {"proportion": part, "factor": factor}
    if issubclass(cls, ScaledRotary):
        original = said.get(_ORIGINAL) or getattr(config, _ORIGINAL, None) or shape.train_len
        factor = factor if "factor" in said else shape.train_len / original
        if factor == cls.unscaled:
            name, cls = "rope", Rotary
        else:
            options |= {"scale": factor, "train_scale": factor, "original_len": original}
            options |= {key: said[key] for key in _SAME if said.get(key)}  # for transformers 0 means the default too
            options |= {} if said.get("truncate", True) else {"ramp": "unrounded"}
    options |= {"name": name, "_target_": f"{cls.__module__}.{cls.__name__}", "base": float(said["rope_theta"])}
    if cls in (Yarn, LongRope):
        options["attention_factor"] = _frequencies(config, arch).attention_scaling
    check(position.build(options, shape)[0], config, arch)
    return options


def _frequencies(config: Any, arch: Architecture) -> Any:
    """The module of transformers that holds a model's frequencies."""
    module = import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    return getattr(module, f"{arch.name.removesuffix('ForCausalLM')}RotaryEmbedding")(config)


def check(pe: PositionEncoding, config: Any, arch: Architecture) -> None:
    """Raise ValueError unless transformers, by `config`, rotates and sharpens as `pe` does, at all lengths."""
    assert isinstance(pe, Rotary)
    theirs = _frequencies(config, arch)
    same = math.isclose(pe.logit_scale, theirs.attention_scaling**2, rel_tol=1e-6)
    same &= pe.rotary_dim == pe.head_dim or theirs.attention_scaling == 1  # they sharpen the rotated channels alone
    original = getattr(pe, "original_len", pe.train_len)
    for length in (original, original + 1, 4 * original):  # some frequencies change with the length
        theirs(torch.empty(0), torch.tensor([[length - 1]]))
        ours = pe.frequencies(length).float()
        same &= ours.shape == theirs.inv_freq.shape and torch.allclose(ours, theirs.inv_freq, rtol=1e-5, atol=0)
    if not same:
        remedy = ""
        if pe.rotary_dim != pe.head_dim:
            remedy = "; a copy of the folder with attention_factor 1 can be read, and must be trained on"
        there = f"by rope_parameters={config.rope_parameters} {arch.name} does not rotate and sharpen"
        here = f"{type(pe).__name__} does here, with a logit scale of {pe.logit_scale:g} for all channels{remedy}"
        raise ValueError(f"{there} as {here}")


def write(pe: PositionEncoding, reach: int) -> dict[str, Any]:
    """The settings of transformers for `pe` at its active scale, with the length that it reaches there; `reach` without
    a scaling.

    Frequencies for which transformers has no name are written as divisors of their own, as LongRoPE has them.
    Raises ValueError: the encoding does more than rotate by frequencies, or pairs its channels otherwise.
    """
    hooks = ("embed", "tables", "state", "rotate", "bias", "attend")
    if not isinstance(pe, Rotary) or any(getattr(type(pe), hook) is not getattr(Rotary, hook) for hook in hooks):
        known = "pe=learned, and what rotates by frequencies (rope, linear, ntk, yarn and the like)"
        raise ValueError(f"the encoding {type(pe).__name__} cannot be exported: transformers has {known}")
    if pe.layout != "half":
        raise ValueError(f"pe.layout={pe.layout} cannot be exported: train with pe.layout=half, that of transformers")
    if pe.resonance:
        raise ValueError("pe.resonance=true cannot be exported: transformers has no rounded wavelengths")
    base, scale, length, original = pe.base, pe.active_scale, reach, getattr(pe, "original_len", reach)
    kind = {cls: kind for kind, (_, cls) in _TYPES.items()}.get(type(pe), "longrope")
    partial = pe.rotary_dim != pe.head_dim
    settings: dict[str, Any] = {"factor": scale}
    if type(pe) is Rotary or (isinstance(pe, ScaledRotary) and scale == pe.unscaled):
        kind, settings = "default", {}
    elif isinstance(pe, NTK) and not isinstance(pe, DynamicNTK):
        kind, settings, base = "default", {}, float(pe.base_at(scale))
    elif isinstance(pe, PRope):
        settings = {"partial_rotary_factor": pe.proportion, "factor": pe.factor}
    elif kind == "longrope" or partial or getattr(pe, "ramp", "") == "paper":
        plain, kind = inverse_frequencies(pe.rotary_dim, base), "longrope"
        short, long = ((plain / pe.frequencies(original + more)).tolist() for more in (0, 1))
        settings |= {"short_factor": short, "long_factor": long, "attention_factor": math.sqrt(pe.logit_scale)}
    else:
        settings |= {key: getattr(pe, key) for key in _SAME if hasattr(pe, key)}
        if isinstance(pe, Yarn):
            settings |= {"attention_factor": math.sqrt(pe.logit_scale), "truncate": pe.ramp == "code"}
    if kind == "dynamic":
        length = original  # from which it counts
    elif isinstance(pe, ScaledRotary) and scale not in (pe.unscaled, pe.scales[0]):
        length = max(reach, math.ceil(pe.stretch * original))
    if partial and kind != "proportional":
        settings["partial_rotary_factor"] = pe.partial_rotary_factor
    fields = {"max_position_embeddings": length, "rope_parameters": {"rope_type": kind, "rope_theta": base} | settings}
    return fields if kind in ("default", "proportional") else fields | {_ORIGINAL: original}
