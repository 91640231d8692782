"""Beginning with another model's weights: what a new run inherits, and what it may not change."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from conf.rundir import check_identity
from conf.schema import ConfigError
from data.base import Data
from model import position, store
from model.gpt import GPT, GPTConfig

_NOT_INHERITED = ("name", "_target_", "scale", "train_scale")


def inherit(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The configuration `values`, completed by the model that `init_from` names.

    The architecture is the parent's. The encoding is the parent's too, unless `pe` was given; see `inherit_encoding`.

    Args:
        values: the composed configuration.
        given: keys that the user gave, which are not inherited: "pe", "pe.base", ...

    Raises:
        ConfigError: a key that the user gave contradicts the weights, or they belong to another kind of encoding.
        ValueError: there is no model at `init_from`.
    """
    source = values.get("init_from")
    if source is None:
        return dict(values)
    parent = describe(str(source))
    model = dict(parent["model"])
    for key, value in values["model"].items():
        if value == model.get(key) or not ({"model", f"model.{key}"} & set(given)):
            continue
        if key not in ("dropout", "init_std"):
            raise ConfigError(f"model.{key}={value} contradicts {source}, which has {model.get(key)}: leave it out")
        model[key] = value
    wanted = dict(values["pe"]) if "pe" in given else parent["pe"] | _only_given(values["pe"], given)
    own = inherit_encoding(parent, wanted, given)
    completed = dict(values) | {"model": model, "pe": own}
    if values.get("name") is None:
        completed["name"] = f"{Path(str(source)).name}-{own['name']}-{values['train_len']}"
        if values["seed"]:
            completed["name"] += f"-s{values['seed']}"
    if not values["init_partial"]:
        check_family(parent, own, int(values["train_len"]), remedy="init_partial=true starts from them all the same")
    return completed


def describe(source: str) -> dict[str, Any]:
    """What model.json says of the model that `source` names: a run directory, or hf:FOLDER_OR_HUB_ID.

    Raises:
        ValueError: there is none, or none that can be read.
    """
    if not source.startswith("hf:"):
        return store.describe(Path(source))
    from model.pretrained import load_pretrained

    return load_pretrained(source).describe()


def begin(net: GPT, data: Data, source: str, *, partial: bool) -> list[str]:
    """Give `net` the weights of the model that `source` names; returns the tensors that keep their fresh values.

    Raises:
        ValueError: they cannot be read, do not fit (unless `partial`), or belong to another vocabulary than `data`.
    """
    if source.startswith("hf:"):
        from model.pretrained import load_pretrained

        pretrained = load_pretrained(source)
        if pretrained.vocab_size != data.vocab_size:
            raise ConfigError(
                f"{source} has a vocabulary of {pretrained.vocab_size} tokens, the data one of {data.vocab_size}: "
                f"choose the model's own with data.tokenizer"
            )
        weights = dict(pretrained.net.state_dict())
    else:
        check_identity(Path(source), data.tokenizer_identity())
        weights = store.read_weights(Path(source))
    return store.initialise(net, weights, source, partial=partial)


def keep_tokenizer(source: str, run: Path) -> None:
    """Copy the tokenizer files of the model that `source` names, if it has any, into the run: export needs them."""
    if source.startswith("hf:"):
        from model.pretrained import copy_tokenizer, load_pretrained

        copy_tokenizer(load_pretrained(source), run / "tokenizer")
    elif (Path(source) / "tokenizer").is_dir():
        shutil.copytree(Path(source) / "tokenizer", run / "tokenizer", dirs_exist_ok=True)


def inherit_encoding(parent: Mapping[str, Any], pe: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The encoding `pe` for the weights of `parent` (its model.json): options that both have are the parent's, but for
    the scale and those `given`; original_len is the length at which the parent's line began."""
    inherited = {
        key: value
        for key, value in parent["pe"].items()
        if key in pe and key not in _NOT_INHERITED and f"pe.{key}" not in given
    }
    if "original_len" in pe and "pe.original_len" not in given:
        inherited["original_len"] = parent["pe"].get("original_len") or parent["train_len"]
    return dict(pe) | inherited


def check_family(parent: Mapping[str, Any], pe: Mapping[str, Any], train_len: int, *, remedy: str) -> None:
    """Raise ConfigError if weights trained with the parent's encoding mean nothing to the encoding `pe`."""
    cfg = GPTConfig.model_validate(parent["model"])
    trained = position.build(parent["pe"], cfg.shape(parent["train_len"])).family
    wanted = position.build(pe, cfg.shape(train_len)).family
    if trained != wanted:
        raise ConfigError(
            f"pe={pe['name']} ({wanted}) cannot read weights trained with {parent['pe']['name']} ({trained}); {remedy}"
        )


def _only_given(pe: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in pe.items() if f"pe.{key}" in given}
