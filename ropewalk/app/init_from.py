"""Starting from a trained model: its configuration lies beneath the user's choices, merged by Hydra; its weights."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conf.errors import ConfigError
from conf.files import read_json
from conf.schema import Config
from data.base import Data, build_data
from data.text import TextData
from model import serialization
from model.gpt import GPT
from ropewalk import hf
from ropewalk.app.cli import TRAIN, composed, encoding, plain, quoted, recompose
from ropewalk.app.resolve import (
    Options,
    base_model,
    check,
    load_config,
    original_len,
    readable,
    resolve,
    shared_options,
    variants,
    with_variants,
)  # fmt: skip
from ropewalk.run.directory import RunDir, data_options, find, read_environment, steps_in
from ropewalk.training import checkpoints
from ropewalk.training.ranks import assign


def train_values(*overrides: str) -> dict[str, Any]:
    """The values of train.py's command line with these overrides, not yet checked."""
    with composed(TRAIN, *overrides) as config:
        return merged(plain(config))


def merged(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that Hydra has composed, over those of the model that `init_from` names, if any.

    From that model come its architecture, encoding and tokenizer, unless the user chose others, and the options that
    both encodings have, but for the scale.

    Raises ValueError: there is no such model, a choice contradicts its weights, or they belong to another family of
    encodings.
    """
    if values["init_from"] is None:
        return values | {"pe": encoding(values.get("pe", {}))}
    source = str(values["init_from"])
    base = base_model(source)
    groups = {"model": base["model"], "pe": base["pe"]}
    # Which encoding is chosen decides which options it shares with the base model's: so Hydra composes twice.
    chosen = recompose({}, groups).get("pe", {})
    beneath = {
        "pe": shared_options(base, encoding(chosen)),
        "data": _tokenizer_of(source, values["data"]),
    }
    if not values["trainer"]["max_steps"]:  # without training the weights stay those of their own length
        beneath["train_len"] = base["train_len"]
    values = recompose(beneath, groups)
    values["pe"] = encoding(values["pe"])
    if not values["init_partial"]:
        _check_fit(source, base, values)
    return values


def _tokenizer_of(source: str, data: Options) -> dict[str, Any]:
    """The tokenizer of the model `source`, for data that have one."""
    if source.startswith("hf:"):
        theirs: Options = {"tokenizer": source}
    else:
        theirs = data_options(find(source), cache_dir="")  # of which only the tokenizer is used
    return {key: value for key, value in theirs.items() if key == "tokenizer" and key in data}


def _check_fit(source: str, base: Options, values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the weights of the model `base` fit the network that `values` describe."""
    for key, value in values["model"].items():
        theirs = base["model"].get(key)
        if value != theirs and key not in ("dropout", "init_std"):  # another value of these fits the same weights
            remedy = "leave it out, or take what fits with init_partial=true"
            raise ConfigError(f"model.{key}={value} contradicts {source}, which has {theirs}: {remedy}")
    readable(base, values["pe"], remedy="init_partial=true starts from them all the same", dropping=True)


def evaluation(path: Path, pe: Options | None) -> Config:
    """Return the configuration of the run at `path`, with the `eval` of the command line over its own.

    With `pe`, which the command line chose, that encoding is the only variant. Raises ValueError: the run is damaged,
    or an encoding cannot read its weights.
    """
    trained = serialization.describe(path)
    values = load_config(path).model_dump()
    # What is read is the network of model.json, which carries a checksum.
    values |= {key: trained[key] for key in ("model", "pe", "train_len")}
    asked = recompose({"eval": values["eval"]}, {})
    cfg = check(values | {"eval": asked["eval"], "runs_dir": str(path.parent), "name": path.name})
    wanted = [chosen_reader(trained, pe)] if pe else cfg.eval.variants or []
    return with_variants(cfg, variants(trained, wanted, max(cfg.eval.lengths)))


def chosen_reader(trained: Options, pe: Options) -> dict[str, Any]:
    """The encoding `pe` of a program's command line, as one of the `variants` of a trained model."""
    values = recompose({"pe": shared_options(trained, encoding(pe))}, {})
    return variants(trained, [encoding(values["pe"])])[0]


def opened(run: str | Path, cache_dir: str = "prepared", step: int | None = None) -> Path:
    """Return the directory of a trained run. Any other model becomes a run of 0 steps first, whose path is printed.

    Args:
        run: a run directory, or hf:FOLDER_OR_HUB_ID for a model of transformers.
        step: of the checkpoint to take; None: the final weights, or the newest checkpoint of a run that was stopped.

    Raises ValueError: there is no such model or checkpoint, or it cannot be read.
    """
    source = str(run)
    if source.startswith("hf:"):
        base = base_model(source)
        places = f"init_from={quoted(source)}", f"data.cache_dir={quoted(cache_dir)}"
        cfg = resolve(train_values(*places, "trainer.max_steps=0"))
        fill = partial(load_weights, base=base, partial=False)
        return _run_of(cfg, base, fill, made_of=hf.read_model(source).identity(), length=base["original_len"])
    path = find(source)
    steps = steps_in(path / "checkpoints")
    if step is None and ((path / "training.json").is_file() or not steps):
        return path
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(f"{path} has no checkpoint of step {step}: its steps are {steps}")
    trained = load_config(path)
    base = base_model(trained.init_from)
    cfg = _of_checkpoint(trained, path, step, cache_dir)
    load = partial(_load_checkpoint, path / "checkpoints", step)
    return _run_of(
        cfg,
        base,
        load,
        made_of=read_environment(path).run_id,
        length=original_len(trained, base),
    )


def _of_checkpoint(cfg: Config, path: Path, step: int, cache_dir: str) -> Config:
    """The configuration of a run of 0 steps that has the weights of a checkpoint of the run at `path`."""
    values = cfg.model_dump()
    values["trainer"]["max_steps"] = 0
    values["eval"]["at"] = []
    own = {
        "name": f"{path.name}-step{step}",
        "runs_dir": str(path.parent),
        "init_from": f"{path}@{step}",
        "stages": [],
        "data": data_options(path, cache_dir),
    }
    return check(values | own)


def _load_checkpoint(folder: Path, step: int, net: GPT) -> None:
    checkpoints.resume(folder, net, torch.optim.AdamW(net.parameters()), only=step)


def _run_of(cfg: Config, base: Options, fill: Callable[[GPT], Any], made_of: str, length: int) -> Path:
    """Return the directory of the run of 0 steps `cfg`; make it of the weights that `fill` gives a network.

    Args:
        base: the model that the weights began with, if any.
        made_of: tells them from later ones under the same name: the hash of a model's files, or the run_id of a run.
        length: their `original_len`.
    """
    run = RunDir(cfg)
    run.check()
    if not (run.path / serialization.DESCRIPTION).is_file():
        data = build_data(cfg.data)
        net = GPT(cfg.model, cfg.pe, vocab_size=vocab_size(data, base), train_len=cfg.train_len)
        fill(net)
        data.prepare()
        identity = data.identity()
        with run.lock():
            run.create(identity | {"made_of": made_of}, data.tokenizer_files())
            serialization.save(net, run.path, pe=cfg.pe, tokenizer=identity, original_len=length)
    # None: an older version has made the run, and nothing tells its weights from others.
    elif read_json(run.path / "data.json").get("made_of") not in (None, made_of):
        raise ConfigError(f"{run.path} holds earlier weights of {cfg.init_from}: rename or delete it, and try again")
    print(f"{cfg.init_from} is the run {run.path}")
    return run.path


def vocab_size(data: Data, base: Options) -> int:
    """Return the vocabulary size of a network that starts from the model `base`, if any.

    The data may use fewer tokens than the model has, and their tokenizer may have more special ones, which no text has.
    Raises ConfigError: the data have other tokens.
    """
    if not base:
        return data.vocab_size
    tokenizer, size = base.get("tokenizer"), int(base["vocab_size"])
    differs = tokenizer and not data.tokenizer_identity().items() <= tokenizer.items()
    if differs or _largest_id(data) >= size:
        what = f"{base['source']} has a vocabulary of {size} tokens, the data another one of {data.vocab_size}"
        remedy = "leave out data.tokenizer, so that it is the model's own, or choose its data"
        raise ConfigError(f"{what}: {remedy}; of a tokenizer with tokens that the model lacks, remove these")
    return size


def _largest_id(data: Data) -> int:
    """The largest token id in any text of `data`: special tokens are in none, but for those at its start and end."""
    if not isinstance(data, TextData):
        return data.vocab_size - 1
    of_text = int(data.encoder.token_bytes.nonzero().max())
    return max(of_text, data.encoder.eot, data.text_start or 0)


def load_weights(net: GPT, base: Options, *, partial: bool) -> list[str]:
    """Give `net` the weights of the model `base`; returns the tensors that keep their initial values.

    With `partial` the tensors that fit no other are left out. Raises ConfigError: the weights cannot be read, one does
    not fit, or with `partial` none does; names them.
    """
    source = base["source"]
    if source.startswith("hf:"):
        weights = hf.read_model(source).state_dict()
    else:
        weights = serialization.read_weights(source, base)
    wrong = serialization.mismatched_tensors(net, weights)
    if wrong and not partial:
        reason = f"{', '.join(wrong[:5])} differ in name or shape; init_partial=true takes those that fit"
        raise ConfigError(f"the weights of {source} do not fit: {reason}")
    if not weights.keys() - wrong:
        raise ConfigError(f"none of the weights of {source} fits")
    tensors = net.state_dict()
    for name in weights.keys() - wrong:
        assign(tensors[name], weights[name])
    return [name for name in wrong if name in tensors]
