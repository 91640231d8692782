"""Rotary settings of transformers and the `pe` options that mean the same.

transformers has many names for few rotations, and the meaning of a name changes between models. So this module first
translates the names and then compares the result: whenever a model is read or written, `check` compares our frequencies
and logit scale with those that transformers computes from its settings.

A scaling of transformers is active at every length: its factor is our `scale` and our `train_scale`.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model import position
from model.position import PositionEncoding, Shape
from model.position.ops import inverse_frequencies
from model.position.rotary import PRope, Rotary
from model.position.scaled_rotary import ABF, NTK, DynamicNTK, Linear, LongRope, NTKByParts, ScaledRotary, Yarn
from ropewalk.hf.architectures import Architecture

# Kinds of layers in transformers.
FULL = "full_attention"
SLIDING = "sliding_attention"

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
# Settings that have the same name and meaning here.
_SAME = ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
# All settings that are understood. Any other is an error, since it might change the rotation.
_KNOWN = {
    *_SAME,
    _ORIGINAL,
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "finetuned",  # in the first YaRN models, where it has no effect on the rotation
}


class Layer(NamedTuple):
    """The positions of a layer, here or in transformers."""

    window: int | None
    rotates: bool = True  # False: the layer has no positions

    @property
    def kind(self) -> str:
        return FULL if self.window is None else SLIDING


def layers(config: Any) -> list[Layer]:
    """Return the layers of a configuration.

    Raises:
        ValueError: it names kinds of layers that its architecture lacks.
    """
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None

    # An architecture without layer_types treats all its layers alike.
    kind = Layer(window).kind
    kinds = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    possible = {kind}
    if hasattr(type(config), "layer_types"):
        possible.add(FULL)
    if not set(kinds) <= possible:
        raise ValueError(f"sliding_window={window} with layer_types={sorted(set(kinds))} is not supported")

    # SmolLM3 alone has layers without positions.
    rotates = [True] * len(kinds)
    if config.model_type == "smollm3":
        rotates = [bool(flag) for flag in config.no_rope_layers[: len(kinds)]]
    windows = [window if kind == SLIDING else None for kind in kinds]
    return [Layer(*layer) for layer in zip(windows, rotates, strict=True)]


def read(config: Any, arch: Architecture, shape: Shape, layer: Layer) -> dict[str, Any]:
    """Return the `pe` options for a layer in a configuration of transformers.

    Raises:
        ValueError: names the settings that have no counterpart here.
    """
    options: dict[str, Any] = {}
    if layer.window is not None:
        options["window"] = layer.window
    if not layer.rotates:
        return options | {"name": "nope", "_target_": _import_path(PositionEncoding)}

    settings = _rope_parameters(config, arch, layer)
    name, cls = _TYPES[settings["rope_type"]]
    share = float(settings.get("partial_rotary_factor", 1.0))
    if cls is PRope:
        options |= {"proportion": share, "factor": float(settings.get("factor", 1.0))}
    elif share != 1:
        raise ValueError(f"partial_rotary_factor={share:g} is not supported (only 1 is)")
    if issubclass(cls, ScaledRotary):
        scaling = _scaling(config, settings, cls, shape.train_len)
        if not scaling:
            name = "rope"
            cls = Rotary
        options |= scaling

    options |= {"name": name, "_target_": _import_path(cls), "base": float(settings["rope_theta"])}
    # transformers computes the sharpening of these two from several settings: its result is taken as it is.
    if cls in (Yarn, LongRope):
        _, options["attention_factor"] = _frequencies(config, arch, layer, length=1)
    pe = position.build_encodings(options, shape)[0]
    check(pe, config, arch, layer)
    return options


def _import_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def _rope_parameters(config: Any, arch: Architecture, layer: Layer) -> dict[str, Any]:
    """Return the rotary settings for a layer. Raises ValueError: one of them, or their type, is unknown here."""
    settings = config.rope_parameters
    if arch.rotates_by_kind:
        settings = settings[layer.kind]
    # None means the default. Only for truncate does transformers read it as false.
    settings = {key: value for key, value in settings.items() if value is not None or key == "truncate"}
    unknown = sorted(settings.keys() - _KNOWN)
    if unknown:
        raise ValueError(f"rope_parameters: {', '.join(unknown)} is not supported: remove it if it changes nothing")
    kind = settings["rope_type"]
    if kind not in _TYPES:
        raise ValueError(f"rope_type={kind!r} is not supported; these are: {', '.join(_TYPES)}")
    return settings


def _scaling(config: Any, settings: dict[str, Any], cls: type[ScaledRotary], train_len: int) -> dict[str, Any]:
    """Return the options of a scaling; none if its factor changes nothing, which makes it plain RoPE."""
    original = settings.get(_ORIGINAL) or getattr(config, _ORIGINAL, None) or train_len
    factor = float(settings["factor"]) if "factor" in settings else train_len / original
    if factor == cls.unscaled:
        return {}
    options: dict[str, Any] = {"scale": factor, "train_scale": factor, "original_len": original}
    for key in _SAME:
        if settings.get(key):  # for transformers 0 means the default too
            options[key] = settings[key]
    if not settings.get("truncate", True):
        options["ramp"] = "unrounded"
    return options


def _frequencies(config: Any, arch: Architecture, layer: Layer, length: int) -> tuple[Tensor, float]:
    """Ask transformers how it rotates in a text of `length` tokens.

    Returns:
        The inverse frequencies, in radians per token [D / 2], and what queries and keys are multiplied by.
    """
    family = config.model_type.removesuffix("_text")
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    embedding = getattr(module, f"{arch.name.removesuffix('ForCausalLM')}RotaryEmbedding")(config)
    # The forward pass of this module updates the frequencies that change with the length of the text, which it takes
    # from the largest position.
    last_position = torch.tensor([[length - 1]])
    if not arch.rotates_by_kind:
        embedding(torch.empty(0), last_position)
        return embedding.inv_freq, embedding.attention_scaling
    embedding(torch.empty(0), last_position, layer.kind)
    inv_freq = getattr(embedding, f"{layer.kind}_inv_freq")
    return inv_freq, getattr(embedding, f"{layer.kind}_attention_scaling")


def check(pe: PositionEncoding, config: Any, arch: Architecture, layer: Layer) -> None:
    """Raise ValueError unless transformers rotates and sharpens in `layer` as `pe` does, at all lengths."""
    assert isinstance(pe, Rotary)
    original = getattr(pe, "original_len", pe.train_len)
    # Frequencies that change with the length do so beyond the original one.
    for length in (original, original + 1, 4 * original):
        theirs, sharpening = _frequencies(config, arch, layer, length)
        ours = pe.frequencies(length).float()
        same_frequencies = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=0)
        same_logits = math.isclose(pe.logit_scale, sharpening**2, rel_tol=1e-6)
        if not (same_frequencies and same_logits):
            raise ValueError(
                f"by rope_parameters={config.rope_parameters} {arch.name} does not rotate and sharpen as "
                f"{type(pe).__name__} does here, with a logit scale of {pe.logit_scale:g}"
            )


Settings = dict[str, Any]  # the rope_parameters of transformers


def write(pe: PositionEncoding, reach: int) -> dict[str, Any]:
    """Return the settings of transformers for `pe` at its active scale.

    Args:
        pe: encoding of a layer.
        reach: tokens that the model was trained to read without a scaling.

    Returns:
        `rope_parameters`; `max_position_embeddings`, the length that `pe` reaches at this scale; and for a scaling
        `original_max_position_embeddings`.

    Raises:
        ValueError: the encoding does more than rotate by frequencies.
    """
    _refuse_more_than_frequencies(pe)
    assert isinstance(pe, Rotary)
    # A scaling that is unscaled is plain RoPE. A class without a writer of its own is written by its frequencies.
    scaled = isinstance(pe, ScaledRotary) and pe.active_scale != pe.unscaled
    if isinstance(pe, ScaledRotary) and not scaled:
        settings = _write_rope(pe)
    else:
        settings = _WRITERS.get(type(pe), _write_divisors)(pe)
    kind = settings["rope_type"]

    # The longest text, in tokens: the one that the model was trained to read, or the one that a scaling, applied after
    # training, extends it to.
    original = getattr(pe, "original_len", reach)
    length = reach
    if kind == "dynamic":
        length = original  # transformers lets the base grow beyond max_position_embeddings
    elif isinstance(pe, ScaledRotary) and scaled and pe.active_scale != pe.scales[0]:
        length = max(reach, math.ceil(pe.stretch * original))

    if kind in ("yarn", "llama3", "longrope"):
        settings[_ORIGINAL] = original
    fields: dict[str, Any] = {"max_position_embeddings": length, "rope_parameters": settings}
    if kind not in ("default", "proportional"):
        fields[_ORIGINAL] = original
    return fields


def _refuse_more_than_frequencies(pe: PositionEncoding) -> None:
    """Raise ValueError unless `pe` is RoPE with some frequencies, in the layout of transformers."""
    # A subclass that overrides `frequencies` alone is still RoPE; any hook of its own makes it something else.
    hooks = ("embed", "tables", "state", "rotate", "bias", "attend")
    if not isinstance(pe, Rotary) or any(getattr(type(pe), hook) is not getattr(Rotary, hook) for hook in hooks):
        exported = "pe=learned, and what rotates by frequencies (rope, linear, ntk, yarn and the like)"
        raise ValueError(f"the encoding {type(pe).__name__} cannot be exported: transformers has {exported}")
    if pe.layout != "half":
        raise ValueError(f"pe.layout={pe.layout} cannot be exported: train with pe.layout=half")
    if pe.resonance:
        raise ValueError("pe.resonance=true cannot be exported: transformers has no rounded wavelengths")
    if pe.values:
        raise ValueError("pe.values=true cannot be exported: transformers rotates no values")


def _write_rope(pe: Any) -> Settings:
    return {"rope_type": "default", "rope_theta": pe.base}


def _write_larger_base(pe: Any) -> Settings:
    return {"rope_type": "default", "rope_theta": float(pe.base_at(pe.active_scale))}


def _write_factor(rope_type: str, pe: Any) -> Settings:
    return {"rope_type": rope_type, "rope_theta": pe.base, "factor": pe.active_scale}


def _write_by_parts(pe: Any) -> Settings:
    return {
        "rope_type": "llama3",
        "rope_theta": pe.base,
        "factor": pe.active_scale,
        "low_freq_factor": pe.low_freq_factor,
        "high_freq_factor": pe.high_freq_factor,
    }


def _write_yarn(pe: Any) -> Settings:
    if pe.ramp == "paper":  # transformers has no name for it
        return _write_divisors(pe)
    return {
        "rope_type": "yarn",
        "rope_theta": pe.base,
        "factor": pe.active_scale,
        "beta_fast": pe.beta_fast,
        "beta_slow": pe.beta_slow,
        "attention_factor": math.sqrt(pe.logit_scale),
        "truncate": pe.ramp == "code",
    }


def _write_proportional(pe: Any) -> Settings:
    return {
        "rope_type": "proportional",
        "rope_theta": pe.base,
        "partial_rotary_factor": pe.proportion,
        "factor": pe.factor,
    }


def _write_divisors(pe: Any) -> Settings:
    """Return LongRoPE's settings, divisors of RoPE's frequencies, for frequencies that transformers has no name for."""
    # LongRoPE has two lists of divisors, for texts up to the original length and for longer ones.
    plain = inverse_frequencies(pe.rotary_dim, pe.base)
    original = getattr(pe, "original_len", pe.train_len)
    return {
        "rope_type": "longrope",
        "rope_theta": pe.base,
        "factor": pe.active_scale,
        "short_factor": (plain / pe.frequencies(original)).tolist(),
        "long_factor": (plain / pe.frequencies(original + 1)).tolist(),
        "attention_factor": math.sqrt(pe.logit_scale),
    }


_WRITERS: dict[type[Rotary], Callable[[Any], Settings]] = {  # any other class is written by its divisors
    Rotary: _write_rope,
    NTK: _write_larger_base,
    ABF: _write_larger_base,
    Linear: partial(_write_factor, "linear"),
    DynamicNTK: partial(_write_factor, "dynamic"),
    NTKByParts: _write_by_parts,
    Yarn: _write_yarn,
    PRope: _write_proportional,
}
