"""Reading a trained model with other encodings than its own: pe=A,B and pe.OPTION=VALUE on a script's command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from conf.cli import compose
from conf.parent import check_family, inherit_encoding
from conf.schema import Config, ConfigError, check, nearest
from model import store


def swaps(run: Path, values: Mapping[str, Any], arguments: Mapping[str, str]) -> list[Config]:
    """The configuration `values` of the run with each encoding that `arguments` name; their other keys are ignored.

    Options that an encoding shares with the run's are the run's, but for the scale and those given.

    Raises:
        ConfigError: an encoding or option that does not exist, or one that cannot read these weights.
    """
    parent = store.describe(run)
    names = arguments.get("pe", "")
    given = {key: yaml.safe_load(value) for key, value in arguments.items() if key.startswith("pe.")}
    chosen = [inherit_encoding(parent, compose(f"pe={name}")["pe"], given) for name in names.split(",") if name]
    for key, value in given.items():
        option = key.removeprefix("pe.")
        takers = [pe for pe in chosen if option in pe]
        if not takers:
            known = sorted({f"pe.{option}" for pe in chosen for option in pe})
            why = f"none of pe={names} has this option" if names else "choose encodings to read with, as in pe=yarn,ntk"
            raise ConfigError(f"{key}: {why}" + nearest(key, known))
        for pe in takers:
            pe[option] = value
    found = [check({**values, "pe": pe}) for pe in chosen]
    for cfg in found:
        check_family(parent, cfg, remedy="fine-tune with train.py init_from=... instead")
    return found
