"""What a user is told about a mistake on the command line, and by --help. Only files are read here, no library of ours.

The words about a key stand beside its value, in the YAML file: options of encodings, data and loggers have no other
place, a user's own files count like ours, and whoever reads or copies a file has both.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from conf.foreign import answer
from conf.schema import flatten, nearest, unknown_key
from ropewalk.files import printable

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
_EXTRAS = {"submitit_local": "slurm", "submitit_slurm": "slurm", "optuna": "optuna"}


def help_text(about: str, config: DictConfig) -> str:
    """The text of --help: what the program does, its groups, and each key with its value and the comment beside it."""
    section = config.hydra
    folders = [Path(source.path) for source in section.runtime.config_sources if source.schema == "file"]
    comments = described(folders, "", section.job.config_name)
    lines = [about, "Groups, as in GROUP=OPTION:"]
    for group, name in section.runtime.choices.items():
        if not group.startswith("hydra/"):
            comments |= described(folders, group, str(name))
            options = GlobalHydra.instance().config_loader().get_group_options(group)
            lines.append(f"  {group}: {', '.join(options)}")
    lines += ["", "Keys and their values, as in KEY=VALUE; with -m, KEY=A,B runs the program for each:"]
    values: Any = OmegaConf.to_container(config)
    for key, value in flatten(values).items():
        if not (key.startswith(("hydra.", "experiment")) or key.endswith("_target_")):
            text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            setting = f"  {key}={text}"
            lines.append(f"{setting:40} {comments.get(key, '')}".rstrip())
    return "\n".join(lines)


def described(folders: Sequence[Path], group: str, name: str) -> dict[str, str]:
    """{key: the comment beside it} of an option, in the first of these folders that has it, and of its defaults."""
    paths = [folder / group / f"{name}.yaml" for folder in folders]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return {}
    comments: dict[str, str] = {}
    text = path.read_text(encoding="utf-8")
    for parent in (yaml.safe_load(text) or {}).get("defaults", []):
        if isinstance(parent, str) and parent != "_self_":
            comments |= described(folders, group, parent)
    root = "" if not group or "@package _global_" in text else f"{group}."
    return comments | dict(_beside(yaml.compose(text), text.splitlines(), root))


def _beside(node: Any, lines: Sequence[str], prefix: str) -> Iterator[tuple[str, str]]:
    """Each key of a mapping of YAML that has a comment at the end of its line, and that."""
    for key, value in node.value:
        on_one_line = value.start_mark.line == key.start_mark.line
        end = value.end_mark if on_one_line else key.end_mark
        _, mark, comment = lines[end.line][end.column :].partition("# ")
        if mark:
            yield prefix + key.value, comment
        if isinstance(value, yaml.MappingNode):
            yield from _beside(value, lines, f"{prefix}{key.value}.")


def explain(error: BaseException) -> str:
    """The message of an error, for a terminal. For an error of Hydra's it names the nearest key or option."""
    message = str(error).strip()
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        message = _missing_option(error.missing_cfg_file, error.options or ())
    elif isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        message = f"{key!r} is not KEY=VALUE"
        if equals:
            message = f"{error.override}: this cannot be read; a text has quotes of its own: \"{key}='{value}'\""
    elif isinstance(error, HydraException) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        siblings = [] if cause.parent_node is None else list(cause.parent_node)
        message = _unknown_key(str(cause.full_key), [str(name) for name in siblings if name != "hydra"])
    elif message.startswith("Could not override '"):
        message = unknown_key(message.split("'")[1], ())  # a group of other programs
    elif message.startswith("Ambiguous value"):
        argument = message.split("'")[1]
        message = f"{argument}: several values; for a run of each write -m {argument}"
    return printable(message)


def _missing_option(name: str, options: Sequence[str]) -> str:
    """The message about an option that no file of its group has, as in pe=yarm."""
    group, _, choice = name.rpartition("/")
    if choice in _EXTRAS:
        return f'{group}={choice} needs a package: pip install -e ".[{_EXTRAS[choice]}]"'
    # Of an option within a file Hydra does not say which there are.
    known = options or sorted(path.stem for path in CONF_DIR.joinpath(group).glob("*.yaml"))
    hint = answer(group, choice) or nearest(choice, known)
    return f"{group or 'configuration'}={choice}: there is no such option{hint}"


def _unknown_key(key: str, siblings: Iterable[str]) -> str:
    """The message about a key that does not exist: the nearest beside it, or which options have such a key."""
    message = unknown_key(key, siblings)
    if "; there is: " not in message:  # a similar or a foreign name was found
        return message
    section, _, word = key.rpartition(".")
    group = section.partition(".")[0]
    options = [(path.parent.name, path.stem) for path in sorted(CONF_DIR.glob("*/*.yaml"))]
    have = [name for home, name in options if home == group and f"{group}.{word}" in described([CONF_DIR], home, name)]
    if have:
        choice = group if group == section else f"{section}.pe"  # of a part of a pattern
        choices = ", ".join(f"{choice}={name}" for name in have)
        return f"{message}. These have it: {choices}; where {choice} is swept, or is a pattern, write ++{key}..."
    # The word may be right and in the wrong place: an option of a group (rope), or a key of a section (lr).
    places = [f"{home}={name}" for home, name in options if name == word]
    for home, name in [("", "config"), *options]:
        places += [known for known in described([CONF_DIR], home, name) if known.endswith(f".{word}")]
    return f"{key}: there is no such key; did you mean {places[0]}?" if places else message
