"""The command line of every program: Hydra composes, the schema checks, and a mistake ends in one clear message.

Every composition uses the program's own search path, so a user's --config-dir and hydra.searchpath count like conf/.
"""

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
from training.distributed import leave_to_rank_zero

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
ERRORS = HydraException, OmegaConfBaseException, ValueError, OSError, OverflowError  # that a user can mend
_TRACEBACK = "ROPEWALK_TRACEBACK"  # set to 1, errors keep their traceback
_BASE = "base_model"
_EXTRAS = {"joblib": "sweep", "submitit_local": "slurm", "submitit_slurm": "slurm", "optuna": "optuna"}


def program(name: str, schema: type[Section] | None = None) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Decorates the main function of a program that is configured by conf/`name`.yaml: it gets an instance of `schema`,
    or else what Hydra composed. A user's mistake ends the program with one message and exit code 2, without a
    traceback; Ctrl-C with 130; and in silence, if nobody reads its output, as after `| head`."""

    def decorate(function: Callable[[Any], Any]) -> Callable[[], None]:
        @functools.wraps(function)
        def run(composed: DictConfig) -> Any:
            return function(parse(schema, plain(composed)) if schema else composed)

        @functools.wraps(function)
        def main() -> None:
            module = sys.modules[function.__module__]
            OmegaConf.register_new_resolver("program_help", functools.partial(_help, module.__doc__), replace=True)
            for stream in ("stdout", "stderr"):  # None: closed
                setattr(sys, stream, getattr(sys, stream) or open(os.devnull, "w"))  # noqa: SIM115
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra must hand exceptions on: it would print them in its own way
            try:
                root = Path(str(module.__file__)).resolve().parents[1]  # of a script; Python may look elsewhere
                if (root / "app" / "cli.py").is_file() and root != CONF_DIR.parent:
                    raise ConfigError(f"{root} would run {CONF_DIR.parent}: each clone needs its own environment")
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


def _help(about: str | None, *, _root_: DictConfig) -> str:
    """The text of --help: what the program does, its groups, and each key with its value and the comment beside it."""
    section, lines = _root_.hydra, [about or "", "Groups, as in GROUP=OPTION:"]
    folders = [CONF_DIR, *(Path(source.path) for source in section.runtime.config_sources if source.schema == "file")]
    comments = _comments(folders, "", section.job.config_name)
    for group, name in section.runtime.choices.items():
        if not group.startswith("hydra/"):
            comments |= _comments(folders, group, str(name))
            lines.append(f"  {group}: {', '.join(GlobalHydra.instance().config_loader().get_group_options(group))}")
    lines += ["", "Keys and their values, as in KEY=VALUE; with -m, KEY=A,B runs the program for each:"]
    for key, value in flatten(OmegaConf.to_container(_root_)).items():  # type: ignore[arg-type]
        if not key.startswith(("hydra.", "experiment")) and not key.endswith("_target_"):
            text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            lines.append(f"{f'  {key}={text}':40} {comments.get(key, '')}".rstrip())
    return "\n".join(lines).replace("$", "$$")  # Hydra replaces $NAME


def _comments(folders: list[Path], group: str, name: str) -> dict[str, str]:
    """{key: the comment beside it} in a YAML file and those among its defaults."""
    found: dict[str, str] = {}
    for path in (folder / group / f"{name}.yaml" for folder in folders):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for parent in (yaml.safe_load(text) or {}).get("defaults", []):
            found |= _comments(folders, group, parent) if isinstance(parent, str) else {}
        keys = root = [group] if group and "@package _global_" not in text else []
        for indent, key, comment in re.findall(r"^( *)([\w.]+):(?:.*?#\s*(.*))?", text, re.MULTILINE):
            keys = [*keys[: len(root) + len(indent) // 2], key]
            found[".".join(keys)] = comment or found.get(".".join(keys), "")
    return found


@contextmanager
def composed(config_name: str, *overrides: str) -> Iterator[DictConfig]:
    """The configuration that Hydra composes with these overrides. Within the context ${hydra:...} refers to it."""
    if not GlobalHydra.instance().is_initialized():  # no program: Python use
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"), composed(config_name, *overrides) as found:
            yield found
        return
    before = HydraConfig.instance().cfg
    path = [o for o in HydraConfig.get().overrides.hydra if o.startswith("hydra.searchpath")] if before else []
    found = hydra.compose(config_name, [*overrides, *path], return_hydra_config=True)
    HydraConfig.instance().set_config(found)
    try:
        yield found
    finally:
        HydraConfig.instance().cfg = before


def recompose(under: Mapping[str, Any], groups: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Compose the program's command line once more, over the configuration of a trained model; returns plain values.
    Experiments, `more` and the command line override `under`. `groups` are {group: values of its default option}."""
    section, store = HydraConfig.get(), ConfigStore.instance().store
    program = OmegaConf.load(CONF_DIR / f"{section.job.config_name}.yaml")
    defaults: list[Any] = list(program.defaults)
    for group, values in groups.items():
        store(_BASE, dict(values), group=group)
        defaults = [{group: _BASE} if isinstance(entry, DictConfig) and group in entry else entry for entry in defaults]
    store(_BASE, dict(under), group=_BASE, package="_global_")
    defaults.insert(len(defaults) - ({"experiment": None} in defaults), {_BASE: _BASE})
    program.defaults = defaults
    store(f"over_{_BASE}", program)
    with composed(f"over_{_BASE}", *more, *section.overrides.task) as found:
        return plain(found)


def plain(config: DictConfig) -> dict[str, Any]:
    """Plain, resolved values of a program's own keys, without required keys that are not given."""
    keys = [key for key in config if key not in ("experiment", "hydra") and not OmegaConf.is_missing(config, key)]
    return OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)  # type: ignore[arg-type, return-value]


def encoding(spec: str | Mapping[str, Any], where: str = "pe") -> dict[str, Any]:
    """The options of the encoding `spec`, or part of a pattern: its name, {pe: NAME, OPTION: VALUE, ...}, or the
    options themselves. Raises ConfigError, which names the key `where`: there is no such option or encoding."""
    options = {"pe": spec} if isinstance(spec, str) else dict(spec)
    if "pe" in options:
        name, sources = str(options.pop("pe")), HydraConfig.initialized() and HydraConfig.get().runtime.config_sources
        known = _of_yaml(name, tuple(source.path for source in sources or ()))
        for key in options.keys() - known.keys():
            raise ConfigError(f"{where}={name}: {unknown_key(str(key), known)}")
        options = known | options
    if "pattern" in options:
        parts = {key: value for key, value in options.items() if isinstance(value, Mapping)}
        options |= {key: encoding(value, f"{where}.{key}.pe") for key, value in parts.items()}
    return options


@functools.cache
def _of_yaml(name: str, sources: tuple[str, ...]) -> dict[str, Any]:
    try:
        with composed(f"pe/{name}") as found:
            return plain(found)["pe"]
    except HydraException as error:
        raise ConfigError(explain(error)) from None


def fail(error: Exception) -> None:
    """End the program: after a user's mistake with its message and exit code 2; in silence with 1 if nobody reads its
    output. Returns for any other error."""
    if isinstance(error, BrokenPipeError):  # nobody reads what is printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at its end
        raise SystemExit(1)
    no_memory = isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error))
    if os.environ.get(_TRACEBACK) == "1" or not (no_memory or isinstance(error, ERRORS)):
        return
    leave_to_rank_zero()
    hint = "not enough memory for this model, batch or text: " if no_memory else ""
    print(f"error: {hint}{explain(error)}", file=sys.stderr)
    if not isinstance(error, ConfigError | HydraException | OmegaConfBaseException):
        print(f"({_TRACEBACK}=1 shows where)", file=sys.stderr)
    raise SystemExit(2)


def explain(error: BaseException) -> str:
    """The message of an error; that of Hydra's names the nearest key or option."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if extra := _EXTRAS.get(choice):
            return f'{group}={choice} needs a package: pip install -e ".[{extra}]"'
        options = error.options or [path.stem for path in CONF_DIR.glob(f"{group}/*.yaml")]
        return f"{group}={choice}: there is no such option{nearest(choice, options)}"
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        quoted = shlex.quote(f"{key}='{value.replace(chr(39), chr(92) + chr(39))}'")
        text = f"{error.override}: Hydra cannot read this value; as text it is {quoted}"
        return text if equals else f"{key!r} is not KEY=VALUE"
    cause = error.__cause__
    if not isinstance(cause, ConfigAttributeError | ConfigKeyError) or not isinstance(cause.parent_node, DictConfig):
        return str(error).strip()
    key, siblings = str(cause.full_key), [str(name) for name in cause.parent_node if name != "hydra"]
    word, message = key.rpartition(".")[2], unknown_key(key, siblings)
    if "there is no such key; there is:" not in message:
        return message
    if key == "pe" or key.startswith("pe."):  # perhaps another encoding's
        have = [path.stem for path in sorted(CONF_DIR.glob("pe/*.yaml")) if word in encoding(path.stem)]
        if cause.parent_node.get("pe") in have or ("pattern" in siblings and not have):  # it shows only what it sets
            return f"{key} is not set by the pattern: write +{key}... to add it"
        group = key.removesuffix(word) + "pe" if "pe" in siblings else "pe"
        these = f". These have it: {', '.join(f'{group}={name}' for name in have)}" if have else ""
        return message + these + (f"; where {group} is swept, write ++{key}..." if have or key == "pe" else "")
    everything: Any = OmegaConf.to_container(cause.parent_node._get_root())
    hints = [f"{path.parent.name}={word}" for path in CONF_DIR.glob(f"*/{word}.yaml")]
    hints += [name for name in flatten(everything) if name.endswith(f".{word}") and not name.startswith("hydra.")]
    return f"{key}: there is no such key; did you mean {hints[0]}?" if hints else message
