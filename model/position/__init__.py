"""Position encodings, each a class behind one interface; `build_encodings` makes those that a configuration names."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from common import plugins
from model.position.base import Context, PositionEncoding, Shape
from model.position.layer import check_length

__all__ = ["Context", "PositionEncoding", "Shape", "build_encodings", "checked", "options_of", "parts", "resolve"]

M = TypeVar("M", bound=BaseModel)


def resolve(target: str) -> type[PositionEncoding]:
    """Return the class for a `_target_` such as "model.position.rotary.Rotary".

    Raises:
        ValueError: see `plugins.resolve`.
    """
    return plugins.resolve(target, PositionEncoding, "model.position", "pe")


def parts(options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The encodings in a `pe` configuration: {"": options}, or those that a pattern over layers names."""
    if "pattern" not in options:
        return {"": options}
    return {key: value for key, value in options.items() if key not in ("name", "pattern")}


def options_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """The options of a class, {name: (type, default)}; the default of one that must be given is `...`.

    They are the keyword-only parameters of its constructor and of those of its bases, which pass **options on.
    """
    options: dict[str, tuple[Any, Any]] = {}
    for parent in reversed(cls.__mro__[:-1]):  # a subclass may give an option another type or default
        constructor: Any = parent.__init__  # type: ignore[misc]
        types = get_type_hints(constructor, include_extras=True)
        for p in inspect.signature(constructor).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                default = ... if p.default is p.empty else p.default
                options[p.name] = (types[p.name], default)
    return options


def checked(schema: type[M], values: Any, where: str = "") -> M:
    """Return `values` as an instance of a pydantic model.

    Raises:
        ValueError: names the first field that is wrong, after `where`.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].replace("Input should", "it should")
        if first["loc"]:
            message = f"{where}{first['loc'][0]}={first['input']!r}: {message}"
        raise ValueError(message) from None


def build_encodings(options: Mapping[str, Any], shape: Shape) -> list[PositionEncoding]:
    """The encoding of each layer; one instance appears several times where layers share it.

    Args:
        options: `_target_`, a display `name`, and the class's own options. Or a pattern over layers: `pattern`, such
            as [local, local, global], repeated over the layers, and such options under each name in it.

    Raises:
        ValueError: an option is unknown, of another type or out of range, or train_len beyond the encoding's limit.
    """
    by_name = parts(options)
    pattern = options.get("pattern", [""])
    if not pattern or set(pattern) - set(by_name):
        names = ", ".join(by_name)
        raise ValueError(f"pe.pattern={pattern} must be a list of {names}, one name for each layer in turn")
    shared: dict[str, PositionEncoding] = {}
    encodings = []
    for layer in range(shape.n_layer):
        name = pattern[layer % len(pattern)]
        if name in shared:
            encodings.append(shared[name])
            continue
        cls = resolve(str(by_name[name]["_target_"]))
        encoding = cls(shape, **checked_options(by_name[name]))
        check_length(encoding, shape.train_len)
        # Layers with equal encodings share one without parameters, so that its tables are computed once.
        if encoding.shared or not list(encoding.parameters()):
            shared[name] = encoding
        encodings.append(encoding)
    return encodings


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoding's own options, checked: 8 becomes 8.0 where a float belongs.

    Raises:
        ValueError: names the first bad option.
    """
    # The schema is made from the constructors' signatures, so that an option's type and default stand in one place.
    cls = resolve(str(options["_target_"]))
    given = {key: value for key, value in options.items() if key not in ("_target_", "name")}
    strict = ConfigDict(extra="forbid", strict=True)
    schema: type[BaseModel] = create_model(cls.__name__, __config__=strict, **options_of(cls))  # type: ignore
    return checked(schema, given, "pe.").model_dump(include=set(given))
