"""The command line: Hydra composes, the schema checks, and a user's mistake ends in one message without a traceback."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from conf.parent import inherit
from conf.rundir import RunDir
from conf.schema import Config, ConfigError, flatten, nearest
from model.processes import AnotherFailed, wait_for_the_first

CONF_DIR = Path(__file__).resolve().parent
MISTAKE = 2  # exit code of a user's mistake
_LAUNCHERS = {"joblib": "sweep", "submitit_local": "slurm", "submitit_slurm": "slurm"}  # and the extras they belong to
_TRACEBACK = "ROPEWALK_TRACEBACK"  # set to 1, errors keep their traceback


def fail(error: BaseException) -> NoReturn:
    """Print what a user can do about `error` and exit; with ROPEWALK_TRACEBACK=1, callers raise it."""
    wait_for_the_first()
    print(f"error: {explain(error)}", file=sys.stderr)
    if not isinstance(error, ConfigError | HydraException | OmegaConfBaseException):
        print(f"({_TRACEBACK}=1 shows where)", file=sys.stderr)
    raise SystemExit(MISTAKE)


def run(task: Callable[[Config], Any], alone: Callable[[Config], Any] = lambda cfg: None) -> None:
    """Compose the configuration from the command line, check it, and call `task` with it; `-m` sweeps: see conf.sweep.

    After a task that is no job of a sweep, `alone` is called, too.

    The process exits with 2 after a mistake, 1 after a sweep of which jobs failed, 130 if it was interrupted, and 75 if
    it was stopped in an orderly way: see model.stop.
    """
    wants_traceback = os.environ.get(_TRACEBACK) == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra must hand exceptions on: it would print them in its own way

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    def job(composed: DictConfig) -> Exception | None:
        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            cfg = configure(composed, overrides_of(HydraConfig.get()))
            if not (sweep and RunDir(cfg).complete):
                task(cfg)
            if not sweep:
                alone(cfg)
        except AnotherFailed:
            if not sweep:
                raise
        except Exception as error:
            if sweep:
                return error  # conf.sweep names the job, and the others go on
            if wants_traceback or not isinstance(error, ValueError | OSError):
                raise
            fail(error)
        return None

    try:
        job()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if wants_traceback:
            raise
        fail(error)


def overrides_of(section: Any) -> list[str]:
    """The overrides in Hydra's section as they were typed, with the interpolations in them unresolved."""
    overrides = OmegaConf.to_container(section.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [str(override) for override in overrides]


def configure(composed: DictConfig, overrides: Sequence[str]) -> Config:
    """The checked configuration of what Hydra composed with these overrides. Raises ValueError, OSError."""
    return inherit(to_dict(composed), given(overrides))


def given(overrides: Sequence[str]) -> set[str]:
    """The keys that a user set, by these overrides or in the experiments that they choose: "pe", "pe.base", ..."""
    keys: set[str] = set()
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        keys.add(key)
        for name in value.strip("[]").split(",") if key == "experiment" else []:
            keys |= _set_by(CONF_DIR / "experiment" / f"{name.strip()}.yaml")
    return keys


def _set_by(path: Path) -> set[str]:
    """The keys that a file of the `experiment` group sets, by itself and by its defaults."""
    content = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None) or {}
    keys: set[str] = set()
    for default in content.pop("defaults", []):
        if isinstance(default, dict):  # such as {"override /pe": "rope"}
            keys |= {str(key).split()[-1].lstrip("/") for key in default}
        elif default != "_self_":
            keys |= _set_by(path.parent / f"{default}.yaml")
    return keys | set(flatten(content))


def script(task: Callable[[dict[str, str]], Any]) -> None:
    """Call `task` with the key=value arguments of the command line."""
    try:
        arguments = {}
        for argument in sys.argv[1:]:
            key, sign, value = argument.partition("=")
            if not sign:
                raise ConfigError(f"{argument!r} is not key=value")
            arguments[key] = value
        task(arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if os.environ.get(_TRACEBACK) == "1":
            raise
        fail(error)


def compose(*overrides: str) -> dict[str, Any]:
    """The values of train.py's command line with these overrides, not yet checked."""
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dict(hydra.compose("config", overrides=list(overrides)))


def to_dict(composed: DictConfig) -> dict[str, Any]:
    """Plain, resolved values; the `experiment` group has done its work by overriding others."""
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key not in ("experiment", "hydra")])
    values = OmegaConf.to_container(own, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def explain(error: BaseException) -> str:
    """The message of an error; for Hydra's, with the nearest key or option."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if extra := _LAUNCHERS.get(choice):
            return f'{group}={choice} needs a package: pip install "ropewalk[{extra}]"'
        return f"{group}={choice}: there is no such option" + nearest(choice, error.options or [])
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        key, parent = str(cause.full_key), cause.parent_node
        word = key.rpartition(".")[2]
        siblings = [str(k) for k in parent] if isinstance(parent, DictConfig) else []
        hint = nearest(word, siblings, key.removesuffix(word))
        if isinstance(parent, DictConfig) and "did you mean" not in hint:  # perhaps it belongs to another section
            root: Any = OmegaConf.to_container(parent._get_root(), resolve=False)
            there = [k for k in flatten(root) if k.endswith(f".{word}")]
            hint = f"; did you mean {there[0]}?" if there else hint
        return f"{key}: there is no such key{hint}"
    return str(error).strip()
