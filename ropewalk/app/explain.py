"""What a user is told about a mistake on the command line, and by --help, without importing the network or the data."""

import sys
from collections.abc import Iterable
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from conf.errors import ConfigError, flatten, unknown_key
from conf.files import printable
from conf.foreign import FOREIGN
from conf.options import CONF_DIR, comments, no_such_option

# Mistakes that a user can correct. They are reported without a traceback.
ERRORS = HydraException, OmegaConfBaseException, ValueError, OSError, OverflowError, RecursionError
SEVERAL = ("logger", "experiment")  # groups of which several options at once mean something: Hydra merges them
# How errors of Hydra's begin that do not say what to type, and what to say instead.
REMEDIES = {
    "BasicSweeper does not support": "-m tries given values, as 1e-3,2e-3; hydra/sweeper=optuna searches an interval "
    "(docs/usage.md)",
    "Only one of --run": "-m does not go with --cfg and --info: they show one run, so leave out -m and the sweep",
}


def help_text(config: DictConfig) -> str:
    """The text of --help: what the program does, its groups, and each key with its value and the comment beside it.

    Hydra drops the comments of YAML files, so they are read here.
    """
    section = config.hydra
    loader = GlobalHydra.instance().config_loader()
    of_program = comments("", section.job.config_name)
    of_groups = {}
    lines = [sys.modules["__main__"].__doc__ or "", "Groups, as in GROUP=OPTION:"]
    for group, name in section.runtime.choices.items():
        if not group.startswith("hydra/"):
            of_groups[group] = comments(group, str(name))
            lines.append(f"  {group}: {', '.join(loader.get_group_options(group))}")
    lines += ["", "Keys and their values, as in KEY=VALUE; with -m, KEY=A,B runs the program for each:"]
    values: Any = OmegaConf.to_container(config)
    for key, value in flatten(values).items():
        if not (key.startswith("hydra.") or key.endswith("_target_")):
            text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            setting = f"  {key}={text}"
            words = key.split(".")
            known = of_groups.get(words[0], of_program)
            # The last one counts: a key without a comment of its own has that of the section that holds it.
            remarks = ["", *(known[word] for word in words if word in known)]
            lines.append(f"{setting:40} {remarks[-1]}".rstrip())
    return "\n".join([*lines, "", "--hydra-help: Hydra's own flags, such as --info, --cfg and --config-dir"])


def check_overrides() -> None:
    """Raise ConfigError for what Hydra takes on the command line of the current job, but to no good."""
    config = HydraConfig.get()
    for override in config.overrides.task:
        if override.startswith("~"):
            raise ConfigError(
                f"{override}: keys cannot be removed; "
                "set another value, as in logger=none, optim.grad_clip=null or pe=NAME"
            )
        group, _, choice = override.partition("=")
        if choice == "{}":
            raise ConfigError(f"{override} changes nothing: name an option, as in pe=yarn, or a key, as in pe.scale=8")
        if choice.startswith("[") and group not in SEVERAL and (CONF_DIR / group).is_dir():
            each = choice.strip("[]")
            raise ConfigError(f"{override}: one option at a time; for a run of each write -m {group}={each}")
    for override in config.overrides.hydra:
        key, _, value = override.lstrip("+").partition("=")
        remedy = FOREIGN.get(key, "")
        # A program that goes into the folder of Hydra's, as chdir asks, has a use for that. "." is what conf has, and
        # what Fabric gives to the ranks that it starts.
        if remedy and value.strip("\"'") != "." and not config.job.chdir:
            raise ConfigError(f"{override}: {remedy}")


def explain(error: BaseException) -> str:
    """The message of an error, for a terminal. For an error of Hydra's it names the nearest key or option."""
    message = str(error).strip()
    if isinstance(error, MissingMandatoryValue):
        message = _missing(str(error.full_key))
    elif isinstance(error, OmegaConfBaseException):
        message = message.partition("\n")[0]  # what follows names keys of OmegaConf's own
    elif isinstance(error, HydraException):
        message = _of_hydra(error, message)
    for beginning, remedy in REMEDIES.items():
        if message.startswith(beginning):
            message = remedy
    return printable(message or type(error).__name__)


def _of_hydra(error: HydraException, message: str) -> str:
    """What one of Hydra's errors means here."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return no_such_option(group, name, error.options or ())
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return f"{error.override!r} is not KEY=VALUE; quote text: \"{key}='{value}'\""
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        siblings = [] if cause.parent_node is None else list(cause.parent_node)
        return _unknown_key(str(cause.full_key), [str(name) for name in siblings if name != "hydra"])
    if message.startswith("Could not override '"):
        return unknown_key(message.split("'")[1], ())  # a group of other programs
    if message.startswith("Ambiguous value"):
        override = message.split("'")[1]
        return f"{override}: several values; with -m each is a run; use brackets for a list, quotes for text"
    return message


def _missing(key: str) -> str:
    """The message about a key that has no value: how it is given, and what it is."""
    group, _, word = key.rpartition(".")
    about = comments(group, str(HydraConfig.get().runtime.choices.get(group))).get(word)
    return f"{key} is missing: write {key}=..." + (f", {about}" if about else "")


def _unknown_key(key: str, siblings: Iterable[str]) -> str:
    """The message about a key that does not exist: the nearest beside it, or which options have such a key."""
    message = unknown_key(key, siblings)
    if "; available: " not in message:  # a similar or a foreign name was found
        return message
    word = key.rpartition(".")[2]
    paths = sorted(CONF_DIR.glob("*/*.yaml"))
    having = [f"{path.parent.name}={path.stem}" for path in paths if word in comments(path.parent.name, path.stem)]
    # A pattern shows only those options of its parts that it sets; ++ adds another.
    remedy = f"; a pattern takes ++{key}=..." if key.startswith("pe.") else ""
    return f"{message}. These have it: {', '.join(having)}{remedy}" if having else message
