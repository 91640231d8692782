"""Sources of token sequences, each a class behind the interface `Data`; `build` makes the one configured."""

import os
from collections.abc import Mapping
from importlib import import_module
from inspect import isabstract
from typing import Any

from data.base import IGNORE_INDEX, Data, EvalSet

__all__ = ["IGNORE_INDEX", "Data", "EvalSet", "build", "resolve"]

PLUGINS = "ROPEWALK_PLUGINS"  # environment variable: names of packages of the user's, separated by commas


def resolve(target: str) -> type[Data]:
    """The class for a `_target_` such as "data.text.TextFiles". ValueError if there is none.

    Only Data classes under this package, and under those that ROPEWALK_PLUGINS names, are accepted: a configuration may
    come from somebody else's run, and naming a target must not let it call anything.
    """
    module, _, name = str(target).rpartition(".")
    packages = ["data", *(plugin.strip() for plugin in os.environ.get(PLUGINS, "").split(",") if plugin.strip())]
    try:
        if not any(f"{module}.".startswith(f"{package}.") for package in packages):
            raise ImportError(f"it is outside of {', '.join(packages)}")
        found = getattr(import_module(module), name)
        if not (isinstance(found, type) and issubclass(found, Data)) or isabstract(found):
            raise ImportError("it is something else")
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"data._target_={target!r} is not a Data class under data ({error}); a package of your own must be named "
            f"in the environment variable {PLUGINS}"
        ) from None
    return found


def build(options: Mapping[str, Any]) -> Data:
    """The source described by a `data` configuration: `_target_`, a display `name`, and the class's own options."""
    own = {key: value for key, value in options.items() if key not in ("_target_", "name")}
    return resolve(options["_target_"])(**own)
