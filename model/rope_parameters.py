"""The rotary settings in a config.json of transformers, and the `pe` options that mean the same.

Two styles are read, and both are written: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling`
before it. A scaling of transformers is at work at every length, so that `train_scale` here is its factor.
"""

import math
from collections.abc import Mapping
from typing import Any

from model import position
from model.position import PositionEncoding, Shape
from model.position import frequencies as fr
from model.position.rotary import PRope, Rotary
from model.position.scaled_rotary import NTK, DynamicNTK, Linear, Llama3, LongRope, NTKByParts, ScaledRotary, Yarn

_TARGETS: dict[str, tuple[str, type[Rotary]]] = {  # rope_type: our name and class
    "default": ("rope", Rotary),
    "linear": ("linear", Linear),
    "dynamic": ("dynamic_ntk", DynamicNTK),
    "yarn": ("yarn", Yarn),
    "llama3": ("llama3", Llama3),
    "longrope": ("longrope", LongRope),
    "proportional": ("p_rope", PRope),
}
ROPE_TYPES = {kind: kind for kind in _TARGETS}
"""The names that an architecture gives them, and which is meant."""
_ORIGINAL = "original_max_position_embeddings"
_FIELDS = {  # rope_type: what else it may say
    "default": {_ORIGINAL},  # says nothing there, but stands in every config.json of Phi-3
    "linear": {"factor", _ORIGINAL},
    "dynamic": {"factor", _ORIGINAL},
    "yarn": {"factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"},
    "llama3": {"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", _ORIGINAL, "short_factor", "long_factor", "attention_factor"},
    "proportional": {"factor"},
}


def read(
    config: Mapping[str, Any], shape: Shape, *, rope_types: Mapping[str, str] = ROPE_TYPES, partial: bool = False
) -> dict[str, Any]:
    """The `pe` options for a config.json of transformers.

    Args:
        config: of transformers 5, or older.
        shape: of the network; its train_len is max_position_embeddings, which is also the original length where
            nothing else is said.
        rope_types: those of the architecture, like `ROPE_TYPES`.
        partial: whether the architecture may turn a part of each head's channels.

    Raises:
        ValueError: names the setting that contradicts another, is missing, unknown, ignored by transformers, or has no
            counterpart here.
    """
    given = _settings(config)
    said = given.pop("rope_type", "default")
    if said not in rope_types:
        raise ValueError(f"rope_type={said!r} cannot be read; these can: {', '.join(rope_types)}")
    kind = rope_types[said]
    theta, share = given.pop("rope_theta", 10000.0), float(given.pop("partial_rotary_factor", 1.0))
    unknown = sorted(set(given) - _FIELDS[kind])
    if unknown:
        raise ValueError(f"{unknown[0]}={given[unknown[0]]!r} means nothing to rope_type={said!r}: remove it")
    options = _named("default") | {"base": float(theta)}
    if kind == "proportional":
        return options | _named(kind) | {"proportion": share, "factor": float(given.get("factor", 1.0))}
    if share != 1 and not partial:
        raise ValueError(
            f"partial_rotary_factor={share:g} cannot be honoured: in transformers this architecture turns whole heads, "
            f"it ignores the setting with rope_type='default' and fails with others"
        )
    if share != 1:
        options["fraction"] = share
    if kind != "default":
        options |= _scaling(kind, given, shape)
    _check(position.build(options, shape))
    return options


def _scaling(kind: str, given: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """The options of a scaling, or those of RoPE where it scales nothing."""
    original = given.get(_ORIGINAL, shape.train_len)
    if kind == "dynamic" and original != shape.train_len:
        raise ValueError(
            f"{_ORIGINAL}={original!r} is not what rope_type='dynamic' counts from, which is "
            f"max_position_embeddings={shape.train_len}: remove it"
        )
    if kind in ("yarn", "longrope"):
        given.setdefault("factor", shape.train_len / original)
    needed = {"llama3": ["low_freq_factor", "high_freq_factor"], "longrope": ["short_factor", "long_factor"]}
    for field in ["factor", *needed.get(kind, [])]:
        if field not in given:
            raise ValueError(f"rope_type={kind!r} needs {field}")
    options: dict[str, Any] = {}
    factor, sharpening = float(given["factor"]), _sharpening(given)
    if kind == "longrope":
        options = {field: [float(divisor) for divisor in given[field]] for field in needed[kind]}
        if factor <= 1:  # its lists are at work all the same, as they are at no scale of 1 here
            factor, sharpening = max(2.0, *options["long_factor"]), sharpening or 1.0
    if factor == (0 if kind == "dynamic" else 1):
        if sharpening not in (None, 1):
            raise ValueError(f"attention_factor={sharpening:g} with factor={factor:g}, no scaling, has no counterpart")
        return _named("default")
    if kind == "llama3":
        options = {field: float(given[field]) for field in needed[kind]}
    if kind == "yarn":  # zero is its default too, for transformers
        limits = (("beta_fast", 32.0), ("beta_slow", 1.0))
        options = {field: float(given.get(field) or default) for field, default in limits}
        if not given.get("truncate", True):
            options["ramp"] = "unrounded"
    if sharpening is not None:
        options["attention_factor"] = sharpening
    return _named(kind) | {"scale": factor, "train_scale": factor, "original_len": original} | options


def _named(kind: str) -> dict[str, Any]:
    name, cls = _TARGETS[kind]
    return {"name": name, "_target_": f"{cls.__module__}.{cls.__name__}"}


def _sharpening(given: Mapping[str, Any]) -> float | None:
    """The factor of queries and keys, unless it is the default."""
    if "attention_factor" in given:
        return float(given["attention_factor"])
    one, all_dim, steps = given.get("mscale"), given.get("mscale_all_dim"), math.log(max(given["factor"], 1.0))
    return (0.1 * one * steps + 1) / (0.1 * all_dim * steps + 1) if one and all_dim else None


def _check(pe: PositionEncoding) -> None:
    """Raise ValueError where transformers computes something else in spite of the same settings."""
    assert isinstance(pe, Rotary)
    if pe.dim != pe.head_dim and pe.temperature != 1:
        raise ValueError(
            f"partial_rotary_factor={pe.fraction:g} with attention_factor={math.sqrt(pe.temperature):g} has no "
            f"counterpart: transformers sharpens the turning channels alone, here all are"
        )
    if isinstance(pe, Yarn) and pe.active != pe.unscaled and pe.options["ramp"] != "paper":
        fast, slow, rounded = pe.options["beta_fast"], pe.options["beta_slow"], pe.options["ramp"] == "code"
        low, high = fr.yarn_limits(
            pe.dim, pe.base, original_len=pe.original_len, beta_fast=fast, beta_slow=slow, rounded=rounded
        )
        if low > high:
            raise ValueError(
                f"beta_fast={fast:g}, beta_slow={slow:g} at {_ORIGINAL}={pe.original_len}: no channel lies between "
                f"them, where transformers keeps frequencies that it should divide, or the reverse"
            )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every rotary setting of a config.json, wherever it stands in it, by its name of today; without nulls, which mean
    the default."""
    settings: dict[str, Any] = {}
    outside = ("rope_theta", "partial_rotary_factor", _ORIGINAL)
    for place in ({key: config.get(key) for key in outside}, config.get("rope_scaling"), config.get("rope_parameters")):
        if not isinstance(place or {}, Mapping):
            raise ValueError(f"{place!r} is no set of rotary settings")
        for key, value in (place or {}).items():
            key = "rope_type" if key == "type" else key
            if value is None and key == "truncate":
                value = False  # for transformers
            if value is not None and settings.setdefault(key, value) != value:
                raise ValueError(f"it says both {key}={settings[key]!r} and {key}={value!r}: remove one")
    return settings


def write(pe: PositionEncoding, train_len: int) -> dict[str, Any]:
    """Inverse of `read`, for the scale at which `pe` reads: its entries in a config.json of transformers.

    `train_len` is recorded as max_position_embeddings, or the length that `pe` reaches at a scale it was not
    trained at.

    Raises:
        ValueError: no rope_type of transformers computes the same.
    """
    if type(pe) not in (*(cls for _, cls in _TARGETS.values()), NTK, NTKByParts):
        names = ", ".join([*(name for name, _ in _TARGETS.values()), "ntk", "ntk_by_parts"])
        raise ValueError(
            f"the encoding {type(pe).__name__} cannot be exported, because transformers lacks it; of the "
            f"rotary ones it has {names}"
        )
    assert isinstance(pe, Rotary)
    _check(pe)
    theta: float = pe.base
    scaling: dict[str, Any] = {"rope_type": "default"}
    outside: dict[str, Any] = {"max_position_embeddings": train_len}
    if isinstance(pe, PRope):
        scaling = {"rope_type": "proportional", "partial_rotary_factor": pe.proportion}
        if pe.factor != 1:
            scaling["factor"] = pe.factor
    elif isinstance(pe, ScaledRotary) and pe.active != pe.unscaled:
        if pe.active != pe.train_scale:
            outside["max_position_embeddings"] = max(train_len, math.ceil(pe.stretch * pe.original_len))
        original = {_ORIGINAL: pe.original_len}
        match pe:
            case Linear():
                scaling = {"rope_type": "linear", "factor": pe.active}
                if outside["max_position_embeddings"] != pe.original_len:
                    outside |= original  # inside, transformers would warn of it
            case DynamicNTK():
                scaling = {"rope_type": "dynamic", "factor": pe.active}
                outside["max_position_embeddings"] = pe.original_len  # from which it counts
            case NTK():
                theta = pe.base * pe.active ** (pe.dim / (pe.dim - 2))
            case NTKByParts() | Llama3():
                low, high = pe.options["alpha"], pe.options["beta"]
                limits = {"low_freq_factor": low, "high_freq_factor": high}
                scaling = {"rope_type": "llama3", "factor": pe.active} | original | limits
            case Yarn():
                if pe.options["ramp"] == "paper":
                    raise ValueError("pe.ramp=paper cannot be exported: transformers has code and unrounded")
                limits = {key: pe.options[key] for key in ("beta_fast", "beta_slow", "attention_factor")}
                scaling = {"rope_type": "yarn", "factor": pe.active} | original | limits
                if pe.options["ramp"] == "unrounded":
                    scaling["truncate"] = False
            case LongRope():
                plain, _ = pe.at_scale(pe.unscaled).frequencies(pe.original_len)
                short, long = (plain / pe.frequencies(pe.original_len + more)[0] for more in (0, 1))
                factors = {
                    "short_factor": pe.short_factor or short.tolist(),
                    "long_factor": pe.long_factor or long.tolist(),
                    "attention_factor": pe.attention_factor,
                }
                scaling = {"rope_type": "longrope", "factor": pe.active} | original | factors
                outside |= original  # where Phi-3 has it
    scaling = {key: value for key, value in scaling.items() if value is not None}
    old = {"rope_theta": theta, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}
    partial = {"partial_rotary_factor": pe.fraction} if pe.dim != pe.head_dim else {}
    return outside | {"rope_parameters": scaling | {"rope_theta": theta} | partial} | old | partial
