"""What may be configured. The schema is closed: an unknown key, or a value of another type, is an error by name.

What a key means is said once, beside its default in the YAML files; --help shows it.
"""

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

import data as data_sources
from model import position
from model.gpt import GPT, GPTConfig

_CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
S = TypeVar("S", bound=BaseModel)

RENAMED = {  # old key -> the new one, or what to do instead
    "trainer.accumulate": "trainer.grad_accum_steps",
    "eval.scored": "eval.target_tokens",
    "eval.stride": "no successor: every length scores the same tokens",
    "pe.every": "a pattern over layers, as in pe=hybrid",
    "pe.fraction": "pe.partial_rotary_factor",
    "pe.decay_len": "pe.scale_base",
}


class ConfigError(ValueError):
    """What is wrong with a configuration, a line for each finding."""


def _check_name(name: str) -> str:
    """Names become names of files and folders."""
    if not name or name[0] == "." or name != name.strip() or not name.isprintable() or set("/\\") & set(name):
        raise ValueError("must be printable, without / or \\, and begin with neither a dot nor a blank")
    if len(name.encode()) > 200:
        raise ValueError("must have at most 200 bytes")
    return name


def _check_sizes(model: GPTConfig) -> GPTConfig:
    """Refuse what would hang or exhaust the memory before it is built."""
    for key, value in model.model_dump().items():
        if type(value) is int and value > (10_000 if key == "n_layer" else 2**22):
            raise ValueError(f"model.{key}={value} is too large")
    return model


Name = Annotated[str, AfterValidator(_check_name)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Section(BaseModel):
    """Base of everything that is configured."""

    model_config = _CLOSED


class Optim(Section):
    """AdamW with linear warm-up and cosine decay."""

    lr: float = Field(gt=0)
    min_lr_ratio: float = Field(ge=0, le=1)
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    grad_clip: float | None = Field(gt=0)


class Trainer(Section):
    max_steps: Count
    batch_size: Count
    grad_accum_steps: Count
    log_every: Count
    val_every: Count
    val_tokens: Count
    checkpoint_every: Count
    checkpoint_minutes: float = Field(gt=0)
    keep_checkpoints: Count
    time_limit: float | None = Field(gt=0)
    accelerator: Literal["auto", "cpu", "cuda", "mps"]
    strategy: Literal["auto", "ddp", "fsdp"]
    devices: Count | Literal["auto"]
    num_nodes: Count
    precision: Literal["auto", 32, "32-true", "bf16-mixed", "bf16-true"]
    compile: bool | Literal["auto"]
    num_workers: int = Field(ge=0, le=1024)

    @model_validator(mode="after")
    def _equal_micro_batches(self) -> "Trainer":
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"trainer.batch_size={self.batch_size} must be a multiple of "
                f"trainer.grad_accum_steps={self.grad_accum_steps}"
            )
        return self


class Eval(Section):
    """What is measured after training, and by scripts/evaluate.py."""

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
    """No tracker, or one that writes files into the run directory."""

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


class Config(Section):
    """A whole run. `pe` and `data` hold a `_target_` and the options of that class; `pe` may be a pattern of such."""

    seed: int = Field(ge=0, lt=2**63)
    name: Name | None
    runs_dir: str
    overwrite: bool
    train_len: int = Field(ge=2, le=2**24)
    init_from: str | None
    init_partial: bool
    pe: dict[str, Any]
    model: Annotated[GPTConfig, AfterValidator(_check_sizes)]
    data: dict[str, Any]
    optim: Optim
    trainer: Trainer
    eval: Eval
    logger: Annotated[WandbLogger | FileLogger, Field(discriminator="kind")]

    @property
    def target_tokens(self) -> int:
        """Last tokens of each evaluation text, which are scored at every length."""
        return self.eval.target_tokens or max(1, self.train_len // 4)

    @property
    def lengths(self) -> dict[int, float]:
        """Length in tokens -> multiple of train_len, ascending."""
        return {round(ratio * self.train_len): ratio for ratio in sorted(self.eval.lengths)}


def check(values: Mapping[str, Any]) -> Config:
    """The configuration in `values`, plain and resolved, if every key, type and value is right.

    `name` and those options of the encoding that are null are filled in.

    Raises:
        ConfigError: names every unknown key with its nearest known one, and every bad value.
    """
    findings = [*_check_encoding(values.get("pe")), *_check_target(values.get("data"), "data", data_sources.resolve)]
    if findings := [*_findings(Config, values), *findings]:
        raise ConfigError("\n".join(findings))
    config = Config.model_validate(values)
    if config.name is None:
        config.name = f"{config.pe['name']}-{config.data['name']}" + (f"-s{config.seed}" if config.seed else "")
    shortest = min(config.lengths)
    if shortest < config.target_tokens:
        findings.append(
            f"eval.lengths: {config.lengths[shortest]:g} x train_len is {shortest} tokens, fewer than the "
            f"{config.target_tokens} that are scored; raise it or lower eval.target_tokens"
        )
    try:
        config.pe, net = resolve_encoding(config.pe, config.model, config.train_len)
        with net.at_scale(max(net.scales)):
            if net.max_len is not None and net.max_len < shortest:
                findings.append(
                    f"eval.lengths: pe={config.pe['name']} has no position beyond {net.max_len} tokens, and the "
                    f"shortest length is {shortest}: lower it, or raise pe.scale"
                )
        data_sources.build(config.data)
    except (ValueError, OverflowError) as error:
        findings.append(str(error))
    if findings:
        raise ConfigError("\n".join(findings))
    return config


def resolve_encoding(pe: Mapping[str, Any], model: GPTConfig, train_len: int) -> tuple[dict[str, Any], GPT]:
    """The options `pe`, each null replaced by what the encoding takes for it, and the network on the meta device.

    Raises:
        ValueError: an option is unknown, of another type, or out of range.
    """
    if findings := _check_encoding(pe):
        raise ConfigError("\n".join(findings))
    with torch.device("meta"):
        net = GPT(model, pe, vocab_size=1, train_len=train_len)
    instances = dict(zip(pe.get("pattern", [""]), net.encodings, strict=False))
    parts = {
        name: {k: getattr(instances.get(name), k, None) if v is None else v for k, v in options.items()}
        for name, options in position.parts(pe).items()
    }
    return dict(parts.get("", {**pe, **parts})), net


def options_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """The options of a class: {name: (type, default or ...)} of the keyword-only parameters in its constructors."""
    options: dict[str, tuple[Any, Any]] = {}
    for parent in reversed(cls.__mro__[:-1]):
        hints = get_type_hints(parent.__init__)  # type: ignore[misc]
        for p in inspect.signature(parent.__init__).parameters.values():  # type: ignore[misc]
            if p.kind is p.KEYWORD_ONLY:
                options[p.name] = (hints[p.name], ... if p.default is p.empty else p.default)
    return options


def _check_encoding(pe: Any) -> list[str]:
    if not isinstance(pe, Mapping) or "pattern" not in pe:
        return _check_target(pe, "pe", position.resolve)
    parts = position.parts(pe)
    own = create_model("Pattern", __config__=_CLOSED, name=(Name, ...), pattern=(list[Name], ...))
    findings = list(_findings(own, {key: value for key, value in pe.items() if key not in parts}, "pe."))
    return findings + [f for name, part in parts.items() for f in _check_target(part, f"pe.{name}", position.resolve)]


def _check_target(values: Any, key: str, resolve: Any) -> list[str]:
    """What is wrong with the options of a section that has a `_target_`."""
    if not isinstance(values, Mapping) or "_target_" not in values:
        return [f"{key} needs a _target_: choose it by its group, as in {key}=NAME"]
    try:
        cls = resolve(str(values["_target_"]))
    except ValueError as error:
        return [str(error)]
    schema = create_model(cls.__name__, __config__=_CLOSED, name=(Name, ...), **options_of(cls))  # type: ignore
    return list(_findings(schema, {k: v for k, v in values.items() if k != "_target_"}, f"{key}."))


def parse(schema: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """`values` as an instance of `schema`. Raises ConfigError: a line for each key that is wrong."""
    if findings := list(_findings(schema, values, prefix)):
        raise ConfigError("\n".join(findings))
    return schema.model_validate(values)


def _findings(schema: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each key that is wrong. For a union pydantic reports every alternative: the first will do."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            kind, path, at, siblings = detail["type"], list[str](), values, values
            for part in map(str, detail["loc"]):  # pydantic adds names of a union's alternatives
                if isinstance(at, Mapping) and part in at:
                    path, at, siblings = [*path, part], at[part], at
            key, said = prefix + ".".join(path), detail["msg"].replace("Input should", "it should")
            if kind == "missing":
                key = prefix + ".".join([*path, str(detail["loc"][-1])])
                lines[key] = f"{key} is missing"
            elif kind == "extra_forbidden":
                lines[key] = unknown_key(key, [name for name in siblings if name != path[-1]])
            elif kind.startswith("union_tag"):
                lines[key] = f"{key}.kind={at.get('kind')!r} is none of {detail['ctx'].get('expected_tags')}"
            elif kind == "value_error":  # of a validator; one about several keys names them itself
                lines[key] = ("" if isinstance(at, Mapping) else f"{key}={at!r} ") + str(detail["ctx"]["error"])
            lines.setdefault(key, f"{key}={at!r}: {said}")
        yield from lines.values()


def unknown_key(key: str, siblings: Iterable[str]) -> str:
    """The message about a key that does not exist beside its siblings."""
    parent, dot, word = key.rpartition(".")
    if key in RENAMED and word not in siblings:
        return f"{key} is gone; there is {RENAMED[key]}"
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
