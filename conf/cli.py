"""The command line of every program: Hydra composes, the schema checks, and a mistake ends in one clear message.

@program("sample", Arguments)  # conf/sample.yaml, checked by this schema
def main(args: Arguments) -> None: ...
"""

import functools
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from conf import sweep
from conf.compose import CONF_DIR, fail, plain
from conf.init_from import merged, recipe, resolve
from conf.schema import Config, ConfigError, Section, flatten, parse
from training.distributed import env_rank

_about = ""  # the docstring of the program that runs


def configure(composed: DictConfig) -> Config:
    """The checked configuration of a training run; in a sweep see also `conf.sweep.planned`. Raises ValueError."""
    cfg = sweep.planned(resolve(merged(plain(composed))))
    layers, pattern, doubts = cfg.model.n_layer, cfg.pe.get("pattern", []), []
    if cfg.optim.warmup_steps >= cfg.trainer.max_steps > 0:
        said = f"optim.warmup_steps={cfg.optim.warmup_steps} and trainer.max_steps={cfg.trainer.max_steps}"
        doubts.append(f"{said}: the learning rate never leaves its warm-up")
    if unused := sorted(set(pattern[layers:]) - set(pattern[:layers])):
        doubts.append(f"model.n_layer={layers} and pe.pattern={pattern}: no layer gets {', '.join(unused)}")
    if (taken := recipe(cfg.init_from)) and not env_rank():
        said = (
            f"learning rate {cfg.optim.lr:g}, {cfg.optim.warmup_steps} steps of warm-up, {cfg.trainer.max_steps} in all"
        )
        print(f"{taken[0]}, for a trained model, beneath what is given: {said}")
    for doubt in doubts if not env_rank() else ():
        print(f"warning: {doubt}", file=sys.stderr)
    return cfg


def program(name: str, schema: type[Section] | None = None) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Decorates the main function of a program that is configured by conf/`name`.yaml.

    It gets an instance of `schema`, or else what Hydra composed. A user's mistake ends the program with one message and
    exit code 2, without a traceback; Ctrl-C with 130; and in silence, if nobody reads its output, as after `| head`.
    """

    def decorate(function: Callable[[Any], Any]) -> Callable[[], None]:
        @functools.wraps(function)
        def run(composed: DictConfig) -> Any:
            return function(parse(schema, plain(composed)) if schema else composed)

        @functools.wraps(function)
        def main() -> None:
            global _about
            _about = sys.modules[function.__module__].__doc__ or ""
            for stream in ("stdout", "stderr"):  # None: closed
                setattr(sys, stream, getattr(sys, stream) or open(os.devnull, "w"))  # noqa: SIM115
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra must hand exceptions on: it would print them in its own way
            try:
                _check_clone(Path(str(sys.modules[function.__module__].__file__)).resolve())
                hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(run)()
                sys.stdout.flush()
            except KeyboardInterrupt:
                raise SystemExit(130) from None
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at its end
                raise SystemExit(1) from None
            except Exception as error:
                fail(error)
                raise

        return main

    return decorate


def _check_clone(script: Path) -> None:
    root = script.parents[1]  # where Python does not look for packages: it may have found those of another clone
    if (root / "conf" / "cli.py").is_file() and root != CONF_DIR.parent:
        remedy = f"give each clone an environment of its own, or write PYTHONPATH={shlex.quote(str(root))} before it"
        raise ConfigError(f"{script} would run the source in {CONF_DIR.parent}: {remedy}")


def _help(*, _root_: DictConfig) -> str:
    """The text of --help: what the program does, its groups, and each key with its value and the comment beside it."""
    section, lines = _root_.hydra, [_about, "Groups, as in GROUP=OPTION:"]
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


OmegaConf.register_new_resolver("program_help", _help, replace=True)
