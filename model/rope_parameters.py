"""The rotary settings in a config.json of transformers, and the `pe` options that mean the same.

Two styles are read, and both are written: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling`
before it. A scaling of transformers is at work at every length, so that `train_scale` here is its factor.
"""

import math
from collections.abc import Mapping
from typing import Any

from model import position
from model.position import PositionEncoding, Shape
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
_FIELDS = {  # rope_type: what else it may say
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
    | {"attention_factor", "mscale", "mscale_all_dim"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"},
    "proportional": {"factor"},
}


def read(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The `pe` options for a config.json of transformers.

    `shape` is that of the network; its train_len is max_position_embeddings, which is also the original length where
    nothing else is said.

    Raises:
        ValueError: names the setting that contradicts another, is missing, unknown, or has no counterpart here.
    """
    given = _settings(config)
    kind = given.pop("rope_type", "default")
    if kind not in _TARGETS:
        raise ValueError(f"rope_type={kind!r} cannot be read; these can: {', '.join(_TARGETS)}")
    theta, fraction = given.pop("rope_theta", 10000.0), given.pop("partial_rotary_factor", 1.0)
    unknown = sorted(set(given) - _FIELDS[kind])
    if unknown:
        raise ValueError(f"{unknown[0]}={given[unknown[0]]!r} means nothing to rope_type={kind!r}: remove it")
    name, cls = _TARGETS[kind]
    options: dict[str, Any] = {"name": name, "_target_": f"{cls.__module__}.{cls.__name__}", "base": float(theta)}
    if kind == "proportional":
        options["proportion"] = float(fraction)
        _only("factor", given.get("factor", 1.0), 1.0)
    else:
        _only("partial_rotary_factor", fraction, 1.0)
    if kind in ("default", "proportional"):
        return options

    original = given.get("original_max_position_embeddings", shape.train_len)
    if kind == "dynamic" and original != shape.train_len:
        raise ValueError(
            f"original_max_position_embeddings={original!r} is not what rope_type='dynamic' counts from, which is "
            f"max_position_embeddings={shape.train_len}: remove it"
        )
    if kind in ("yarn", "longrope"):
        given.setdefault("factor", shape.train_len / original)
    needed = {"llama3": ["low_freq_factor", "high_freq_factor"], "longrope": ["short_factor", "long_factor"]}
    for field in ["factor", *needed.get(kind, [])]:
        if field not in given:
            raise ValueError(f"rope_type={kind!r} needs {field}")
    factor = float(given["factor"])
    options |= {"scale": factor, "train_scale": factor, "original_len": original}
    for field in ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
        if given.get(field) or (kind == "llama3" and field in given):  # YaRN's zero is its default, for transformers
            options[field] = float(given[field])
    for field in ("short_factor", "long_factor"):
        if field in given:
            options[field] = [float(divisor) for divisor in given[field]]
    if kind == "longrope" and factor == 1 and {*options["short_factor"], *options["long_factor"]} != {1.0}:
        raise ValueError(
            "rope_type='longrope' with factor=1 is unscaled here, in spite of its short_factor, long_factor"
        )
    _only("truncate", given.get("truncate", True), True)
    _check_sharpening(given, options, shape)
    return options


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every rotary setting of a config.json, wherever it stands in it, by its name of today; nulls are left out."""
    settings: dict[str, Any] = {}
    outside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    for place in ({key: config.get(key) for key in outside}, config.get("rope_scaling"), config.get("rope_parameters")):
        if not isinstance(place or {}, Mapping):
            raise ValueError(f"{place!r} is no set of rotary settings")
        for key, value in (place or {}).items():
            key = "rope_type" if key == "type" else key
            if value is not None and settings.setdefault(key, value) != value:
                raise ValueError(f"it says both {key}={settings[key]!r} and {key}={value!r}: remove one")
    return settings


def _only(field: str, value: Any, allowed: Any) -> None:
    if value != allowed:
        raise ValueError(f"{field}={value!r} has no counterpart here, only {allowed!r} has")


def _check_sharpening(given: Mapping[str, Any], options: dict[str, Any], shape: Shape) -> None:
    """Raise ValueError if queries and keys get another factor than the encoding's own."""
    wanted, fields = given.get("attention_factor"), ["attention_factor"]
    one, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if wanted is None and one and all_dim:
        steps = math.log(max(options["scale"], 1.0))
        wanted, fields = (0.1 * one * steps + 1) / (0.1 * all_dim * steps + 1), ["mscale", "mscale_all_dim"]
    own = math.sqrt(position.build(options, shape).temperature)
    if wanted is not None and not math.isclose(wanted, own, rel_tol=1e-6):
        said = ", ".join(f"{field}={given[field]:g}" for field in fields)
        raise ValueError(f"{said} multiplies queries and keys by {wanted:g}; only {own:g}, the default, can be read")


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
    if pe.dim != pe.head_dim:
        raise ValueError(
            f"pe.fraction={pe.dim / pe.head_dim:g} cannot be exported: these architectures turn all channels of a head"
        )
    theta: float = pe.base
    scaling: dict[str, Any] = {"rope_type": "default"}
    outside: dict[str, Any] = {"max_position_embeddings": train_len}
    if isinstance(pe, PRope):
        scaling = {"rope_type": "proportional", "partial_rotary_factor": pe.proportion}
    elif isinstance(pe, ScaledRotary) and pe.active != pe.unscaled:
        if pe.active != pe.train_scale:
            outside["max_position_embeddings"] = max(train_len, math.ceil(pe.stretch * pe.original_len))
        original = {"original_max_position_embeddings": pe.original_len}
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
                if pe.options["ramp"] != "code":
                    raise ValueError(f"pe.ramp={pe.options['ramp']} cannot be exported: transformers has code alone")
                limits = {key: pe.options[key] for key in ("beta_fast", "beta_slow")}
                scaling = {"rope_type": "yarn", "factor": pe.active} | original | limits
            case LongRope():
                plain, _ = pe.at_scale(pe.unscaled).frequencies(pe.original_len)
                short, long = (plain / pe.frequencies(pe.original_len + more)[0] for more in (0, 1))
                factors = {
                    "short_factor": pe.short_factor or short.tolist(),
                    "long_factor": pe.long_factor or long.tolist(),
                }
                scaling = {"rope_type": "longrope", "factor": pe.active} | original | factors
    old = {"rope_theta": theta, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}
    return outside | {"rope_parameters": scaling | {"rope_theta": theta}} | old
