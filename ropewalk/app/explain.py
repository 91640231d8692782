"""What a user is told about a mistake on the command line, and by --help, without importing the network or the data.

The words about a key stand beside its value, in the YAML file: options of encodings, data and loggers have no other
place, a user's own files count like ours, and whoever reads or copies a file has both.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from conf.errors import flatten, nearest, unknown_key
from conf.files import printable
from conf.foreign import answer

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"


def help_text(about: str, config: DictConfig) -> str:
    """The text of --help: what the program does, its groups, and each key with its value and the comment beside it.

    Hydra drops the comments of YAML files, so they are read here.
    """
    section = config.hydra
    folders = [Path(source.path) for source in section.runtime.config_sources if source.schema == "file"]
    of_program = described(folders, "", section.job.config_name)
    comments = {}
    lines = [about, "Groups, as in GROUP=OPTION:"]
    for group, name in section.runtime.choices.items():
        if not group.startswith("hydra/"):
            comments[group] = described(folders, group, str(name))
            options = GlobalHydra.instance().config_loader().get_group_options(group)
            lines.append(f"  {group}: {', '.join(options)}")
    lines += ["", "Keys and their values, as in KEY=VALUE; with -m, KEY=A,B runs the program for each:"]
    values: Any = OmegaConf.to_container(config)
    for key, value in flatten(values).items():
        if not (key.startswith(("hydra.", "experiment")) or key.endswith("_target_")):
            text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            setting = f"  {key}={text}"
            words = key.split(".")
            known = comments.get(words[0], of_program)
            # The last one counts: a key without a comment of its own has that of the section that holds it.
            found = ["", *(known[word] for word in words if word in known)]
            lines.append(f"{setting:40} {found[-1]}".rstrip())
    return "\n".join(lines)


def described(folders: Sequence[Path], group: str, name: str) -> dict[str, str]:
    """{last word of a key: the comment beside it} of an option, in the first of these folders, and of its defaults."""
    paths = [folder / group / f"{name}.yaml" for folder in folders]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return {}
    text = path.read_text(encoding="utf-8")
    comments: dict[str, str] = {}
    for parent in (yaml.safe_load(text) or {}).get("defaults", []):
        comments |= described(folders, group, str(parent))
    return comments | dict(re.findall(r"^ *(\w+):.*? # (.*)$", text, re.MULTILINE))


def explain(error: BaseException) -> str:
    """The message of an error, for a terminal. For an error of Hydra's it names the nearest key or option."""
    message = str(error).strip()
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        message = _missing_option(error.missing_cfg_file, error.options or ())
    elif isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        message = f"{error.override!r} is not KEY=VALUE; a text has quotes of its own: \"{key}='{value}'\""
    elif isinstance(error, HydraException) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        siblings = [] if cause.parent_node is None else list(cause.parent_node)
        message = _unknown_key(str(cause.full_key), [str(name) for name in siblings if name != "hydra"])
    elif message.startswith("Could not override '"):
        message = unknown_key(message.split("'")[1], ())  # a group of other programs
    return printable(message)


def _missing_option(name: str, options: Sequence[str]) -> str:
    """The message about an option that no file of its group has, as in pe=yarm."""
    group, _, choice = name.rpartition("/")
    # Of an option within a file Hydra does not say which there are.
    known = options or sorted(path.stem for path in CONF_DIR.joinpath(group).glob("*.yaml"))
    hint = answer(group, choice) or nearest(choice, known)
    return f"{group or 'configuration'}={choice}: there is no such option{hint}"


def _unknown_key(key: str, siblings: Iterable[str]) -> str:
    """The message about a key that does not exist: the nearest beside it, or which options have such a key."""
    message = unknown_key(key, siblings)
    if "; there is: " not in message:  # a similar or a foreign name was found
        return message
    word = key.rpartition(".")[2]
    files = [(path.parent.name, path.stem) for path in sorted(CONF_DIR.glob("*/*.yaml"))]
    having = [f"{group}={name}" for group, name in files if word in described([CONF_DIR], group, name)]
    # A pattern shows only those options of its parts that it sets; ++ adds another.
    remedy = f"; a pattern takes ++{key}=..." if key.startswith("pe.") else ""
    return f"{message}. These have it: {', '.join(having)}{remedy}" if having else message
