"""The command line of every program: Hydra composes it, the schema checks it, a mistake ends in one clear message.

Nothing here imports PyTorch, so that a mistake is answered at once. Hydra's globals belong to whoever uses Ropewalk, a
notebook or a Hydra program of theirs: each composition puts them back.
"""

import argparse
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import ConfigError, unknown_key
from conf.schema import S, parse
from ropewalk.app.explain import CONF_DIR, explain, help_text

# Mistakes that a user can correct. They are reported without a traceback.
ERRORS = HydraException, OmegaConfBaseException, ValueError, OSError, OverflowError, RecursionError
TRAIN = "train"  # the configuration of train.py, to which an experiment and a model to start from belong
_BASE = "base_model"

Task = Callable[[DictConfig], Any]


def program(schema: type[S]) -> Callable[[Callable[[S], Any]], Task]:
    """Decorate the main function of a program: it gets what Hydra has composed as an instance of `schema`."""

    def decorate(function: Callable[[S], Any]) -> Task:
        @functools.wraps(function)
        def main(config: DictConfig) -> Any:
            return function(parse(schema, plain(config)))

        return main

    return decorate


def run(module: str) -> NoReturn:
    """Run the program in `module`, which is imported once the command line of this process has proved right.

    Its `main` gets the configuration that Hydra composes from conf/NAME.yaml, NAME being the last word of `module`.

    A user's mistake ends the program with one message and exit code 2, without a traceback, and Ctrl-C with 130. It
    ends silently if nobody reads its output, as after `| head`.
    """
    name = module.rpartition(".")[2]
    sys.path.append(str(CONF_DIR.parent))  # for a package of the user's beside train.py
    try:
        flags, overrides = _parse(sys.argv[1:])
        if flags.version:
            print(f"Ropewalk {version('ropewalk')}")
        elif flags.multirun and not (flags.help or flags.cfg):
            from ropewalk.app.sweep import sweep

            sweep(name, import_module(module).main, overrides)
        else:
            with composed(name, *overrides) as config:
                if flags.help:
                    print(help_text(sys.modules["__main__"].__doc__ or "", config))
                elif flags.cfg:
                    values = plain(config)
                    if name == TRAIN:
                        values = import_module("ropewalk.app.init_from").merged(values)
                    print(yaml.safe_dump(values, sort_keys=False), end="")
                else:
                    import_module(module).main(config)
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        fail(error)
        raise
    raise SystemExit(0)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Divide a command line into flags, in any place, and KEY=VALUE."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("-h", "--help"), ("--version",), ("-m", "--multirun")):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-cd", "--config-dir")
    flags, rest = parser.parse_known_args(arguments)
    # As programs with argparse take them: --seed=1 is seed=1.
    overrides = [argument.lstrip("-") for argument in rest]
    # The name of a run of a sweep has = in it, as in run=runs/rope-train_len=32. Hydra wants quotes around it.
    overrides = [re.sub(r"^(\w[\w./]*)=([\w./-]+=[\w./=-]+)$", r"\1='\2'", argument) for argument in overrides]
    for argument in overrides:
        # Hydra would silently merge several options of a group into one. Trackers are made to be merged.
        group, _, choice = argument.partition("=")
        for gone in ("launcher", "sweeper"):
            if group.startswith((f"hydra/{gone}", f"hydra.{gone}")):
                raise ConfigError(unknown_key(f"hydra/{gone}", ()))
        if choice.startswith("[") and group != "logger" and (CONF_DIR / group).is_dir():
            each = choice.strip("[]")
            raise ConfigError(f"{argument}: one option at a time; for a run of each write -m {group}={each}")
    if flags.config_dir:
        overrides.insert(0, f"hydra.searchpath=[file://{Path(flags.config_dir).absolute()}]")
    return flags, overrides


def fail(error: Exception) -> None:
    """End the program after a mistake of the user, with its message and exit code 2. Returns for any other error."""
    # Nobody reads the output any more, so there is nobody to tell. Python flushes stdout once more when it ends, which
    # would fail again.
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1)
    no_memory = isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error))
    # ROPEWALK_TRACEBACK=1 shows where an error arose.
    if os.environ.get("ROPEWALK_TRACEBACK") == "1" or not (no_memory or isinstance(error, ERRORS)):
        return
    message = explain(error) or type(error).__name__
    if no_memory:
        message = f"not enough memory for this model, batch or text: {message}"
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def composed(name: str | None, *overrides: str) -> Iterator[DictConfig]:
    """The configuration that Hydra composes from conf/`name`.yaml, over the `recipe` that the overrides call for.

    Without a name the overrides are all there is. Within the context ${hydra:...} refers to it.

    Raises ConfigError: names the first mistake.
    """
    arguments = [*_search_path(), *overrides]
    outer_hydra, outer_config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            config = hydra.compose(name, arguments, return_hydra_config=True)
            experiment = recipe(config)
            if experiment:
                config = hydra.compose(name, [f"experiment={experiment}", *arguments], return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            yield config
    except HydraException as error:
        raise ConfigError(explain(error)) from None
    finally:
        GlobalHydra.instance().hydra = outer_hydra
        HydraConfig.instance().cfg = outer_config


def recipe(config: DictConfig) -> str:
    """The experiment that a run takes where none is chosen, beneath the command line; empty: none.

    Data with an experiment of their own name take that one: it holds what suits them. A run that starts from a model of
    transformers takes a short fine-tuning.
    """
    choices = config.hydra.runtime.choices
    source = config.get("init_from")
    starts_from_run = source is not None and not str(source).startswith("hf:")
    # Programs that take no experiment lack the key. In others one may be chosen already.
    if "experiment" not in choices or choices["experiment"] or starts_from_run:
        return ""
    experiment = choices.get("data") if source is None else "extend"
    file = CONF_DIR / "experiment" / f"{experiment}.yaml"
    return experiment if file.is_file() else ""


def _search_path() -> list[str]:
    """The overrides hydra.searchpath=..., by which a user's own folders count like conf/.

    None before Hydra has composed a program, as in Python or when a sweep is planned.
    """
    if not HydraConfig.initialized():
        return []
    return [override for override in HydraConfig.get().overrides.hydra if override.startswith("hydra.searchpath")]


def recompose(under: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Compose the program's command line once more, over the configuration of a trained model.

    Args:
        under: values beneath experiments and the command line, which override them.
        groups: {group: values that take the place of its default option}.

    Returns:
        Plain values.
    """
    # Hydra's defaults list decides which value wins, later entries over earlier ones. So the model's values are stored
    # as options, and the program's list is composed again with these options in it: no precedence of our own.
    section = HydraConfig.get()
    store = ConfigStore.instance().store
    program = OmegaConf.load(CONF_DIR / f"{section.job.config_name}.yaml")
    defaults = program.defaults
    for group, values in groups.items():
        store(_BASE, literal(dict(values)), group=group)
        for entry in defaults:
            if isinstance(entry, DictConfig) and group in entry:
                entry[group] = _BASE
    store(_BASE, literal(dict(under)), group=_BASE, package="_global_")
    # After the program's own defaults, but before an experiment, which is the last of them.
    place = len(defaults) - 1 if {"experiment": None} in defaults else len(defaults)
    defaults.insert(place, {_BASE: _BASE})
    store(f"over_{_BASE}", program)
    with composed(f"over_{_BASE}", *section.overrides.task) as config:
        return plain(config)


def plain(config: DictConfig) -> dict[str, Any]:
    """Plain, resolved values of a program's own keys, without those that are required and not given.

    Raises MissingMandatoryValue: one within a section is not given.
    """
    own: Any = [key for key in config if key not in ("experiment", "hydra") and not OmegaConf.is_missing(config, key)]
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, own), resolve=True, throw_on_missing=True)
    return values


def encoding_names() -> list[str]:
    """Return the names of all encodings, sorted: for pe=NAME, `ropewalk.encoding` and `ropewalk.load`."""
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
        # Also the files of a run choose encodings: they must not reach a YAML file beside them, which may hold ${...}.
        if ".." in name.split("/"):
            raise ConfigError(f"{where}={name} is no name of an encoding: leave out ..")
        defaults = _of_yaml(name, *_search_path())
        for key in options.keys() - defaults.keys():
            raise ConfigError(f"{where}={name}: {unknown_key(str(key), defaults)}")
        options = defaults | options
    # Mappings are the parts of a pattern: encodings themselves.
    for key, value in options.items():
        if isinstance(value, Mapping):
            options[key] = encoding(value, f"{where}.{key}.pe")
    return options


def literal(value: Any) -> Any:
    """Return plain values as OmegaConf takes them for what they are, to be resolved once.

    It would compute ${...}. In the files of somebody else's run ${oc.env:NAME} stands for a variable of the user's
    environment, which would then be in files that the user sends on.
    """
    # A backslash before ${ escapes it, and one before that stands for itself. In JSON each of them is two.
    return json.loads(re.sub(r"(\\*)\$\{", r"\1\1\\\\${", json.dumps(value)))


def quoted(text: str) -> str:
    """Return `text` as a value of Hydra's command line, which stands for itself whatever characters it has."""
    # Hydra reads \' as a quote. So backslashes before a quote, also before the last one, are doubled, and no others.
    # `literal` keeps ${...} from being computed.
    doubled = re.sub(r"(\\+)(?='|\Z)", r"\1\1", literal(text))
    return "'" + doubled.replace("'", r"\'") + "'"


@functools.cache
def _of_yaml(name: str, *search_path: str) -> dict[str, Any]:
    """The options in pe/`name`.yaml; `search_path` makes the cache tell folders apart."""
    # Not as the primary configuration, which Hydra does not look for in a user's folders.
    with composed(None, f"+pe={quoted(name)}") as config:
        return plain(config)["pe"]
