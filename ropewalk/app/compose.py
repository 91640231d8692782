"""What Hydra composes, for Python: plain values of a command line. Nothing here imports PyTorch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from conf.errors import ConfigError
from conf.options import CONF_DIR, folders
from ropewalk.app.explain import check_overrides, explain


@contextmanager
def composed(name: str, *overrides: str) -> Iterator[DictConfig]:
    """The configuration that Hydra composes from conf/`name`.yaml, also within a program of Hydra that runs already.

    Hydra's globals belong to that program: they are put back. Within the context ${hydra:...} refers to this one. The
    folders in which that program looks for options count here too.

    Raises ConfigError: names the first mistake.
    """
    paths = [f"file://{folder}" for folder in folders() if folder != CONF_DIR]
    search_path = [f"hydra.searchpath=[{','.join(map(quoted, paths))}]"] if paths else []
    outer_hydra, outer_config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            config = hydra.compose(name, [*search_path, *overrides], return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            check_overrides()
            yield config
    except HydraException as error:
        raise ConfigError(explain(error)) from None
    finally:
        GlobalHydra.instance().hydra = outer_hydra
        HydraConfig.instance().cfg = outer_config


def plain(config: DictConfig) -> dict[str, Any]:
    """Plain, resolved values of a program's own keys, without those that are required and not given.

    Raises MissingMandatoryValue: one within a section is not given.
    """
    keys: Any = [key for key in config if key != "hydra" and not OmegaConf.is_missing(config, key)]
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True, throw_on_missing=True)
    return values


def quoted(text: str) -> str:
    """Return `text` as a value of Hydra's command line, which stands for itself whatever characters it has.

    Hydra would compute ${...}: in the files of somebody else's run ${oc.env:NAME} stands for a variable of the user's
    environment, which would then be in files that the user sends on.
    """
    # A backslash before ${ escapes it, and one before that stands for itself.
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return QuotedString(escaped, Quote.single).with_quotes()
