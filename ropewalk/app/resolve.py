"""Fill in what a configuration leaves open. Only here are data, network and machine asked.

The result is frozen: training, evaluation and config.yaml see only that.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf

from conf.schema import Config, ConfigError, Stage, parse
from data.base import build_data
from data.base import resolve as resolve_data
from data.sampler import micro_batch_size
from model import position
from model.gpt import GPT
from model.position.layer import check_length
from model.position.network import at_scale, max_len_of, scales_of
from model.position.rotary import Rotary
from ropewalk.app.encodings import encoding_findings, resolve_encoding, target_findings
from ropewalk.app.trained import base_model, original_len, variants
from ropewalk.training.distributed import resolve_devices
from ropewalk.training.hardware import Hardware

# What reads the weights of an encoding in an evaluation, unless the user names others. By exact class: an encoding that
# can read RoPE's weights may be wrong for those of a variant.
ZERO_SHOT: dict[type, tuple[str, ...]] = {Rotary: ("yarn",)}


def resolve(values: Mapping[str, Any]) -> Config:
    """Check the values of a run to train, and return its configuration with all options of eval.variants.

    Raises ConfigError: a line for each mistake.
    """
    cfg = check(values)
    trained = cfg.model_dump(include={"model", "pe", "train_len"})
    trained["original_len"] = original_len(cfg, base_model(cfg.init_from))
    wanted = cfg.eval.variants
    if wanted is None:
        wanted = _usual_variants(cfg.pe)
    return with_variants(cfg, variants(trained, wanted, max(cfg.eval.lengths)))


def _usual_variants(pe: Mapping[str, Any]) -> list[str | dict[str, Any]]:
    """The encodings that read the weights of `pe` in an evaluation, unless the user names others."""
    if "_target_" not in pe:  # a pattern
        return []
    return [*ZERO_SHOT.get(position.resolve(pe["_target_"]), ())]


def with_variants(cfg: Config, encodings: Iterable[dict[str, Any]]) -> Config:
    """Return `cfg` with these encodings, each once, as its eval.variants."""
    distinct: list[str | dict[str, Any]] = []
    for pe in encodings:
        if pe not in distinct:
            distinct.append(pe)
    return cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"variants": distinct})})


def for_this_machine(cfg: Config) -> Config:
    """Return `cfg` with this machine's precision, kernels and number of devices where it says "auto".

    They are recorded, so that no run continues with another rounding. Raises ValueError: the machine lacks them.
    """
    t = cfg.trainer
    # Kernels sum the gradients of some biases in any order.
    kernels = False if t.deterministic and t.kernels == "auto" else t.kernels
    hardware = Hardware.resolve(accelerator=t.accelerator, precision=t.precision, compile=t.compile, kernels=kernels)
    devices = resolve_devices(t.devices, num_nodes=t.num_nodes, device=hardware.device)
    resolved = {"precision": hardware.precision, "kernels": hardware.kernels, "devices": devices}
    trainer = t.model_copy(update=resolved)
    return cfg.model_copy(update={"trainer": trainer})


def check(values: Mapping[str, Any]) -> Config:
    """Return the plain, resolved `values` as a configuration, with its name and the encoding's null options filled in.

    Raises ValueError: names every unknown key with its nearest known one, and every bad value.
    """
    findings = encoding_findings(values.get("pe")) + target_findings(values.get("data"), "data", resolve_data)
    given = parse(Config, values, findings)
    micro_batch_size(given.trainer.batch_size, given.trainer.grad_accum_steps, 1)
    build_data(given.data)
    pe, net = resolve_encoding(given.pe, given.model, given.train_len)
    cfg = given.model_copy(update={"pe": pe, "name": given.name or _usual_name(given)})
    _check_lengths(cfg, net)
    cfg = cfg.model_copy(update={"stages": [_resolve_stage(cfg, stage, net) for stage in cfg.stages]})
    _check_steps(cfg)
    if cfg.init_optimizer and (cfg.init_partial or cfg.init_from is None or cfg.init_from.startswith("hf:")):
        raise ConfigError("init_optimizer=true needs all weights of a run: init_from=RUN, without init_partial")
    if cfg.trainer.positions != "consecutive":
        _check_positions(cfg, net)
    if cfg.trainer.deterministic and cfg.trainer.kernels is True:
        raise ConfigError("trainer.deterministic=true: kernels add in any order, so it needs trainer.kernels=false")
    if cfg.trainer.compile == "graphs" and (cfg.trainer.strategy == "fsdp" or cfg.trainer.context_parallel > 1):
        raise ConfigError("trainer.compile=graphs: layers of fsdp and context_parallel send messages; use compile=true")
    _check_short_window(cfg, net)
    if cfg.trainer.replicas > 1 and cfg.trainer.strategy != "fsdp":
        asked = f"trainer.replicas={cfg.trainer.replicas}"
        raise ConfigError(f"{asked} needs trainer=fsdp; with ddp every process has a copy of the model")
    if cfg.trainer.context_parallel > 1:
        _check_context_parallel(cfg)
    return cfg


def _usual_name(cfg: Config) -> str:
    name = f"{cfg.pe['name']}-{cfg.data['name']}"
    return f"{name}-s{cfg.seed}" if cfg.seed else name


def _check_lengths(cfg: Config, net: GPT) -> None:
    """Raise ConfigError if no text of the evaluation can be scored, or read by the network `net`."""
    shortest, scored = min(cfg.lengths), cfg.target_tokens
    if shortest < scored:
        raise ConfigError(f"eval.lengths: the shortest has {shortest} tokens, fewer than the {scored} scored: raise it")
    max_len = max_len_of(at_scale(net.encodings, max(scales_of(net.encodings)), cfg.train_len))
    if max_len is not None and max_len < shortest:
        end = f"pe={cfg.pe['name']} has no position beyond {max_len} tokens, and the shortest length is"
        raise ConfigError(f"eval.lengths: {end} {shortest}: lower it, or raise pe.scale")


def _resolve_stage(cfg: Config, stage: Stage, net: GPT) -> Stage:
    """Return `stage` with all options of its encoding.

    Raises ConfigError: its length does not divide that of `cfg`, or its encoding cannot take over the parameters of
    `net`, the network after the stages.
    """
    if cfg.train_len % stage.train_len:
        raise ConfigError(f"stages: train_len={stage.train_len} must divide train_len={cfg.train_len}")
    merged: Any = OmegaConf.to_container(OmegaConf.merge(cfg.pe, stage.pe))
    pe, stage_net = resolve_encoding(merged, cfg.model, stage.train_len)
    if _parameters(stage_net) != _parameters(net):
        raise ConfigError(f"stages: pe={stage.pe} gives another class or other parameters than pe={cfg.pe['name']}")
    if cfg.trainer.positions != "consecutive":
        for encoding in stage_net.distinct_encodings:
            check_length(encoding, cfg.trainer.max_position or 0)
    return stage.model_copy(update={"pe": pe})


def _parameters(net: GPT) -> Any:
    """Which layers share an encoding, of which class, and the names and shapes of all parameters."""
    encodings = [(net.encodings.index(pe), type(pe)) for pe in net.encodings]
    shapes = {name: p.shape for name, p in net.named_parameters()}
    return encodings, shapes


def _check_steps(cfg: Config) -> None:
    """Raise ConfigError if a step that is named does not exist."""
    last = cfg.trainer.max_steps
    in_stages = sum(stage.steps for stage in cfg.stages)
    if cfg.stages and in_stages >= last:
        rest = f"trainer.max_steps={last} leaves none at train_len={cfg.train_len}"
        raise ConfigError(f"stages: they take {in_stages} steps, and {rest}")
    late = [step for step in cfg.eval.at if step > last]
    if late:
        raise ConfigError(f"eval.at={late} is beyond trainer.max_steps={last}: lower it")


def _check_positions(cfg: Config, net: GPT) -> None:
    """Raise ConfigError if trainer.positions does not fit. The encoding of `net` must know all positions drawn."""
    t, max_position = cfg.trainer, cfg.trainer.max_position or 0
    if max_position < cfg.train_len:
        needs = f"trainer.positions={t.positions} needs the length of a text, at least train_len={cfg.train_len}"
        raise ConfigError(f"trainer.max_position={t.max_position}: {needs}")
    if cfg.data.get("documents") == "mask":
        raise ConfigError("data.documents=mask: positions restart in each document; leave out trainer.positions")
    for pe in net.distinct_encodings:
        check_length(pe, max_position)


def _check_short_window(cfg: Config, net: GPT) -> None:
    """Raise ConfigError if trainer.short_window shortens no window of `net`."""
    short = cfg.trainer.short_window
    longest = max(pe.window or 0 for pe in net.encodings)
    if short is not None and longest <= short:
        which = f"pe={cfg.pe['name']} has no window longer than that"
        raise ConfigError(f"trainer.short_window={short}: {which}; leave it out, or set pe.window above it")


def _check_context_parallel(cfg: Config) -> None:
    """Raise ConfigError if texts are asked for that several ranks cannot share."""
    asked = f"trainer.context_parallel={cfg.trainer.context_parallel}"
    if cfg.data.get("documents") == "mask":
        raise ConfigError(f"data.documents=mask: {asked} shares one text, not several documents; set one of them only")
    if cfg.trainer.positions != "consecutive":
        instead = f"trainer.positions={cfg.trainer.positions} stands for long texts with short ones"
        raise ConfigError(f"{asked}: {instead}, which one device can hold; set one of them only")
    for key, unset in (("conv", None), ("key_offset", False)):
        value = getattr(cfg.model, key)
        if value != unset:
            raise ConfigError(f"model.{key}={value}: {asked} does not have the tokens before a piece; set one only")
