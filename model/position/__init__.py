"""Position encodings, each a class behind one interface; `build_encodings` makes those that a configuration names."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from common import plugins
from model.position.base import Context, PositionEncoding, Shape

__all__ = ["Context", "PositionEncoding", "Shape", "build_encodings", "checked", "options_of", "parts", "resolve"]

M = TypeVar("M", bound=BaseModel)


def resolve(target: str) -> type[PositionEncoding]:
    """The class for a `_target_` such as "model.position.rotary.Rotary". Raises ValueError: see `plugins.resolve`."""
    return plugins.resolve(target, PositionEncoding, "model.position", "pe")


def parts(options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The encodings in a `pe` configuration: {"": options}, or those that a pattern over layers names."""
    if "pattern" not in options:
        return {"": options}
    return {key: value for key, value in options.items() if key not in ("name", "pattern")}


def options_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """The options of a class: {name: (type, default or ...)} of the keyword-only parameters in its constructors."""
    options: dict[str, tuple[Any, Any]] = {}
    for parent in reversed(cls.__mro__[:-1]):
        hints = get_type_hints(parent.__init__, include_extras=True)  # type: ignore[misc]
        for p in inspect.signature(parent.__init__).parameters.values():  # type: ignore[misc]
            if p.kind is p.KEYWORD_ONLY:
                options[p.name] = (hints[p.name], ... if p.default is p.empty else p.default)
    return options


def checked(schema: type[M], values: Any, where: str = "") -> M:
    """`values` as an instance of a pydantic model. Raises ValueError: names the first field that is wrong."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"{where}{first['loc'][0]}={first['input']!r}: " if first["loc"] else ""
        raise ValueError(name + first["msg"].replace("Input should", "it should")) from None


def build_encodings(options: Mapping[str, Any], shape: Shape) -> list[PositionEncoding]:
    """The encoding of each layer; one instance appears several times where layers share it.

    Args:
        options: `_target_`, a display `name`, and the class's own options. Or a pattern over layers: `pattern`, such
            as [local, local, global], repeated over the layers, and such options under each name in it.

    Raises ValueError: an option is unknown, of another type or out of range, or train_len beyond the encoding's limit.
    """
    found = parts(options)
    pattern = options.get("pattern", [""])
    if not pattern or set(pattern) - set(found):
        raise ValueError(f"pe.pattern={pattern} must be a list of {', '.join(found)}, one name for each layer in turn")
    shared: dict[str, PositionEncoding] = {}
    encodings = []
    for layer in range(shape.n_layer):
        name = pattern[layer % len(pattern)]
        if (encoding := shared.get(name)) is None:
            encoding = resolve(str(found[name]["_target_"]))(shape, **checked_options(found[name]))
            encoding.check_length(shape.train_len)
        if encoding.shared or not any(True for _ in encoding.parameters()):
            shared[name] = encoding
        encodings.append(encoding)
    return encodings


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """An encoding's own options: 8 becomes 8.0 where a float belongs. Raises ValueError: names the first bad one."""
    cls, strict = resolve(str(options["_target_"])), ConfigDict(extra="forbid", strict=True)
    own = {key: value for key, value in options.items() if key not in ("_target_", "name")}
    schema: type[BaseModel] = create_model(cls.__name__, __config__=strict, **options_of(cls))  # type: ignore
    return checked(schema, own, "pe.").model_dump(include=set(own))
