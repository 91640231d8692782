"""Rotary settings of transformers and the `pe` options that mean the same.

transformers has many names for few rotations, and the meaning of a name changes between models. So this module first
translates the names and then compares the result: whenever a model is read or written, `check` compares our frequencies
and logit scale with those that transformers computes from its settings.

A scaling of transformers is active at every length: its factor is our `scale` and our `train_scale`.
"""

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.position import PositionEncoding, Shape, build_encodings
from model.position.ops import inverse_frequencies
from model.position.rotary import PRope, Rotary
from model.position.scaled_rotary import ABF, NTK, DynamicNTK, Linear, LongRope, NTKByParts, ScaledRotary, Yarn
from ropewalk.hf.architectures import Architecture

# Kinds of layers in transformers.
FULL = "full_attention"
SLIDING = "sliding_attention"

ORIGINAL = "original_max_position_embeddings"


class RopeType(NamedTuple):
    """A rope_type of transformers: our name, our class, and the names of settings there and here."""

    name: str
    cls: type[Rotary]
    options: dict[str, str]


ROPE_TYPES = {
    "default": RopeType("rope", Rotary, {"partial_rotary_factor": "partial_rotary_factor"}),
    "linear": RopeType("linear", Linear, {}),
    "dynamic": RopeType("dynamic_ntk", DynamicNTK, {}),
    "yarn": RopeType("yarn", Yarn, {"beta_fast": "beta_fast", "beta_slow": "beta_slow", ORIGINAL: "original_len"}),
    "llama3": RopeType(
        "llama3",
        NTKByParts,
        {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor", ORIGINAL: "original_len"},
    ),
    "longrope": RopeType("longrope", LongRope, {"short_factor": "short_factor", "long_factor": "long_factor"}),
    "proportional": RopeType("p_rope", PRope, {"partial_rotary_factor": "proportion", "factor": "factor"}),
}
ROPE_TYPE_OF = {ours.cls: rope_type for rope_type, ours in ROPE_TYPES.items()}


class Layer(NamedTuple):
    """The positions of a layer, here or in transformers."""

    window: int | None
    rotates: bool = True  # False: the layer has no positions

    @property
    def layer_type(self) -> str:
        return FULL if self.window is None else SLIDING


def layers(config: Any) -> list[Layer]:
    """Return the layers of a configuration.

    Raises:
        ValueError: it names kinds of layers that its architecture lacks.
    """
    # Only some architectures have this switch: the others pass over it.
    has_window = not hasattr(type(config), "use_sliding_window") or config.use_sliding_window
    window = getattr(config, "sliding_window", None) if has_window else None
    # An architecture without layer_types treats all its layers alike.
    layer_types = [Layer(window).layer_type] * config.num_hidden_layers
    if hasattr(type(config), "layer_types"):
        layer_types = config.layer_types
    if not set(layer_types) <= {FULL, Layer(window).layer_type}:
        raise ValueError(f"sliding_window={window} with layer_types={sorted(set(layer_types))} is not supported")

    # SmolLM3 alone has layers without positions.
    rotates = [True] * len(layer_types)
    if config.model_type == "smollm3":
        rotates = list(map(bool, config.no_rope_layers[: len(layer_types)]))
    windows = [window if layer_type == SLIDING else None for layer_type in layer_types]
    return [Layer(own_window, is_rotated) for own_window, is_rotated in zip(windows, rotates, strict=True)]


def read(config: Any, arch: Architecture, shape: Shape, layer: Layer) -> dict[str, Any]:
    """Return the `pe` options for a layer in a configuration of transformers.

    Raises:
        ValueError: names the settings that have no counterpart here.
    """
    options: dict[str, Any] = {} if layer.window is None else {"window": layer.window}
    if not layer.rotates:
        return options | name_and_target("nope", PositionEncoding)

    settings = _settings(config, arch, layer)
    name, cls, counterparts = ROPE_TYPES[settings["rope_type"]]
    original, factor = _original_len_and_factor(settings, shape.train_len)
    # One whose factor changes nothing is plain RoPE.
    if issubclass(cls, ScaledRotary) and factor == cls.unscaled:
        name, cls, counterparts = ROPE_TYPES["default"]

    options["base"] = float(settings["rope_theta"])
    # For transformers 0 means the default too.
    options |= {ours: settings[theirs] for theirs, ours in counterparts.items() if settings.get(theirs)}
    if issubclass(cls, ScaledRotary):
        options |= {"scale": factor, "train_scale": factor, "original_len": original}
    if cls is Yarn and not settings.get("truncate", True):
        options["ramp"] = "unrounded"
    # transformers computes the sharpening of these two from several settings: its result is taken as it is.
    if cls in (Yarn, LongRope):
        _, options["attention_factor"] = _frequencies(config, arch, layer, length=1)
    options = name_and_target(name, cls) | options
    check(build_encodings(options, shape)[0], config, arch, layer)
    return options


def _settings(config: Any, arch: Architecture, layer: Layer) -> dict[str, Any]:
    """Return the `rope_parameters` of a layer, without None. Raises ValueError: their type is unknown here."""
    config.standardize_rope_params()  # an original length that stands beside the settings moves into them
    settings = config.rope_parameters[layer.layer_type] if arch.by_layer_type else config.rope_parameters
    rope_type = settings["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type={rope_type!r} is not supported; these are: {', '.join(ROPE_TYPES)}")
    older = settings.get("type", rope_type)  # what rope_type was called once
    if rope_type == "default" and older != rope_type:
        # transformers 5 passes over it where each kind of layer has settings of its own.
        raise ValueError(f"type={older!r} is not supported here: call it rope_type")
    # None means the default. Only for truncate does transformers read it as false.
    return {key: value for key, value in settings.items() if value is not None or key == "truncate"}


def _original_len_and_factor(settings: dict[str, Any], train_len: int) -> tuple[float, float]:
    """Return the length that a model was trained at before its scaling, if it has one, and how far that extends it."""
    original = settings.get(ORIGINAL) or train_len
    if float(original).is_integer():
        original = int(original)  # some files have 4096.0
    return original, float(settings.get("factor", train_len / original))


def name_and_target(name: str, cls: type) -> dict[str, Any]:
    """Return the options that choose an encoding."""
    return {"name": name, "_target_": f"{cls.__module__}.{cls.__name__}"}


def _frequencies(config: Any, arch: Architecture, layer: Layer, length: int) -> tuple[Tensor, float]:
    """Ask transformers how it rotates in a text of `length` tokens.

    Returns:
        The inverse frequencies, in radians per token [D / 2], and what queries and keys are multiplied by.
    """
    family = config.model_type.removesuffix("_text")
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    embedding = getattr(module, arch.name.replace("ForCausalLM", "RotaryEmbedding"))(config)
    # The forward pass of this module updates the frequencies that change with the length of the text, which it takes
    # from the largest position. Where each kind of layer has settings of its own, it takes the kind as well, and the
    # results are named by it, as in full_attention_inv_freq.
    layer_types = [layer.layer_type] if arch.by_layer_type else []
    embedding(torch.empty(0), torch.tensor([[length - 1]]), *layer_types)
    prefix = f"{layer.layer_type}_" if arch.by_layer_type else ""
    return getattr(embedding, f"{prefix}inv_freq"), getattr(embedding, f"{prefix}attention_scaling")


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


def write(pe: PositionEncoding, trained_len: int) -> dict[str, Any]:
    """Return the settings of transformers for `pe` at its active scale.

    Args:
        pe: encoding of a layer, RoPE with any frequencies.
        trained_len: tokens that the model was trained to read without a scaling.

    Returns:
        `rope_parameters`; `max_position_embeddings`, the length that `pe` reaches at this scale; and for a scaling
        `original_max_position_embeddings`.
    """
    assert isinstance(pe, Rotary)
    original = getattr(pe, "original_len", trained_len)
    settings = _rope_parameters(pe)
    rope_type = settings["rope_type"]
    # The longest text, in tokens: the one that the model was trained to read, or the one that a scaling, applied after
    # training (so not the first of its scales), extends it to.
    length = trained_len
    if rope_type == "dynamic":
        length = original  # transformers lets the base grow beyond max_position_embeddings
    elif rope_type == "yarn":
        length = round(original * pe.active_scale)  # before 4.56 transformers takes length / original for the factor
    elif isinstance(pe, ScaledRotary) and pe.active_scale not in (pe.unscaled, pe.scales[0]):
        length = max(trained_len, math.ceil(original * max(pe.scales)))

    fields: dict[str, Any] = {"max_position_embeddings": length, "rope_parameters": settings}
    if rope_type not in ("default", "proportional"):
        fields[ORIGINAL] = original
    return fields


def _rope_parameters(pe: Any) -> dict[str, Any]:
    """Return the settings of transformers that rotate as `pe` does at its active scale, by a name if there is one."""
    cls = type(pe)
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": pe.base}
    # A scaling that is unscaled is plain RoPE.
    if cls is Rotary or (isinstance(pe, ScaledRotary) and pe.active_scale == pe.unscaled):
        return settings
    # These two are RoPE with a larger base.
    if cls in (NTK, ABF):
        return settings | {"rope_theta": float(pe.base_at(pe.active_scale))}

    # All other types have a factor. That of p-RoPE is an option of its own, which replaces the scale below.
    settings["factor"] = pe.active_scale
    # A class that transformers has no name for is written as "longrope": its divisors can say any frequencies.
    rope_type = ROPE_TYPE_OF.get(cls, "longrope")
    if cls is Yarn:
        settings["attention_factor"] = math.sqrt(pe.logit_scale)
        # Of YaRN's ramps this is the one that every version of transformers has. Before 4.56 it took the factor from
        # the quotient of two lengths, which are whole numbers.
        if pe.ramp != "code" or not float(pe.active_scale * pe.original_len).is_integer():
            rope_type = "longrope"
    if rope_type == "longrope":
        return settings | _divisors(pe)
    options = {theirs: getattr(pe, ours) for theirs, ours in ROPE_TYPES[rope_type].options.items()}
    return settings | options | {"rope_type": rope_type}


def _divisors(pe: Any) -> dict[str, Any]:
    """Return settings of LongRoPE, which can say any frequencies.

    They are said by their divisors: a list for texts up to the original length, and one for longer texts.

    Raises ValueError: a frequency is 0.
    """
    plain = inverse_frequencies(pe.rotary_dim, pe.base)
    original = getattr(pe, "original_len", pe.train_len)
    divisors = [plain / pe.frequencies(length) for length in (original, original + 1)]
    if not all(divided.isfinite().all() for divided in divisors):
        raise ValueError(f"{type(pe).__name__} cannot be exported: transformers has frequencies of 0 only in p-RoPE")
    return {
        "rope_type": "longrope",
        ORIGINAL: original,
        "short_factor": divisors[0].tolist(),
        "long_factor": divisors[1].tolist(),
        "attention_factor": math.sqrt(pe.logit_scale),
    }
