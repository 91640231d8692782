"""Classes that a configuration names by their `_target_`."""

import os
from importlib import import_module
from inspect import isabstract
from typing import Any, TypeVar

T = TypeVar("T")
# Where classes were that runs of older versions name.
MOVED = {
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

    `problem(encodings, device)` says why they cannot, or ""; `install(encodings)` lets these encodings use them.
    """
    return import_module("lab.kernels")


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
