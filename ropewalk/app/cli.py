"""The door of every program: Hydra runs it, and a mistake ends in one clear message.

Nothing here imports PyTorch, so that a mistake is answered at once.
"""

import argparse
import json
import os
import re
import sys
import traceback
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.options import CONF_DIR
from ropewalk.app.compose import composed, plain, quoted
from ropewalk.app.explain import ERRORS, check_overrides, explain, help_text
from ropewalk.app.side_by_side import LAUNCHER_ENV, RESULT_ENV
from ropewalk.run.stop import EXIT_INTERRUPTED, EXIT_STOPPED, PARENT_ENV, die_with_parent

FULL_ERROR = "HYDRA_FULL_ERROR"  # environment variable: 1 shows where an error arose


def run(module: str, schema: str | None = None) -> NoReturn:
    """Run the program in `module` as an application of Hydra, configured by conf/NAME.yaml, NAME its last word.

    Its function `main` gets what Hydra has composed: as an instance of the module's `Arguments`, if it has such a
    schema, else as it is.

    A user's mistake ends the program with one message and exit code 2, without a traceback, and Ctrl-C with 130. It
    ends silently if nobody reads its output, as after `| head`.

    Args:
        schema: "module:class" of its configuration, to check this before `module` is imported.
    """
    # A sweep has started this process, or rank zero of its run: it ends with that one, also while it still imports.
    parent = int(os.environ.pop(LAUNCHER_ENV, "") or os.environ.get(PARENT_ENV, "") or os.getpid())
    if parent != os.getpid():
        die_with_parent(parent)
    if sys.stdout is None:  # closed, as by >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may lack a character, such as that of an interval
            stream.reconfigure(errors="replace")
    sys.path.append(str(CONF_DIR.parent))  # for a package of the user's beside train.py
    name = module.rpartition(".")[2]
    task = Task(module, schema)
    try:
        # Hydra lets errors pass, and `explain` says what they mean.
        with env_override({FULL_ERROR: "1"}):
            flags = _flags()
            if not _shown(flags, name):
                hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(task)()
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:
        fail(error)
        raise
    raise SystemExit(0)


def _flags() -> argparse.Namespace:
    """Return Hydra's flags and overrides, and write the command line as Hydra takes it: flags first."""
    arguments = sys.argv[1:]
    flags, unknown = get_args_parser().parse_known_intermixed_args(arguments)
    overrides = {*flags.overrides, *unknown}
    flags.overrides = [_override(argument) for argument in arguments if argument in overrides]
    sys.argv[1:] = [argument for argument in arguments if argument not in overrides] + flags.overrides
    return flags


def _override(argument: str) -> str:
    """An override as Hydra takes it."""
    # As programs with argparse take them: --seed=1 is seed=1.
    argument = argument.lstrip("-")
    # Of our groups each is in the defaults list already: +experiment=NAME, as other programs want it, is the same here.
    group = argument.lstrip("+").partition("=")[0]
    if (CONF_DIR / group).is_dir():
        argument = argument.lstrip("+")
    # The name of a run of a sweep has = in it, as in run=runs/rope-train_len=32. Hydra wants quotes around it.
    return re.sub(r"^(\w[\w./]*)=([\w./-]+=[\w./=-]+)$", r"\1='\2'", argument)


def _shown(flags: argparse.Namespace, name: str) -> bool:
    """Print what --help or --cfg job ask for, unless Hydra does it as well. Returns whether it was printed."""
    if not flags.help and (flags.cfg != "job" or flags.multirun):
        return False
    folder = [f"hydra.searchpath=[{quoted(f'file://{os.path.abspath(flags.config_dir)}')}]"] if flags.config_dir else []
    with composed(flags.config_name or name, *folder, *flags.overrides) as config:
        if flags.help:
            print(help_text(config))
            return True
        if config.get("init_from") is None:
            return False
        from ropewalk.app.configure import merged  # imports PyTorch, to read the model

        values: Any = merged(config)
    for key in flags.package.split(".") if flags.package else ():
        values = values[key]
    print(yaml.safe_dump(values, sort_keys=False), end="")
    return True


class Task:
    """What Hydra calls for each job: the main function in `module`, imported once the job is composed.

    Launchers may pickle it, and run it on other machines.
    """

    def __init__(self, module: str, schema: str | None) -> None:
        self.module = module
        self.schema = schema
        self.full_error = os.environ.get(FULL_ERROR, "0")
        self.__module__ = module  # by which Hydra names the program

    def __call__(self, config: DictConfig) -> Any:
        is_alone = HydraConfig.get().mode == RunMode.RUN
        result_to = os.environ.pop(RESULT_ENV, None)
        # Hydra had to let errors pass: from here on, and in further processes, the user's own setting holds.
        with env_override({FULL_ERROR: self.full_error}):
            try:
                check_overrides()
                # Before all is imported that a run needs. Of a run that starts from a model, the model decides what
                # lies beneath: it is checked in its place.
                if self.schema and config.get("init_from") is None:
                    _checked(resolve_name(self.schema), config)
                program: Any = import_module(self.module)
                result = program.main(_checked(program.Arguments, config) if hasattr(program, "Arguments") else config)
            except SystemExit as end:  # in a sweep some programs say by their exit code what they have found
                if is_alone or end.code in (EXIT_STOPPED, EXIT_INTERRUPTED):
                    raise
                return end.code
            except Exception as error:
                if is_alone:
                    fail(error)
                elif not isinstance(error, ERRORS):  # a defect, not a mistake of the user
                    traceback.print_exception(error)
                raise
        if result_to:
            os.write(int(result_to), json.dumps(result).encode())
        return result


def _checked(schema: Any, config: DictConfig) -> Any:
    """Return what Hydra has composed as an instance of `schema`. Raises ConfigError: a line for each mistake."""
    from conf.schema import parse  # it takes as long to import as all else that answers a typo

    return parse(schema, plain(config))


def fail(error: Exception) -> None:
    """End the program after a mistake of the user, with its message and exit code 2. Returns for any other error."""
    # Nobody reads the output any more, so there is nobody to tell. Python flushes stdout once more when it ends, which
    # would fail again.
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1)
    no_memory = isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error))
    if os.environ.get(FULL_ERROR) == "1" or not (no_memory or isinstance(error, ERRORS)):
        return
    message = explain(error)
    if no_memory:
        message = f"not enough memory for this model, batch or text: {message}"
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
