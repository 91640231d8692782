"""Starting from a trained model: its configuration lies beneath the user's choices, in a merge that Hydra makes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.schema import Config, ConfigError
from data.base import build_data
from model import serialization
from model.gpt import GPT
from ropewalk.app.cli import composed, encoding, plain, quoted, recipe, recompose
from ropewalk.app.resolve import check, load_config, resolve, with_variants
from ropewalk.app.run_dir import RunDir, data_options, find
from ropewalk.app.trained import (
    Options,
    base_model,
    divided,
    load_weights,
    original_len,
    readable,
    shared_options,
    variants,
    vocab_size,
)
from ropewalk.training import checkpoints

_OF_TRAINING = ("dropout", "init_std")  # of the architecture: another value fits the same weights


def train_values(*overrides: str) -> dict[str, Any]:
    """The values of train.py's command line with these overrides, not yet checked."""
    with composed("config", *overrides) as config:
        return merged(plain(config))


def merged(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that Hydra has composed, over those of the model that `init_from` names.

    Without such a model, those of the experiment that suits the data lie beneath the command line: see `recipe`.

    From that model come its architecture, encoding and tokenizer, unless the user chose others, and the options that
    both encodings have, but for the scale.

    Raises ValueError: there is no such model, a choice contradicts its weights, or they belong to another family of
    encodings.
    """
    if values["init_from"] is None:
        experiment = recipe(None)
        if experiment:
            values = recompose({}, {}, *experiment)
        return values | {"pe": encoding(values.get("pe", {}))}
    source = str(values["init_from"])
    base = base_model(source)
    groups = {"model": base["model"], "pe": base["pe"]}
    # Which encoding is chosen decides which options it shares with the base model's: so Hydra composes twice.
    chosen = recompose({}, groups).get("pe", {})
    beneath = {"pe": shared_options(base, encoding(chosen)), "data": _tokenizer_of(source, values["data"])}
    values = recompose(beneath, groups, *recipe(source))
    values["pe"] = encoding(values["pe"])
    if not values["init_partial"]:
        _check_fit(source, base, values)
    seed = f"-s{values['seed']}" if values["seed"] else ""
    name = f"{Path(source).name}-{values['pe'].get('name')}-{values['train_len']}{seed}"
    return values | {"name": values["name"] or name}


def _tokenizer_of(source: str, data: Options) -> dict[str, Any]:
    """The tokenizer of the model `source`, for data that have one."""
    run, _ = divided(source)
    given = {"tokenizer": source} if source.startswith("hf:") else data_options(find(run), "")
    return {"tokenizer": given["tokenizer"]} if "tokenizer" in data and "tokenizer" in given else {}


def _check_fit(source: str, base: Options, values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the weights of the model `base` fit the network that `values` describe."""
    for key, value in values["model"].items():
        theirs = base["model"].get(key)
        if value != theirs and key not in _OF_TRAINING:
            remedy = "leave it out, or take what fits with init_partial=true"
            raise ConfigError(f"model.{key}={value} contradicts {source}, which has {theirs}: {remedy}")
    readable(base, values["pe"], remedy="init_partial=true starts from them all the same", dropping=True)


def evaluation(path: Path, pe: Options | None) -> Config:
    """Return the configuration of the run at `path`, with the `eval` of the command line over its own.

    With `pe`, which the command line chose, that encoding is the only variant. Raises ValueError: the run is damaged,
    or an encoding cannot read its weights.
    """
    run_config = load_config(path)
    trained = serialization.describe(path)
    values = run_config.model_dump()
    reader = chosen_reader(trained, pe)
    asked = recompose({"eval": values["eval"]}, {})
    cfg = check(values | {"eval": asked["eval"], "runs_dir": str(path.parent), "name": path.name})
    wanted = [reader] if reader else cfg.eval.variants or []
    return with_variants(cfg, variants(trained, wanted, max(cfg.eval.lengths)))


def chosen_reader(trained: Options, pe: Options | None) -> dict[str, Any] | None:
    """The encoding `pe` of a program's command line, as one of the `variants` of a trained model."""
    if pe is None:
        return None
    values = recompose({"pe": shared_options(trained, encoding(pe))}, {})
    return variants(trained, [encoding(values["pe"])])[0]


def opened(run: str | Path, cache_dir: str = "prepared", step: int | None = None) -> Path:
    """Return the directory of a trained run. Any other model becomes a run of 0 steps first, whose path is printed.

    Args:
        run: a run directory, RUN@STEP, or hf:FOLDER_OR_HUB_ID for a model of transformers.
        step: of the checkpoint to take; None: the final weights, or the newest checkpoint of a run that was stopped.

    Raises ValueError: there is no such model, or it cannot be read.
    """
    source = str(run)
    if source.startswith("hf:"):
        base = base_model(source)
        options = [f"init_from={quoted(source)}", f"train_len={base['train_len']}", "trainer.max_steps=0"]
        cfg = resolve(train_values(*options, f"data.cache_dir={quoted(cache_dir)}"))
    else:
        folder, step = (source, step) if step is not None else divided(source)
        path = find(folder)
        run_config = load_config(path)
        known = checkpoints.steps_in(path / "checkpoints")
        finished = (path / "training.json").is_file() or not run_config.trainer.max_steps or not known
        if step is None and finished:
            return path
        step = known[-1] if step is None else step
        source = f"{path}@{step}"
        base = base_model(source)
        cfg = _of_checkpoint(run_config, path, source, step, cache_dir)
    directory = RunDir(cfg)
    if not (directory.path / serialization.DESCRIPTION).is_file():
        _import_model(directory, base)
    directory.check()
    print(f"{source} is the run {directory.path}")
    return directory.path


def _of_checkpoint(cfg: Config, path: Path, source: str, step: int, cache_dir: str) -> Config:
    """The configuration of a run of 0 steps that has the weights of a checkpoint of the run at `path`."""
    trainer = cfg.trainer.model_copy(update={"max_steps": 0})
    measured = cfg.eval.model_copy(update={"at": []})
    changes = {"name": f"{path.name}-step{step}", "runs_dir": str(path.parent), "init_from": source, "stages": []}
    options = data_options(path, cache_dir)
    return cfg.model_copy(update=changes | {"trainer": trainer, "eval": measured, "data": options, "overwrite": False})


def _import_model(directory: RunDir, base: Options) -> None:
    """Make a run of 0 steps of the model `base`."""
    cfg = directory.cfg
    data = build_data(cfg.data)
    net = GPT(cfg.model, cfg.pe, vocab_size=vocab_size(data, base), train_len=cfg.train_len)
    load_weights(net, base, partial=False)
    data.prepare(progress=True)
    identity = data.identity()
    with directory.lock():
        directory.create(identity, data.tokenizer_files())
        length = original_len(cfg, base)
        serialization.save(net, directory.path, pe=cfg.pe, tokenizer=identity, original_len=length)
