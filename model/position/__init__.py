"""Position encodings, each a class behind one interface; `build` makes those that a configuration names."""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from model.position.base import Context, PositionEncoding, Shape

__all__ = ["Context", "PositionEncoding", "Shape", "build", "parts", "resolve"]

PLUGINS = "ROPEWALK_PLUGINS"  # environment variable: names of packages of the user's, separated by commas


def resolve(target: str) -> type[PositionEncoding]:
    """The class for a `_target_` such as "model.position.rotary.Rotary".

    Only encodings of this package, and of those that ROPEWALK_PLUGINS names, are accepted: a configuration may come
    from somebody else's run, and naming a target must not let it call anything.

    Raises:
        ValueError: the target is no such encoding.
    """
    module, _, name = target.rpartition(".")
    plugins = [plugin.strip() for plugin in os.environ.get(PLUGINS, "").split(",") if plugin.strip()]
    try:
        if not any(f"{module}.".startswith(f"{package}.") for package in ("model.position", *plugins)):
            raise ImportError
        found = getattr(import_module(module), name)
        if not issubclass(found, PositionEncoding):
            raise TypeError
    except (ImportError, AttributeError, TypeError):
        raise ValueError(
            f"pe._target_={target!r} is not a PositionEncoding under model.position; a package of your own must be "
            f"named in the environment variable {PLUGINS}"
        ) from None
    return found


def parts(options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The encodings in a `pe` configuration: {"": options}, or those that a pattern over layers names."""
    if "pattern" not in options:
        return {"": options}
    return {key: value for key, value in options.items() if key not in ("name", "pattern")}


def build(options: Mapping[str, Any], shape: Shape) -> list[PositionEncoding]:
    """The encoding of each layer; one instance appears several times where layers share it.

    Args:
        options: `_target_`, a display `name`, and the class's own options. Or a pattern over layers: `pattern`, such
            as [local, local, global], repeated over the layers, and such options under each name in it.

    Raises:
        ValueError: an option is out of range, or a pattern is empty or names what is not there.
    """
    found = parts(options)
    pattern = options.get("pattern", [""])
    if not pattern or set(pattern) - set(found):
        raise ValueError(f"pe.pattern={pattern} must be a list of {', '.join(found)}, one name for each layer in turn")
    shared: dict[str, PositionEncoding] = {}
    encodings = []
    for layer in range(shape.n_layer):
        name = pattern[layer % len(pattern)]
        encoding = shared.get(name) or _one(found[name], shape)
        if encoding.shared or not any(True for _ in encoding.parameters()):
            shared[name] = encoding
        encodings.append(encoding)
    return encodings


def _one(options: Mapping[str, Any], shape: Shape) -> PositionEncoding:
    own = {key: value for key, value in options.items() if key not in ("_target_", "name")}
    return resolve(str(options["_target_"]))(shape, **own)
