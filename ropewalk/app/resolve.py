"""Fill in what a configuration leaves open. Only here are data, network and machine asked.

The result is frozen: training, evaluation and config.yaml see only that. Here is also which encodings can read which
weights.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from conf.errors import ConfigError, flatten
from conf.options import encoding, over
from conf.schema import Config, GPTConfig, Stage, parse
from data.base import build_data
from data.sampler import micro_batch_size
from model import position, serialization
from model.gpt import GPT
from model.position.base import NO_ENCODING, in_tokens
from model.position.layer import check_length
from model.position.network import at_scale, family_of, max_len_of, scales_of
from ropewalk import hf
from ropewalk.run.directory import RESTORE, naming_damage, read_config
from ropewalk.training.distributed import resolve_devices
from ropewalk.training.hardware import Hardware
from ropewalk.training.optimizer import make_optimizer

Options = Mapping[str, Any]
_NOT_SHARED = ("name", "_target_", "scale", "train_scale", "attention_factor", "group")  # the last two follow the scale


def resolve(values: Mapping[str, Any]) -> Config:
    """Check the values of a run to train, and return its configuration with all options of eval.variants.

    The training length of the model that it starts from, if shorter, is one of its eval.lengths.

    Raises ConfigError: a line for each mistake.
    """
    cfg = completed(values)
    base = base_model(cfg.init_from)
    if base:
        cfg = _with_length(cfg, base["train_len"])
    trained = cfg.model_dump(include={"model", "pe", "train_len"})
    trained["original_len"] = original_len(cfg, base)
    wanted = cfg.eval.variants
    if wanted is None:
        # Unless the user names encodings, YaRN reads the weights of RoPE. Of exactly this class: what can read RoPE's
        # weights may be wrong for those of a variant.
        is_rope = cfg.pe.get("_target_") == "model.position.rotary.Rotary"  # a pattern has no _target_
        # A window that training fills keeps its scale: see `scales_of`.
        has_room = (in_tokens(cfg.pe.get("window"), cfg.train_len) or math.inf) > cfg.train_len
        wanted = ["yarn"] if is_rope and has_room else []
    if cfg.init_optimizer:
        theirs = _optimizer(read_config(Path(base["source"]))["optim"]["optimizer"])
        if theirs != _optimizer(cfg.optim.optimizer):
            raise ConfigError(
                f"init_optimizer=true: {_optimizer(cfg.optim.optimizer)} cannot go on with the state of {theirs}, "
                f"with which {cfg.init_from} was trained: choose optim as there, or leave out init_optimizer"
            )
    if cfg.optim.optimizer:  # made here only to find mistakes
        _, net = resolve_encoding(cfg.pe, cfg.model, cfg.train_len)
        make_optimizer(net, cfg.optim)
    return with_variants(cfg, variants(trained, wanted, max(cfg.eval.lengths)))


def _optimizer(options: Options | None) -> str:
    """The class of the optimizer with these `optim.optimizer`."""
    return str((options or {}).get("_target_", "torch.optim.AdamW"))


def _with_length(cfg: Config, length: int) -> Config:
    """Return `cfg` with the training length of the model it starts from among eval.lengths: gains are over it."""
    # A shorter text than all others would have fewer targets than the user has asked for.
    shortest = cfg.eval.target_tokens or 1
    if length >= cfg.train_len or length in cfg.lengths or length < shortest:
        return cfg
    lengths = sorted([*cfg.eval.lengths, length / cfg.train_len])
    evaluation = cfg.eval.model_copy(update={"lengths": lengths})
    return cfg.model_copy(update={"eval": evaluation})


def load_config(run: Path) -> Config:
    """Read and check the configuration of a run. Raises ConfigError if the file is damaged."""
    values = read_config(run)
    with naming_damage(run / "config.yaml", RESTORE):
        return completed(values)


def with_variants(cfg: Config, encodings: Sequence[dict[str, Any]]) -> Config:
    """Return `cfg` with these encodings, each once, as its eval.variants."""
    distinct = [pe for i, pe in enumerate(encodings) if pe not in encodings[:i]]
    evaluation = cfg.eval.model_copy(update={"variants": distinct})
    return cfg.model_copy(update={"eval": evaluation})


def for_this_machine(cfg: Config) -> tuple[Config, Hardware]:
    """Return `cfg` with this machine's precision, kernels and number of devices where it says "auto"; and the hardware.

    They are recorded, so that no run continues with another rounding. Raises ValueError: the machine lacks them.
    """
    t = cfg.trainer
    # Kernels sum the gradients of some biases in any order.
    kernels = False if t.deterministic and t.kernels == "auto" else t.kernels
    hardware = Hardware.resolve(
        accelerator=t.accelerator,
        precision=t.precision,
        compile=t.compile,
        kernels=kernels,
    )
    resolved = {
        "precision": hardware.precision,
        "kernels": hardware.kernels,
        "devices": resolve_devices(t.devices, device=hardware.device),
    }
    trainer = t.model_copy(update=resolved)
    return cfg.model_copy(update={"trainer": trainer}), hardware


def completed(values: Mapping[str, Any]) -> Config:
    """Return the plain, resolved `values` as a configuration, with its name and the encoding's null options filled in.

    Raises ValueError: names every unknown key with its nearest known one, and every bad value.
    """
    given = parse(Config, values)
    micro_batch_size(given.trainer.batch_size, given.trainer.grad_accum_steps, 1)
    build_data(given.data)
    pe, net = resolve_encoding(given.pe, given.model, given.train_len)
    words = [pe["name"], given.data["name"]]
    if given.init_from:
        words = [Path(given.init_from).name, pe["name"], str(given.train_len)]
    seed = f"-s{given.seed}" if given.seed else ""
    name = given.name or "-".join(words) + seed
    cfg = given.model_copy(update={"pe": pe, "name": name})
    stages = [_resolve_stage(cfg, stage, net) for stage in cfg.stages]
    cfg = cfg.model_copy(update={"stages": stages})
    rules = [
        *_rules_of_evaluation(cfg, net),
        *_rules_of_training(cfg),
        *_rules_of_positions(cfg),
        *_rules_of_shared_texts(cfg),
    ]
    contradictions = [message for broken, message in rules if broken]
    if contradictions:
        raise ConfigError("\n".join(contradictions))
    _check_positions(cfg, net)
    return cfg


def _check_positions(cfg: Config, net: GPT) -> None:
    """Raise ConfigError if an encoding of `net` has no position that training may draw."""
    if cfg.trainer.positions != "consecutive":
        for encoding in net.distinct_encodings:
            check_length(encoding, cfg.trainer.max_position or 0)


def _resolve_stage(cfg: Config, stage: Stage, net: GPT) -> Stage:
    """Return `stage` with all options of its encoding.

    Raises ConfigError: its length does not divide that of `cfg`, or its encoding cannot take over the parameters of
    `net`, the network after the stages.
    """
    if cfg.train_len % stage.train_len:
        raise ConfigError(f"stages: train_len={stage.train_len} must divide train_len={cfg.train_len}")
    # A stage may give some options of a pattern's part: the others stay.
    pe, stage_net = resolve_encoding(over(stage.pe, cfg.pe), cfg.model, stage.train_len)
    fits = _sharing_and_classes(stage_net) == _sharing_and_classes(net)
    if not fits or serialization.mismatched_tensors(stage_net, net.state_dict()):
        raise ConfigError(f"stages: pe={stage.pe} gives another class or other parameters than pe={cfg.pe['name']}")
    _check_positions(cfg, stage_net)
    return stage.model_copy(update={"pe": pe})


def _sharing_and_classes(net: GPT) -> list[tuple[int, type]]:
    """Which layers share an encoding, and of which class."""
    return [(net.encodings.index(pe), type(pe)) for pe in net.encodings]


Rules = list[tuple[bool, str]]  # (whether a rule is broken, the message if it is)


def _rules_of_evaluation(cfg: Config, net: GPT) -> Rules:
    """Some text of the evaluation can be scored, and read by `net`; and the steps of eval.at exist."""
    shortest = min(cfg.lengths)
    # The longest text that the network reads, it reads at its largest scale.
    largest_scale = max(scales_of(net.encodings))
    scaled = at_scale(net.encodings, largest_scale)
    max_len = max_len_of(scaled)  # None: no limit
    late = [step for step in cfg.eval.at if step > cfg.trainer.max_steps]
    return [
        (shortest < cfg.target_tokens,
         f"eval.lengths: the shortest has {shortest} tokens, fewer than the {cfg.target_tokens} scored: raise it"),
        (max_len is not None and max_len < shortest,
         f"eval.lengths: pe={cfg.pe['name']} has no position beyond {max_len} tokens, and the shortest length is "
         f"{shortest}: lower it, or raise pe.scale"),
        (cfg.objective != "validation" and round(cfg.objective * cfg.train_len) not in cfg.lengths,
         f"objective={cfg.objective}: it is none of eval.lengths={cfg.eval.lengths}; add it there"),
        (bool(late), f"eval.at={late} is beyond trainer.max_steps={cfg.trainer.max_steps}: lower it"),
    ]  # fmt: skip


def _rules_of_training(cfg: Config) -> Rules:
    """Stages leave steps for the last part, init_optimizer has a run, and what is chosen goes together."""
    t = cfg.trainer
    in_stages = sum(stage.steps for stage in cfg.stages)
    unlike_a_run = cfg.init_partial or cfg.init_from is None or cfg.init_from.startswith("hf:")
    return [
        (bool(cfg.stages) and in_stages >= t.max_steps,
         f"stages: they take {in_stages} steps, and trainer.max_steps={t.max_steps} leaves none after them"),
        (cfg.init_optimizer and unlike_a_run,
         "init_optimizer=true needs all weights of a run: init_from=RUN, without init_partial"),
        (t.deterministic and t.kernels is True,
         "trainer.deterministic=true: kernels add in any order, so it needs trainer.kernels=false"),
        (t.replicas > 1 and t.strategy != "fsdp",
         f"trainer.replicas={t.replicas} needs trainer=fsdp; with ddp every process has a copy of the model"),
    ]  # fmt: skip


def _rules_of_positions(cfg: Config) -> Rules:
    """The positions that a step draws are of a longer text, and of one document."""
    t = cfg.trainer
    positions_drawn = t.positions != "consecutive"
    return [
        (positions_drawn and (t.max_position or 0) < cfg.train_len,
         f"trainer.max_position={t.max_position}: trainer.positions={t.positions} needs the length of a text, at least "
         f"train_len={cfg.train_len}"),
        (positions_drawn and cfg.data.get("documents") == "mask",
         "data.documents=mask: positions restart in each document; leave out trainer.positions"),
    ]  # fmt: skip


def _rules_of_shared_texts(cfg: Config) -> Rules:
    """With trainer.context_parallel nothing is asked for that several ranks cannot share."""
    t = cfg.trainer
    shares = t.context_parallel > 1
    asked = f"trainer.context_parallel={t.context_parallel}"
    return [
        (shares and cfg.data.get("documents") == "mask",
         f"data.documents=mask: {asked} shares one text, not several documents; set only one of them"),
        (shares and t.positions != "consecutive",
         f"trainer.positions={t.positions}: {asked} has long texts, which this imitates; set only one of them"),
        (shares and bool(cfg.model.conv or cfg.model.key_offset),
         f"model.conv and model.key_offset need the tokens before a piece, which {asked} does not have; set only one"),
    ]  # fmt: skip


def resolve_encoding(pe: Options, model: GPTConfig, train_len: int) -> tuple[dict[str, Any], GPT]:
    """Return the options `pe` with what the encodings take for null and "auto", and the network on the device "meta".

    Raises ValueError: an option is unknown, of another type or out of range.
    """
    with torch.device("meta"):
        net = GPT(model, pe, vocab_size=1, train_len=train_len)
    if "pattern" not in pe:
        return net.encodings[0].options, net
    # The layers repeat the pattern, so its first occurrence has an instance of each part that is used.
    parts = {name: part.options for name, part in zip(pe["pattern"], net.encodings, strict=False)}
    return {**pe, **parts}, net


def base_model(source: str | None) -> dict[str, Any]:
    """Return what model.json says of the model `source`, and its `source`; nothing for None.

    Args:
        source: a run; or hf:FOLDER_OR_HUB_ID for a model of transformers, of which it is what model.json would say.

    Raises ValueError: there is no such model, or it cannot be read.
    """
    if source is None:
        return {}
    if source.startswith("hf:"):
        description = hf.read_model(source).describe()
    else:
        description = serialization.describe(source)
    return description | {"source": source}


def with_windows_in_tokens(base: Options, train_len: int) -> Options:
    """The model `base`, from which a run with this train_len starts: of another length, its windows are in tokens.

    As shares they would be of the run's length, and the run would not begin with what the model has learned.
    """
    if not base or base["train_len"] == train_len:
        return base
    by_name = {}
    for name, part in position.parts(base["pe"]).items():
        by_name[name] = {**part, "window": in_tokens(part.get("window"), base["train_len"])}
    return {**base, "pe": by_name.get("", {**base["pe"], **by_name})}


def original_len(cfg: Config, base: Options) -> int:
    """The longest text that the weights of a run, or those it began with, were trained to read without a scaling."""
    # A run of 0 steps gives a trained model other texts: nothing was trained at the run's own length.
    own_len = 0 if base and not cfg.trainer.max_steps else cfg.train_len
    return max(own_len, base.get("original_len", 0))


def shared_options(base: Options, chosen: Options, given_keys: Collection[str]) -> dict[str, Any]:
    """The options of the encoding `chosen` that the encoding of the model `base` decides, part by part of a pattern.

    A pattern of the same parts has them in the same layers.

    Args:
        given_keys: those of `chosen` that the user gave, with dots.

    Raises ConfigError: of a part that the base does not have, an option would have to be that of several parts.
    """
    base_parts = position.parts(base["pe"])
    shared: dict[str, Any] = {}
    # Which layers have which part, if the parts have the same names.
    pattern = base["pe"].get("pattern")
    if pattern and set(pattern) <= position.parts(chosen).keys():
        shared["pattern"] = pattern
    for name, part in position.parts(chosen).items():
        if not isinstance(part, Mapping):
            continue  # `build_encodings` says what is wrong with it
        base_part = base_parts.get(name, base_parts.get(""))
        own = {*_NOT_SHARED}
        # Each class chooses a near_window of its own, which does not matter to the weights.
        if (base_part or {}).get("_target_") != part.get("_target_"):
            own.add("near_window")
        if base_part is None:
            prefix = f"{name}." if name else ""
            open_keys = [key for key in part if prefix + key not in given_keys and key not in own]
            base_part = _common(base_parts, open_keys, chosen["name"])
        shared[name] = _decided_by(base_part, part.keys() - own)
        if "original_len" in part:
            shared[name]["original_len"] = base_part.get("original_len") or base["original_len"]
    return shared.get("", shared)


def _decided_by(part: Options, keys: Collection[str]) -> dict[str, Any]:
    """Those of the `keys` that a part of the model decides. What it leaves off, such as a window, may be chosen."""
    return {key: value for key, value in part.items() if key in keys and value not in (None, "none")}


def _common(parts: Mapping[str, Options], keys: Iterable[str], pe_name: str) -> dict[str, Any]:
    """Those options of a pattern, by `keys`, on which all parts that have them agree.

    Raises ConfigError: two parts have different values, of which the encoding `pe_name` would lose one.
    """
    common = {}
    for key in keys:
        values = {name: part[key] for name, part in parts.items() if key in part}
        if not values:
            continue
        common[key], *others = values.values()
        if any(value != common[key] for value in others):
            told = ", ".join(f"{name}: {value}" for name, value in values.items())
            raise ConfigError(
                f"pe={pe_name}: the parts of the model differ in {key} ({told}): choose a pattern of such parts, as "
                f"pe=hybrid is, or give pe.{key}=..."
            )
    return common


def with_options_of(
    trained: Options, pe: Options, given_keys: Collection[str], longest_multiple: float | None = None
) -> dict[str, Any]:
    """The options `pe` of an encoding that is to read a trained model: `given_keys` stay, all others are the model's.

    Args:
        trained: as of `variants`.
        given_keys: with dots, those that the user gave: on a command line (`chosen_variant`) or in a mapping.
        longest_multiple: as of `variants`. A scale that was given stays.
    """
    options = over(shared_options(trained, pe, given_keys), pe, given_keys)
    if longest_multiple:
        options = scaled_to(longest_multiple, trained, options, given_keys)
    return options


def options_for_model(
    trained: Options, spec: str | Options, where: str = "pe", longest_multiple: float | None = None
) -> dict[str, Any]:
    """Return all options of the encoding `spec`, which takes over those of a trained model that it does not give.

    Args:
        trained: as of `variants`; empty: there is no such model.
        spec: as in `variants`.
        where: the key to name in messages.
    """
    given = {"pe": spec} if isinstance(spec, str) else spec
    pe = encoding(given, where)
    if not trained or "pe" not in given:
        return pe
    return with_options_of(trained, pe, flatten(given), longest_multiple)


def variants(
    trained: Options, wanted: Iterable[str | Options], longest_multiple: float | None = None
) -> list[dict[str, Any]]:
    """Return all options of the encodings `wanted`, which read the weights of a trained model zero-shot.

    Options that are not given are those of the trained encoding, where it has them.

    Args:
        trained: model, pe, train_len and original_len of the trained model, as in model.json.
        wanted: each a name, {pe: NAME, OPTION: VALUE, ...}, or all options already.
        longest_multiple: the longest text / train_len, which decides the scale; None: as in the YAML.

    Raises ConfigError: an encoding or option does not exist, or an encoding cannot read these weights.
    """
    encodings = [options_for_model(trained, spec, longest_multiple=longest_multiple) for spec in wanted]
    return [check_readable(trained, pe, remedy="fine-tune with train.py init_from=... instead") for pe in encodings]


def scaled_to(longest_multiple: float, trained: Options, pe: Options, given_keys: Collection[str]) -> dict[str, Any]:
    """The options `pe` with the scales that a text of `longest_multiple` x train_len needs.

    A scale among the `given_keys`, with dots, stays, and so does an encoding or part without one.
    """
    scales = {}
    for name, part in position.parts(pe).items():
        key = f"{name}.scale" if name else "scale"
        # dynamic_ntk's is 1 for any length
        if isinstance(part, Mapping) and key not in given_keys and part.get("scale", 1) > 1:
            original_len = part["original_len"] or trained["train_len"]  # of a null that was given: as in `Scaled`
            scales[name] = {"scale": max(1.0, longest_multiple * trained["train_len"] / original_len)}
    return over(scales.get("", scales), pe)


def check_readable(trained: Options, pe: Options, *, remedy: str, dropping: bool = False) -> dict[str, Any]:
    """Return all options of the encoding `pe`, which is to read the weights of the trained model.

    With `dropping` NoPE may take over, in some layers or all, from an encoding without parameters, to be trained on:
    DroPE.

    Raises ConfigError: this encoding cannot read these weights; names the `remedy`.
    """
    model, length = parse(GPTConfig, trained["model"]), trained["train_len"]
    _, old_net = resolve_encoding(trained["pe"], model, length)
    options, net = resolve_encoding(pe, model, length)
    family = family_of(net.encodings)
    old_family = family_of(old_net.encodings)
    # Options decide the shapes of parameters, and whether layers share them.
    wrong = serialization.mismatched_tensors(net, old_net.state_dict())
    layers = zip(old_net.encodings, net.encodings, strict=True)
    # Each layer keeps its encoding or drops it. One with parameters cannot be dropped: they would be missing.
    only_drops = dropping and all(new.family in (old.family, NO_ENCODING) for old, new in layers)
    if wrong or (family != old_family and not only_drops):
        theirs = f"{trained['pe']['name']} ({old_family})"
        if family == old_family or only_drops:
            theirs += ", whose parameters have other names or shapes"
        raise ConfigError(f"pe={pe['name']} ({family}) cannot read weights trained with {theirs}; {remedy}")
    return options
