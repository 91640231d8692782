"""The options of position encodings: checked by the signatures of their classes, and filled in by the encodings."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import create_model

from conf.schema import ConfigError, GPTConfig, Name, Section, findings_of
from model import position
from model.gpt import GPT
from model.position.base import PositionEncoding

Options = Mapping[str, Any]


def resolve_encoding(pe: Options, model: GPTConfig, train_len: int) -> tuple[dict[str, Any], GPT]:
    """Check the options `pe` and fill in each null and "auto" with what the encoding takes for it.

    Returns: the options, and the network of the architecture `model` with this encoding, on the device "meta".

    Raises ConfigError: an option is unknown or of another type. ValueError: out of range.
    """
    findings = encoding_findings(pe)
    if findings:
        raise ConfigError("\n".join(findings))
    with torch.device("meta"):
        net = GPT(model, pe, vocab_size=1, train_len=train_len)
    # The layers repeat the pattern, so its first occurrence has an instance of each part that is used.
    instances = dict(zip(pe.get("pattern", [""]), net.encodings, strict=False))
    parts = {name: _filled_in(part, instances.get(name)) for name, part in position.parts(pe).items()}
    if "pattern" in pe:
        return {**pe, **parts}, net
    return parts[""], net


def _filled_in(part: Options, encoding: PositionEncoding | None) -> dict[str, Any]:
    """The options of one encoding with its choices in place of null and "auto".

    `encoding` is None where no layer has it.

    This relies on a rule of the interface: an option that may be either is kept as an attribute of its name. To break
    it is an error, since config.yaml would otherwise record no number for what the encoding has chosen, and a network
    that takes over the weights at another length would choose another one.
    """
    given = {key: value for key, value in part.items() if key not in ("_target_", "name")}
    cls = position.resolve(str(part["_target_"]))
    schema = option_schema(cls)  # type: ignore[arg-type]
    # 8 becomes 8.0 where a float belongs; "x" stands in for the name, which the schema requires.
    checked = schema.model_validate({"name": "x", **given})
    options = {**part, **checked.model_dump(include=set(given))}
    if encoding is None:
        return options
    for key in given:
        if options[key] in (None, "auto"):
            if not hasattr(encoding, key):
                raise ConfigError(f"{cls.__name__} must keep its option as self.{key}: pe.{key} may be null or auto")
            options[key] = getattr(encoding, key)
    return options


def encoding_findings(pe: Any) -> list[str]:
    """A line for each mistake in the options of an encoding or of a pattern."""
    if not isinstance(pe, Mapping) or "pattern" not in pe:
        return target_findings(pe, "pe", position.resolve)
    parts = position.parts(pe)
    pattern = create_model("Pattern", __base__=Section, name=(Name, ...), pattern=(list[Name], ...))
    own_options = {key: value for key, value in pe.items() if key not in parts}
    findings = findings_of(pattern, own_options, "pe.")
    for name, part in parts.items():
        findings += target_findings(part, f"pe.{name}", position.resolve)
    return findings


def target_findings(values: Any, key: str, resolve: Callable[[str], type]) -> list[str]:
    """A line for each mistake in the options `values` of the section `key`, whose class `resolve` finds."""
    if not isinstance(values, Mapping) or "_target_" not in values:
        group = f"{key}.pe" if "." in key else key  # a part of a pattern, or a group of Hydra's
        return [f"{key} needs a _target_: choose it by its group, as in {group}=NAME"]
    try:
        schema = option_schema(resolve(str(values["_target_"])))
    except ValueError as error:
        return [str(error)]
    options = {name: value for name, value in values.items() if name != "_target_"}
    return findings_of(schema, options, f"{key}.")


@functools.cache
def option_schema(cls: type) -> type[Section]:
    """The schema of a class's options, from the signatures of its constructors, and of the name beside them."""
    return create_model("Target", __base__=Section, name=(Name, ...), **position.options_of(cls))  # type: ignore
