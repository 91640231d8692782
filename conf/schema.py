"""What may be configured. The schema is closed: a key it lacks, or a value of another type, is an error by name."""

import difflib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

import data as data_sources
from model import position
from model.gpt import GPTConfig

_CLOSED = ConfigDict(extra="forbid", strict=True)
S = TypeVar("S", bound=BaseModel)


class ConfigError(ValueError):
    """What is wrong with a configuration, a line for each finding."""


class Section(BaseModel):
    model_config = _CLOSED


class Optim(Section):
    """AdamW with linear warm-up and cosine decay."""

    lr: float = Field(gt=0)
    min_lr_ratio: float = Field(ge=0, le=1)  # of lr, at the last step
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0)  # of the matrices; not of norms, biases and position encodings
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    grad_clip: float | None = Field(gt=0)  # largest norm of the gradient; null: do not clip


class Trainer(Section):
    """The training run. Every count of steps means optimizer steps."""

    max_steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)  # sequences in an optimizer step, over all processes and accumulation
    accumulate: int = Field(ge=1)  # forward passes in an optimizer step
    log_every: int = Field(ge=1)
    val_every: int = Field(ge=1)
    val_tokens: int = Field(ge=1)  # targets in each validation, at most
    checkpoint_every: int = Field(ge=1)
    checkpoint_minutes: float = Field(10.0, gt=0)  # and after so long without one
    keep_checkpoints: int = Field(ge=1)  # the newest, beside that of the lowest validation loss
    time_limit: float | None = Field(None, gt=0)  # minutes of training, then it stops as after SIGTERM: model.stop
    accelerator: Literal["auto", "cpu", "cuda", "mps"]
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"  # auto: ddp, if there are several processes
    devices: Annotated[int, Field(ge=1)] | Literal["auto"]  # processes on each machine, one for each GPU
    num_nodes: int = Field(1, ge=1)  # machines
    precision: Literal["auto", 32, "32-true", "bf16-mixed", "bf16-true"]
    compile: bool | Literal["auto"]
    num_workers: int = Field(ge=0)  # processes that prepare batches

    @model_validator(mode="after")
    def _whole_portions(self) -> "Trainer":
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"trainer.batch_size={self.batch_size} must be a multiple of trainer.accumulate={self.accumulate}"
            )
        return self


class Eval(Section):
    """Length extrapolation, measured after training and by scripts/evaluate.py."""

    lengths: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)  # multiples of train_len
    scored: int | None = Field(ge=1)  # last tokens of each text that are scored at every length; null: train_len / 4
    sequences: int = Field(ge=1)  # texts, at most
    stride: int | None = Field(None, ge=1)  # also whole texts in sliding windows so many tokens apart; null: not
    by_position: bool  # also the loss at every position, from one pass at the longest length


class FileLogger(Section):
    """A mirror of metrics.jsonl in the run directory."""

    kind: Literal["none", "csv", "tensorboard"]


class WandbLogger(Section):
    kind: Literal["wandb"]
    project: str
    mode: Literal["auto", "online", "offline"]  # auto: online if logged in


class Config(Section):
    """A whole run. `pe` and `data` hold a `_target_` and the options of that class."""

    seed: int = Field(ge=0)
    name: str | None = Field(pattern=r"^[^./\\][^/\\]*$")  # null: the encoding's, the data's, and the seed unless 0
    runs_dir: str
    overwrite: bool  # start afresh under an existing name
    train_len: int = Field(ge=2)  # tokens of a training sequence
    init_from: str | None  # run directory, or hf:FOLDER_OR_HUB_ID, whose weights this run begins with
    init_partial: bool  # begin with those that fit, and leave the others fresh
    pe: dict[str, Any]
    model: GPTConfig
    data: dict[str, Any]
    optim: Optim
    trainer: Trainer
    eval: Eval
    logger: Annotated[WandbLogger | FileLogger, Field(discriminator="kind")]

    @property
    def scored(self) -> int:
        return self.eval.scored or max(1, self.train_len // 4)

    @property
    def lengths(self) -> dict[int, float]:
        """Length in tokens -> multiple of train_len, ascending."""
        return {round(ratio * self.train_len): ratio for ratio in sorted(self.eval.lengths)}


def options_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """The options of a class: {name: (type, default or ...)} of the keyword-only parameters of its constructor, and
    of its parents' as long as the constructor passes **kwargs on."""
    options: dict[str, tuple[Any, Any]] = {}
    for parent in cls.__mro__:
        if "__init__" not in vars(parent) or parent is object:
            continue
        init = parent.__init__  # type: ignore[misc]
        hints = get_type_hints(init)
        parameters = inspect.signature(init).parameters.values()
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY and p.name not in options:
                options[p.name] = (hints[p.name], ... if p.default is p.empty else p.default)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return options


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """'; did you mean ...?' for the known word that looks most like `word`, or all there are."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; there is: {', '.join(known)}" if known else ""


def check(values: Mapping[str, Any]) -> Config:
    """The configuration in `values`, plain and resolved, if every key, type and value is right.

    `name` and the options of the encoding that are null are filled in.

    Raises:
        ConfigError: names every unknown key with its nearest known one, and every bad value.
    """
    findings: list[str] = []
    config = None
    try:
        config = parse(Config, values)
    except ConfigError as error:
        findings.append(str(error))
    pe = _check_target(values.get("pe"), "pe", position.resolve, findings)
    _check_target(values.get("data"), "data", data_sources.resolve, findings)
    if findings or config is None:
        raise ConfigError("\n".join(findings))
    if config.name is None:
        config.name = f"{config.pe['name']}-{config.data['name']}" + (f"-s{config.seed}" if config.seed else "")
    for length, ratio in config.lengths.items():
        if length < config.scored:
            findings.append(
                f"eval.lengths: {ratio:g} x train_len is {length} tokens, fewer than the {config.scored} that are "
                f"scored; raise it or lower eval.scored"
            )
    try:
        with torch.device("meta"):
            encoding = position.build(pe, config.model.shape(config.train_len))
        config.pe = pe | encoding.resolved()
        reach = [math.inf if reading.max_len is None else reading.max_len for reading in encoding.readings()]
        if max(reach) < min(config.lengths):
            findings.append(
                f"eval.lengths: pe={config.pe['name']} has no position beyond {max(reach)} tokens, and the shortest "
                f"length is {min(config.lengths)}: lower it, or raise pe.scale"
            )
    except ValueError as error:
        findings.append(str(error))
    try:
        data_sources.build(config.data)
    except ValueError as error:
        findings.append(str(error))
    if findings:
        raise ConfigError("\n".join(findings))
    return config


def _check_target(values: Any, key: str, resolve: Any, findings: list[str]) -> dict[str, Any]:
    """Check the options of a `_target_` section against its class; returns them."""
    if not isinstance(values, Mapping) or "_target_" not in values:
        findings.append(f"{key} needs a _target_: choose it by its group, as in {key}=NAME")
        return {}
    try:
        cls = resolve(str(values["_target_"]))
    except ValueError as error:
        findings.append(str(error))
        return {}
    fields: dict[str, Any] = {"name": (str, ...), **options_of(cls)}
    schema = create_model(cls.__name__, __config__=_CLOSED, **fields)
    own = {k: v for k, v in values.items() if k != "_target_"}
    try:
        parse(schema, own, f"{key}.")
    except ConfigError as error:
        findings.append(str(error))
    return dict(values)


def parse(schema: type[S], values: Mapping[str, Any], prefix: str = "", *, strings: bool = False) -> S:
    """`values` as an instance of `schema`; with `strings`, every value is text as on a command line.

    Raises:
        ConfigError: a line for each key that is wrong.
    """
    try:
        return schema.model_validate_strings(values) if strings else schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_findings(error, values, schema, prefix))) from None


def _findings(error: ValidationError, values: Any, schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A line for each key that is wrong. For a union pydantic reports every alternative: the first will do."""
    seen = set()
    for detail in error.errors(include_url=False):
        kind, path, at = detail["type"], [], values
        for part in detail["loc"]:  # keep what is in the values: pydantic adds the names of a union's alternatives
            if isinstance(at, Mapping) and part in at:
                path.append(str(part))
                at = at[part]
        if kind == "missing":
            path.append(str(detail["loc"][-1]))
        elif kind.startswith("union_tag"):
            path.append(detail["ctx"]["discriminator"].strip("'"))
            at = at.get(path[-1])
        key = prefix + ".".join(path)
        if key in seen:
            continue
        seen.add(key)
        if kind == "extra_forbidden":
            yield f"{key}: there is no such key" + nearest(
                path[-1], _fields(schema, path[:-1]), key.removesuffix(path[-1])
            )
        elif kind == "missing":
            yield f"{key} is missing"
        elif kind == "value_error" and isinstance(at, Mapping):  # about several keys: the validator names them
            yield str(detail["ctx"]["error"])
        elif kind == "value_error":
            yield f"{key}={at!r} {detail['ctx']['error']}"
        else:
            yield f"{key}={at!r}: " + detail["msg"].replace("Input should", "it should")


def _fields(annotation: Any, path: list[str]) -> list[str]:
    """Keys of the section at `path` below a schema, of all alternatives where it is a union."""
    models = [m for m in (annotation, *get_args(annotation)) if isinstance(m, type) and issubclass(m, BaseModel)]
    if not path:
        return [name for m in models for name in m.model_fields]
    return [
        f for m in models if path[0] in m.model_fields for f in _fields(m.model_fields[path[0]].annotation, path[1:])
    ]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat
