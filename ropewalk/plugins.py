"""Classes that a configuration names by their `_target_`."""

import os
from collections.abc import Mapping
from importlib import import_module
from inspect import isabstract
from typing import Any, TypeVar

T = TypeVar("T")
# Where modules and classes are now that runs of older versions name elsewhere.
MOVED = {
    "data.tasks.copy": "lab.tasks.copy",
    "data.tasks.group": "lab.tasks.group",
    "data.tasks.recall.RecallAliases": "lab.tasks.recall_aliases.RecallAliases",
    "data.tasks.variables": "lab.tasks.variables",
    "model.position.path": "lab.zoo.path",
    "model.position.polar": "lab.zoo.polar",
    "model.position.selective": "lab.zoo.selective",
}
PLUGINS = "ROPEWALK_PLUGINS"  # environment variable: names of packages of the user's, separated by commas


def resolve(target: str, base: type[T], home: str, group: str) -> type[T]:
    """Return the concrete subclass of `base` that a `_target_` such as "data.text.TextFiles" names.

    Nothing else is accepted: a configuration may come from somebody else's run, and must not call anything.

    Args:
        home: the package that it lies in, unless it is of the lab, or ROPEWALK_PLUGINS names its package.
        group: the group of the configuration that names it, for the message.

    Raises:
        ValueError: it lies elsewhere, cannot be imported, or is not such a class.
    """
    # The package is checked before the import, since importing a module runs its code.
    module, _, name = MOVED.get(target, target).rpartition(".")
    module = MOVED.get(module, module)
    packages = [home, "lab", *os.environ.get(PLUGINS, "").replace(",", " ").split()]
    try:
        if not any(f"{module}.".startswith(f"{package}.") for package in packages):
            raise ImportError(f"it is outside of {', '.join(packages)}")
        cls = getattr(import_module(module), name)
        if not issubclass(cls, base) or isabstract(cls):
            raise TypeError("it is not a concrete subclass of it")
    except (ImportError, AttributeError, TypeError) as error:
        problem = f"{group}._target_={target!r} is not a {base.__name__} class under {home} ({error})"
        raise ValueError(f"{problem}; a package of your own must be importable, and named in {PLUGINS}") from None
    return cls


def current_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `data` of a run of any version with the options that it has today."""
    options = dict(data)
    if str(options.get("_target_")).startswith("data.text."):
        # Of a tokenizer that begins texts with a token, the identity of an older run lacks it: see `TextData.identity`.
        options.setdefault("bos", "auto")
        # Gone, and without effect if it was not set. Otherwise the class names it as unknown.
        if options.get("lengths") is None:
            options.pop("lengths", None)
    return options
