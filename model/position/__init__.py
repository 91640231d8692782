"""Position encodings, each a class behind one interface; `build` makes the one a configuration names."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from model.position.base import Context, PositionEncoding, Shape

__all__ = ["Context", "PositionEncoding", "Shape", "build", "resolve"]


def resolve(target: str) -> type[PositionEncoding]:
    """The encoding's class for a `_target_` such as "model.position.scaled_rotary.Yarn".

    Only classes of this package are accepted: a configuration may come from somebody else's run, and naming a target
    must not let it call anything.

    Raises:
        ValueError: the target is not an encoding of `model.position`.
    """
    module, _, name = target.rpartition(".")
    try:
        if not module.startswith("model.position."):
            raise ImportError
        found = getattr(import_module(module), name)
        if not issubclass(found, PositionEncoding):
            raise TypeError
    except (ImportError, AttributeError, TypeError):
        raise ValueError(f"pe._target_={target!r} is not a PositionEncoding defined under model.position") from None
    return found


def build(options: Mapping[str, Any], shape: Shape) -> PositionEncoding:
    """The encoding described by a `pe` configuration: `_target_`, a display `name`, and the class's own options."""
    own = {key: value for key, value in options.items() if key not in ("_target_", "name")}
    return resolve(options["_target_"])(shape, **own)
