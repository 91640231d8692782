"""What may be configured; an unknown key, or a value of another type, is an error by name. What a key means is said
beside its default in the YAML files, and by --help."""

import difflib
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

import torch
from omegaconf import OmegaConf
from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from data.base import build_data
from data.base import resolve as resolve_data
from data.sampler import micro_batch_size
from model import position
from model.gpt import GPT, GPTConfig

S = TypeVar("S", bound=BaseModel)


class ConfigError(ValueError):
    """What is wrong with a configuration, a line for each finding."""


def _check_name(name: str) -> str:
    """Names become names of files and folders."""
    bad = not name or name[0] == "." or name != name.strip() or not name.isprintable() or set("/\\") & set(name)
    if bad or len(name.encode()) > 200:
        raise ValueError("must be printable, without / or \\, begin with no dot or blank, and have at most 200 bytes")
    return name


Name = Annotated[str, AfterValidator(_check_name)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Precision = Literal["auto", 32, "32-true", "bf16-mixed", "bf16-true"]


class Section(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Base of everything that is configured."""


class Optim(Section):
    lr: float = Field(gt=0)
    min_lr_ratio: float = Field(ge=0, le=1)
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    grad_clip: float | None = Field(gt=0)


class Trainer(Section):
    max_steps: int = Field(ge=0, le=2**31 - 1)
    batch_size: Count
    grad_accum_steps: Count
    log_every: Count
    val_every: Count
    val_tokens: Count
    checkpoint_every: Count
    checkpoint_minutes: float = Field(gt=0)
    positions: Literal["consecutive", "random", "pose"]
    max_position: Count | None
    keep_checkpoints: Count
    time_limit: float | None = Field(gt=0)
    accelerator: Literal["auto", "cpu", "cuda", "mps"]
    strategy: Literal["auto", "ddp", "fsdp"]
    devices: Count | Literal["auto"]
    num_nodes: Count
    precision: Precision
    compile: bool | Literal["auto"]
    checkpointing: bool
    deterministic: bool = False  # younger than the runs that lack it


class Eval(Section):
    lengths: list[Annotated[float, Field(gt=0, le=1e6)]] = Field(min_length=1)
    target_tokens: Count | None
    sequences: Count
    by_position: bool
    far_copies: bool
    variants: list[Name | dict[str, Any]] | None
    at: list[Count]
    tolerance: float = Field(ge=0)
    task_tolerance: float = Field(ge=0)


class FileLogger(Section):
    kind: Literal["none", "csv", "tensorboard"]


class WandbLogger(Section):
    kind: Literal["wandb"]
    project: str
    mode: Literal["auto", "online", "offline"]
    entity: str | None
    tags: list[str]
    group: str | None
    notes: str | None
    log_model: bool


class Stage(Section):
    """Steps before those of the rest of the configuration; `pe` holds options that differ in them."""

    steps: Count
    train_len: Annotated[int, Field(ge=2)]
    pe: dict[str, Any] = {}


class Config(Section):
    """A whole run. `pe` and `data` hold a `_target_` and the options of that class; `pe` may be a pattern of such."""

    seed: int = Field(ge=0, lt=2**63)
    name: Name | None
    runs_dir: str
    overwrite: bool
    train_len: int = Field(ge=2, le=2**24)
    stages: list[Stage]
    init_from: str | None
    init_partial: bool
    init_optimizer: bool
    pe: dict[str, Any]
    model: GPTConfig
    data: dict[str, Any]
    optim: Optim
    trainer: Trainer
    eval: Eval
    logger: Annotated[WandbLogger | FileLogger, Field(discriminator="kind")]

    def stage(self, step: int) -> int:
        """The number of the stage of optimizer step `step`, from 0; len(stages) after the last of them."""
        return bisect([*accumulate(stage.steps for stage in self.stages)], step)

    def batch_shape(self, step: int) -> tuple[int, int]:
        """Sequences of optimizer step `step`, from 0, and tokens of each: in all as many as in every other step."""
        length = [*(stage.train_len for stage in self.stages), self.train_len][self.stage(step)]
        return self.trainer.batch_size * self.train_len // length, length

    @property
    def target_tokens(self) -> int:
        """Last tokens of each evaluation text, which are scored at every length."""
        return self.eval.target_tokens or max(1, self.train_len // 4)

    @property
    def lengths(self) -> list[int]:
        """Text lengths in tokens, each once, ascending."""
        return sorted({round(ratio * self.train_len) for ratio in self.eval.lengths})


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
            pe.check_length(t.max_position or 0)
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
            pe.check_length(config.trainer.max_position or 0)
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
    findings = _findings(own, {key: value for key, value in pe.items() if key not in parts}, "pe.")
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
    return _findings(schema, {k: v for k, v in values.items() if k != "_target_"}, f"{key}.")


def parse(schema: type[S], values: Mapping[str, Any], more: Iterable[str] = ()) -> S:
    """`values` as an instance of `schema`. Raises ConfigError: a line for each key that is wrong, and for `more`."""
    if findings := [*_findings(schema, values), *more]:
        raise ConfigError("\n".join(findings))
    return schema.model_validate(values)


def _findings(schema: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A line for each key that is wrong. For a union pydantic reports every alternative: the first will do."""
    lines: dict[str, str] = {}
    try:
        schema.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path, at, siblings = list[str](), values, values
            for part in map(str, detail["loc"]):  # pydantic adds names of a union's alternatives
                if isinstance(at, list) and all(isinstance(entry, Mapping) for entry in at):
                    at = {str(number): entry for number, entry in enumerate(at)}
                if isinstance(at, Mapping) and part in at:
                    path, at, siblings = [*path, part], at[part], at
            key, said = prefix + ".".join(path), detail["msg"].replace("Input should", "it should")
            line = f"{key}={at!r}: {said.removeprefix('Value error, ')}"
            if detail["type"] == "missing":
                key = prefix + ".".join([*path, str(detail["loc"][-1])])
                line = f"{key} is missing"
            elif detail["type"] == "extra_forbidden":
                line = unknown_key(key, [name for name in siblings if name != path[-1]])
            elif detail["type"] == "value_error" and isinstance(at, Mapping):  # it names the keys itself
                line = str(detail["ctx"]["error"])
            lines.setdefault(key, line)
    return [*lines.values()]


def unknown_key(key: str, siblings: Iterable[str]) -> str:
    """The message about a key that does not exist beside its siblings."""
    parent, dot, word = key.rpartition(".")
    return f"{key}: there is no such key" + nearest(word, siblings, parent + dot)


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """'; did you mean ...?' for the known word that looks most like `word`, or all there are."""
    known = [name for name in known if name != "_target_"]
    if close := difflib.get_close_matches(word, known, n=1):
        return f"; did you mean {prefix}{close[0]}?"
    return f"; there is: {', '.join(known)}" if known else ""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + str(key): value}
    return flat
