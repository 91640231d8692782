"""The command line of every program: Hydra composes, the schema checks, and a mistake ends in one clear message."""

import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from conf.schema import ConfigError, Section, flatten, nearest, parse, unknown_key
from ropewalk.files import printable
from ropewalk.training.distributed import leave_to_rank_zero

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
# Mistakes that a user can correct. They are reported without a traceback.
ERRORS = HydraException, OmegaConfBaseException, ValueError, OSError, OverflowError, RecursionError
_TRACEBACK = "ROPEWALK_TRACEBACK"  # set to 1, errors keep their traceback
_BASE = "base_model"
_OTHER_DATA = (
    "For other data make a run of 0 steps of the model: python train.py init_from=RUN trainer.max_steps=0 data="
)
_EXTRAS = {"joblib": "sweep", "submitit_local": "slurm", "submitit_slurm": "slurm", "optuna": "optuna"}


def program(name: str, schema: type[Section] | None = None) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Decorate the main function of a program that is configured by conf/`name`.yaml.

    Args:
        schema: the function gets an instance of it; None: the configuration as Hydra composed it.

    A user's mistake ends the program with one message and exit code 2, without a traceback, and Ctrl-C with 130. It
    ends silently if nobody reads its output, as after `| head`.
    """

    def decorate(function: Callable[[Any], Any]) -> Callable[[], None]:
        @functools.wraps(function)
        def run(composed: DictConfig) -> Any:
            if schema is None:
                return function(composed)
            return function(parse(schema, plain(composed)))

        @functools.wraps(function)
        def main() -> None:
            module = sys.modules[function.__module__]
            OmegaConf.register_new_resolver("program_help", functools.partial(_help, module.__doc__), replace=True)
            _replace_closed_streams()
            # Hydra would print errors in its own way, with a traceback. This makes it raise them.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            try:
                _check_clone(Path(str(module.__file__)))
                _check_groups(sys.argv[1:])
                sys.path.append(str(CONF_DIR.parent))  # for a package of the user's beside train.py
                hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(run)()
                sys.stdout.flush()
            except KeyboardInterrupt:
                raise SystemExit(130) from None
            except Exception as error:
                fail(error)
                raise

        return main

    return decorate


def _replace_closed_streams() -> None:
    """Replace output streams that were closed when the program started: Python sets these to None."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115


def _check_clone(script: Path) -> None:
    """Raise ConfigError if `script` belongs to another clone than this code."""
    # An environment has one clone installed. Run with it, a script of another clone would import this one's code.
    root = script.resolve().parents[1]
    if (root / "ropewalk" / "app" / "cli.py").is_file() and root != CONF_DIR.parent:
        raise ConfigError(f"{root} would run {CONF_DIR.parent}: each clone needs its own environment")


def _check_groups(arguments: list[str]) -> None:
    """Raise ConfigError if several options of a group are chosen at once, as in pe=[rope,nope]."""
    # Hydra would silently merge them all into one.
    for argument in arguments:
        group, _, choice = argument.partition("=")
        if choice.startswith("[") and (CONF_DIR / group).is_dir():
            options = choice.strip("[]")
            raise ConfigError(f"{argument}: one option at a time; for a run of each write -m {group}={options}")


def experiment_of_data(choices: Mapping[str, Any]) -> str | None:
    """Return the experiment of the data's own name, which holds what suits them, if none is chosen and there is one."""
    experiments = GlobalHydra.instance().config_loader().get_group_options("experiment")
    data = choices.get("data")
    return data if data in experiments and not choices.get("experiment") else None


def _help(about: str | None, *, _root_: DictConfig) -> str:
    """The text of --help: what the program does, its groups, and each key with its value and the comment beside it.

    The comments in the YAML files are the documentation of the keys; Hydra drops them, so they are read here.
    """
    section = _root_.hydra
    lines = [about or ""]
    groups = []
    folders = [CONF_DIR]
    for source in section.runtime.config_sources:
        if source.schema == "file":
            folders.append(Path(source.path))
    comments = _comments(folders, "", section.job.config_name)
    for group, name in section.runtime.choices.items():
        if not group.startswith("hydra/"):
            comments |= _comments(folders, group, str(name))
            options = GlobalHydra.instance().config_loader().get_group_options(group)
            groups.append(f"  {group}: {', '.join(options)}")
    if groups:
        lines += ["Groups, as in GROUP=OPTION:", *groups, ""]
    data = experiment_of_data(section.runtime.choices)
    if data:
        note = f"data={data} trains by experiment={data}, beneath what you give:\n--help with it shows its values."
        lines += [note, ""]
    lines.append("Keys and their values, as in KEY=VALUE; with -m, KEY=A,B runs the program for each:")
    values: Any = OmegaConf.to_container(_root_)
    for key, value in flatten(values).items():
        if key.startswith(("hydra.", "experiment")) or key.endswith("_target_"):
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
        setting = f"  {key}={text}"
        comment = comments.get(key, "")
        lines.append(f"{setting:40} {comment}".rstrip())
    return "\n".join(lines).replace("$", "$$")  # Hydra fills in $NAME, and makes $ of $$


def _comments(folders: list[Path], group: str, name: str) -> dict[str, str]:
    """{key: the comment beside it} in a YAML file and in the files among its defaults."""
    comments: dict[str, str] = {}
    for folder in folders:
        path = folder / group / f"{name}.yaml"
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text) or {}
        for parent in values.get("defaults", []):
            if isinstance(parent, str):
                comments |= _comments(folders, group, parent)
        is_global = not group or "@package _global_" in text
        _add_comments(comments, text, [] if is_global else [group])
    return comments


def _add_comments(comments: dict[str, str], text: str, root: list[str]) -> None:
    """Add the comments of a YAML file whose keys lie below `root`.

    A key without a comment keeps that of the file's defaults.
    """
    # YAML's parsers drop comments. Our files have one key a line and are indented by two, so a line tells its depth.
    keys = list(root)
    for indent, key, comment in re.findall(r"^( *)([\w.]+):(?:.*?#\s*(.*))?", text, re.MULTILINE):
        depth = len(root) + len(indent) // 2
        keys = [*keys[:depth], key]
        full_key = ".".join(keys)
        comments[full_key] = comment or comments.get(full_key, "")


@contextmanager
def composed(config_name: str, *overrides: str) -> Iterator[DictConfig]:
    """The configuration that Hydra composes with these overrides. Within the context ${hydra:...} refers to it."""
    if not GlobalHydra.instance().is_initialized():  # no program: Python use
        with (
            hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"),
            composed(config_name, *overrides) as config,
        ):
            yield config
        return
    # Every composition uses the program's own search path, so a user's --config-dir and hydra.searchpath count like
    # conf/. Hydra keeps the first by itself, but not the second.
    before = HydraConfig.instance().cfg
    arguments = list(overrides)
    if before:
        given = HydraConfig.get().overrides.hydra
        arguments += [override for override in given if override.startswith("hydra.searchpath")]
    config = hydra.compose(config_name, arguments, return_hydra_config=True)
    # `compose` does not set the configuration that ${hydra:...} and `recompose` read.
    HydraConfig.instance().set_config(config)
    try:
        yield config
    finally:
        HydraConfig.instance().cfg = before


def recompose(under: Mapping[str, Any], groups: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Compose the program's command line once more, over the configuration of a trained model.

    Args:
        under: values beneath experiments, `more` and the command line, which all override them.
        groups: {group: values that take the place of its default option}.
        more: overrides that the command line may override again.

    Returns:
        Plain values.
    """
    # Hydra's defaults list decides which value wins, later entries over earlier ones. So the model's values are stored
    # as options, and the program's list is composed again with these options in it: no precedence of our own.
    section = HydraConfig.get()
    store = ConfigStore.instance().store
    program = OmegaConf.load(CONF_DIR / f"{section.job.config_name}.yaml")
    defaults: list[Any] = list(program.defaults)
    for group, values in groups.items():
        store(_BASE, dict(values), group=group)
        for i, entry in enumerate(defaults):
            if isinstance(entry, DictConfig) and group in entry:
                defaults[i] = {group: _BASE}
    store(_BASE, dict(under), group=_BASE, package="_global_")
    # After the program's own defaults, but before an experiment, which is the last of them.
    place = len(defaults)
    if {"experiment": None} in defaults:
        place -= 1
    defaults.insert(place, {_BASE: _BASE})
    program.defaults = defaults
    store(f"over_{_BASE}", program)
    with composed(f"over_{_BASE}", *more, *section.overrides.task) as config:
        return plain(config)


def plain(config: DictConfig) -> dict[str, Any]:
    """Plain, resolved values of a program's own keys, without required keys that are not given."""
    keys: Any = []
    for key in config:
        if key not in ("experiment", "hydra") and not OmegaConf.is_missing(config, key):
            keys.append(key)
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)
    return values


def encoding_names() -> list[str]:
    """Return the names of the encodings in conf/pe, sorted."""
    return sorted(path.stem for path in CONF_DIR.glob("pe/*.yaml"))


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
        defaults = _of_yaml(name, _search_path())
        for key in options.keys() - defaults.keys():
            raise ConfigError(f"{where}={name}: {unknown_key(str(key), defaults)}")
        options = defaults | options
    if "pattern" in options:
        for key, value in options.items():
            if isinstance(value, Mapping):
                options[key] = encoding(value, f"{where}.{key}.pe")
    return options


def quoted(text: str) -> str:
    """Return `text` as a value of Hydra's command line."""
    escaped = text.replace("'", r"\'")
    return f"'{escaped}'"


def _search_path() -> tuple[str, ...]:
    """The folders in which Hydra looks for options, including the user's own; empty in Python use."""
    if not HydraConfig.initialized():
        return ()
    return tuple(source.path for source in HydraConfig.get().runtime.config_sources)


@functools.cache
def _of_yaml(name: str, search_path: tuple[str, ...]) -> dict[str, Any]:
    """The options in pe/`name`.yaml; `search_path` makes the cache tell folders apart."""
    try:
        with composed(f"pe/{name}") as config:
            return plain(config)["pe"]
    except HydraException as error:
        raise ConfigError(explain(error)) from None


def fail(error: Exception) -> None:
    """End the program after a mistake of the user, with its message and exit code 2. Returns for any other error."""
    # Nobody reads the output any more, so there is nobody to tell. Python flushes stdout once more when it ends, which
    # would fail again.
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1)
    no_memory = isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error))
    if os.environ.get(_TRACEBACK) == "1" or not (no_memory or isinstance(error, ERRORS)):
        return
    leave_to_rank_zero()
    message = explain(error) or type(error).__name__
    if no_memory:
        message = f"not enough memory for this model, batch or text: {message}"
    print(f"error: {message}", file=sys.stderr)
    if not isinstance(error, ConfigError | HydraException | OmegaConfBaseException):
        print(f"({_TRACEBACK}=1 shows where)", file=sys.stderr)
    raise SystemExit(2)


def explain(error: BaseException) -> str:
    """The message of an error, for a terminal. For an error of Hydra's it names the nearest key or option."""
    if isinstance(error, RecursionError):
        return "a value is nested too deeply to be read"
    for explanation in (_explain_missing_option, _explain_missing_group, _explain_override, _explain_unknown_key):
        message = explanation(error)
        if message is not None:
            return printable(message)
    return printable(error).strip()


def _explain_missing_option(error: BaseException) -> str | None:
    """The message about an option that no file of its group has, as in pe=yarm."""
    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file:
        return None
    group, _, choice = error.missing_cfg_file.rpartition("/")
    if choice in _EXTRAS:
        return f'{group}={choice} needs a package: pip install -e ".[{_EXTRAS[choice]}]"'
    if not group:
        return f"{choice}: there is no such configuration; --config-name is not needed here"
    options = error.options or [path.stem for path in CONF_DIR.glob(f"{group}/*.yaml")]
    return f"{group}={choice}: there is no such option{nearest(choice, options)}"


def _explain_missing_group(error: BaseException) -> str | None:
    """The message about a group that only other programs have, as data=text of scripts/evaluate.py."""
    choice = re.match(r"Could not override '(\w+)'.*=(.*)", str(error), re.DOTALL)
    if not isinstance(error, HydraException) or choice is None:
        return None
    group, option = choice.groups()
    if not (CONF_DIR / group).is_dir():
        return None  # a key, which may be misspelt
    message = f"{group}={option}: this program has no choice of {group}"
    return f"{message}. {_OTHER_DATA}{option}" if group == "data" else message


def _explain_override(error: BaseException) -> str | None:
    """The message about an argument that Hydra cannot read."""
    if not isinstance(error, OverrideParseException):
        return None
    key, equals, value = error.override.partition("=")
    if not equals:
        return f"{key!r} is not KEY=VALUE"
    as_text = shlex.quote(f"{key}={quoted(value)}")
    return f"{error.override}: Hydra cannot read this value; as text it is {as_text}"


def _explain_unknown_key(error: BaseException) -> str | None:
    """The message about a key that does not exist: the nearest one beside it, or one of that name elsewhere."""
    cause = error.__cause__
    if not isinstance(cause, ConfigAttributeError | ConfigKeyError) or not isinstance(cause.parent_node, DictConfig):
        return None
    key = str(cause.full_key)
    section = cause.parent_node
    siblings = [str(name) for name in section if name != "hydra"]
    message = unknown_key(key, siblings)
    if "there is no such key; there is:" not in message:  # a similar one was found
        return message
    if key == "data":
        return f"{message}. {_OTHER_DATA}text data.files=GLOB"
    if key == "pe" or key.startswith("pe."):
        return _explain_encoding_key(key, section, siblings, message)

    # The last word may be right and in the wrong place: an option of a group (rope), or a key of a section (lr).
    word = key.rpartition(".")[2]
    options = [f"{path.parent.name}={word}" for path in CONF_DIR.glob(f"*/{word}.yaml")]
    everything: Any = OmegaConf.to_container(section._get_root())
    keys = [name for name in flatten(everything) if name.endswith(f".{word}") and not name.startswith("hydra.")]
    hints = options + keys
    if not hints:
        return message
    return f"{key}: there is no such key; did you mean {hints[0]}?"


def _explain_encoding_key(key: str, section: DictConfig, siblings: list[str], message: str) -> str:
    """The `message` about an unknown option of an encoding, with the encodings that have this option."""
    word = key.rpartition(".")[2]
    encodings = [name for name in encoding_names() if word in encoding(name)]
    # A pattern shows only those options of its parts that it sets.
    if section.get("pe") in encodings or ("pattern" in siblings and not encodings):
        return f"{key} is not set by the pattern: write +{key}... to add it"
    group = key.removesuffix(word) + "pe" if "pe" in siblings else "pe"
    if encodings:
        choices = ", ".join(f"{group}={name}" for name in encodings)
        message += f". These have it: {choices}"
    if encodings or key == "pe":
        message += f"; where {group} is swept, write ++{key}..."
    return message
