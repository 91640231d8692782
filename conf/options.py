"""The options of the groups, as their YAML files have them: what Hydra composes of, read without composing.

The words about a key stand beside its value, in the YAML file: options of encodings, data and loggers have no other
place, a user's own files count like ours, and whoever reads or copies a file has both.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conf.errors import ConfigError, nearest, unknown_key
from conf.foreign import foreign_hint

CONF_DIR = Path(__file__).resolve().parent


def folders() -> list[Path]:
    """Where options are looked for, in this order: the folders of the program that Hydra runs, if any, and ours."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    return [*(Path(source.path) for source in sources if source.schema == "file"), CONF_DIR]


def names(group: str) -> list[str]:
    """The options of a group, sorted."""
    return sorted({path.stem for folder in folders() for path in folder.joinpath(group).glob("*.yaml")})


def encoding_names() -> list[str]:
    """Return the names of all encodings, sorted: for pe=NAME, `ropewalk.encoding` and `ropewalk.load`."""
    return names("pe")


def file_of(group: str, name: str) -> Path | None:
    """The file of an option, or of a program's configuration, whose group is ""."""
    paths = [folder / group / f"{name}.yaml" for folder in folders()]
    return next(filter(Path.is_file, paths), None)


def options_of(group: str, name: str) -> dict[str, Any]:
    """The values of an option, over those that it is built on. Raises ConfigError: there is no such option."""
    path = file_of(group, name)
    # Also the files of a run choose encodings: they must not reach a YAML file beside them, which may hold ${...}.
    if path is None or ".." in name.split("/"):
        raise ConfigError(no_such_option(group, name))
    values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    inherited: dict[str, Any] = {}
    for parent in _parents(values.pop("defaults", None)):
        inherited |= options_of(group, parent)
    return inherited | values


def no_such_option(group: str, name: str, known: Sequence[str] = ()) -> str:
    """The message about an option that no file of its group has, as in pe=yarm."""
    hint = foreign_hint(group, name) or nearest(name, known or names(group))
    if group == "experiment" and name in names("data"):
        hint = f"; data={name} brings settings that suit it"
    return f"{group or '--config-name'}={name}: no such option{hint}"


def comments(group: str, name: str) -> dict[str, str]:
    """{last word of a key: the comment beside it} of an option, and of those that it is built on."""
    path = file_of(group, name)
    if path is None:
        return {}
    text = path.read_text(encoding="utf-8")
    inherited: dict[str, str] = {}
    # Most files have no defaults: parsing all of them would take as long as all else that answers a typo.
    if "defaults:" in text:
        for parent in _parents(yaml.safe_load(text).get("defaults")):
            inherited |= comments(group, parent)
    return inherited | dict(re.findall(r"^ *(\w+):.*? # (.*)$", text, re.MULTILINE))


def _parents(defaults: Sequence[Any] | None) -> list[str]:
    """The options of the same group that an option with such a defaults list is built on."""
    return [parent for parent in defaults or () if isinstance(parent, str) and parent != "_self_"]


def encoding(spec: str | Mapping[str, Any], where: str = "pe") -> dict[str, Any]:
    """Return all options of an encoding, or of one part of a pattern.

    Args:
        spec: its name, {pe: NAME, OPTION: VALUE, ...}, or the options themselves.
        where: the key to name in messages.

    Raises:
        ConfigError: there is no such option or encoding.
    """
    options: dict[str, Any] = {"pe": spec} if isinstance(spec, str) else dict(spec)
    if "pe" in options:
        name = str(options.pop("pe"))
        defaults = options_of("pe", name)
        for key in options.keys() - defaults.keys():
            raise ConfigError(f"{where}={name}: {unknown_key(str(key), defaults)}")
        options = with_parts(options, defaults)
    # Mappings are the parts of a pattern: encodings themselves.
    for key, value in options.items():
        if isinstance(value, Mapping):
            options[key] = encoding(value, f"{where}.{key}.pe")
    return options


def with_parts(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults` with these options of an encoding in their places.

    A part of a pattern that says of which encoding it is replaces the part in `defaults`; another one gives only some
    of its options.
    """
    merged = {**defaults, **options}
    for key, value in options.items():
        old = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not value.keys() & {"pe", "_target_"}:
            merged[key] = {**old, **value}
    return merged


def by_name(specs: Sequence[str | Mapping[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """Return the options of several encodings, see `encoding`. Raises ConfigError: two have one name, too."""
    named: dict[str, dict[str, Any]] = {}
    for spec in specs:
        options = encoding(spec, where)
        name = options["name"]
        if name in named:
            raise ConfigError(f"{where} has {name} twice: name one otherwise, as in {{pe: {name}, name: {name}-2}}")
        named[name] = options
    return named


def over(
    upper: Mapping[str, Any], lower: Mapping[str, Any], kept: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Return the values `lower`, in which those of `upper` take their places, key by key within sections.

    Args:
        kept: keys, with dots, whose values in `lower` stay.
        prefix: of all keys, to compare with `kept`.
    """
    merged = dict(lower)
    for key, value in upper.items():
        old = merged.get(key)
        if prefix + key in kept:
            continue
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = over(value, old, kept, f"{prefix}{key}.")
        else:
            merged[key] = value
    return merged
