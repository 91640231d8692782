"""Where token sequences come from, each source a class behind one interface; `build` makes the one configured."""

from collections.abc import Mapping
from importlib import import_module
from inspect import isabstract
from typing import Any

from data.base import IGNORE, Data, Slice

__all__ = ["IGNORE", "Data", "Slice", "build", "resolve"]


def resolve(target: str) -> type[Data]:
    """The source's class for a `_target_` such as "data.text.TextFiles".

    Only classes of this package are accepted: a configuration may come from somebody else's run, and naming a target
    must not let it call anything.

    Raises:
        ValueError: the target is not a source of `data`.
    """
    module, _, name = target.rpartition(".")
    try:
        if not module.startswith("data."):
            raise ImportError
        found = getattr(import_module(module), name)
        if not issubclass(found, Data) or isabstract(found) or not found.__module__.startswith("data."):
            raise TypeError
    except (ImportError, AttributeError, TypeError):
        raise ValueError(f"data._target_={target!r} is not a Data class defined under data") from None
    return found


def build(options: Mapping[str, Any]) -> Data:
    """The source described by a `data` configuration: `_target_`, a display `name`, and the class's own options."""
    own = {key: value for key, value in options.items() if key not in ("_target_", "name")}
    return resolve(options["_target_"])(**own)
