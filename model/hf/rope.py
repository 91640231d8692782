"""Rotary settings of transformers, and the `pe` options that mean the same: both ways their frequencies are compared.

A scaling of transformers is active at every length: `train_scale` here is its factor.
"""

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch

from model import position
from model.hf.architectures import Architecture
from model.position import PositionEncoding, Shape
from model.position.rotary import PRope, Rotary, inverse_frequencies
from model.position.scaled_rotary import NTK, DynamicNTK, Linear, LongRope, NTKByParts, ScaledRotary, Yarn

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers in transformers
_ORIGINAL = "original_max_position_embeddings"
_TYPES: dict[str, tuple[str, type[Rotary]]] = {  # rope_type: our name and class
    "default": ("rope", Rotary),
    "linear": ("linear", Linear),
    "dynamic": ("dynamic_ntk", DynamicNTK),
    "yarn": ("yarn", Yarn),
    "llama3": ("llama3", NTKByParts),
    "longrope": ("longrope", LongRope),
    "proportional": ("p_rope", PRope),
}
_SAME = ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
_KNOWN = {  # settings; `finetuned`, of the first YaRN models, says nothing about the rotation
    *_SAME, _ORIGINAL, "type", "rope_type", "rope_theta", "factor", "attention_factor", "mscale", "mscale_all_dim",
    "truncate", "partial_rotary_factor", "finetuned",
}  # fmt: skip


class Layer(NamedTuple):
    """The positions of a layer, here or in transformers."""

    window: int | None
    rotates: bool = True  # or else it has no positions

    @property
    def kind(self) -> str:
        return FULL if self.window is None else SLIDING


def layers(config: Any) -> list[Layer]:
    """The layers of a configuration. Raises ValueError: it names kinds of layers that its architecture lacks."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kind = Layer(window).kind
    kinds = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    if set(kinds) - {kind, FULL if hasattr(type(config), "layer_types") else kind}:
        raise ValueError(f"sliding_window={window} with layer_types={sorted(set(kinds))} cannot be honoured")
    rotates = [True] * len(kinds)
    if config.model_type == "smollm3":
        rotates = [bool(one) for one in config.no_rope_layers[: len(kinds)]]
    return [Layer(window if k == SLIDING else None, r) for k, r in zip(kinds, rotates, strict=True)]


def read(config: Any, arch: Architecture, shape: Shape, layer: Layer) -> dict[str, Any]:
    """The `pe` options for a layer in a configuration of transformers.

    Raises ValueError: names the settings that have no counterpart here.
    """
    options: dict[str, Any] = {} if layer.window is None else {"window": layer.window}
    if not layer.rotates:
        return options | {"name": "nope", "_target_": f"{PositionEncoding.__module__}.{PositionEncoding.__name__}"}
    given = config.rope_parameters[layer.kind] if arch.rotates_by_kind else config.rope_parameters
    said = {key: value for key, value in given.items() if value is not None or key == "truncate"}
    kind, factor = said["rope_type"], float(said.get("factor", 1.0))
    if unknown := sorted(said.keys() - _KNOWN):
        raise ValueError(f"rope_parameters: {', '.join(unknown)} cannot be honoured: remove it if it changes nothing")
    if kind not in _TYPES:
        raise ValueError(f"rope_type={kind!r} cannot be read; these can: {', '.join(_TYPES)}")
    name, cls = _TYPES[kind]
    part = float(said.get("partial_rotary_factor", 1.0))
    if cls is PRope:
        options |= {"proportion": part, "factor": factor}
    elif part != 1:
        raise ValueError(f"partial_rotary_factor={part:g} is not supported (only 1 is)")
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
        _, options["attention_factor"] = _frequencies(config, arch, layer, 1)
    check(position.build_encodings(options, shape)[0], config, arch, layer)
    return options


def _frequencies(config: Any, arch: Architecture, layer: Layer, length: int) -> Any:
    """Of transformers, in a text of `length` tokens: the frequencies, and what queries and keys are multiplied by."""
    family = config.model_type.removesuffix("_text")
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, f"{arch.name.removesuffix('ForCausalLM')}RotaryEmbedding")(config)
    kind = [layer.kind] if arch.rotates_by_kind else []
    theirs(torch.empty(0), torch.tensor([[length - 1]]), *kind)
    return (getattr(theirs, "_".join([*kind, name])) for name in ("inv_freq", "attention_scaling"))


def check(pe: PositionEncoding, config: Any, arch: Architecture, layer: Layer) -> None:
    """Raise ValueError unless transformers rotates and sharpens in `layer` as `pe` does, at all lengths."""
    assert isinstance(pe, Rotary)
    original, same = getattr(pe, "original_len", pe.train_len), True
    for length in (original, original + 1, 4 * original):  # some frequencies change with the length
        theirs, sharpening = _frequencies(config, arch, layer, length)
        ours = pe.frequencies(length).float()
        same &= ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=0)
        same &= math.isclose(pe.logit_scale, sharpening**2, rel_tol=1e-6)
    if not same:
        there = f"by rope_parameters={config.rope_parameters} {arch.name} does not rotate and sharpen"
        here = f"{type(pe).__name__} does here, with a logit scale of {pe.logit_scale:g}"
        raise ValueError(f"{there} as {here}")


def write(pe: PositionEncoding, reach: int) -> dict[str, Any]:
    """The settings of transformers for `pe` at its active scale, with the length that it reaches there; `reach` without
    a scaling.

    Frequencies for which transformers has no name are written as divisors of their own, as LongRoPE has them.
    Raises ValueError: the encoding does more than rotate by frequencies.
    """
    hooks = ("embed", "tables", "state", "rotate", "bias", "attend")
    if not isinstance(pe, Rotary) or any(getattr(type(pe), hook) is not getattr(Rotary, hook) for hook in hooks):
        known = "pe=learned, and what rotates by frequencies (rope, linear, ntk, yarn and the like)"
        raise ValueError(f"the encoding {type(pe).__name__} cannot be exported: transformers has {known}")
    if pe.layout != "half":
        raise ValueError(f"pe.layout={pe.layout} cannot be exported: train with pe.layout=half, which transformers has")
    if pe.resonance:
        raise ValueError("pe.resonance=true cannot be exported: transformers has no rounded wavelengths")
    base, scale, length, original = pe.base, pe.active_scale, reach, getattr(pe, "original_len", reach)
    kind = {cls: kind for kind, (_, cls) in _TYPES.items()}.get(type(pe), "longrope")
    settings: dict[str, Any] = {"factor": scale}
    if type(pe) is Rotary or (isinstance(pe, ScaledRotary) and scale == pe.unscaled):
        kind, settings = "default", {}
    elif isinstance(pe, NTK) and not isinstance(pe, DynamicNTK):
        kind, settings, base = "default", {}, float(pe.base_at(scale))
    elif isinstance(pe, PRope):
        settings = {"partial_rotary_factor": pe.proportion, "factor": pe.factor}
    elif kind == "longrope" or getattr(pe, "ramp", "") == "paper":
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
    if kind in ("yarn", "llama3", "longrope"):
        settings[_ORIGINAL] = original
    fields = {"max_position_embeddings": length, "rope_parameters": {"rope_type": kind, "rope_theta": base} | settings}
    return fields if kind in ("default", "proportional") else fields | {_ORIGINAL: original}
