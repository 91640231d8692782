"""Starting from a trained model: its configuration lies beneath the user's choices, in a merge that Hydra makes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from conf.schema import Config, ConfigError
from data.base import build_data
from model import serialization
from model.gpt import GPT
from ropewalk.app.cli import composed, encoding, experiment_of_data, plain, quoted, recompose
from ropewalk.app.encodings import Options
from ropewalk.app.resolve import check, resolve, with_variants
from ropewalk.app.run_dir import RunDir, data_options, find, load_config
from ropewalk.app.trained import (
    base_model,
    load_weights,
    original_len,
    readable,
    shared_options,
    variants,
    vocab_size,
)

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
    return values | {"name": values["name"] or _name_of_extension(source, values)}


def _tokenizer_of(source: str, data: Options) -> dict[str, Any]:
    """The tokenizer of the model `source`, for data that have one."""
    if "tokenizer" not in data:
        if not source.startswith("hf:"):
            find(source)
        return {}
    if source.startswith("hf:"):
        return {"tokenizer": source}
    options = data_options(find(source), "")
    return {"tokenizer": options["tokenizer"]} if "tokenizer" in options else {}


def _check_fit(source: str, base: Options, values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the weights of the model `base` fit the network that `values` describe."""
    for key, value in values["model"].items():
        theirs = base["model"].get(key)
        if value != theirs and key not in _OF_TRAINING:
            remedy = "leave it out, or take what fits with init_partial=true"
            raise ConfigError(f"model.{key}={value} contradicts {source}, which has {theirs}: {remedy}")
    readable(base, values["pe"], remedy="init_partial=true starts from them all the same", dropping=True)


def _name_of_extension(source: str, values: Mapping[str, Any]) -> str:
    name = f"{Path(source).name}-{values['pe'].get('name')}-{values['train_len']}"
    return f"{name}-s{values['seed']}" if values["seed"] else name


def recipe(source: str | None) -> list[str]:
    """The experiment that is taken where none is chosen, beneath the command line; empty: none.

    Data with an experiment of their own name take that one: it holds what suits them. A run that starts from a model of
    transformers takes a short fine-tuning.

    Args:
        source: what `init_from` names.
    """
    choices = HydraConfig.get().runtime.choices
    if choices.get("experiment"):
        return []
    if source is not None:
        return ["experiment=extend"] if source.startswith("hf:") else []
    experiment = experiment_of_data(choices)
    return [f"experiment={experiment}"] if experiment else []


def evaluation(path: Path, pe: Options | None) -> Config:
    """Return the configuration of the run at `path`, with the `eval` of the command line over its own.

    With `pe`, which the command line chose, that encoding is the only variant. Raises ValueError: the run is damaged or
    has not finished training, or an encoding cannot read its weights.
    """
    run_config = load_config(path)
    trained = serialization.describe(path)
    if run_config.trainer.max_steps and not (path / "training.json").is_file():
        # The weights may be those of a shorter training, which is being continued.
        raise ConfigError(f"{path} has not finished training: the same command of train.py resumes it")
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


def opened(run: str | Path, cache_dir: str = "prepared") -> Path:
    """Return the run directory `run`; or one of 0 steps in runs/, made of the model of transformers that `run` names.

    Raises ValueError: there is neither, or the model cannot be read.
    """
    if not str(run).startswith("hf:"):
        return find(run)
    base = base_model(str(run))
    overrides = [f"init_from={quoted(str(run))}", f"train_len={base['train_len']}", "trainer.max_steps=0"]
    cfg = resolve(train_values(*overrides, f"data.cache_dir={quoted(cache_dir)}"))
    directory = RunDir(cfg)
    if not (directory.path / serialization.DESCRIPTION).is_file():
        _import_model(directory, base)
    directory.check()
    print(f"{run} is the run {directory.path}")
    return directory.path


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
