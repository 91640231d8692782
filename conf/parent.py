"""Beginning with another model's weights: what a new run inherits, and what it may not change."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from conf.rundir import check_identity, read_config
from conf.schema import Config, ConfigError, check
from data.base import Data
from model import position, store
from model.gpt import GPT, GPTConfig

_NOT_INHERITED = ("name", "_target_", "scale", "train_scale", "attention_factor")  # the last belongs to the scale


def inherit(values: Mapping[str, Any], given: Collection[str]) -> Config:
    """The checked configuration in `values`, completed by the model that `init_from` names.

    The architecture is the parent's. The encoding is the parent's too, unless `pe` was given; see `inherit_encoding`.
    A run that has begun can do without its parent: what it inherited is in its own configuration.

    Args:
        values: the composed configuration.
        given: keys that the user gave, which are not inherited: "pe", "pe.base", ...

    Raises:
        ConfigError: as `check`; or there is no model at `init_from`, a key that the user gave contradicts the weights,
            or they belong to another kind of encoding.
        ValueError: the model at `init_from` cannot be read.
    """
    source = values.get("init_from")
    if source is None:
        return check(values)
    try:
        parent = describe(str(source))
    except ValueError:
        if (record := _begun(values, given)) is None:
            raise
        parent = record
    model = dict(parent["model"])
    for key, value in values.get("model", {}).items():
        if value == model.get(key) or not ({"model", f"model.{key}"} & set(given)):
            continue
        if key not in ("dropout", "init_std") and not values["init_partial"]:
            raise ConfigError(
                f"model.{key}={value} contradicts {source}, which has {model.get(key)}: leave it out, or take what "
                f"fits with init_partial=true"
            )
        model[key] = value
    chosen = values.get("pe", {})
    own = inherit_encoding(parent, chosen if "pe" in given else parent["pe"] | _only_given(chosen, given), given)
    cfg = check({**values, "model": model, "pe": own, "name": _name(values, own.get("name"))})
    if not cfg.init_partial:
        check_family(parent, cfg, remedy="init_partial=true starts from them all the same")
    return cfg


def _name(values: Mapping[str, Any], encoding: Any) -> Any:
    """The name of the run, by default after its parent."""
    seed = f"-s{values['seed']}" if values["seed"] else ""
    return values["name"] or f"{Path(values['init_from']).name}-{encoding}-{values['train_len']}{seed}"


def _begun(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any] | None:
    """The recorded configuration of the run that `values` describe, if it has begun with the same parent."""
    if values["overwrite"] or (values["name"] is None and "pe" not in given):  # else the parent would tell its name
        return None
    run = Path(str(values["runs_dir"]), str(_name(values, values.get("pe", {}).get("name"))))
    record = read_config(run) if (run / "config.yaml").is_file() else {}
    return record if record.get("init_from") == values["init_from"] else None


def describe(source: str) -> dict[str, Any]:
    """What model.json says of the model that `source` names: a run directory, or hf:FOLDER_OR_HUB_ID.

    Raises:
        ConfigError: there is none.
        ValueError: there is none that can be read.
    """
    if not source.startswith("hf:"):
        if not Path(source).is_dir():
            raise ConfigError(
                f"init_from={source}: there is no such directory; a model of transformers has hf: before it"
            )
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


def check_family(parent: Mapping[str, Any], cfg: Config, *, remedy: str) -> None:
    """Raise ConfigError if weights trained with the parent's encoding mean nothing to that of `cfg`."""
    with torch.device("meta"):
        trained = position.build(parent["pe"], GPTConfig(**parent["model"]).shape(parent["train_len"])).family
        wanted = position.build(cfg.pe, cfg.model.shape(cfg.train_len)).family
    if trained != wanted:
        raise ConfigError(
            f"pe={cfg.pe['name']} ({wanted}) cannot read weights trained with {parent['pe']['name']} ({trained}); "
            f"{remedy}"
        )


def _only_given(pe: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in pe.items() if f"pe.{key}" in given}
