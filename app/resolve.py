"""One place where data and network are asked whether a configuration fits them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import OmegaConf
from pydantic import create_model

from conf.schema import Config, ConfigError, GPTConfig, Name, Section, findings_of, parse
from data.base import build_data
from data.base import resolve as resolve_data
from data.sampler import micro_batch_size
from model import position
from model.gpt import GPT
from model.position.layer import check_length


def check(values: Mapping[str, Any]) -> Config:
    """The configuration in `values`, plain and resolved; `name` and the encoding's null options are filled in. Raises
    ValueError: names every unknown key with its nearest known one, and every bad value."""
    findings = _check_encoding(values.get("pe")) + _check_target(values.get("data"), "data", resolve_data)
    config = parse(Config, values, findings)
    if config.name is None:
        config.name = f"{config.pe['name']}-{config.data['name']}" + (f"-s{config.seed}" if config.seed else "")
    micro_batch_size(config.trainer.batch_size, config.trainer.grad_accum_steps, 1)
    build_data(config.data)
    config.pe, net = resolve_encoding(config.pe, config.model, config.train_len)
    shortest, scored = min(config.lengths), config.target_tokens
    if shortest < scored:
        raise ConfigError(f"eval.lengths: the shortest has {shortest} tokens, fewer than the {scored} scored: raise it")
    with net.at_scale(max(net.scales)):
        if net.max_len is not None and net.max_len < shortest:
            end = f"pe={config.pe['name']} has no position beyond {net.max_len} tokens, and the shortest length is"
            raise ConfigError(f"eval.lengths: {end} {shortest}: lower it, or raise pe.scale")
    t = config.trainer
    _check_stages(config, net)
    if config.init_optimizer and (config.init_partial or str(config.init_from or "hf:").startswith("hf:")):
        raise ConfigError("init_optimizer=true needs all weights of a run: init_from=RUN, without init_partial")
    if t.positions != "consecutive":
        if (t.max_position or 0) < config.train_len:
            needs = f"trainer.positions={t.positions} needs the length of a text, at least train_len={config.train_len}"
            raise ConfigError(f"trainer.max_position={t.max_position}: {needs}")
        if config.data.get("documents") == "mask":
            raise ConfigError("data.documents=mask: positions begin anew in each document; leave out trainer.positions")
        for pe in net.distinct_encodings:
            check_length(pe, t.max_position or 0)
    if late := [step for step in config.eval.at if step > t.max_steps]:
        raise ConfigError(f"eval.at={late} is beyond trainer.max_steps={t.max_steps}: lower it")
    return config


def _check_stages(config: Config, net: GPT) -> None:
    """Fill in all options of the stages' encodings. Raises ConfigError: a stage does not fit the network `net`."""

    def weights(net: GPT) -> Any:  # which layers share an encoding, and the names and shapes of parameters
        kinds = [(net.encodings.index(pe), type(pe)) for pe in net.encodings]
        return kinds, {name: p.shape for name, p in net.named_parameters()}

    for stage in config.stages:
        if config.train_len % stage.train_len:
            raise ConfigError(f"stages: train_len={stage.train_len} must divide train_len={config.train_len}")
        merged: Any = OmegaConf.to_container(OmegaConf.merge(config.pe, stage.pe))
        stage.pe, other = resolve_encoding(merged, config.model, stage.train_len)
        if weights(other) != weights(net):
            raise ConfigError(f"stages: pe={stage.pe} is of another kind than pe, or has other parameters")
        for pe in other.distinct_encodings if config.trainer.positions != "consecutive" else ():
            check_length(pe, config.trainer.max_position or 0)
    steps, last = sum(stage.steps for stage in config.stages), config.trainer.max_steps
    if config.stages and steps >= last:
        raise ConfigError(f"stages: their {steps} steps leave none of trainer.max_steps={last} for train_len")


def resolve_encoding(pe: Mapping[str, Any], model: GPTConfig, train_len: int) -> tuple[dict[str, Any], GPT]:
    """The checked options `pe`, each null replaced by what the encoding takes for it; and the network, on "meta".
    Raises ValueError: an option is unknown, of another type, or out of range."""
    if findings := _check_encoding(pe):
        raise ConfigError("\n".join(findings))
    with torch.device("meta"):
        net = GPT(model, pe, vocab_size=1, train_len=train_len)
    instances = dict(zip(pe.get("pattern", [""]), net.encodings, strict=False))
    parts = {}
    for name, own in position.parts(pe).items():
        options = {**own, **position.checked_options(own)}
        parts[name] = {k: getattr(instances.get(name), k, None) if v is None else v for k, v in options.items()}
    return dict(parts.get("", {**pe, **parts})), net


def _check_encoding(pe: Any) -> list[str]:
    if not isinstance(pe, Mapping) or "pattern" not in pe:
        return _check_target(pe, "pe", position.resolve)
    parts = position.parts(pe)
    own = create_model("Pattern", __base__=Section, name=(Name, ...), pattern=(list[Name], ...))
    findings = findings_of(own, {key: value for key, value in pe.items() if key not in parts}, "pe.")
    return findings + [f for name, part in parts.items() for f in _check_target(part, f"pe.{name}", position.resolve)]


def _check_target(values: Any, key: str, resolve: Callable[[str], type]) -> list[str]:
    """What is wrong with the options of a section that has a `_target_`."""
    if not isinstance(values, Mapping) or "_target_" not in values:
        return [f"{key} needs a _target_: choose it by its group, as in {key}{'.pe' * ('.' in key)}=NAME"]
    try:
        options = position.options_of(resolve(str(values["_target_"])))
    except ValueError as error:
        return [str(error)]
    schema: type[Section] = create_model("Target", __base__=Section, name=(Name, ...), **options)  # type: ignore
    return findings_of(schema, {k: v for k, v in values.items() if k != "_target_"}, f"{key}.")
