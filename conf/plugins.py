"""Classes that a configuration names by their `_target_`, and their options, which their constructors define."""

import functools
import inspect
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

from pydantic import create_model

from conf.schema import Name, Section, parse

T = TypeVar("T")
# Where classes are now that runs of older versions name elsewhere.
MOVED = {
    "data.tasks.copy.Copy": "lab.tasks.copy.Copy",
    "data.tasks.group.Group": "lab.tasks.group.Group",
    "model.position.bias.NAPE": "lab.zoo.nape.NAPE",
    "model.position.forget.StickBreaking": "lab.zoo.stick_breaking.StickBreaking",
    "model.position.path.PaTH": "lab.zoo.path.PaTH",
    "model.position.path.PaTHFoX": "lab.zoo.path.PaTHFoX",
    "model.position.polar.PoPE": "lab.zoo.polar.PoPE",
    "model.position.relative.Profiles": "lab.zoo.profiles.Profiles",
    "model.position.rotary.XPos": "lab.zoo.xpos.XPos",
    "model.position.selective.SelectiveRoPE": "lab.zoo.selective.SelectiveRoPE",
    "model.position.windowed.LaMPE": "lab.zoo.squeezed.LaMPE",
    "model.position.windowed.STRING": "lab.zoo.squeezed.STRING",
}
PLUGINS = "ROPEWALK_PLUGINS"  # environment variable: names of packages of the user's, separated by commas


def kernels() -> Any:
    """The lab's kernels for GPUs, which compute some encodings faster than the core does.

    `problem(encodings, device)` says why they cannot, or ""; `install(encodings)` lets these encodings use them;
    `layout_of(encodings, end)` is how they read packed documents, or None.
    """
    return import_module("lab.kernels")


def allow(package: str) -> None:
    """Let classes of a package be named, here and in the processes that this one starts, as ROPEWALK_PLUGINS does."""
    os.environ[PLUGINS] = f"{os.environ.get(PLUGINS, '')},{package}"


def resolve(options: Mapping[str, Any], base: type[T], home: str, group: str) -> tuple[type[T], dict[str, Any]]:
    """Return the concrete subclass of `base` that `_target_` names, as in "data.text.TextFiles", and all other options.

    Nothing else is accepted: a configuration may come from somebody else's run, and must not call anything.

    Args:
        home: the package that it lies in, unless it is of the lab, or ROPEWALK_PLUGINS names its package.
        group: the group of the configuration that names it, for the message.

    Raises:
        ValueError: it is empty, lies elsewhere, cannot be imported, or is not such a class.
    """
    others = dict(options)
    target = str(others.pop("_target_", None) or "")
    if not target:
        raise ValueError(f"{group} needs a _target_, the name of its class: choose an option with one, {group}=NAME")
    # The package is checked before the import, since importing a module runs its code.
    module, _, name = MOVED.get(target, target).rpartition(".")
    packages = [home, "lab", *os.environ.get(PLUGINS, "").replace(",", " ").split()]
    try:
        if not any(f"{module}.".startswith(f"{package}.") for package in packages):
            raise ImportError(f"it is outside {', '.join(packages)}")
        cls = getattr(import_module(module), name)
        if not issubclass(cls, base) or inspect.isabstract(cls):
            raise TypeError("it is not a concrete subclass")
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{group}._target_={target!r} is not a {base.__name__} class under {home} ({error}); "
            f"a package of your own must be on PYTHONPATH and named in {PLUGINS}"
        ) from None
    return cls, others


def constructor_options(cls: type) -> dict[str, tuple[Any, Any]]:
    """The options of a class, {name: (type, default)}; the default of one that must be given is `...`.

    They are the keyword-only parameters of its constructor and of those of its bases, which pass **options on.
    """
    options: dict[str, tuple[Any, Any]] = {}
    # From the base to the class itself, since a subclass may give an option another type or default.
    for parent in reversed(cls.__mro__[:-1]):
        constructor: Any = parent.__init__  # type: ignore[misc]
        types = get_type_hints(constructor, include_extras=True)
        for p in inspect.signature(constructor).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                default = ... if p.default is p.empty else p.default
                options[p.name] = (types[p.name], default)
    return options


@functools.cache
def schema_of(cls: type) -> type[Section]:
    """The schema of a class's options, and of the name beside them."""
    return create_model("Target", __base__=Section, name=(Name, ...), **constructor_options(cls))  # type: ignore[call-overload]


def checked(cls: type, options: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return all options of a class: those that a configuration gives, and the defaults of the others.

    They are checked: 8 becomes 8.0 where a float belongs. `name` is left out.

    Args:
        group: the group of the configuration, for the message.

    Raises:
        ValueError: a line for each option that is unknown or of another type.
    """
    section = parse(schema_of(cls), options, f"{group}.")
    return {name: getattr(section, name) for name in constructor_options(cls)}
