"""A trained model to start from or to read: a run of its own, if it is none yet, and its weights."""

from collections.abc import Callable
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
from ropewalk.app.compose import quoted
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import Options, base_model, check, load_config, original_len, resolve
from ropewalk.run.directory import RunDir, data_options, find, read_environment, steps_in
from ropewalk.training import checkpoints
from ropewalk.training.ranks import assign


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
