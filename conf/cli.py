"""The command line of every program: Hydra composes, the schema checks, and a mistake ends in one clear message.

@friendly_errors
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> None:
    cfg = configure(composed)
"""

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from conf import sweep
from conf.compose import CONF_DIR, fail, plain
from conf.init_from import compose, merged, resolve
from conf.schema import Config, flatten
from training.distributed import env_rank

__all__ = ["compose", "configure", "friendly_errors", "plain"]
_about = ""  # the docstring of the program that runs


def configure(composed: DictConfig) -> Config:
    """The checked configuration of a training run; in a sweep see also `conf.sweep.planned`. Raises ValueError."""
    cfg = sweep.planned(resolve(merged(plain(composed))))
    warmup, steps = cfg.optim.warmup_steps, cfg.trainer.max_steps
    if warmup >= steps and not env_rank():
        said = f"optim.warmup_steps={warmup} and trainer.max_steps={steps}: the learning rate never leaves its warm-up"
        print(f"warning: {said}", file=sys.stderr)
    return cfg


def friendly_errors(program: Callable[[], Any]) -> Callable[[], None]:
    """Decorates a Hydra program: a user's mistake ends it with one message and exit code 2, without a traceback.

    Ctrl-C exits with 130. If nobody reads its output any more, as after `| head`, the program ends in silence.
    """

    @functools.wraps(program)
    def main() -> None:
        global _about
        _about = sys.modules[program.__module__].__doc__ or ""
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra must hand exceptions on: it would print them in its own way
        for name in ("stdout", "stderr"):
            setattr(sys, name, getattr(sys, name) or Path(os.devnull).open("w"))  # noqa: SIM115 - None: closed
        try:
            program()
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
            raise SystemExit(1) from None
        except Exception as error:
            fail(error)
            raise

    return main


def _help(*, _root_: DictConfig) -> str:
    """The text of --help: what the program does, its groups, and each key with its value and the comment beside it."""
    section, values = _root_.hydra, OmegaConf.to_container(_root_)
    folders = [CONF_DIR, *(Path(source.path) for source in section.runtime.config_sources if source.schema == "file")]
    comments = _comments(folders, "", section.job.config_name)
    lines = [_about, "Groups, as in GROUP=OPTION:"]
    for group, name in section.runtime.choices.items():
        if not group.startswith("hydra/"):
            comments |= _comments(folders, group, str(name))
            options = GlobalHydra.instance().config_loader().get_group_options(group)
            lines.append(f"  {group}: {', '.join(options)}")
    lines += ["", "Keys and their values, as in KEY=VALUE; with -m, KEY=A,B runs the program for each:"]
    for key, value in flatten(values).items():  # type: ignore[arg-type]
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
        root = [group] if group and "@package _global_" not in text else []
        keys = list(root)
        for indent, key, comment in re.findall(r"^( *)([\w.]+):(?:.*?#\s*(.*))?", text, re.MULTILINE):
            keys = [*keys[: len(root) + len(indent) // 2], key]
            found[".".join(keys)] = comment
    return found


OmegaConf.register_new_resolver("program_help", _help, replace=True)
