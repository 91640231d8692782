"""The configuration of a run: what was typed, over the model that it starts from, over what Hydra has composed."""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from conf.errors import ConfigError, flatten
from conf.options import CONF_DIR, encoding, file_of, options_of, over, with_parts
from conf.schema import Config
from ropewalk.app.compose import composed, plain
from ropewalk.app.resolve import (
    Options,
    base_model,
    check_readable,
    completed,
    load_config,
    resolve,
    shared_options,
    variants,
    with_options_of,
    with_variants,
    with_windows_in_tokens,
)
from ropewalk.run.directory import data_options, find
from ropewalk.run.processes import started_by


def train_values(*overrides: str) -> dict[str, Any]:
    """The values of train.py's command line with these overrides, not yet checked."""
    with composed("train", *overrides) as config:
        return merged(config)


def configure(config: DictConfig) -> Config:
    """Return the configuration of a run, checked, with nothing left open but what a machine decides.

    On rank zero prints which settings a published model brings, and a warning if the learning rate never leaves its
    warm-up.

    Args:
        config: what Hydra has composed from conf/train.yaml.

    Raises ValueError: a line for each mistake.
    """
    cfg = resolve(merged(config))
    if started_by().rank == 0 and _takes_extend(config):
        print("using the settings of experiment=extend where you gave none")
    warmup, steps = cfg.optim.warmup_steps, cfg.trainer.max_steps
    if started_by().rank == 0 and warmup >= steps > 0:
        print(f"warning: in {steps} steps the learning rate never leaves its warm-up of {warmup}", file=sys.stderr)
    return cfg


def merged(config: DictConfig) -> dict[str, Any]:
    """Return the values that Hydra has composed, over which come those of the model `init_from`, if there is one.

    What the user typed holds, or else the model's architecture, encoding, tokenizer and split of the data. An encoding
    that is chosen takes over the options that both have, but for the scale. A model of transformers brings a short
    fine-tuning.

    Raises ValueError: there is no such model, a choice contradicts its weights, or they belong to another family of
    encodings.
    """
    values = plain(config)
    pe = values.get("pe", {})
    if values["init_from"] is None:
        return values | {"pe": encoding(pe)}
    source = str(values["init_from"])
    base: Options = base_model(source)
    chosen = typed()
    # Without training the weights stay those of their own length.
    if not values["trainer"]["max_steps"] and "train_len" not in chosen:
        values["train_len"] = base["train_len"]
    base = with_windows_in_tokens(base, values["train_len"])
    values["pe"] = _chosen_encoding(base, pe, chosen)
    of_model = {
        "model": base["model"],
        "data": _data_of(source, values["data"]),
        "pe": shared_options(base, values["pe"], _of_encoding(chosen)),
    }
    if _takes_extend(config):
        of_model |= options_of("experiment", "extend")
    # Of these groups an option that is chosen keeps what it does not share with the model; one of `model` all.
    values = over(of_model, values, chosen - {"pe", "data", "optim", "trainer"})
    if not values["init_partial"]:
        _check_fit(source, base, values)
    return values


def _takes_extend(config: DictConfig) -> bool:
    """Whether a run starts from a model of transformers, and no experiment is chosen: it is a short fine-tuning."""
    return str(config.init_from).startswith("hf:") and "experiment" not in typed()


def _chosen_encoding(base: Options, pe: Options, chosen: Collection[str]) -> dict[str, Any]:
    """All options of the encoding `pe` of a program, or, if none is among what was `chosen`, of that of the model."""
    if "pe" not in chosen:
        pe = with_parts(_among(chosen, pe, "pe."), base["pe"])
    return encoding(pe)


def _among(keys: Collection[str], values: Options, prefix: str) -> dict[str, Any]:
    """Those of the values, also within sections, whose key, with dots and after the prefix, is among the keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            section = _among(keys, value, f"{prefix}{key}.")
            if section:
                found[key] = section
        elif prefix + key in keys:
            found[key] = value
    return found


def _of_encoding(keys: Collection[str]) -> set[str]:
    """Those of the keys that are options of the encoding, without their prefix."""
    return {key.removeprefix("pe.") for key in keys if key.startswith("pe.")}


def typed() -> set[str]:
    """The keys and groups that the user has given: on the command line, by the chosen experiments or a file of theirs.

    The latter is that of a program of their own, or of --config-name.

    Raises ConfigError: Hydra runs no program, and so has not noted what was given.
    """
    if not HydraConfig.initialized():
        raise ConfigError("init_from=... within `config` needs a program of Hydra's: give ropewalk.train the overrides")
    program = HydraConfig.get()
    keys = _given_by("", str(program.job.config_name).removesuffix(".yaml"))
    for override in OverridesParser.create().parse_overrides([*program.overrides.task]):
        keys |= flatten({override.key_or_group: override.value()}).keys()
    chosen = program.runtime.choices.get("experiment")
    if chosen:
        keys.add("experiment")
        for name in [chosen] if isinstance(chosen, str) else chosen:
            keys |= _given_by("experiment", name)
    return keys


def _given_by(group: str, name: str) -> set[str]:
    """The keys and groups that an option gives, itself or by those that it is built on.

    The configurations of our programs, which are of no group, give none: they hold the defaults.
    """
    path = file_of(group, name)
    if path is None or path.parent == CONF_DIR:
        return set()
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    chosen = values.pop("defaults", [])
    keys = {*flatten(values)}
    # A whole encoding, as in the file of a run: the model's does not lie beneath.
    if "pe._target_" in keys or {"pe.name", "pe.pattern"} <= keys:
        keys.add("pe")
    for entry in chosen:
        if isinstance(entry, Mapping):
            keys |= {key.removeprefix("override ").lstrip("/") for key in entry}
        else:
            keys |= _given_by(group, entry)
    return keys


def _data_of(source: str, data: Options) -> dict[str, Any]:
    """What the run's `data` take over from those of the model `source`: the tokenizer, and whether it begins texts.

    Data of the same class are split alike: of the same files none is validated on that the model was trained on.
    """
    keys = {"tokenizer", "bos"}
    if source.startswith("hf:"):
        theirs: Options = {"tokenizer": source}
    else:
        theirs = data_options(find(source), cache_dir="")
        if theirs["_target_"] == data.get("_target_"):
            keys |= {"val_fraction", "documents"}
    return {key: theirs[key] for key in keys & theirs.keys() & data.keys()}


def _check_fit(source: str, base: Options, values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the weights of the model `base` fit the network that `values` describe."""
    for key, value in values["model"].items():
        theirs = base["model"].get(key)
        if value != theirs and key not in ("dropout", "init_std"):  # another value of these fits the same weights
            raise ConfigError(
                f"model.{key}={value} contradicts {source}, which has {theirs}: "
                "leave it out, or take what fits with init_partial=true"
            )
    check_readable(base, values["pe"], remedy="init_partial=true starts from them all the same", dropping=True)


def evaluation(path: Path, trained: Options, pe: Options | None, asked: Options) -> Config:
    """Return the configuration of the run at `path`; what was typed of `asked`, the program's `eval`, holds.

    With `pe`, which the command line chose, that encoding is the only variant. `trained` is what model.json says.
    Raises ValueError: the run is damaged, or an encoding cannot read its weights.
    """
    values = load_config(path).model_dump()
    # What is read is the network of model.json, which carries a checksum.
    values |= {key: trained[key] for key in ("model", "pe", "train_len")}
    evaluation = over(values["eval"], asked, typed(), "eval.")
    cfg = completed(values | {"eval": evaluation, "runs_dir": str(path.parent), "name": path.name})
    longest_multiple = max(cfg.eval.lengths)
    chosen = (
        [chosen_variant(trained, pe, longest_multiple)]
        if pe
        else variants(trained, cfg.eval.variants or [], longest_multiple)
    )
    return with_variants(cfg, chosen)


def chosen_variant(trained: Options, pe: Options, longest_multiple: float | None = None) -> dict[str, Any]:
    """The encoding `pe` of a program's command line, as one of the `variants` of a trained model.

    Options without an encoding are of the model's own. Unless its scale was typed, it is that of a text of
    `longest_multiple` x train_len.
    """
    chosen = typed()
    pe = _chosen_encoding(trained, pe, chosen)
    return variants(trained, [with_options_of(trained, pe, _of_encoding(chosen), longest_multiple)])[0]
